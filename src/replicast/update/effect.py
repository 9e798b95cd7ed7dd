"""What an update has done to a variable: from what it was to what it is. Pure; `distance.py` measures it."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from replicast.codec import Record

_BARS = " ▁▂▃▄▅▆▇█"


class Histogram(Record):
    """By how much the touched values have changed: from the least change to the greatest, in equal bins.

    Of very many values, an even sample is counted.
    """

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
            # `training/named_variables.py`: a rate below 0 is that many times what the schedule computes.
            return "the schedule" if value == -1 else f"{-value:.6g} × the schedule"
        return "not finite" if value is None else f"{value:.6g}"
