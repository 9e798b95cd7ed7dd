"""Edits: operations on one variable, defined in numpy to the last bit.

TensorFlow applies edits on the workers; this module defines the result. `apply_edit` does the same
elementwise operations in the same order, each rounded to the variable's dtype. So the result has the bits of
TensorFlow on a CPU and does not depend on a matrix library. This includes TensorFlow's treatment of denormal
numbers: its arithmetic reads them as zero and never returns them, except in float16, where it keeps them.

One thing is undefined: the sign and payload of a NaN that arithmetic in bfloat16 or float16 produces.
TensorFlow itself returns one NaN in the vectorized part of an array, eight elements at a time, and another in
the rest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypeVar

import ml_dtypes
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from replicast.errors import UpdateRefused

Array: TypeAlias = npt.NDArray[Any]
_Key = TypeVar("_Key")
_Value = TypeVar("_Value")

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)  # with this import, numpy knows it by name
FLOAT_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64"})
INTEGER_DTYPES = frozenset(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64))
DTYPES = FLOAT_DTYPES | INTEGER_DTYPES | {"bool"}
MAX_DIMENSIONS = 32
MAX_ELEMENTS = 2**48  # more than any array has; numpy raises on sizes that overflow

Kind: TypeAlias = Literal["trainable", "non_trainable", "optimizer"]


class Variable(Struct, frozen=True):
    """One variable of the state."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind
    slots: tuple[tuple[str, float], ...] = ()  # the optimizer's variables for it, and what they are reset to

    def __post_init__(self) -> None:
        if (
            self.dtype not in DTYPES
            or len(self.shape) > MAX_DIMENSIONS
            or any(size < 0 for size in self.shape)
            # Zeros count as 1: numpy multiplies the other dimensions too, and they may overflow.
            or math.prod(max(size, 1) for size in self.shape) >= MAX_ELEMENTS
        ):
            raise ValueError(f"Invalid dtype or shape of {self.name}. Received: {self.dtype} {self.shape}")

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class EditKind(StrEnum):
    """What an edit does, the arrays that it needs, in the order of files, and whether it needs a factor."""

    arrays: tuple[str, ...]
    has_factor: bool

    def __new__(cls, name: str, arrays: tuple[str, ...] = (), has_factor: bool = False) -> EditKind:
        kind = str.__new__(cls, name)
        kind._value_, kind.arrays, kind.has_factor = name, arrays, has_factor
        return kind

    ADD = "add", ("value",)  # variable + value
    ASSIGN = "assign", ("value",)  # value, bit for bit
    SCALE = "scale", (), True  # variable * factor
    BLEND = "blend", ("value",), True  # variable + (value - variable) * weight
    ADD_ROWS = "add_rows", ("indices", "rows")  # variable[indices] + rows; the other rows do not change
    ASSIGN_ROWS = "assign_rows", ("indices", "rows")  # rows at indices, bit for bit; the others do not change
    ADD_LOW_RANK = "add_low_rank", ("a", "b")  # variable + a @ b, one rank after the other
    # Every element becomes the factor; made by validation from reset_slots, not by users.
    RESET = "reset", (), True
    RESET_ROWS = "reset_rows", ("indices",), True  # the same for the rows at indices

    @property
    def is_of_rows(self) -> bool:
        return "indices" in self.arrays


RESETS = frozenset({EditKind.RESET, EditKind.RESET_ROWS})
COPY_BITS = frozenset({EditKind.ASSIGN, EditKind.ASSIGN_ROWS}) | RESETS
ADDITIONS = frozenset({EditKind.ADD, EditKind.ADD_ROWS, EditKind.ADD_LOW_RANK})  # undone by subtraction


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    operation: EditKind
    variable: str
    arrays: Mapping[str, Array] = field(default_factory=dict)
    factor: float | None = None
    loose: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "arrays", MappingProxyType(dict(self.arrays)))

    @property
    def nbytes(self) -> int:
        return sum(array.nbytes for array in self.arrays.values())


def refused(
    variable: str,
    problem: str,
    expected: str | None = None,
    received: str | None = None,
    remedy: str | None = None,
) -> UpdateRefused:
    """Why a variable cannot be changed so."""
    return UpdateRefused(problem, variable=variable, expected=expected, received=received, remedy=remedy)


def grouped(pairs: Iterable[tuple[_Key, _Value]]) -> dict[_Key, list[_Value]]:
    """The values of each key, in their order."""
    found: dict[_Key, list[_Value]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def by_variable(edits: Iterable[Edit]) -> dict[str, list[Edit]]:
    return grouped((edit.variable, edit) for edit in edits)


def touched_rows(edits: Sequence[Edit]) -> npt.NDArray[np.int64] | None:
    """The rows that edits of one variable write, unique and sorted; None if one writes the whole variable."""
    if not all(edit.operation.is_of_rows for edit in edits):
        return None
    rows = np.unique(np.concatenate([edit.arrays["indices"] for edit in edits])).astype(np.int64)
    rows.flags.writeable = False
    return rows


def low_rank_norm(a: Array, b: Array) -> float:
    """The norm of a @ b without computing the product: by the sum of (aᵀa) ∘ (b bᵀ)."""
    with np.errstate(all="ignore"):
        a, b = a.astype(np.float64), b.astype(np.float64)
        return math.sqrt(max(0.0, float(np.sum((a.T @ a) * (b @ b.T)))))


def factor_as(factor: float, dtype: npt.DTypeLike) -> Array:
    """A factor, weight or fill value in the variable's dtype, as a scalar array."""
    with np.errstate(all="ignore"):
        return np.asarray(np.asarray(factor, np.float64).astype(dtype))


def apply_edit(edit: Edit, current: Array) -> Array:
    """Returns the variable's value after the edit."""
    arrays = edit.arrays
    factor = factor_as(1.0 if edit.factor is None else edit.factor, current.dtype)
    match edit.operation:
        case EditKind.ADD:
            return _calculate(np.add, current, arrays["value"])
        case EditKind.ASSIGN:
            return np.array(arrays["value"], dtype=current.dtype, order="C")
        case EditKind.SCALE:
            return _calculate(np.multiply, current, factor)
        case EditKind.BLEND:
            difference = _calculate(np.subtract, arrays["value"], current)
            return _calculate(np.add, current, _calculate(np.multiply, difference, factor))
        case EditKind.ADD_ROWS:
            rows = _calculate(np.add, current[arrays["indices"]], arrays["rows"])
            return _with_rows(current, arrays["indices"], rows)
        case EditKind.ASSIGN_ROWS:
            return _with_rows(current, arrays["indices"], arrays["rows"])
        case EditKind.ADD_LOW_RANK:
            a, b = arrays["a"], arrays["b"]
            result = np.array(current, order="C")
            for rank in range(a.shape[1]):
                product = _calculate(np.multiply, a[:, rank : rank + 1], b[rank : rank + 1, :])
                result = _calculate(np.add, result, product)
            return result
        case EditKind.RESET:
            return np.full(current.shape, factor, current.dtype)
        case EditKind.RESET_ROWS:
            return _with_rows(current, arrays["indices"], factor)


def _with_rows(current: Array, indices: Array, rows: Array) -> Array:
    result = np.array(current, order="C")
    result[indices] = rows
    return result


def _calculate(operation: np.ufunc, left: Array, right: Array) -> Array:
    """One elementwise operation as TensorFlow does it: rounded to the dtype, denormals flushed to zero."""
    dtype = left.dtype
    with np.errstate(all="ignore"):  # By definition, integers wrap around and floats overflow to infinity.
        if dtype == BFLOAT16:
            # In float32, where a denormal bfloat16 is denormal too, and so is flushed.
            wide = _calculate(operation, left.astype(np.float32), right.astype(np.float32))
            return np.asarray(wide.astype(BFLOAT16))
        if dtype not in (np.float32, np.float64):
            return np.asarray(operation(left, right, dtype=dtype))
        left, right = _flushed(left), _flushed(right)
        result = np.asarray(operation(left, right, dtype=dtype))
        if operation is np.multiply:
            result = _without_rounded_up(result, left, right)
        return _flushed(result)


def _flushed(array: Array) -> Array:
    """The array with each denormal number replaced by a zero of the same sign."""
    zeros = np.copysign(array.dtype.type(0), array)
    return np.where(np.abs(array) < np.finfo(array.dtype).tiny, zeros, array)


def _without_rounded_up(product: Array, left: Array, right: Array) -> Array:
    """Flushes each product that is the smallest normal number only because it was rounded as a denormal.

    A processor that flushes denormals first rounds as if the exponent were unbounded, and checks the size
    afterwards: with one more bit of precision, such a product stays below the smallest normal number.
    """
    tiny = np.finfo(product.dtype).tiny
    borderline = np.abs(product) == tiny
    if not borderline.any():
        return product
    left, right = (np.broadcast_to(side, product.shape)[borderline] for side in (left, right))
    (left_part, left_exponent), (right_part, right_exponent) = np.frexp(left), np.frexp(right)
    part, exponent = np.frexp(left_part * right_part)
    too_small = exponent + left_exponent + right_exponent < np.frexp(tiny)[1]
    kept = product[borderline]
    product[borderline] = np.where(too_small, np.copysign(product.dtype.type(0), part), kept)
    return product


# Edits of a variable slice by slice: the same bits as on the whole variable, with little memory.
#
# Every edit computes each element from that element and the edit's own arrays alone. So a variable is
# treated as a table, with a row for each index of its first dimension, and cut into slices that are
# contiguous in memory: whole rows, or a part of one row if a row is too long.
#
# The sign and payload of a NaN computed from two different NaNs are undefined: processors give different
# results for vectorized elements and for the remainder. This needs an update that contains NaNs.

SLICE_ELEMENTS = 2**20  # Arithmetic needs about ten arrays of this size, and is faster in the cache.


@dataclass(frozen=True, slots=True)
class Slice:
    rows: slice
    columns: slice

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows.stop - self.rows.start, self.columns.stop - self.columns.start


def slices_of(shape: tuple[int, ...], elements: int = SLICE_ELEMENTS) -> Iterator[Slice]:
    """Cuts a variable into slices of at most `elements` elements, in the order of its bytes."""
    rows, width = _table(shape)
    height, part = max(1, elements // max(1, width)), min(width, elements)
    for row in range(0, rows, height):
        for start in range(0, width, max(1, part)):
            yield Slice(slice(row, min(row + height, rows)), slice(start, min(start + part, width)))


def in_slice(array: Array, part: Slice) -> Array:
    found: Array = array.reshape(_table(array.shape))[part.rows, part.columns]
    return found


def apply_to_slice(edits: Iterable[Edit], shape: tuple[int, ...], part: Slice, current: Array) -> Array:
    for edit in edits:
        cut = edit_in_slice(edit, shape, part)
        if cut is not None:
            current = apply_edit(cut, current)
    return current


def edit_in_slice(edit: Edit, shape: tuple[int, ...], part: Slice) -> Edit | None:
    """The part of an edit that concerns a slice of a variable of this shape; None if it does not."""
    arrays = edit.arrays
    match edit.operation:
        case EditKind.ADD | EditKind.ASSIGN | EditKind.BLEND:
            cut = {"value": in_slice(arrays["value"], part)}
        case EditKind.ADD_ROWS | EditKind.ASSIGN_ROWS | EditKind.RESET_ROWS:
            indices = arrays["indices"]
            chosen = (indices >= part.rows.start) & (indices < part.rows.stop)
            if not chosen.any():
                return None
            cut = {"indices": indices[chosen] - part.rows.start}
            if "rows" in arrays:
                values = arrays["rows"].reshape(len(indices), _table(shape)[1])[:, part.columns]
                cut["rows"] = values[chosen]
        case EditKind.ADD_LOW_RANK:
            cut = {"a": arrays["a"][part.rows], "b": arrays["b"][:, part.columns]}
        case EditKind.SCALE | EditKind.RESET:
            cut = {}
    return Edit(edit.operation, edit.variable, cut, edit.factor)


def _table(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)
