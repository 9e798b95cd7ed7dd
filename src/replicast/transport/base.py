"""What crosses workers as bytes: a parcel of arrays, and what every transport promises about it."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from replicast.blocks import DIGITS, digest_of_blocks
from replicast.errors import UpdateRefused
from replicast.storing import Store


@dataclass(frozen=True, slots=True)
class Piece:
    """Where one array lies in a parcel.

    Attributes:
        dtype: The dtype's name, such as "float32" or "bfloat16".
        shape: Its shape.
        offset: Its first byte, a multiple of 64.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class Parcel:
    """What the source tells the others, as words, so that they can take the bytes.

    Attributes:
        id: Unique in the job: letters, digits, and any of "._-".
        source: The rank of the worker whose arrays these are.
        nbytes: The size of the whole buffer, padding included.
        arrays: The arrays in the order in which they were given.
        blocks: The digests of the arrays' blocks, one behind the other; none before they are known.
        file: The file on its source's host, if it was handed over there and not written for this parcel.
        is_finite: Its source has looked, and no number in it is NaN or infinite; else others have to.
    """

    id: str
    source: int
    nbytes: int
    arrays: tuple[Piece, ...]
    blocks: str = ""
    file: str = ""
    is_finite: bool = False

    @property
    def handed_over(self) -> bool:
        """Whether its source had nothing to write; then it takes its share in checking it."""
        return bool(self.file)

    @property
    def digest(self) -> str:
        """One digest for all bytes of all arrays, wherever they lie."""
        return digest_of_blocks(self.blocks)

    def digest_of(self, block: int) -> str:
        """The digest of one block, by its number."""
        return self.blocks[DIGITS * block : DIGITS * (block + 1)]

    def to_json(self) -> dict[str, Any]:
        """As plain values. Short, because it goes to every worker through the coordination service."""
        return {
            "id": self.id,
            "source": self.source,
            "nbytes": self.nbytes,
            "arrays": [[piece.dtype, list(piece.shape), piece.offset] for piece in self.arrays],
            "blocks": self.blocks,
            "file": self.file,
            "is_finite": self.is_finite,
        }

    @classmethod
    def from_json(cls, described: Mapping[str, Any]) -> Parcel:
        """The parcel that `to_json` described."""
        return cls(
            id=described["id"],
            source=described["source"],
            nbytes=described["nbytes"],
            arrays=tuple(Piece(dtype, tuple(shape), offset) for dtype, shape, offset in described["arrays"]),
            blocks=described["blocks"],
            file=described["file"],
            is_finite=described["is_finite"],
        )


Announce = Callable[[Parcel], None]
Look = Callable[[int, "npt.NDArray[Any]"], None]
"""Given a part of an array, flat, and the array's place in the parcel."""


class Transport(abc.ABC):
    """Carries parcels from one worker to all. Made on every worker.

    One thread of a worker receives; any thread may publish and release.

    ```
    source:  publish ──► words to all ──► receive ──► all have it ──► release
    others:              words arrive ──► receive ──► say so      ──► release
    ```
    Large parcels may be announced while they are being published, so that the others can `expect` them.
    """

    @abc.abstractmethod
    def publish(
        self,
        parcel_id: str,
        arrays: Sequence[npt.NDArray[Any]],
        announce: Announce | None = None,
        *,
        store: Store | None = None,
        to_read: bool = False,
    ) -> Parcel:
        """Makes the arrays ready to be received. Only on the source.

        The arrays are read before it returns and may be changed afterwards, but for those in the store.

        Args:
            parcel_id: What to call it.
            arrays: What is in it.
            announce: Called with the parcel, without digests, before a large one is written.
            store: Where large arrays are already; a transport that can hand it over copies none of them.
            to_read: This worker will only read what it receives of it, and then may be given the very memory
                that the others look at.

        Raises:
            UpdateRefused: There is no room. Nothing is left behind.
        """

    def expect(self, parcel: Parcel, look: Look = lambda *_: None) -> None:  # noqa: B027
        """A parcel is announced: takes what is there of it already. Never raises, and never waits.

        Only a hint. It may be lost, and what was announced may never come.

        Args:
            parcel: What was announced; its digests are not known yet.
            look: As of `receive`, and may be called in another thread until that has returned.
        """

    @abc.abstractmethod
    def receive(
        self, parcel: Parcel, timeout_secs: float, look: Look = lambda *_: None
    ) -> list[npt.NDArray[Any]]:
        """Takes the arrays. On every worker, the source included, parcel after parcel in the same order.

        Blocks until the bytes are here, at most `timeout_secs`; only a worker in the middle of a transfer
        between hosts goes on with it, because giving it up would end the job. The arrays belong to this
        worker alone, unless it has published them `to_read`: they are writable, writing to one is seen by no
        other worker, and they stay valid whatever is released or closed afterwards.

        Workers that look at the same memory check it together, each its share: what one of them finds damaged
        is damaged for all. A parcel is whole when all workers have received it.

        Args:
            parcel: What the source said of it.
            timeout_secs: How long to wait for it.
            look: Called for all parts of this worker's share, unless the source has looked at them. It may be
                called again for the same part.

        Raises:
            UpdateRefused: They did not arrive in time, arrived damaged, or found no room here. Nothing is
                left behind on this worker; the source still has to release the parcel.
        """

    @abc.abstractmethod
    def release(self, parcel_id: str) -> None:
        """Says that this worker needs the parcel no more. Never raises; a second time does nothing.

        To be called when every worker has received the parcel or given it up: the release by the source, and
        by a worker that received the bytes for others, is what takes them away.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Gives back everything but the arrays that were received. A second time does nothing."""


def damaged(parcel: Parcel, expected: str, received: str, worker: int) -> UpdateRefused:
    """The refusal of bytes that are not those that the source published."""
    return UpdateRefused(
        f"The bytes of parcel {parcel.id!r} from worker {parcel.source} arrived damaged at worker {worker}",
        expected=expected,
        received=received,
        worker=worker,
        remedy="Propose it again; if it happens again, check that worker's memory and network",
    )


def not_arrived(parcel: Parcel, timeout_secs: float, worker: int, waited_for: int) -> UpdateRefused:
    """The refusal of a parcel for which this worker waited in vain."""
    return UpdateRefused(
        f"Worker {worker} waited {timeout_secs:g} s for parcel {parcel.id!r} from worker {waited_for}",
        expected=f"{parcel.nbytes:,} bytes from worker {waited_for}",
        received="nothing",
        worker=worker,
        remedy=f"Look for the reason in worker {waited_for}'s log, then propose it again",
    )


def no_room(needed: int, free: int | None, place: str, worker: int, remedy: str) -> UpdateRefused:
    """The refusal of a parcel that is larger than what is free."""
    return UpdateRefused(
        f"Worker {worker} has no room for the update in {place}",
        expected=f"{needed:,} bytes free",
        received="no answer to how much is free" if free is None else f"{free:,} bytes free",
        worker=worker,
        remedy=remedy,
    )
