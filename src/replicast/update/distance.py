"""The distance between two arrays of the same shape and dtype: in bits, and in numbers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from replicast.update.audit_report import Deviation
from replicast.update.edits import FLOAT_DTYPES, Array

_PIECE_BYTES = 2**20  # In float64 and with temporary arrays, a piece takes up to forty times its size.


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance between two arrays of the same shape and dtype."""

    differing: int = 0
    first: int | None = None
    one_is_nan: int = 0
    absolute: float = 0.0
    relative: float = 0.0

    def then(self, other: Distance, start: int) -> Distance:
        """Combines the distance so far with that of the next piece, which starts at index `start`."""
        if other.first is None:
            return self
        return Distance(
            self.differing + other.differing,
            start + other.first if self.first is None else self.first,
            self.one_is_nan + other.one_is_nan,
            max(self.absolute, other.absolute),
            max(self.relative, other.relative),
        )


def distance(left: Array, right: Array) -> Distance:
    """Compares two arrays of the same shape and dtype, piece by piece."""
    left, right = (np.ascontiguousarray(side).reshape(-1) for side in (left, right))
    length = _PIECE_BYTES // left.dtype.itemsize
    found = Distance()
    for start in range(0, left.size, length):
        found = found.then(_of_piece(left[start : start + length], right[start : start + length]), start)
    return found


def deviation(mine: Array, reference: Array) -> Deviation:
    """Compares a value of any dtype with the reference, in bits and in numbers."""
    if (mine.shape, mine.dtype) != (reference.shape, reference.dtype):
        raise ValueError(
            f"Only values of the same shape and dtype can be compared, here {reference.dtype} "
            f"{reference.shape}. Received: {mine.dtype} {mine.shape}"
        )
    found = distance(mine, reference)
    index = None
    if found.first is not None:
        index = tuple(int(place) for place in np.unravel_index(found.first, mine.shape))
    return Deviation(found.differing, mine.size, found.absolute, found.relative, index, found.one_is_nan)


def _of_piece(left: Array, right: Array) -> Distance:
    bits = np.dtype(f"u{left.dtype.itemsize}")
    where = left.view(bits) != right.view(bits)
    if not where.any():
        return Distance()
    numbers = _largest(left[where], right[where])
    return Distance(int(np.count_nonzero(where)), int(np.argmax(where)), *numbers)


def _largest(left: Array, right: Array) -> tuple[int, float, float]:
    """The number of elements that are NaN on one side only; the largest absolute and relative difference."""
    one_is_nan = 0
    with np.errstate(all="ignore"):
        if left.dtype.name in FLOAT_DTYPES:
            left, right = left.astype(np.float64), right.astype(np.float64)
            one_is_nan = int(np.count_nonzero(np.isnan(left) != np.isnan(right)))
            numbers = ~(np.isnan(left) | np.isnan(right))
            left, right = left[numbers], right[numbers]
            absolute = np.abs(left - right)
        else:
            # The difference of integers may wrap around; as an unsigned integer it is right.
            unsigned = np.dtype(f"u{left.dtype.itemsize}")
            forth, back = (
                pair[0].view(unsigned) - pair[1].view(unsigned) for pair in ((left, right), (right, left))
            )
            absolute = np.where(left > right, forth, back).astype(np.float64)
        if not absolute.size:
            return one_is_nan, 0.0, 0.0
        larger = np.maximum(np.abs(left.astype(np.float64)), np.abs(right.astype(np.float64)))
        relative = np.where(np.isinf(absolute), np.inf, absolute / np.where(larger == 0, 1.0, larger))
    return one_is_nan, float(absolute.max()), float(relative.max())
