"""Plans a transfer between hosts: its leaders, its chunks and the keys of its collectives."""

from __future__ import annotations

import itertools
import zlib

from replicast.mapped_memory import ALIGNMENT

# Above all keys of other transfers: those start at 100, 100 million and 500 million, and count up.
FIRST_KEY = 1_000_000_000
_LAST_KEY = 2**31 - 1
_BLOCK = 1024  # The number of keys, and so the maximum number of chunks, of one parcel.
_FIRST_GROUP = 1_000_000_000  # TensorFlow numbers its own groups from 1.
_sent = itertools.count()  # Per process, as the keys are: a script may have several transports.


def leaders_of(hosts: tuple[str, ...]) -> dict[str, int]:
    """The lowest rank on each host, in rank order."""
    leaders: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        leaders.setdefault(host, rank)
    return leaders


def predecessor(leaders: tuple[int, ...], rank: int) -> int:
    """The leader before this one on the ring: a chain of hosts is the ring, cut before its source."""
    return leaders[leaders.index(rank) - 1]


def group_key(leaders: tuple[int, ...]) -> int:
    """The key of the group of these workers. TensorFlow requires that equal groups have equal keys."""
    return _FIRST_GROUP + zlib.crc32(repr(leaders).encode()) % (_LAST_KEY - _FIRST_GROUP)


def chunk_ranges(nbytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """The range of bytes of each chunk; at most as many chunks as a parcel has keys."""
    smallest = -(-nbytes // _BLOCK // ALIGNMENT) * ALIGNMENT
    size = max(chunk_bytes, smallest)
    return [(start, min(start + size, nbytes)) for start in range(0, nbytes, size)]


def next_block(rank: int, leaders: tuple[int, ...]) -> int:
    """A block of keys that no other transfer of these leaders uses: each leader has its own numbers."""
    return next(_sent) * len(leaders) + leaders.index(rank)


def instance_keys(block: int, count: int) -> list[int]:
    """One key for each chunk of the parcel to which this block of keys belongs."""
    blocks = (_LAST_KEY - FIRST_KEY) // _BLOCK
    first = FIRST_KEY + block % blocks * _BLOCK
    return [first + number for number in range(count)]
