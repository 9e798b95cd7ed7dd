"""Act one: one worker assigns to a weight, as the usual answer has it, and the replicas differ for ever."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from replicast.demo.acts import DELTA, Player, Replicas, all_equal
from replicast.demo.errands import Errand
from replicast.demo.screen import print_replicas, print_text

if TYPE_CHECKING:
    from rich.console import Console

TRAINED = "after training"
ASSIGNED = "after worker 0 assigned"
CONTINUED = "after 50 more steps"
TRAINING_STEPS = 200
MORE_STEPS = 50


class OneWorkerAssigns:
    """Both workers train; worker 0 alone changes a weight; both train on."""

    title = "Act 1: one worker changes a weight, the usual way"
    moments: Sequence[str] = (TRAINED, ASSIGNED, CONTINUED)
    steps = TRAINING_STEPS + MORE_STEPS

    def play(self, player: Player) -> None:
        """Runs on every worker."""
        player.train("training together", TRAINING_STEPS)
        player.note_moment(TRAINED)
        if player.rank == 0:
            kernel = player.model.get_layer("hidden").kernel
            kernel.assign_add(np.full(kernel.shape, DELTA, np.float32))
        player.note_moment(ASSIGNED)
        player.train("50 more steps together", MORE_STEPS)
        player.note_moment(CONTINUED)

    def tell(self, moment: str) -> str:
        """What was done to come to a moment, and why."""
        return {
            TRAINED: f"1. Both trained {TRAINING_STEPS} steps, each on the gradients of both: "
            "the same steps.",
            ASSIGNED: f"2. Worker 0 alone ran [bold]kernel.assign_add({DELTA})[/]. No error, no warning.",
            CONTINUED: f"3. Both trained {MORE_STEPS} more steps. Does that bring them together again?",
        }[moment]

    def errand(self, moment: str, replicas: Replicas, directory: Path) -> Errand | None:
        """Nobody outside takes part."""
        return None

    def show(self, replicas: Replicas, console: Console) -> list[str]:
        """Shows the table, and what it means if it is what the act claims."""
        print_replicas({moment: replicas[moment] for moment in self.moments}, console)
        problems = differences_from_the_claim(replicas)
        if not problems:
            print_text(
                f"It does not: their sums were {_distance(replicas, ASSIGNED):.2f} apart, and still are "
                f"{_distance(replicas, CONTINUED):.2f} apart. Training synchronises gradients, never "
                "weights. [bold]Assigning on one worker makes the replicas different for ever, with no "
                "error.[/]",
                console,
            )
        return problems


def differences_from_the_claim(replicas: Replicas) -> list[str]:
    """What did not happen as this act claims."""
    problems = []
    if not all_equal(replicas[TRAINED]):
        problems.append("the replicas should be equal after training, and are not")
    if all_equal(replicas[ASSIGNED]):
        problems.append("the replicas should differ after worker 0 alone assigned, and do not")
    if all_equal(replicas[CONTINUED]):
        problems.append(f"the replicas should still differ after {MORE_STEPS} more steps, and do not")
    return problems


def _distance(replicas: Replicas, moment: str) -> float:
    first, second = replicas[moment]
    return abs(first.weights_sum - second.weights_sum)
