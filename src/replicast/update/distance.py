"""The distance between two arrays of the same shape and dtype: in bits, and in numbers."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from msgspec.structs import replace

from replicast.update.audit_report import Deviation
from replicast.update.edits import FLOAT_DTYPES, Array

_PIECE_BYTES = 2**20  # In float64 and with temporary arrays, a piece takes up to forty times its size.


def deviation(mine: Array, reference: Array) -> Deviation:
    """Compares a value of any dtype with the reference, in bits and in numbers."""
    if (mine.shape, mine.dtype) != (reference.shape, reference.dtype):
        raise ValueError(
            f"Only values of the same shape and dtype can be compared, here {reference.dtype} "
            f"{reference.shape}. Received: {mine.dtype} {mine.shape}"
        )
    found = distance([(mine, reference)])
    if found.first_index is None:
        return found
    index = np.unravel_index(found.first_index[0], mine.shape)
    return replace(found, first_index=tuple(int(place) for place in index))


def distance(pairs: Iterable[tuple[Array, Array]]) -> Deviation:
    """Compares a value in parts, each with the reference's, piece by piece. Its index has one dimension."""
    count = of = one_is_nan = 0
    absolute = relative = 0.0
    first: tuple[int] | None = None
    for pair in pairs:
        left, right = (np.ascontiguousarray(side).reshape(-1) for side in pair)
        bits, length = np.dtype(f"u{left.dtype.itemsize}"), _PIECE_BYTES // left.dtype.itemsize
        for start in range(0, left.size, length):
            piece = slice(start, start + length)
            where = left[piece].view(bits) != right[piece].view(bits)
            if where.any():
                count += int(np.count_nonzero(where))
                first = (of + start + int(np.argmax(where)),) if first is None else first
                nans, *largest = _largest(left[piece][where], right[piece][where])
                one_is_nan += nans
                absolute, relative = max(absolute, largest[0]), max(relative, largest[1])
        of += left.size
    return Deviation(count, of, absolute, relative, first, one_is_nan)


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
