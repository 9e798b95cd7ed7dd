"""Comparing arrays: by digests, which are equal if every bit of the arrays is, and by their distance.

`-0.0` and `0.0` differ, and so do two NaNs with different payloads: digests compare the stored bits, not
their meaning. A digest is xxh3_128 as 32 hexadecimal digits, over the dtype's name, the shape, and the
elements in row-major order. It is fast, but not cryptographic: it does not protect against a forged array.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash
from msgspec.structs import replace

from replicast.mapped_memory import Bytes
from replicast.update.audit_report import Deviation
from replicast.update.edits import FLOAT_DTYPES, Array


@functools.cache
def name_of(dtype: np.dtype[Any]) -> str:
    """`dtype.name`, which numpy composes again at each call: 4 us, and several times for each edit."""
    return dtype.name


def digest_array(array: npt.NDArray[Any]) -> str:
    """Digests one array. Reads a row-major array in place; copies any other layout first."""
    array = np.asarray(array)
    hasher = begun_digest(array.dtype, array.shape)
    hasher.update(bytes_of(array).data)
    return hasher.hexdigest()


def begun_digest(dtype: np.dtype[Any], shape: Sequence[int]) -> xxhash.xxh3_128:
    """A hasher for an array of this dtype and shape, ready for its elements."""
    name = name_of(dtype)
    if dtype.hasobject or name.startswith("void"):  # Addresses, or bytes of unknown meaning.
        raise TypeError(f"Only arrays of plain numbers have a digest. Received: dtype {dtype}")
    return xxhash.xxh3_128(f"{name}{list(shape)}".encode())


def digest_state(state: Mapping[str, npt.NDArray[Any]]) -> str:
    """Digests named arrays, independent of their order."""
    return digest_of_digests({name: digest_array(array) for name, array in state.items()})


def digest_of_digests(digests: Mapping[str, str]) -> str:
    """The result of `digest_state` for arrays with these digests."""
    hasher = xxhash.xxh3_128()
    for name in sorted(digests):
        encoded = name.encode()
        # The length separates a name from what follows it.
        hasher.update(len(encoded).to_bytes(8, "little") + encoded)
        hasher.update(bytes.fromhex(digests[name]))
    return hasher.hexdigest()


# Arrays divided into blocks with one digest each, so that several workers can verify one buffer together.

BLOCK_BYTES = 1 << 22
"""Small enough to share a large array evenly, large enough that all digests fit in a message."""
DIGITS = 16
"""The length of a block's digest: xxh3_64 in hexadecimal digits."""
_CHUNK_BYTES = 1 << 18  # fits in the processor's cache, and makes Python's part negligible

Each = Callable[[int, Bytes], Bytes]
"""Called with the offset of a chunk in its block, and the chunk; returns the chunk or a copy to digest."""


def blocks_of(arrays: Sequence[npt.NDArray[Any]]) -> Iterator[tuple[int, int, Bytes]]:
    """Each block of all arrays: the index of its array, its offset there, and its bytes."""
    for place, array in enumerate(arrays):
        content = bytes_of(array)
        for start in range(0, len(content), BLOCK_BYTES):
            yield place, start, content[start : start + BLOCK_BYTES]


def bytes_of(array: npt.NDArray[Any]) -> Bytes:
    """The elements in row-major order and this machine's byte order; a view if they are stored that way."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def digest_block(content: Bytes, each: Each = lambda _, chunk: chunk) -> str:
    """The digest of one block; calls `each` for its chunks while they are in the processor's cache."""
    hasher = xxhash.xxh3_64()
    for start in range(0, len(content), _CHUNK_BYTES):
        hasher.update(each(start, content[start : start + _CHUNK_BYTES]).data)
    return hasher.hexdigest()


def digest_of_blocks(digests: str) -> str:
    return xxhash.xxh3_128_hexdigest(digests.encode())


# Checks whether numbers are finite: the only slow check of an update's values.

_CHUNK = 2**16  # Elements. Small enough that temporary results stay in the processor's cache.


def chunks_of(array: Array) -> Iterator[Array]:
    flat = np.ascontiguousarray(array).reshape(-1)
    return (flat[start : start + _CHUNK] for start in range(0, flat.size, _CHUNK))


def is_finite(array: Array) -> bool:
    return name_of(array.dtype) not in FLOAT_DTYPES or nonfinite(array)[0] == 0


def _surely_finite(array: Array) -> bool:
    """A quick check: the sum of all squares is finite only if every element is.

    The reverse does not hold: squares of large numbers overflow, and dtypes that numpy multiplies slowly are
    not checked.
    """
    if array.dtype not in (np.float32, np.float64):
        return False
    with np.errstate(all="ignore"):
        return all(math.isfinite(np.dot(chunk, chunk)) for chunk in chunks_of(array))


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


# The distance between two arrays of the same shape and dtype, in bits and in numbers.

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
