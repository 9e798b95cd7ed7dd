"""Arrays divided into blocks with one digest each, so that several workers can verify one buffer together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from replicast.mapping import Bytes

BLOCK_BYTES = 1 << 22
"""Small enough to share a large array evenly, large enough that all digests fit in a message."""
DIGITS = 16
"""The length of a block's digest: xxh3_64 in hexadecimal digits."""
_CHUNK_BYTES = 1 << 18  # fits in the processor's cache, and makes Python's part negligible

Each = Callable[[int, Bytes], Bytes]
"""Called with the offset of a chunk in its block, and the chunk; returns the chunk or a copy to digest."""


class Block(NamedTuple):
    """A part of one array: the index of the array, the offset of the part, and the part."""

    place: int
    start: int
    content: Bytes


def blocks_of(arrays: Sequence[npt.NDArray[Any]]) -> Iterator[Block]:
    """All blocks of all arrays; an empty array has no blocks."""
    for place, array in enumerate(arrays):
        content = bytes_of(array)
        for start in range(0, len(content), BLOCK_BYTES):
            yield Block(place, start, content[start : start + BLOCK_BYTES])


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
    """One digest from the digests of all blocks: xxh3_128, as hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(digests.encode())
