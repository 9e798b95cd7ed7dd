"""The bytes of updates on one worker: those it has published, and those it has prepared to apply.

publish    the author, a function's source, or worker 0 for a loaded payload: makes bytes available to all
prepare    every worker: fetches and checks the bytes, and keeps them until they are applied or discarded
release    frees the memory of both
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy.typing as npt

from replicast import faults
from replicast.core.records import Stage
from replicast.errors import UpdateRefused
from replicast.mapped_memory import copied
from replicast.transport import Inspect, Parcel, Transport
from replicast.update.digest import is_finite
from replicast.update.edits import EditKind
from replicast.update.schema import Limits, Schema, planned
from replicast.update.state import State
from replicast.update.update import Update

# For values that a replica publishes from its own state, and updates that their author has checked.
NO_LIMITS = Limits(max_bytes=2**62, max_edits=2**62)


class Parcels:
    """One worker's. Any thread publishes and releases; one thread prepares; the training thread takes."""

    def __init__(self, transport: Transport, name: str, rank: int, schema: Schema) -> None:
        self._transport = transport
        self._name = name
        self._rank = rank
        self._schema = schema
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._prepared: dict[tuple[str, str], tuple[Update, str]] = {}
        self._published: dict[str, tuple[str, str]] = {}
        self._refused: dict[str, list[str]] = {}  # by update: its parcels that this worker did not prepare
        self._unwanted: set[str] = set()

    def publish(self, update: Update, ticket: str = "") -> Parcel:
        parcel_id = f"{self._name}-{self._rank}-{next(self._numbers)}"
        # The outcome of a proposal comes when no worker reads its values any more.
        parcel = self._transport.publish(parcel_id, update.content(), to_read=bool(ticket))
        with self._lock:
            self._published[parcel.id] = (update.id, ticket)
        return parcel

    def prepare(self, id_: str, digest: str, parcel: Parcel, timeout_secs: float) -> None:
        """Fetches the bytes and checks them. Until `discard`, other hosts may fetch them from here.

        All workers of a host share the check for non-finite values: each checks its part of the bytes while
        they are in the processor's cache.
        """
        faults.point("stage")
        try:
            update = self._checked(id_, parcel, timeout_secs)
        except BaseException:
            with self._lock:
                self._refused.setdefault(id_, []).append(parcel.id)
            raise
        if parcel.to_read:
            update = _with_own_values(update)
        with self._lock:
            self._prepared[id_, digest] = update, parcel.id
        faults.point("ready")

    def _checked(self, id_: str, parcel: Parcel, timeout_secs: float) -> Update:
        if id_ in self._unwanted:
            raise UpdateRefused(f"Update {id_!r} has ended before it was prepared", worker=self._rank)
        doubtful: set[int] = set()
        update = Update.from_content(
            id_, self._transport.receive(parcel, timeout_secs, _inspecting(doubtful))
        )
        first = [0]
        for edit in update.edits:
            first.append(first[-1] + len(edit.arrays))

        def look_at(place: int) -> bool:  # only doubtful edits are checked again, to name the value
            return not doubtful.isdisjoint(range(first[place], first[place + 1]))

        return planned(update, self._schema, NO_LIMITS, look_at=look_at)

    def prepared(self, id_: str, digest: str) -> Update:
        with self._lock:
            return self._prepared[id_, digest][0]

    def take(self, id_: str, digest: str) -> tuple[Update, str]:
        """Removes and returns the prepared update, and the parcel to release once it is applied."""
        with self._lock:
            return self._prepared.pop((id_, digest))

    def release(self, parcel_id: str, *, reuse: bool = False) -> None:
        """Frees memory. This takes as long as applying the update: not for the training thread."""
        with self._lock:
            self._published.pop(parcel_id, None)
        self._transport.release(parcel_id, reuse=reuse)

    def release_applied(self, parcel_id: str) -> None:
        """Frees the memory of an update that this worker has applied, unless a ticket of its own holds it."""
        with self._lock:
            _, ticket = self._published.get(parcel_id, ("", ""))
        if not ticket:
            self.release(parcel_id)

    def release_ticket(self, ticket: str, stage: Stage) -> None:
        """Releases what was published for a proposal of this worker, once it has its outcome."""
        with self._lock:
            parcels = [parcel for parcel, (_, of) in self._published.items() if of == ticket]
        for parcel in parcels:
            self.release(parcel, reuse=stage not in (Stage.REFUSED, Stage.WITHDRAWN))

    def discard_soon(self, id_: str) -> None:
        """An update has ended: until `discard`, nothing waits for its bytes, which its source may release."""
        self._unwanted.add(id_)

    def discard(self, id_: str) -> None:
        """Releases everything that was received for an id, and what this worker has published for it."""
        with self._lock:
            self._unwanted.discard(id_)
            refused = self._refused.pop(id_, [])
            parcels = [parcel for parcel in refused if not self._published.get(parcel, ("", ""))[1]]
            parcels += [parcel for key, (_, parcel) in self._prepared.items() if key[0] == id_]
            self._prepared = {key: one for key, one in self._prepared.items() if key[0] != id_}
            parcels += [
                parcel for parcel, (of, ticket) in self._published.items() if of == id_ and not ticket
            ]
        for parcel in parcels:
            self.release(parcel)


def _with_own_values(update: Update) -> Update:
    """Copies what a variable takes over: `assign` keeps the memory, all other operations only read it."""
    edits = [
        replace(edit, arrays={"value": copied(edit.arrays["value"])})
        if edit.operation is EditKind.ASSIGN
        else edit
        for edit in update.edits
    ]
    return update.replaced(edits)


def _inspecting(doubtful: set[int]) -> Inspect:
    def inspect(place: int, part: npt.NDArray[Any]) -> None:
        if place not in doubtful and not is_finite(part):
            doubtful.add(place)

    return inspect


# Updates that one worker computes from the live values at a boundary.

Function = Callable[[Mapping[str, npt.NDArray[Any]]], "Update | Mapping[str, Any] | None"]


class LiveValues(Mapping[str, "npt.NDArray[Any]"]):
    """The values of the variables at this boundary. Each lookup makes a copy.

    Any unique suffix of a name works, as in an update.
    """

    def __init__(self, state: State) -> None:
        self._state = state

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        full = self._state.schema.resolve(name).name
        return self._state.read([full])[full]

    def __iter__(self) -> Iterator[str]:
        return (variable.name for variable in self._state.schema)

    def __len__(self) -> int:
        return len(self._state.schema)


def computed_update(id_: str, function: Function, state: State, rank: int) -> Update:
    """Runs a user's function on the live values and returns its update under the agreed id."""
    try:
        returned = function(LiveValues(state))
    except UpdateRefused:
        raise
    except KeyboardInterrupt:
        raise
    except (
        BaseException
    ) as error:  # An exit is an error of the function too: all workers wait for its result.
        said = f"The function {_name(function)} raised {type(error).__name__}: {error}"
        raise UpdateRefused(said, worker=rank) from error
    if isinstance(returned, Update):
        return returned.with_id(id_)
    if isinstance(returned, Mapping):
        update = Update(id=id_)
        for name, value in returned.items():
            update = update.assign(name, value)
        return update
    raise UpdateRefused(
        f"The function {_name(function)} must return an Update, or a dict from variable names to new values",
        received=type(returned).__name__,
        worker=rank,
    )


def _name(function: Function) -> str:
    return getattr(function, "__qualname__", repr(function))
