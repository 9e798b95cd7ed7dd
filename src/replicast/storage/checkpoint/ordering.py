"""Which checkpoint is the last one: training may have gone back to an earlier step and continued from there.

    500   1000   1500   2000      one line of training
     └─ 600   700                 restore(step=500): another line, which is now the current one

A checkpoint of an earlier step than the last one starts a new line, with a number one higher. Neither clocks
nor attempt numbers would work: clocks differ between hosts, and a run may be copied into another.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

from replicast.storage.checkpoint.manifest import Manifest

Best: TypeAlias = tuple[str, Literal["min", "max"]]
"""A metric, and which of its values is the best."""


def line_of_next(there: Iterable[Manifest], step: int) -> int:
    """The line of a new checkpoint of this step, given the existing ones."""
    last = max(there, key=_age, default=None)
    return 0 if last is None else last.line + (step < last.step)


def latest_first(there: Iterable[Manifest]) -> list[Manifest]:
    """The last checkpoint, those that it follows, and then those abandoned when training went back."""
    followed: list[Manifest] = []
    given_up: list[Manifest] = []
    for manifest in sorted(there, key=_age, reverse=True):
        came_before = not followed or manifest.step < followed[-1].step
        (followed if came_before else given_up).append(manifest)
    return followed + given_up


def with_unreadable(ordered: Sequence[int], unreadable: Iterable[int]) -> list[int]:
    """Inserts steps with unreadable checkpoints, whose line is not known, into an ordered list of steps.

    Each is placed before all lower steps: it may have been the last.
    """
    steps = list(ordered)
    for step in sorted(unreadable):
        lower = (place for place, other in enumerate(steps) if other < step)
        steps.insert(next(lower, len(steps)), step)
    return steps


def best_of(ordered: Iterable[Manifest], best: Best | None) -> set[int]:
    """The step of the best checkpoint, if any has the metric; of equal ones, the first in this order."""
    if best is None:
        return set()
    metric, direction = best
    sign = 1.0 if direction == "max" else -1.0
    ranked = [m for m in ordered if not math.isnan(m.metrics.get(metric, math.nan))]
    return {max(ranked, key=lambda m: sign * m.metrics[metric]).step} if ranked else set()


def _age(manifest: Manifest) -> tuple[int, int]:
    return manifest.line, manifest.step
