"""Bytes in blocks, each with a digest of its own, so that several can check one buffer together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from replicast.mapping import Bytes

BLOCK_BYTES = 1 << 22
"""Enough of them that workers can share a large array evenly, few enough to be told in a message."""
CHUNK_BYTES = 1 << 18
"""Small enough for a cache, large enough to forget what Python costs."""
DIGITS = 16
"""Of one block: xxh3_64, as hexadecimal digits."""


Each = Callable[[int, Bytes], Bytes]
"""Given where a chunk begins and the chunk; returns what is digested, itself or a copy.

The processor's cache has it for both."""


def bytes_of(array: npt.NDArray[Any]) -> Bytes:
    """The elements in row-major order and this machine's byte order; a view where they lie so already."""
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def digest_block(block: Bytes, each: Each = lambda _, chunk: chunk) -> str:
    """The digest of one block; `each` is called for its chunks, one after the other."""
    hasher = xxhash.xxh3_64()
    for start in range(0, len(block), CHUNK_BYTES):
        hasher.update(each(start, block[start : start + CHUNK_BYTES]).data)
    return hasher.hexdigest()


def digest_blocks(data: Bytes, each: Each = lambda _, chunk: chunk) -> str:
    """The digests of all blocks of an array, one behind the other; none for an empty one."""
    digests = []
    for start in range(0, len(data), BLOCK_BYTES):
        each_of_block = partial(_shifted, each, start)
        digests.append(digest_block(data[start : start + BLOCK_BYTES], each_of_block))
    return "".join(digests)


def digest_of_blocks(blocks: str) -> str:
    """One digest for all that these are of: xxh3_128, as hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(blocks.encode())


def _shifted(each: Each, by: int, start: int, chunk: Bytes) -> Bytes:
    return each(by + start, chunk)
