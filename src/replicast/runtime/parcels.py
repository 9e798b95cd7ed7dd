"""The bytes of updates on one worker: what it has published for all, and what it has prepared to apply.

publish    the author, a function's source, worker 0 for what it loads: bytes that all can fetch
prepare    every worker: fetched, checked, kept until it is applied or discarded
release    both are given back
"""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy.typing as npt

from replicast import faults
from replicast.transport import Look, Parcel, Transport
from replicast.update.edits import Operation
from replicast.update.finite import is_finite
from replicast.update.schema import Schema
from replicast.update.update import Update
from replicast.update.validate import Limits, planned

NO_LIMITS = Limits(max_bytes=2**62, max_edits=2**62)
"""For what a replica publishes of its own state, and for what its author has checked."""


class Parcels:
    """One worker's. Any thread publishes and releases; one thread prepares; the training thread takes.

    Args:
        transport: Carries the bytes.
        name: In front of the names of all parcels.
        rank: Which worker this is.
        schema: The state that updates change.
    """

    def __init__(self, transport: Transport, name: str, rank: int, schema: Schema) -> None:
        self._transport = transport
        self._name = name
        self._rank = rank
        self._schema = schema
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._prepared: dict[tuple[str, str], tuple[Update, str]] = {}
        self._published: dict[str, tuple[str, str]] = {}

    def publish(self, update: Update, ticket: str = "") -> Parcel:
        """Makes a planned update's bytes, and what it does with them, available to all workers.

        Args:
            update: Which one.
            ticket: The proposal of this worker that it belongs to, if it does.

        Raises:
            UpdateRefused: There is no room.
        """
        parcel_id = f"{self._name}-{self._rank}-{next(self._numbers)}"
        # A variable may live in what it was assigned; from all other values it is computed.
        to_read = all(edit.operation is not Operation.ASSIGN for edit in update.edits)
        parcel = self._transport.publish(parcel_id, update.content(), to_read=to_read)
        with self._lock:
            self._published[parcel.id] = (update.id, ticket)
        return parcel

    def prepare(self, id_: str, digest: str, parcel: Parcel, timeout_secs: float) -> None:
        """Fetches the bytes and checks them.

        Whether a value is finite is checked by all workers of a host together, each at its share of the
        bytes, while the processor has them in its cache.

        Raises:
            UpdateRefused: The bytes did not arrive, or something about the update is wrong.
        """
        faults.point("stage")
        doubtful: set[int] = set()
        update = Update.from_content(id_, self._transport.receive(parcel, timeout_secs, _looking(doubtful)))
        first = [0]
        for edit in update.edits:
            first.append(first[-1] + len(edit.arrays))

        def look_at(place: int) -> bool:  # to say which value it is, and where
            return not doubtful.isdisjoint(range(first[place], first[place + 1]))

        update = planned(update, self._schema, NO_LIMITS, look_at=look_at)
        with self._lock:
            self._prepared[id_, digest] = update, parcel.id
        faults.point("ready")

    def prepared(self, id_: str, digest: str) -> Update:
        """What was prepared."""
        with self._lock:
            return self._prepared[id_, digest][0]

    def take(self, id_: str, digest: str) -> tuple[Update, str]:
        """What was prepared, to be applied; and the parcel to be released then."""
        with self._lock:
            return self._prepared.pop((id_, digest))

    def release(self, parcel_id: str) -> None:
        """Gives memory back, which takes as long as applying the update: not for the training thread."""
        with self._lock:
            self._published.pop(parcel_id, None)
        self._transport.release(parcel_id)

    def release_ticket(self, ticket: str) -> None:
        """A proposal of this worker has its outcome."""
        with self._lock:
            parcels = [parcel for parcel, (_, of) in self._published.items() if of == ticket]
        for parcel in parcels:
            self.release(parcel)

    def discard(self, id_: str) -> None:
        """Releases all that was prepared under an id, and what this worker has published for it itself."""
        with self._lock:
            parcels = [parcel for key, (_, parcel) in self._prepared.items() if key[0] == id_]
            self._prepared = {key: one for key, one in self._prepared.items() if key[0] != id_}
            parcels += [
                parcel for parcel, (of, ticket) in self._published.items() if of == id_ and not ticket
            ]
        for parcel in parcels:
            self.release(parcel)


def _looking(doubtful: set[int]) -> Look:
    def look(place: int, part: npt.NDArray[Any]) -> None:
        if place not in doubtful and not is_finite(part):
            doubtful.add(place)

    return look
