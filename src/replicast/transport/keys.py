"""Who takes part in a transfer between hosts, in which pieces, and under which keys."""

from __future__ import annotations

import itertools
import zlib

from replicast.mapping import ALIGNMENT

FIRST_KEY = 1_000_000_000
"""Above all keys of transfers in steps and between them, which count up from 100, 100 and 500 million."""
_LAST_KEY = 2**31 - 1
_BLOCK = 1024
"""Keys, and so chunks, that one parcel may use."""
_FIRST_GROUP = 1_000_000_000
"""TensorFlow counts its groups from 1 on."""
_sent = itertools.count()
"""Of the process, as the keys are: a script may have several transports."""


def leaders_of(hosts: tuple[str, ...]) -> dict[str, int]:
    """The lowest rank on each host, in the order of the ranks."""
    leaders: dict[str, int] = {}
    for rank, host in enumerate(hosts):
        leaders.setdefault(host, rank)
    return leaders


def group_key(leaders: tuple[int, ...]) -> int:
    """The key of the group of these workers: the same for the same workers, as TensorFlow demands."""
    return _FIRST_GROUP + zlib.crc32(repr(leaders).encode()) % (_LAST_KEY - _FIRST_GROUP)


def chunk_ranges(nbytes: int, chunk_bytes: int) -> list[tuple[int, int]]:
    """The first byte of each chunk and the one after its last; at most as many chunks as there are keys."""
    smallest = -(-nbytes // _BLOCK // ALIGNMENT) * ALIGNMENT
    size = max(chunk_bytes, smallest)
    return [(start, min(start + size, nbytes)) for start in range(0, nbytes, size)]


def next_block(rank: int, leaders: tuple[int, ...]) -> int:
    """A range of keys that no other transfer of these leaders has had: each leader has numbers of its own."""
    return next(_sent) * len(leaders) + leaders.index(rank)


def instance_keys(block: int, count: int) -> list[int]:
    """One key for each chunk of the parcel that has this block."""
    blocks = (_LAST_KEY - FIRST_KEY) // _BLOCK
    first = FIRST_KEY + block % blocks * _BLOCK
    return [first + number for number in range(count)]
