"""Act two: the same change through replicast, in the middle of training, and the replicas stay equal."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file

from replicast.demo import act_one
from replicast.demo.acts import CHANGED, CHANGED_SHAPE, DELTA, RUN, Player, Replicas, all_equal
from replicast.demo.errands import Errand
from replicast.demo.screen import print_replicas, print_text

if TYPE_CHECKING:
    from rich.console import Console

SYNCED = "after replicas.sync"
PUSHED = "after the push"
CONTINUED = "50 more steps later"
PIECE_STEPS = 100
MOST_PIECES = 100
"""When an update has not come after so many pieces, it will not: no demo lasts for ever."""
LIKELY_PIECES = 1
MORE_STEPS = 50
ADDED = DELTA * CHANGED_SHAPE[0] * CHANGED_SHAPE[1]
"""How much the sum of the weights grows by the change."""


class EveryReplicaFollows:
    """Both workers train; a process outside pushes the change of act one; both apply it and train on."""

    title = "Act 2: the same change, through replicast"
    moments: Sequence[str] = (SYNCED, PUSHED, CONTINUED)
    steps = LIKELY_PIECES * PIECE_STEPS + MORE_STEPS

    def play(self, player: Player) -> None:
        """Runs on every worker."""
        replicas = player.open_replicas()
        replicas.sync(source=0)
        before = {receipt.id for receipt in replicas.history}
        player.note_moment(SYNCED)
        for _ in range(MOST_PIECES):
            player.train("training on", PIECE_STEPS)
            # One applied at this very boundary may have its receipt here and not yet on the other worker; for
            # earlier steps all workers have the same receipts, so all leave the loop together.
            if any(r.id not in before and r.step < replicas.step for r in replicas.history):
                break
        else:
            return
        player.note_moment(PUSHED)
        player.train("50 more steps together", MORE_STEPS)
        player.note_moment(CONTINUED, replicas.audit(on_divergence="warn"))

    def tell(self, moment: str) -> str:
        """What was done to come to a moment, and why."""
        return {
            SYNCED: "1. Both called [bold]replicas.sync(source=0)[/]: worker 1 has worker 0's weights again.",
            PUSHED: "   (That digest is of the changed variable alone, as each worker found it.)",
            CONTINUED: f"3. Both trained {MORE_STEPS} more steps. Are they still equal?",
        }[moment]

    def errand(self, moment: str, replicas: Replicas, directory: Path) -> Errand | None:
        """Pushes the change of act one, in a plain safetensors file, while the workers train."""
        if moment != SYNCED:
            return None
        save_file({CHANGED: np.full(CHANGED_SHAPE, DELTA, np.float32)}, directory / "delta.safetensors")
        return Errand(
            announcement=f"2. While both train on, a process outside of the job adds the same {DELTA}:",
            arguments=("push", RUN, "--add", "delta.safetensors", "--wait"),
            directory=directory,
        )

    def show(self, replicas: Replicas, console: Console) -> list[str]:
        """Shows the table, with the end of act one to compare, and what it means if it is true."""
        rows = {"act 1, at its end": replicas[act_one.CONTINUED]}
        rows |= {moment: replicas[moment] for moment in self.moments}
        print_replicas(rows, console, explained=True)
        problems = differences_from_the_claim(replicas)
        report = replicas[CONTINUED][0].audit
        if not problems and report is not None:
            print_text(
                "They are, bit for bit: each worker computed these digests from its own weights, and "
                f"replicas.audit() finds all {report.variables} variables equal, the optimizer's too. "
                "[bold]One process writes, every replica follows, at the same step.[/]",
                console,
            )
        return problems


def differences_from_the_claim(replicas: Replicas) -> list[str]:
    """What did not happen as this act claims."""
    problems = [
        f"the replicas should be equal {moment}, and are not"
        for moment in (SYNCED, PUSHED, CONTINUED)
        if not all_equal(replicas[moment])
    ]
    for before, after in zip(replicas[SYNCED], replicas[PUSHED], strict=True):
        grown = after.weights_sum - before.weights_sum
        if grown < ADDED / 2:  # Training moves the sum too, by far less.
            problems.append(
                f"the weights of worker {after.worker} should sum to about {ADDED:.0f} more after the push, "
                f"and grew by {grown:.2f}"
            )
    for replica in replicas[CONTINUED]:
        if replica.audit is None or not replica.audit.equal:
            problems.append(
                f"the audit should find all variables equal {CONTINUED}; worker {replica.worker} was told: "
                f"{'nothing' if replica.audit is None else replica.audit}"
            )
    return problems
