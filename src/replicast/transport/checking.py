"""The share of a parcel's blocks that one worker checks, and looks at while the cache has them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from replicast.blocks import BLOCK_BYTES, bytes_of, digest_block
from replicast.mapping import Bytes
from replicast.transport.base import Look, Parcel, damaged

Wait = Callable[[int], bool]
"""Given an offset in the parcel: whether all bytes before it are there, if need be after a while."""
_OWN_SHARE = 7
"""Blocks that the source of what is handed over checks, for one of another: those map all of it meanwhile."""


class Share:
    """Which blocks of a parcel a worker checks. All are at nearly the same place at once.

    Args:
        parcel: The parcel.
        rank: The worker.
        mates: All workers that look at the same memory.
    """

    def __init__(self, parcel: Parcel, rank: int, mates: Sequence[int]) -> None:
        others = [mate for mate in mates if mate != parcel.source]
        first = [parcel.source] if len(others) < len(mates) else []
        if parcel.handed_over:
            first *= _OWN_SHARE * max(1, len(others))
        elif others:  # it knows what it has written, and was busy with that
            first = []
        self._turns = [*first, *others]
        self._rank = rank

    def __contains__(self, block: int) -> bool:
        return self._turns[block % len(self._turns)] == self._rank

    @property
    def is_empty(self) -> bool:
        """Whether others check it all."""
        return self._rank not in self._turns


def digests_of_share(
    parcel: Parcel,
    arrays: Sequence[npt.NDArray[Any]],
    share: Share,
    look: Look,
    wait: Wait = lambda _: True,
) -> dict[int, str] | None:
    """The digests of the blocks in a share, by number; None when waiting for one was in vain."""
    digests: dict[int, str] = {}
    block = 0
    for place, (array, piece) in enumerate(zip(arrays, parcel.arrays, strict=True)):
        content = bytes_of(array)

        def seen(_: int, chunk: Bytes, place: int = place, dtype: Any = array.dtype) -> Bytes:
            look(place, chunk.view(dtype))
            return chunk

        for start in range(0, len(content), BLOCK_BYTES):
            part = content[start : start + BLOCK_BYTES]
            if not wait(piece.offset + start + len(part)):
                return None
            if block in share:
                digests[block] = digest_block(part, seen)
            block += 1
    return digests


def check_share(
    parcel: Parcel, arrays: Sequence[npt.NDArray[Any]], rank: int, mates: Sequence[int], look: Look
) -> None:
    """Checks a worker's share of a parcel.

    Raises:
        UpdateRefused: A block is not what the source published.
    """
    if parcel.is_finite:
        look = _look_away
    digests = digests_of_share(parcel, arrays, Share(parcel, rank, mates), look)
    for block, found in (digests or {}).items():
        expected = parcel.digest_of(block)
        if found != expected:
            raise damaged(parcel, f"digest {expected} of block {block}", f"digest {found}", rank)


def _look_away(place: int, part: npt.NDArray[Any]) -> None:
    pass
