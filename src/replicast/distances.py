"""How far two arrays are apart: as bits, and as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from replicast.edits import FLOAT_DTYPES, Array
from replicast.parts import factor_to_json
from replicast.strictjson import reading

_PIECE_BYTES = 2**20  # In float64 and with what is computed of it, a piece takes up to forty times its size.


@dataclass(frozen=True, slots=True)
class Distance:
    """How far two arrays of one shape and dtype are apart.

    Attributes:
        differing: How many elements differ in their bits.
        first: The place of the first of them, in row-major order; None when every bit is equal.
        one_is_nan: How many are NaN in one array only.
        absolute: The largest absolute difference of elements that are no NaN.
        relative: The largest difference in relation to the larger of the two.
    """

    differing: int = 0
    first: int | None = None
    one_is_nan: int = 0
    absolute: float = 0.0
    relative: float = 0.0

    def then(self, other: Distance, place: int) -> Distance:
        """This piece of two arrays and the next one, which begins at `place`, as one."""
        if other.first is None:
            return self
        return Distance(
            self.differing + other.differing,
            place + other.first if self.first is None else self.first,
            self.one_is_nan + other.one_is_nan,
            max(self.absolute, other.absolute),
            max(self.relative, other.relative),
        )


@dataclass(frozen=True, slots=True)
class Deviation:
    """How far one worker's value of a variable is from the reference's.

    Attributes:
        count: How many elements differ in their bits.
        of: How many there are.
        largest_absolute: The largest difference of elements that are no NaN; infinite if one of them is.
        largest_relative: The largest difference in relation to the larger of the two.
        first_index: Where the first differing element is, an index for each dimension; None if none differs.
        one_is_nan: How many elements are NaN on one side only.
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
        """Where the first differing element is; empty when there is nothing to choose from."""
        return str(list(self.first_index)) if self.first_index else ""

    @property
    def largest(self) -> str:
        """The largest difference, in words."""
        nans = f"{self.one_is_nan} NaN on one side only" if self.one_is_nan else ""
        if self.largest_absolute == 0:  # zeros of another sign, other NaNs
            return nans or "same values, other bits"
        numbers = f"{self.largest_absolute:.4g} ({self.largest_relative:.4g} relative)"
        return f"{numbers}, {nans}" if nans else numbers

    def __str__(self) -> str:
        elements = f"{self.share} elements" if self.of != 1 else "its one number"
        where = f", first at {self.place}" if self.place else ""
        if self.largest_absolute == 0 and not self.one_is_nan and self.count:
            return f"{elements}{where}; the values are the same, the bits are not"
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
        """What `to_json` described.

        Raises:
            ValueError: It is none.
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
    """How far a value is from the reference's, as bits and as numbers. Any dtype.

    Raises:
        ValueError: They have not the same shape and dtype.
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
    """How many are NaN on one side only, and the largest absolute and relative difference of the others."""
    one_is_nan = 0
    with np.errstate(all="ignore"):
        if left.dtype.name in FLOAT_DTYPES:
            left, right = left.astype(np.float64), right.astype(np.float64)
            one_is_nan = int(np.count_nonzero(np.isnan(left) != np.isnan(right)))
            numbers = ~(np.isnan(left) | np.isnan(right))
            left, right = left[numbers], right[numbers]
            absolute = np.abs(left - right)
        else:
            # Wrapped around, the difference of integers is right as an unsigned one.
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
