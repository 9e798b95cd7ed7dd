"""Trials of updates: the criterion, and the outcome. Pure data."""

from __future__ import annotations

import math
from typing import Literal

from msgspec.structs import force_setattr

from replicast.strictjson import View

Mode = Literal["min", "max"]

MAX_STEPS = 1_000_000
MAX_METRIC_NAME = 200
MAX_INCREASE = 1e6
"""Limits of a trial's settings, which may come from an untrusted file."""


class Trial(View, frozen=True):
    """Applies an update on trial: after some steps, all replicas keep it or revert it.

    Compares the mean of a metric over the steps of the trial with its mean over as many steps before.

    Args:
        steps: How many steps the trial lasts, at most a million.
        metric: The name in the logs: "loss", or a metric that is a mean, such as "accuracy".
        max_increase: By how much the metric may get worse, relative to its value before: 0.05 is 5 %. A
            negative number requires an improvement. At most a million either way.
        mode: "min" if smaller is better, "max" if larger is.
    """

    steps: int
    metric: str = "loss"
    max_increase: float = 0.0
    mode: Mode = "min"

    def __post_init__(self) -> None:
        steps = self.steps
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= MAX_STEPS:
            raise ValueError(f"steps must be an integer from 1 to {MAX_STEPS}. Received: {repr(steps)[:200]}")
        name = self.metric
        if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= MAX_METRIC_NAME:
            raise ValueError(
                "metric must be the name of a metric, such as 'loss', with at most "
                f"{MAX_METRIC_NAME} printable characters. Received: {repr(name)[:200]}"
            )
        number = self.max_increase
        # By comparison: an integer from JSON may be larger than any float, and NaN is never within bounds.
        if (
            isinstance(number, bool)
            or not isinstance(number, int | float)
            or not -MAX_INCREASE <= number <= MAX_INCREASE
        ):
            raise ValueError(
                f"max_increase must be a number up to {MAX_INCREASE:.0f}, relative to the metric before: "
                f"0.05 is 5 %. Received: {repr(number)[:200]}"
            )
        if self.mode not in ("min", "max"):
            raise ValueError(
                f'mode must be "min" (smaller is better) or "max" (larger is better). Received: {self.mode!r}'
            )
        # Messages and files have plain types only, and a number of numpy is a `float` too.
        force_setattr(self, "steps", int(steps))
        force_setattr(self, "metric", str.__str__(name))
        force_setattr(self, "max_increase", float(number))
        force_setattr(self, "mode", str.__str__(self.mode))

    def allows(self, before: float, during: float) -> bool:
        """Whether an update with this effect on the metric is kept."""
        bound = self.bound(before)
        return during <= bound if self.mode == "min" else during >= bound

    def bound(self, before: float) -> float:
        """The worst value of the metric with which the update is kept."""
        margin = self.max_increase * abs(before)
        return before + margin if self.mode == "min" else before - margin


class TrialOutcome(View, frozen=True):
    """How a trial ended, on every replica."""

    sequence: int
    outcome: Literal["kept", "reverted"]
    step: int
    metric: str
    before: float | None
    during: float | None
    reason: str


def judged(
    trial: Trial, before: float | None, during: float | None, measured: int
) -> tuple[bool, str, float | None]:
    """Decides whether an update is kept; says why, and what the metric was in the trial."""
    if during is None:
        return False, f"{trial.metric} was not measured in the trial", None
    if not math.isfinite(during):
        return False, f"{trial.metric} was not finite in the trial", None
    if before is None or not math.isfinite(before):
        return False, f"{trial.metric} was not measured before the update", during
    limit = f"{'at most' if trial.mode == 'min' else 'at least'} {trial.bound(before):.6g}"
    few = f" ({measured} of its {trial.steps} steps)" if measured < trial.steps else ""
    reason = f"{trial.metric} was {before:.6g} before the update and {during:.6g} in the trial{few}"
    return trial.allows(before, during), f"{reason}; the limit was {limit}", during
