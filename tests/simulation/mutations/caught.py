"""Which schedule notices which break."""

from __future__ import annotations

from replicast.testing.simulation import StoryFailed, World, random_plan
from tests.simulation.mutations.registry import MUTATIONS

CAUGHT_BY: dict[str, int] = {
    "heal nothing": 23,
    "raise an audit before all have its report": 35,
    "keep the threads that rest when an audit raises": 8732,
    "do not raise what an audit found": 35,
    "heal with the value of the minority": 23,
    "take the reports of different boundaries for one": 0,
    "skip the stop": 0,
    "pass a boundary in spite of a stop": 4,
    "choose the earliest boundary instead of the latest": 13,
    "apply twice": 0,
    "leave a stop up when a rest ends": 495183,
    "end a rest while another operation has the turn": 2249,
    "apply in another order on one worker": 98,
    "commit others during a trial": 79,
    "ignore at step": 8,
    "wait without a deadline": 70,
    "do not ask again when a worker rests early": 67,
    "do not say until when an update waits": 17,
    "acknowledge before the journal is durable": 0,
    "commit after a refusal": 1,
    "forget the id check": 1,
    "keep what was prepared by id alone": 23,
    "refuse what is committed": 69697,
    "accept other content under the same id": 40,
    "lose a withdrawal": 33,
    "tell a withdrawal before it is written": 69,
    "promise a step without writing it down": 4,
    "remove from the inbox when it is read": 8,
    "tell a refusal that a restart would undo": 1860,
    "keep the bytes of what was refused": 174,
    "let a stale groups records count": 25,
    "do not look for a later claim after a write": 25,
    "replay at the step after": 58,
    "replay what the checkpoint holds": 7,
    "forget the last replay": 58,
    "let new updates overtake replays": 119,
    "decide a trial again after a restart": 69,
    "revert a trial on all workers but one": 14,
    "save during a trial": 17,
    "forget uncommitted proposals in a checkpoint": 25,
    "keep checkpoints that were given up": 119,
    "save a state that differs between workers": 304,
    "write a checkpoint before the payloads": 25,
    "take snapshots on both sides of an update for one state": 523,
    "hold proposals of which nothing is written": 7,
    "forget whose proposals a checkpoint holds": 1860,
    "bring back what has ended": 249,
    "use the bytes of an earlier attempt": 25,
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
