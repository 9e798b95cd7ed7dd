"""A trial of an update: what it is judged by, and how it ended. Pure data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Mode = Literal["min", "max"]
Outcome = Literal["kept", "reverted"]

MAX_STEPS = 1_000_000
MAX_METRIC_NAME = 200
MAX_INCREASE = 1e6
"""Bounds of what a trial may ask for: a file from outside may say anything."""


@dataclass(frozen=True, slots=True)
class Trial:
    """An update that has to prove itself: after some steps it is kept, or every replica goes back.

    The mean of the metric over the steps of the trial is compared with its mean over as many steps before.

    Args:
        steps: How many steps the trial lasts, at most a million.
        metric: The name in the logs: "loss", or a metric that is a mean, such as "accuracy".
        max_increase: By how much it may get worse, as a part of what it was: 0.05 is 5 %. A negative number
            asks for an improvement. At most a million either way.
        mode: "min": smaller is better. "max": larger is.
    """

    steps: int
    metric: str = "loss"
    max_increase: float = 0.0
    mode: Mode = "min"

    def __post_init__(self) -> None:
        steps = self.steps
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= MAX_STEPS:
            raise ValueError(
                f"A trial lasts a whole number of steps, at least 1 and at most {MAX_STEPS}. "
                f"Received: {repr(steps)[:200]}"
            )
        name = self.metric
        if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= MAX_METRIC_NAME:
            raise ValueError(
                "A trial is judged by a metric, such as 'loss': give its name, at most "
                f"{MAX_METRIC_NAME} printable characters. Received: {repr(name)[:200]}"
            )
        number = self.max_increase
        # By comparing: an integer of JSON may be larger than any float. NaN is within no bounds.
        if (
            isinstance(number, bool)
            or not isinstance(number, int | float)
            or not -MAX_INCREASE <= number <= MAX_INCREASE
        ):
            raise ValueError(
                f"max_increase is a part of what the metric was: 0.05 is 5 %. At most {MAX_INCREASE:.0f}. "
                f"Received: {repr(number)[:200]}"
            )
        if self.mode not in ("min", "max"):
            raise ValueError(f'mode is "min" or "max": which values are better. Received: {self.mode!r}')

    def allows(self, before: float, during: float) -> bool:
        """Whether the update is kept that had this effect on the metric."""
        bound = self.bound(before)
        return during <= bound if self.mode == "min" else during >= bound

    def bound(self, before: float) -> float:
        """The worst value with which the update is kept."""
        margin = self.max_increase * abs(before)
        return before + margin if self.mode == "min" else before - margin

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Trial:
        """What `to_json` described; other fields are left alone.

        Raises:
            ValueError: It is no trial.
        """
        try:
            return cls(**{name: fields[name] for name in cls.__slots__ if name in fields})
        except TypeError as error:
            raise ValueError(f"This describes no trial ({error}). Received: {str(fields)[:200]}") from error


@dataclass(frozen=True, slots=True)
class TrialOutcome:
    """How a trial ended, on every replica.

    Attributes:
        sequence: The update's place in the order.
        outcome: "kept", or "reverted": every replica has the bits of before the update.
        step: The boundary at which it was decided.
        metric: By what.
        before: Its mean before the update, over all workers; None when nothing was measured.
        during: Its mean in the trial; None when nothing, or no finite number, was measured.
        reason: Why, in words.
    """

    sequence: int
    outcome: Outcome
    step: int
    metric: str
    before: float | None
    during: float | None
    reason: str

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return asdict(self)


def judged(
    trial: Trial, sequence: int, step: int, before: float | None, during: float | None, measured: int
) -> TrialOutcome:
    """What becomes of an update.

    Args:
        trial: What was agreed.
        sequence: The update's place in the order.
        step: Where it is decided.
        before: The metric before the update, over all workers; None when nothing was measured.
        during: The metric in the trial; None when nothing was measured.
        measured: In how many steps that was.
    """
    outcome: Outcome = "reverted"
    if during is None:
        reason = "nothing was measured in the trial"
    elif not math.isfinite(during):
        reason, during = f"{trial.metric} was no finite number in the trial", None
    elif before is None or not math.isfinite(before):
        reason, before = f"{trial.metric} was not measured before the update", None
    else:
        outcome = "kept" if trial.allows(before, during) else "reverted"
        asked = f"{'at most' if trial.mode == 'min' else 'at least'} {trial.bound(before):.6g}"
        few = f" ({measured} of its {trial.steps} steps)" if measured < trial.steps else ""
        reason = f"{trial.metric} was {before:.6g} before the update, and {during:.6g} in the trial{few}"
        reason += f"; {asked} was asked for"
    return TrialOutcome(sequence, outcome, step, trial.metric, before, during, reason)
