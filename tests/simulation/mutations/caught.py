"""Which schedule notices which break."""

from __future__ import annotations

from tests.simulation.mutations.registry import MUTATIONS
from tests.simulator import StoryFailed, World, random_plan

CAUGHT_BY: dict[str, int] = {
    "heal nothing": 35,
    "raise an audit before all have its report": 35,
    "keep the threads that rest when an audit raises": 636,
    "do not raise what an audit found": 35,
    "heal with the value of the minority": 35,
    "take the reports of different boundaries for one": 0,
    "skip the stop": 0,
    "pass a boundary in spite of a stop": 0,
    "choose the earliest boundary instead of the latest": 11,
    "apply twice": 0,
    "leave a stop up when a rest ends": 14079,
    "end a rest while another operation has the turn": 636,
    "apply in another order on one worker": 320,
    "commit others during a trial": 157,
    "ignore at step": 1,
    "wait without a deadline": 95,
    "do not ask again when a worker rests early": 67,
    "do not say until when an update waits": 59,
    "acknowledge before the journal is durable": 0,
    "commit after a refusal": 20,
    "forget the id check": 6,
    "keep what was prepared by id alone": 35,
    "refuse what is committed": 834,
    "accept other content under the same id": 10,
    "lose a withdrawal": 46,
    "tell a withdrawal before it is written": 52,
    "promise a step without writing it down": 1,
    "remove from the inbox when it is read": 7,
    "tell a refusal that a restart would undo": 820,
    "keep the bytes of what was refused": 389,
    "let a stale groups records count": 118,
    "do not look for a later claim after a write": 40,
    "replay at the step after": 7,
    "replay what the checkpoint holds": 7,
    "forget the last replay": 7,
    "let new updates overtake replays": 36,
    "decide a trial again after a restart": 157,
    "revert a trial on all workers but one": 14,
    "save during a trial": 59,
    "forget uncommitted proposals in a checkpoint": 36,
    "keep checkpoints that were given up": 1742,
    "save a state that differs between workers": 207,
    "write a checkpoint before the payloads": 0,
    "take snapshots on both sides of an update for one state": 523,
    "hold proposals of which nothing is written": 0,
    "forget whose proposals a checkpoint holds": 820,
    "bring back what has ended": 820,
    "use the bytes of an earlier attempt": 1,
    "revert what is reverted": 0,
    "save before the overwritten values are durable": 0,
    "keep overwritten values only once": 1540,
    "revert what is just being applied": 417,
    "revert what is still to be replayed": 1162,
    "hold the overwritten values of a reverted trial": 17,
    "forget who asked": 1,
    "pull from each worker at a boundary of its own": 1072,
}
"""The first schedule, from 0 on, that notices each break; of the rarest, one that does."""


def is_caught(name: str, seed: int) -> bool:
    """Whether the story of this seed fails with this break."""
    with MUTATIONS[name]():
        try:
            World(random_plan(seed), most_events=5000).run()
        except StoryFailed:
            return True
    return False
