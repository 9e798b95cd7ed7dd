"""Whether numbers are finite: the one look at an update's values that takes long."""

from __future__ import annotations

import math

import numpy as np

from replicast.update.edits import FLOAT_DTYPES, Array

_CHUNK = 2**16  # Elements. Small enough that what is computed of them stays in the processor's cache.


def is_finite(array: Array) -> bool:
    """Whether no element is NaN or infinite."""
    return array.dtype.name not in FLOAT_DTYPES or nonfinite(array)[0] == 0


def _surely_finite(array: Array) -> bool:
    """Whether a quick look is enough: the sum of all squares is finite only if every element is.

    The reverse does not hold: squares of large numbers overflow, and what numpy does not multiply quickly is
    not looked at.
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
    """How many elements are NaN or infinite, and the place of the first in row-major order.

    Looks at bits, chunk by chunk: without its sign, a number is finite when its bits, as an integer, are
    below those of infinity. One way for all dtypes, also for those that numpy computes slowly.
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
