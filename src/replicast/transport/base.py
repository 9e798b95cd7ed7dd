"""The transport interface: parcels of arrays, and what every transport guarantees."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt

from replicast.errors import UpdateRefused
from replicast.update.blocks import DIGITS, digest_of_blocks


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
    """The description of a parcel, which the source sends to the others so that they can fetch the bytes.

    Attributes:
        id: Unique in the job: letters, digits, and any of "._-".
        source: The rank of the worker whose arrays these are.
        nbytes: The size of the whole buffer, padding included.
        arrays: The arrays in the order in which they were given.
        blocks: The digests of the arrays' blocks, one after the other.
    """

    id: str
    source: int
    nbytes: int
    arrays: tuple[Piece, ...]
    blocks: str

    @property
    def digest(self) -> str:
        """One digest for all bytes of all arrays, wherever they lie."""
        return digest_of_blocks(self.blocks)

    def digest_of(self, block: int) -> str:
        """The digest of one block, by its number."""
        return self.blocks[DIGITS * block : DIGITS * (block + 1)]


Look = Callable[[int, "npt.NDArray[Any]"], None]
"""Given an array's place in the parcel, and a flat part of the array."""


class Transport(abc.ABC):
    """Carries parcels from one worker to all. Made on every worker.

    ```
    source:  publish ──► describe to all ──► receive ──► all have it ──► release
    others:              description ──────► receive ──► confirm     ──► release
    ```
    All methods may be called from any thread, including `receive` for several parcels at once.

    **Between hosts, all workers must begin to receive parcels in the same order**, by one thread or several.
    A parcel is sent when one thread of every host's first worker is in `receive` for it. In different orders,
    each may wait for a parcel that another has not begun to receive, until all time out and refuse. Within
    one host there is no such rule.
    """

    @abc.abstractmethod
    def publish(self, parcel_id: str, arrays: Sequence[npt.NDArray[Any]], *, to_read: bool = False) -> Parcel:
        """Makes the arrays ready to be received. Only on the source.

        The arrays are copied before it returns and may be changed afterwards.

        Args:
            parcel_id: Its id.
            arrays: What is in it.
            to_read: This worker only reads the parcel and needs no private mapping: it may get the same
                memory as the others.

        Raises:
            UpdateRefused: There is not enough space. Nothing is left behind.
        """

    @abc.abstractmethod
    def receive(
        self, parcel: Parcel, timeout_secs: float, look: Look = lambda *_: None
    ) -> list[npt.NDArray[Any]]:
        """Receives the arrays. On every worker, the source included.

        Blocks until the bytes are here, at most `timeout_secs`. Only a worker in the middle of a transfer
        between hosts continues after that, because aborting it would end the job. The arrays are private to
        this worker, unless it has published them `to_read`: they are writable, no other worker sees the
        writes, and they stay valid after any release or close.

        Workers that share the same memory share the check: each checks a part, and damage found by one counts
        for all. A parcel is intact when all workers have received it.

        Args:
            parcel: What the source said of it.
            timeout_secs: How long to wait for it.
            look: Called for all parts of this worker's share.

        Raises:
            UpdateRefused: They did not arrive in time, arrived damaged, or there is not enough space. Nothing
                is left behind on this worker; the source still has to release the parcel.
        """

    @abc.abstractmethod
    def release(self, parcel_id: str) -> None:
        """Releases the parcel on this worker. Never raises; a second call does nothing.

        Call it when every worker has received the parcel or given up: the release by the source, and by a
        worker that received the bytes for others, frees the memory.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Releases everything but the received arrays. A second call does nothing."""


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
    """The refusal of a parcel that did not arrive before the timeout."""
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
