"""Bytes in blocks, each with a digest of its own, so that several can check one buffer together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import xxhash

from replicast.mapping import Bytes

BLOCK_BYTES = 1 << 22
"""Enough of them that workers can share a large array evenly, few enough to be told in a message."""
CHUNK_BYTES = 1 << 18
"""Small enough for a cache, large enough to forget what Python costs."""
DIGITS = 16
"""Of one block: xxh3_64, as hexadecimal digits."""


def digest_block(block: Bytes, each: Callable[[int, Bytes], None] = lambda *_: None) -> str:
    """The digest of one block.

    Args:
        block: Its bytes.
        each: Called with each chunk and where it begins, just before it is digested: the processor's cache
            has it for both.
    """
    hasher = xxhash.xxh3_64()
    for start in range(0, len(block), CHUNK_BYTES):
        chunk = block[start : start + CHUNK_BYTES]
        each(start, chunk)
        hasher.update(chunk.data)
    return hasher.hexdigest()


def digest_blocks(data: Bytes, each: Callable[[int, Bytes], None] = lambda *_: None) -> str:
    """The digests of all blocks of an array, one behind the other; none for an empty one."""
    digests = []
    for start in range(0, len(data), BLOCK_BYTES):
        each_of_block = partial(_shifted, each, start)
        digests.append(digest_block(data[start : start + BLOCK_BYTES], each_of_block))
    return "".join(digests)


def digest_of_blocks(blocks: str) -> str:
    """One digest for all that these are of: xxh3_128, as hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(blocks.encode())


def _shifted(each: Callable[[int, Bytes], None], by: int, start: int, chunk: Bytes) -> None:
    each(by + start, chunk)
