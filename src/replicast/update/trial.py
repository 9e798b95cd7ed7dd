"""What an update does: to its variables (`Effect`), and to a metric, by which a `Trial` decides. Pure."""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_type_hints

import msgspec
from msgspec import UNSET, Meta, UnsetType
from msgspec.structs import force_setattr

from replicast.codec import Record, View

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

    steps: Annotated[int, Meta(ge=1, le=MAX_STEPS)]
    metric: Annotated[str, Meta(min_length=1, max_length=MAX_METRIC_NAME)] = "loss"
    max_increase: Annotated[float, Meta(ge=-MAX_INCREASE, le=MAX_INCREASE)] = 0.0
    mode: Mode = "min"

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if isinstance(value, float):  # a number of numpy is one too, and files have plain types only
                value = float(value)
            try:
                value = msgspec.convert(value, kind)
                if isinstance(value, str) and not value.isprintable():
                    raise ValueError("Expected printable characters")
            except ValueError as error:
                raise ValueError(f"{name}: {error}. Received: {repr(value)[:200]}") from None
            force_setattr(self, name, str.__str__(value) if isinstance(value, str) else value)

    def allows(self, before: float, during: float) -> bool:
        """Whether an update with this effect on the metric is kept."""
        bound = self.bound(before)
        return during <= bound if self.mode == "min" else during >= bound

    def bound(self, before: float) -> float:
        """The worst value of the metric with which the update is kept."""
        margin = self.max_increase * abs(before)
        return before + margin if self.mode == "min" else before - margin


_KINDS = get_type_hints(Trial, include_extras=True)


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


# What an update has done to its variables; `guard.py` measures it.

_BARS = " ▁▂▃▄▅▆▇█"


class Histogram(Record):
    """The changes of the touched values, or of an even sample, from least to greatest in equal bins."""

    least: float
    greatest: float
    counts: tuple[int, ...]

    def __str__(self) -> str:
        most = max(self.counts)
        bars = "".join(_BARS[-(-(len(_BARS) - 1) * count // most)] for count in self.counts)
        return f"{self.least:.3g} {bars} {self.greatest:.3g}"


class Effect(Record):
    """What an update has done to one variable. None: not measured, or not a finite number.

    Attributes:
        variable: Its name.
        shape: The shape of the variable.
        rows: How many rows were touched; None if all of it was.
        before: The value before, of a variable with one element.
        after: Its value afterwards.
        norm: The L2 norm of the touched values before.
        change: The L2 norm of their change.
        histogram: How their changes are distributed; for the first variables of an update.
    """

    variable: str
    shape: tuple[int, ...]
    rows: int | None = None
    before: float | None = None
    after: float | None = None
    norm: float | None = None
    change: float | None = None
    histogram: Histogram | UnsetType = UNSET

    @property
    def relative(self) -> float | None:
        """The norm of the change in relation to the norm before."""
        return self.change / self.norm if self.norm and self.change is not None else None

    def __str__(self) -> str:
        if self.before is not None or self.after is not None:
            return f"{self._short(self.before)} → {self._short(self.after)}"
        shape = "×".join(map(str, self.shape))
        text = shape if self.rows is None else f"{self.rows} row{'' if self.rows == 1 else 's'} of {shape}"
        if self.norm is None or self.change is None:
            return text
        part = "" if self.relative is None else f" ({100 * self.relative:.3g} %)"
        return f"{text}, norm {self.norm:.4g}, changed by {self.change:.4g}{part}"

    def _short(self, value: float | None) -> str:
        if value is not None and value < 0 and self.variable.endswith("/learning_rate"):
            # `training/tensorflow_state.py`: a rate below 0 is that many times what the schedule computes.
            return "the schedule" if value == -1 else f"{-value:.6g} × the schedule"
        return "not finite" if value is None else f"{value:.6g}"
