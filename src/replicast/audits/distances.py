"""The distance between two arrays: in bits, and in numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from replicast.strictjson import reading
from replicast.update.edits import FLOAT_DTYPES, Array
from replicast.update.parts import factor_to_json

_PIECE_BYTES = 2**20  # In float64 and with temporary arrays, a piece takes up to forty times its size.


@dataclass(frozen=True, slots=True)
class Distance:
    """The distance between two arrays of the same shape and dtype.

    Attributes:
        differing: The number of elements whose bits differ.
        first: The flat index of the first of them, in row-major order; None if every bit is equal.
        one_is_nan: The number of elements that are NaN in one array only.
        absolute: The largest absolute difference, without NaNs.
        relative: The largest difference relative to the larger of the two elements.
    """

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


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far one worker's value of a variable is from the reference worker's.

    Attributes:
        count: The number of elements whose bits differ.
        of: The number of elements.
        largest_absolute: The largest difference, without NaNs; infinite if an element is infinite.
        largest_relative: The largest difference relative to the larger of the two elements.
        first_index: The index of the first differing element; None if none differs.
        one_is_nan: The number of elements that are NaN on one side only.
    """

    count: int
    of: int
    largest_absolute: float
    largest_relative: float
    first_index: tuple[int, ...] | None
    one_is_nan: int = 0

    @property
    def share(self) -> str:
        """How many elements differ, in words."""
        return f"{self.count} of {self.of}"

    @property
    def place(self) -> str:
        """The index of the first differing element; empty for a scalar."""
        return str(list(self.first_index)) if self.first_index else ""

    @property
    def largest(self) -> str:
        """The largest difference, in words."""
        nans = f"{self.one_is_nan} NaN on one side only" if self.one_is_nan else ""
        if self.largest_absolute == 0:  # zeros of opposite sign, NaNs with different payloads
            return nans or "equal values, different bits"
        numbers = f"{self.largest_absolute:.4g} ({self.largest_relative:.4g} relative)"
        return f"{numbers}, {nans}" if nans else numbers

    def __str__(self) -> str:
        elements = f"{self.share} elements" if self.of != 1 else "its only element"
        where = f", first at {self.place}" if self.place else ""
        if self.largest_absolute == 0 and not self.one_is_nan and self.count:
            return f"{elements}{where}; the values are equal, the bits differ"
        return f"{elements}{where}, {'by at most ' if self.largest_absolute else ''}{self.largest}"

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        return {
            "count": self.count,
            "of": self.of,
            "largest_absolute": factor_to_json(self.largest_absolute),
            "largest_relative": factor_to_json(self.largest_relative),
            "first_index": None if self.first_index is None else list(self.first_index),
            "one_is_nan": self.one_is_nan,
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Deviation:
        """Reads what `to_json` wrote.

        Raises:
            ValueError: The fields do not describe a deviation.
        """
        with reading("deviation", fields):
            index = fields["first_index"]
            return cls(
                count=int(fields["count"]),
                of=int(fields["of"]),
                largest_absolute=float(fields["largest_absolute"]),
                largest_relative=float(fields["largest_relative"]),
                first_index=None if index is None else tuple(int(place) for place in index),
                one_is_nan=int(fields["one_is_nan"]),
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
    """Compares a value of any dtype with the reference, in bits and in numbers.

    Raises:
        ValueError: Their shapes or dtypes differ.
    """
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
