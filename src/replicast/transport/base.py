"""The transport interface: parcels of arrays, and what every transport guarantees."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from replicast.codec import Record
from replicast.errors import UpdateRefused
from replicast.update.digest import DIGITS, digest_of_blocks


class Piece(Record):
    """The position of one array in a parcel."""

    dtype: str
    shape: tuple[int, ...]
    offset: int


class Parcel(Record):
    """The description of a parcel, which the source sends to the others so that they can fetch the bytes."""

    id: str
    source: int
    nbytes: int
    arrays: tuple[Piece, ...]
    blocks: str
    memory: str = ""
    to_read: bool = False

    @property
    def digest(self) -> str:
        """One digest of the bytes of all arrays; independent of their offsets."""
        return digest_of_blocks(self.blocks)

    def digest_of(self, block: int) -> str:
        """The digest of one block, by its index."""
        return self.blocks[DIGITS * block : DIGITS * (block + 1)]


# Called with the index of an array in the parcel, and a flat chunk of that array.
Inspect = Callable[[int, "npt.NDArray[Any]"], None]


class Transport(abc.ABC):
    """Carries parcels from one worker to all workers. Created on every worker.

    ```
    source:  publish ──► describe to all ──► receive ──► all have it ──► release
    others:              description ──────► receive ──► confirm     ──► release
    ```
    All methods may be called from any thread, including `receive` for several parcels at once.

    **Between hosts, all workers must start to receive parcels in the same order**, in one thread or several.
    TensorFlow's broadcast sends a parcel once the first worker of every host has a thread in `receive` for
    it. If the orders differ, workers may wait for each other until all of them time out and refuse. Within
    one host, and along a chain of hosts, any order works.
    """

    @abc.abstractmethod
    def publish(self, parcel_id: str, arrays: Sequence[npt.NDArray[Any]], *, to_read: bool = False) -> Parcel:
        """Makes the arrays available to all workers. Only on the source.

        The arrays are copied before this returns and may be changed afterwards.
        """

    @abc.abstractmethod
    def receive(
        self, parcel: Parcel, timeout_secs: float, inspect: Inspect = lambda *_: None
    ) -> list[npt.NDArray[Any]]:
        """Receives the arrays. On every worker, the source included.

        Blocks until the bytes have arrived, at most `timeout_secs`. Only TensorFlow's broadcast, once it has
        started, continues beyond the timeout, because aborting it would end the job. Unless the
        parcel was published `to_read`, the arrays are private to this worker: they are writable, no other
        worker sees the writes, and they stay valid after any release or close.

        Workers that share memory also share the verification: each verifies some of the blocks, and damage
        found by one counts for all. So a parcel is intact once all workers have received it.
        """

    @abc.abstractmethod
    def release(self, parcel_id: str, *, reuse: bool = False) -> None:
        """Releases the parcel on this worker. Never raises; a second call does nothing.

        Call it when every worker has received the parcel or given up. The memory is freed when the source
        releases the parcel; on other hosts, when the worker that received the bytes for that host does.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Releases everything but the received arrays. A second call does nothing."""


def damaged(parcel: Parcel, expected: str, received: str, worker: int) -> UpdateRefused:
    """The refusal of bytes that differ from those that the source published."""
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
        remedy=f"Inspect for the reason in worker {waited_for}'s log, then propose it again",
    )


def no_room(needed: int, free: int | None, place: str, worker: int, remedy: str) -> UpdateRefused:
    """The refusal of a parcel for which there is not enough space."""
    return UpdateRefused(
        f"Worker {worker} has no room for the update in {place}",
        expected=f"{needed:,} bytes free",
        received="an unknown amount of free space" if free is None else f"{free:,} bytes free",
        worker=worker,
        remedy=remedy,
    )
