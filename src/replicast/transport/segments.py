"""Which part of a parcel a host has, and which it still needs: the decisions of a transfer, without I/O."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

from replicast.transport.base import Parcel
from replicast.transport.parcel_layout import piece_bytes
from replicast.update.digest import BLOCK_BYTES

# Blocks that lie next to each other go together up to this size. A larger block goes alone.
SEGMENT_BYTES = 1 << 20
MAX_DAMAGED = 3  # How often one segment may arrive damaged before the parcel is refused.


class Block(NamedTuple):
    """The bytes of a parcel's buffer that have one digest."""

    number: int
    start: int
    stop: int


class Segment(NamedTuple):
    """Whole blocks, sent and verified together. Padding between them is sent too, and not verified."""

    start: int
    stop: int
    blocks: tuple[Block, ...]


def segments_of(parcel: Parcel) -> tuple[Segment, ...]:
    """All segments of a parcel: the same on every worker."""
    groups: list[list[Block]] = []
    for block in _blocks(parcel):
        if groups and block.stop - groups[-1][0].start <= SEGMENT_BYTES:
            groups[-1].append(block)
        else:
            groups.append([block])
    return tuple(Segment(group[0].start, group[-1].stop, tuple(group)) for group in groups)


def _blocks(parcel: Parcel) -> Iterable[Block]:
    number = 0
    for piece in parcel.arrays:
        end = piece.offset + piece_bytes(piece)
        for start in range(piece.offset, end, BLOCK_BYTES):
            yield Block(number, start, min(start + BLOCK_BYTES, end))
            number += 1


class Missing:
    """The segments that a host still needs. Each is with at most one stream, in the order of the parcel.

    ```
    missing ──take──► with a stream ──arrived──► here
       ▲                   │
       └──── give_back ────┘   the connection broke, or the bytes were damaged
    ```
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count))
        self._left = count
        self._damaged: Counter[int] = Counter()

    @property
    def complete(self) -> bool:
        return self._left == 0

    def take(self) -> int | None:
        """The next segment that no stream has; None if there is none at the moment."""
        return heapq.heappop(self._free) if self._free else None

    def give_back(self, segments: Iterable[int]) -> None:
        """These have not arrived: another stream may take them."""
        for segment in segments:
            heapq.heappush(self._free, segment)

    def arrived(self, segment: int) -> None:
        """This one has arrived intact."""
        self._left -= 1

    def damaged(self, segment: int) -> bool:
        """This one arrived damaged; returns whether it may be tried again."""
        self._damaged[segment] += 1
        if self._damaged[segment] >= MAX_DAMAGED:
            return False
        self.give_back([segment])
        return True
