"""What an update would do, and everything that is wrong with it: for `inspect`, `show` and `push`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from replicast.edits import FLOAT_DTYPES, RESETS, Array, Edit, Operation
from replicast.errors import UpdateRefused
from replicast.parts import factor_to_json
from replicast.schema import Schema, Variable
from replicast.update import Update
from replicast.validate import planned

_CHUNK = 2**20  # Elements that are widened to float64 at a time.


@dataclass(frozen=True, slots=True)
class Numbers:
    """The values of an array in short.

    Attributes:
        size: How many there are.
        nonfinite: How many of them are NaN or infinite.
        minimum: The smallest finite one; NaN when there is none.
        maximum: The largest finite one; NaN when there is none.
        norm: The square root of the sum of the squares of the finite ones.
    """

    size: int
    nonfinite: int
    minimum: float
    maximum: float
    norm: float


@dataclass(frozen=True, slots=True)
class EditView:
    """One edit, for people.

    Attributes:
        variable: Its name; the full one when the schema knows it.
        operation: What is done.
        factor: The factor, weight or fill, if there is one.
        shape: Of what is written; None when it is the whole of a variable whose shape is not known.
        dtype: Of what is written; empty when not known.
        nbytes: The size of the payload.
        rows: How many rows are written, when not all.
        rank: Of an addition of low rank.
        numbers: The values that are added or assigned; None when there are none.
    """

    variable: str
    operation: Operation
    factor: float | None
    shape: tuple[int, ...] | None
    dtype: str
    nbytes: int
    rows: int | None
    rank: int | None
    numbers: Numbers | None

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {
            "variable": self.variable,
            "operation": str(self.operation),
            "factor": factor_to_json(self.factor),
            "shape": None if self.shape is None else list(self.shape),
            "dtype": self.dtype,
            "nbytes": self.nbytes,
            "rows": self.rows,
            "rank": self.rank,
            "values": None if self.numbers is None else _numbers_to_json(self.numbers),
        }


@dataclass(frozen=True, slots=True)
class Examination:
    """What became of looking at an update.

    Attributes:
        edits: What it would do, in order; with resets of slots when nothing is wrong.
        problems: Why it would be refused; none when it would not.
    """

    edits: tuple[EditView, ...]
    problems: tuple[UpdateRefused, ...]


def examine(update: Update, schema: Schema | None) -> Examination:
    """Looks at all of an update, also behind the first problem.

    Args:
        update: What an author would propose.
        schema: The state it is to change, if known.
    """
    if schema is None:
        views = tuple(view_of(edit, None) for edit in update.edits)
        return Examination(views, tuple(_problems_by_themselves(update, views)))
    problems: list[UpdateRefused] = []
    edits: list[Edit] = []
    for edit in update.edits:
        try:
            # A reset is judged together with the others: it needs the edit whose slots it resets.
            alone = () if edit.operation in RESETS else planned(update.replaced([edit]), schema).edits
            edits += alone
        except UpdateRefused as error:
            problems.append(error)
            edits.append(edit)
    if not problems:
        try:
            edits = list(planned(update, schema, look_at=lambda _place: False).edits)
        except UpdateRefused as error:
            problems.append(error)
    return Examination(tuple(view_of(edit, variable_of(edit, schema)) for edit in edits), tuple(problems))


def view_of(edit: Edit, variable: Variable | None) -> EditView:
    """One edit in short.

    Args:
        edit: The edit.
        variable: What it changes, if known.
    """
    arrays, rank = edit.arrays, None
    shape = None if variable is None else variable.shape
    dtype = "" if variable is None else variable.dtype
    numbers = None
    written = arrays.get("value", arrays.get("rows"))
    if edit.operation is Operation.ADD_LOW_RANK:
        shape, rank, dtype = _low_rank_shape(arrays), arrays["a"].shape[-1], arrays["a"].dtype.name
        numbers = _low_rank_numbers(arrays["a"], arrays["b"])
    elif written is not None:
        shape, dtype, numbers = written.shape, written.dtype.name, numbers_of(written)
    rows = arrays["indices"].size if "indices" in arrays else None
    return EditView(
        edit.variable, edit.operation, edit.factor, shape, dtype, edit.nbytes, rows, rank, numbers
    )


def variable_of(edit: Edit, schema: Schema) -> Variable | None:
    """What an edit changes, or None when the state has no such variable."""
    try:
        return schema.resolve(edit.variable)
    except UpdateRefused:
        return None


def numbers_of(array: Array) -> Numbers:
    """The values of an array in short; takes little memory beside it."""
    flat = array.reshape(-1)
    nonfinite, squares, low, high = 0, 0.0, math.inf, -math.inf
    for start in range(0, flat.size, _CHUNK):
        with np.errstate(all="ignore"):
            chunk = flat[start : start + _CHUNK].astype(np.float64)
            finite = chunk[np.isfinite(chunk)]
            nonfinite += chunk.size - finite.size
            squares += float(np.dot(finite, finite))
        if finite.size:
            low, high = min(low, float(finite.min())), max(high, float(finite.max()))
    if low > high:
        low = high = math.nan
    return Numbers(flat.size, nonfinite, low, high, math.sqrt(squares))


def _problems_by_themselves(update: Update, views: tuple[EditView, ...]) -> list[UpdateRefused]:
    """What is wrong whatever the state is."""
    if not views:
        return [UpdateRefused("The update has no edits", expected="at least one", received="none")]
    if update.allow_nonfinite:
        return []
    problems = []
    for view in views:
        bad_factor = view.factor is not None and not math.isfinite(view.factor)
        nonfinite = view.numbers.nonfinite if view.numbers is not None else 0
        if bad_factor or nonfinite:
            size = view.numbers.size if view.numbers is not None else 0
            what = f"{nonfinite} of {size} values are not finite" if nonfinite else "The factor is not finite"
            problems.append(
                UpdateRefused(
                    what,
                    variable=view.variable,
                    expected="finite values, or allow_nonfinite=True",
                    received=str(view.factor) if bad_factor else "NaN or infinity",
                )
            )
    return problems


def _low_rank_shape(arrays: Mapping[str, Array]) -> tuple[int, ...]:
    return (*arrays["a"].shape[:1], *arrays["b"].shape[-1:])


def _low_rank_numbers(a: Array, b: Array) -> Numbers:
    """Of the factors; but the norm is that of their product, which is never made."""
    parts = numbers_of(a), numbers_of(b)
    norm = math.nan
    if a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]:
        with np.errstate(all="ignore"):
            wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
            norm = math.sqrt(max(0.0, float(np.sum((wide_a.T @ wide_a) * (wide_b @ wide_b.T)))))
    return Numbers(
        size=a.size + b.size,
        nonfinite=sum(part.nonfinite for part in parts),
        minimum=min(part.minimum for part in parts),
        maximum=max(part.maximum for part in parts),
        norm=norm,
    )


def _numbers_to_json(numbers: Numbers) -> dict[str, Any]:
    return {
        "size": numbers.size,
        "nonfinite": numbers.nonfinite,
        "minimum": factor_to_json(numbers.minimum),
        "maximum": factor_to_json(numbers.maximum),
        "norm": factor_to_json(numbers.norm),
    }


def is_float(dtype: str) -> bool:
    """Whether values of this dtype can be NaN or infinite."""
    return dtype in FLOAT_DTYPES
