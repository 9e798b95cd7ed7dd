"""Act three: a worker is killed in the middle of training, and the job ends as if nobody had touched it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from replicast.demo.acts import CHANGED, CHANGED_SHAPE, DELTA, Player, Replicas, all_equal
from replicast.demo.errands import Errand
from replicast.demo.screen import print_replicas, print_text, short
from replicast.update import Update

if TYPE_CHECKING:
    from rich.console import Console

    import replicast

STEPS = 200
SAVE_EVERY = 100
PROPOSED_AT, APPLIED_AT = 110, 140
HALFWAY_AT = 150
WAIT_AT = 195
"""Here a worker waits for its end, should that be late: before the next checkpoint and the last step."""
VICTIM = 1
UNDISTURBED = f"undisturbed, step {STEPS}"
HALFWAY = f"before the kill, {HALFWAY_AT}"
RESTORED = f"restored, step {SAVE_EVERY}"
RECOVERED = f"recovered, step {STEPS}"
EXPECTED_STEPS = {UNDISTURBED: STEPS, HALFWAY: HALFWAY_AT, RESTORED: SAVE_EVERY, RECOVERED: STEPS}


class NothingIsLost:
    """A run that nobody disturbs; the same run again, in which a worker is killed and the job recovers."""

    title = "Act 3: a worker is killed"
    moments: Sequence[str] = (UNDISTURBED, HALFWAY, RESTORED, RECOVERED)
    steps = STEPS + HALFWAY_AT + STEPS - SAVE_EVERY

    def play(self, player: Player) -> None:
        """Runs on every worker, and from its beginning again on those that the launcher started anew."""
        if not player.has_noted(UNDISTURBED):
            undisturbed = player.begin_again("undisturbed", save_every=SAVE_EVERY)
            player.train("undisturbed", STEPS, lambda step: _change(player, undisturbed, step))
            player.note_moment(UNDISTURBED)
        replicas = player.begin_again("killed", save_every=SAVE_EVERY)
        recovering = replicas.restore() is not None
        if recovering:
            player.note_moment(RESTORED)

        def after_step(step: int) -> None:
            _change(player, replicas, step)
            if not recovering:
                _expect_the_end(player, replicas, step)

        player.train("recovering" if recovering else "the same again", STEPS, after_step)
        player.note_moment(RECOVERED)

    def tell(self, moment: str) -> str:
        """What was done to come to a moment, and why."""
        return {
            UNDISTURBED: f"1. Both trained a new model for {STEPS} steps, with the same change at step "
            f"{APPLIED_AT}. Nobody disturbed them.",
            HALFWAY: "2. Both do it all again, with the same first weights. "
            f"A checkpoint was made at step {SAVE_EVERY}.",
            RESTORED: "4. The launcher has ended worker 0 too and started both again: new processes. They "
            f"restored the checkpoint of step {SAVE_EVERY}.",
            RECOVERED: f"5. Both trained on to step {STEPS}; at step {APPLIED_AT} the journal applied the "
            "change again.",
        }[moment]

    def errand(self, moment: str, replicas: Replicas, directory: Path) -> Errand | None:
        """Kills a worker in the middle of training, as the kernel does when memory runs out."""
        if moment != HALFWAY:
            return None
        return Errand(
            announcement=f"3. After step {HALFWAY_AT}, while both train on, worker {VICTIM} is killed:",
            arguments=("-9", str(replicas[HALFWAY][VICTIM].process)),
            directory=directory,
            program="kill",
            then="starting both again",
        )

    def show(self, replicas: Replicas, console: Console) -> list[str]:
        """Shows the table, and how the last digests compare."""
        print_replicas({moment: replicas[moment] for moment in self.moments}, console, explained=True)
        problems = differences_from_the_claim(replicas)
        undisturbed, recovered = replicas[UNDISTURBED][0].digest, replicas[RECOVERED][0].digest
        if not problems:
            print_text(
                f"Undisturbed: {short(undisturbed)}. Killed and recovered: {short(recovered)}. "
                "[bold]Equal, bit for bit: the crash has lost nothing.[/]",
                console,
            )
        return problems


def differences_from_the_claim(replicas: Replicas) -> list[str]:
    """What did not happen as this act claims."""
    problems = []
    for moment, step in EXPECTED_STEPS.items():
        if not all_equal(replicas[moment]):
            problems.append(f"the replicas should be equal at {moment!r}, and are not")
        problems += [
            f"worker {replica.worker} should be at step {step} at {moment!r}, and is at step {replica.step}"
            for replica in replicas[moment]
            if replica.step != step
        ]
    for before, after in zip(replicas[HALFWAY], replicas[RESTORED], strict=True):
        if before.process == after.process:
            problems.append(f"worker {after.worker} should be a new process after the kill, and is not")
    for one, other in zip(replicas[UNDISTURBED], replicas[RECOVERED], strict=True):
        if one.digest != other.digest:
            problems.append(
                f"worker {one.worker} should end as in the undisturbed run, with digest {short(one.digest)}, "
                f"and ended with {short(other.digest)}"
            )
    return problems


def _change(player: Player, replicas: replicast.Replicas, step: int) -> None:
    """One worker proposes an update, in both runs at the same step, and again when a run repeats it."""
    if step == PROPOSED_AT and player.rank == VICTIM:
        change = Update(note="act three").add(CHANGED, np.full(CHANGED_SHAPE, DELTA, np.float32))
        replicas.propose(change, at_step=APPLIED_AT)


def _expect_the_end(player: Player, replicas: replicast.Replicas, step: int) -> None:
    if step == HALFWAY_AT:
        replicas.recovery.settle()  # However slow the disk: the checkpoint is there before the end comes.
        player.note_moment(HALFWAY)
    if step == WAIT_AT and player.rank == VICTIM:
        player.wait_for_the_end(f"`kill -9 {os.getpid()}`")
