"""The bytes of updates on one worker: what it has published for others, and what it has staged to apply.

publish    the author, a function's source, worker 0 for what it replays: bytes that all can fetch
stage      every worker: fetched, checked, kept until it is applied or dropped
settle     both are given back
"""

from __future__ import annotations

import itertools
import json
import logging
from dataclasses import dataclass
from typing import Any

import numpy as np

from replicast import faults
from replicast.edits import Operation
from replicast.errors import ReplicastError, UpdateRefused
from replicast.protocol.channel import Channel
from replicast.protocol.messages import Answer, Drop, Failed, Stage, Verified
from replicast.protocol.receiving import Receiving
from replicast.schema import Schema
from replicast.transport import Parcel, Transport
from replicast.update import Update
from replicast.validate import Limits

logger = logging.getLogger("replicast")


@dataclass(frozen=True, slots=True)
class Staged:
    """An update whose bytes this worker has, and where they came from."""

    update: Update
    parcel_id: str
    content_digest: str


class Shelf:
    """One worker's. The follower stages and settles, any thread publishes, the training thread takes."""

    def __init__(self, channel: Channel, transport: Transport, schema: Schema, limits: Limits) -> None:
        self._channel = channel
        self._transport = transport
        self._receiving = Receiving(transport, schema, limits)
        self._staged: dict[str, Staged] = {}
        self._published: dict[str, tuple[str, str, str]] = {}
        self._parcels = itertools.count(1)

    def publish(self, update: Update, content_digest: str | None = None, ticket: str = "") -> Parcel:
        """Makes an update's bytes, and what it says, available to all workers, until it is settled.

        Args:
            update: Planned.
            content_digest: What it is known by. Default: the parcel's digest, which is that of the values and
                of what is done with them.
            ticket: The proposal it belongs to, if it is one of this worker's.
        """
        described = np.frombuffer(json.dumps(update.describe()).encode(), np.uint8)
        parcel_id = f"{self._channel.name}-{self._channel.rank}-{next(self._parcels)}"
        # A variable may live in what it was assigned; from all other values it is computed.
        to_read = all(edit.operation is not Operation.ASSIGN for edit in update.edits)
        parcel = self._transport.publish(parcel_id, [*update.arrays(), described], to_read=to_read)
        known_by = parcel.digest if content_digest is None else content_digest
        self._published[parcel.id] = (update.id, known_by, ticket)
        return parcel

    def stage(self, message: Stage, timeout_secs: float) -> Answer:
        """Fetches the bytes and checks them; the answer says whether this worker could apply them."""
        faults.point("stage")
        try:
            parcel = Parcel.from_json(message.parcel)
            update = self._receiving.take(parcel, timeout_secs)
        except UpdateRefused as error:
            return Answer(error=by_worker(error, self._channel.rank))
        except ReplicastError:
            raise  # of the job, not of this update
        except Exception as error:
            logger.warning("an update cannot be staged", exc_info=True)
            said = f"A worker could not stage it ({type(error).__name__}: {error})"
            return Answer(error=UpdateRefused(said, worker=self._channel.rank).to_json())
        self._staged[message.id] = Staged(update, parcel.id, message.content_digest)
        return Answer()

    def staged(self, id_: str) -> Update:
        """A staged update."""
        return self._staged[id_].update

    def take(self, id_: str) -> Staged:
        """A staged update, to be applied and then let go."""
        return self._staged.pop(id_)

    def let_go(self, staged: Staged) -> None:
        """Gives its memory back, which takes as long as applying it."""
        self._transport.release(staged.parcel_id)

    def settle(self, id_: str, message: Drop | Verified | Failed) -> None:
        """An update has come to its end: gives back what is here of it."""
        staged = self._staged.get(id_)
        if staged is not None and staged.content_digest == message.content_digest:
            del self._staged[id_]
            self._transport.release(staged.parcel_id)
        for parcel_id, (update_id, content_digest, ticket) in list(self._published.items()):
            meant = not isinstance(message, Drop) or ticket in ("", *message.tickets)
            if (update_id, content_digest) == (id_, message.content_digest) and meant:
                del self._published[parcel_id]
                self._transport.release(parcel_id)


def by_worker(error: UpdateRefused, rank: int) -> dict[str, Any]:
    """The refusal as JSON, with the worker that refused, unless it names one."""
    described = error.to_json()
    if described["worker"] is None:
        described["worker"] = rank
    return described
