"""Act one: one worker assigns, as the usual answer has it; the replicas differ for ever; an audit sees it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from replicast.audit import AuditReport, Difference
from replicast.demo.acts import CHANGED, CHANGED_SHAPE, DELTA, Player, Replicas, all_equal
from replicast.demo.errands import Errand
from replicast.demo.screen import print_output, print_replicas, print_text

if TYPE_CHECKING:
    from rich.console import Console

TRAINED = "after training"
ASSIGNED = "after worker 1 assigned"
CONTINUED = "after 50 more steps"
TRAINING_STEPS = 200
MORE_STEPS = 50
_ROUNDING = 1e-5
"""Each step rounds two different weights, each in its own way."""
_CONCLUSION = (
    "It finds that variable and no other: Adam's moments are equal, since gradients are summed. Training "
    "synchronises gradients, never weights. [bold]Assigning on one worker makes the replicas different for "
    "ever, with no error. An audit sees it.[/]"
)


class OneWorkerAssigns:
    """Both workers train; worker 1 alone changes a weight; both train on; an audit compares them."""

    title = "Act 1: one worker changes a weight, the usual way"
    moments: Sequence[str] = (TRAINED, ASSIGNED, CONTINUED)
    steps = TRAINING_STEPS + MORE_STEPS

    def play(self, player: Player) -> None:
        """Runs on every worker."""
        player.train("training together", TRAINING_STEPS)
        player.note_moment(TRAINED)
        if player.rank == 1:
            kernel = player.model.get_layer("hidden").kernel
            kernel.assign_add(np.full(kernel.shape, DELTA, np.float32))
        player.note_moment(ASSIGNED)
        player.train("50 more steps together", MORE_STEPS)
        report = player.open_replicas().audit(on_divergence="warn")
        player.note_moment(CONTINUED, report)

    def tell(self, moment: str) -> str:
        """What was done to come to a moment, and why."""
        return {
            TRAINED: f"1. Both trained {TRAINING_STEPS} steps, each on the gradients of both: "
            "the same steps.",
            ASSIGNED: f"2. Worker 1 alone ran [bold]kernel.assign_add({DELTA})[/]. No error, no warning.",
            CONTINUED: f"3. Both trained {MORE_STEPS} more steps. Does that bring them together again?",
        }[moment]

    def errand(self, moment: str, replicas: Replicas, directory: Path) -> Errand | None:
        """Nobody outside takes part."""
        return None

    def show(self, replicas: Replicas, console: Console) -> list[str]:
        """Shows the table and the audit's report, and what they mean if they are what the act claims."""
        print_replicas({moment: replicas[moment] for moment in self.moments}, console)
        problems = differences_from_the_claim(replicas)
        if not all_equal(replicas[CONTINUED]):
            print_text(
                f"It does not: their sums were {_distance(replicas, ASSIGNED):.2f} apart, and still are "
                f"{_distance(replicas, CONTINUED):.2f} apart.",
                console,
            )
        report = replicas[CONTINUED][0].audit
        if report is not None:
            print_text('4. Both called [bold]replicas.audit(on_divergence="warn")[/]:', console)
            print_output("\n".join(report.lines()), console)
        if not problems:
            print_text(_CONCLUSION, console)
        return problems


def differences_from_the_claim(replicas: Replicas) -> list[str]:
    """What did not happen as this act claims."""
    problems = []
    if not all_equal(replicas[TRAINED]):
        problems.append("the replicas should be equal after training, and are not")
    if all_equal(replicas[ASSIGNED]):
        problems.append("the replicas should differ after worker 1 alone assigned, and do not")
    if all_equal(replicas[CONTINUED]):
        problems.append(f"the replicas should still differ after {MORE_STEPS} more steps, and do not")
    first, second = (replica.audit for replica in replicas[CONTINUED])
    if first is None or first != second:
        problems.append("both workers should have the same report of an audit, and do not")
    else:
        problems += _differences_from_the_audit(first)
    return problems


def _differences_from_the_audit(report: AuditReport) -> list[str]:
    """The changed variable is all that differs: the optimizer saw the same gradients on both workers."""
    problems = []
    steps = TRAINING_STEPS + MORE_STEPS
    if (report.step, report.since) != (steps, f"step {steps} or before"):
        problems.append(
            f"the audit should know of a difference at step {steps}, and not since when; it says: "
            f"at step {report.step}, since {report.since or 'never'}"
        )
    found = {difference.variable: difference for difference in report.differences}
    changed = [difference for name, difference in found.items() if _is_the_changed_one(name)]
    if not changed:
        problems.append(f"the audit should find that {CHANGED} differs, and does not")
    problems += [
        f"the audit should find that only {CHANGED} differs, and found {name} too"
        for name in found
        if not _is_the_changed_one(name)
    ]
    for difference in changed:
        problems += _differences_from_the_change(difference)
    return problems


def _differences_from_the_change(difference: Difference) -> list[str]:
    problems = []
    if (difference.groups, difference.rule) != (((0,), (1,)), "coordinator"):
        problems.append(f"the audit should take worker 0's value, without a majority; it says: {difference}")
    elements = CHANGED_SHAPE[0] * CHANGED_SHAPE[1]
    by = difference.differing.get(1)
    if by is None or by.count != elements or abs(by.largest_absolute - DELTA) > _ROUNDING:
        problems.append(
            f"the audit should find {elements} elements that differ by {DELTA}, and found: {by or 'none'}"
        )
    return problems


def _is_the_changed_one(variable: str) -> bool:
    return f"/{variable}".endswith(f"/{CHANGED}")


def _distance(replicas: Replicas, moment: str) -> float:
    first, second = replicas[moment]
    return abs(first.weights_sum - second.weights_sum)
