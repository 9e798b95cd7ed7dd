"""Checks whether numbers are finite: the only slow check of an update's values."""

from __future__ import annotations

import math

import numpy as np

from replicast.update.digest import name_of
from replicast.update.edits import FLOAT_DTYPES, Array

_CHUNK = 2**16  # Elements. Small enough that temporary results stay in the processor's cache.


def is_finite(array: Array) -> bool:
    """Whether no element is NaN or infinite."""
    return name_of(array.dtype) not in FLOAT_DTYPES or nonfinite(array)[0] == 0


def _surely_finite(array: Array) -> bool:
    """A quick check: the sum of all squares is finite only if every element is.

    The reverse does not hold: squares of large numbers overflow, and dtypes that numpy multiplies slowly are
    not checked.
    """
    if array.dtype not in (np.float32, np.float64):
        return False
    flat = np.ascontiguousarray(array).reshape(-1)
    with np.errstate(all="ignore"):
        return all(
            math.isfinite(np.dot(chunk, chunk))
            for chunk in (flat[start : start + _CHUNK] for start in range(0, flat.size, _CHUNK))
        )


def nonfinite(array: Array) -> tuple[int, int]:
    """How many elements are NaN or infinite, and the index of the first in row-major order.

    Compares bits, chunk by chunk: without its sign, a number is finite if its bits, as an integer, are below
    those of infinity. This works for all dtypes, including those that numpy computes slowly.
    """
    if _surely_finite(array):
        return 0, -1
    bits = np.dtype(f"u{array.dtype.itemsize}")
    infinity = np.array(np.inf, array.dtype).view(bits)
    flat = np.ascontiguousarray(array).reshape(-1).view(bits)
    buffer = np.empty(min(_CHUNK, flat.size), bits)
    found, first = 0, -1
    for start in range(0, flat.size, _CHUNK):
        chunk = flat[start : start + _CHUNK]
        # Shifted by one bit, the sign is gone.
        shifted = np.left_shift(chunk, 1, out=buffer[: chunk.size])
        if shifted.max() < infinity << 1:
            continue
        wrong = shifted >= infinity << 1
        first = start + int(np.argmax(wrong)) if first < 0 else first
        found += int(np.count_nonzero(wrong))
    return found, first
