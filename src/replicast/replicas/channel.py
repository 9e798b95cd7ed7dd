"""Messages between workers, as keys of the coordination service.

MultiWorkerMirroredStrategy runs that service in worker 0.

    down/17      the coordinator's log, read by every other worker in order
    up/2/5       the messages of worker 2 to the coordinator, in order

Each key holds the messages that were sent together. Messages of worker 0 to itself bypass the service, which
is slow when the cores are busy. A key is deleted once it has been read; a key of the log, once all workers
have read it. Each worker reports how far it has read with every message that it sends.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from replicast.coordination import Coordination
from replicast.core import (
    entries,
    messages,
    operation,
)
from replicast.core import (
    records as proposal,
)
from replicast.core import (
    records as refusal,
)
from replicast.core import (
    records as reports,
)
from replicast.core.operations import (
    audit,
    function,
    leave,
    pull,
    revert,
    save,
    sync,
    trial,
    update,
)
from replicast.core.operations import (
    revert as keep,
)
from replicast.core.records import Stage, record
from replicast.errors import JobFailed
from replicast.transport import Parcel, Piece
from replicast.update.audit_report import Deviation
from replicast.update.trial import Trial, TrialOutcome

# A worker's note on its way to worker 0, which writes it where a worker cannot write it itself.


@record
class Note:
    """The note of a worker that does not see the run directory. It is not for the coordinator."""

    text: str


# Encodes messages of the core as text; `decode(encode(value))` equals `value`.
#
# Scalars encode as themselves, containers as a list that starts with their kind. Only the classes listed
# here can be decoded.

_CLASSES: tuple[type[Any], ...] = (
    *(messages.Propose, messages.Withdraw, messages.Request, messages.At, messages.Answer, messages.Rest),
    *(messages.Stop, messages.Meet, messages.Do, messages.Release, messages.Resume, messages.Tell),
    *(update.Load, update.Prepare, update.Apply, update.Discard, function.Compute, sync.Digest, sync.Publish),
    *(save.TakeSnapshot, leave.Exit, trial.Measure, trial.BeginTrial, trial.End),
    *(pull.TakeRows, keep.WriteBefore, revert.Invert),
    *(audit.Examine, audit.Expected, audit.Compare, audit.Report, audit.AuditResult, audit.DifferentVariable),
    *(reports.ReportId, reports.Applied, reports.Seen, reports.Snapshot, entries.Receipt),
    *(operation.Outcome, refusal.Refusal),
    *(proposal.Proposal, proposal.Published, Trial, TrialOutcome, Parcel, Piece, Deviation),
    Note,
)
_BY_NAME = {cls.__name__: cls for cls in _CLASSES}
_FIELDS = {cls: tuple(field.name for field in fields(cls)) for cls in _CLASSES}


def encode(value: Any) -> str:
    """Encodes a message, or a list of messages, as text."""
    return json.dumps(_packed(value), separators=(",", ":"))


def decode(text: str) -> Any:
    """Decodes the output of `encode`."""
    try:
        return _unpacked(json.loads(text))
    except (KeyError, TypeError) as error:  # an unknown class, or one with other fields
        raise ValueError(f"This is not a message ({error!r}). Received: {text[:200]}") from error


def _packed(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    names = _FIELDS.get(type(value))
    if names is not None:
        return ["class", type(value).__name__, *(_packed(getattr(value, name)) for name in names)]
    match value:
        case Stage():
            return ["stage", value.value]
        case tuple():
            return ["tuple", *map(_packed, value)]
        case list():
            return ["list", *map(_packed, value)]
        case frozenset():
            return ["set", *sorted(value)]
        case Mapping():
            return ["map", *([_packed(key), _packed(one)] for key, one in value.items())]
    raise TypeError(f"A message cannot contain this type. Received: {type(value).__name__}")


def _unpacked(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    kind, *parts = value
    match kind:
        case "class":
            name, *values = parts
            return _BY_NAME[name](*map(_unpacked, values))
        case "stage":
            return Stage(parts[0])
        case "tuple":
            return tuple(map(_unpacked, parts))
        case "list":
            return list(map(_unpacked, parts))
        case "set":
            return frozenset(parts)
        case "map":
            return {_unpacked(key): _unpacked(one) for key, one in parts}
    raise ValueError(f"Not part of a message. Received: {str(value)[:200]}")


LOOK_SECS = 1.0
"""Timeout of one request to the service, so that a reader soon notices that it has to stop."""


class Channel:
    """One worker's end. `send` and `broadcast` are for the event loop, the others for one reader each."""

    def __init__(self, coordination: Coordination, name: str, rank: int, size: int) -> None:
        self._coordination = coordination
        self._prefix = f"replicast/{name}"
        self.rank = rank
        self.size = size
        self._sent = 0
        self._appended = 0
        self._deleted = 0
        self._read = 0
        self._read_from = [0] * size
        self._read_by = [0] * size

    def send(self, messages: Sequence[Any]) -> None:
        """Sends messages to the coordinator. For all workers but worker 0."""
        self._put(f"up/{self.rank}/{self._sent}", [self._read, *messages])
        self._sent += 1

    def broadcast(self, messages: Sequence[Any]) -> None:
        """Sends the coordinator's messages to all workers but worker 0; raises as `send`."""
        if self.size == 1:
            return
        self._put(f"down/{self._appended}", list(messages))
        self._appended += 1
        read_by_all = min(self._read_by[1:])
        while self._deleted < read_by_all:
            self._coordination.delete(f"{self._prefix}/down/{self._deleted}")
            self._deleted += 1

    def _put(self, key: str, messages: list[Any]) -> None:
        if not self._coordination.put(f"{self._prefix}/{key}", encode(messages)):
            raise JobFailed(
                f"Worker {self.rank} cannot send a message: the coordination service has another one under "
                f"its key ({key}). A call to the service failed before; see the log of this worker",
                worker=self.rank,
            )

    def receive(self) -> list[Any]:
        """The next messages of the coordinator; empty if none arrived in time."""
        text = self._coordination.get(f"{self._prefix}/down/{self._read}", LOOK_SECS)
        if text is None:
            return []
        self._read += 1
        messages: list[Any] = decode(text)
        return messages

    def receive_from(self, rank: int) -> list[Any]:
        """The next messages of a worker to the coordinator; empty if none arrived in time."""
        key = f"{self._prefix}/up/{rank}/{self._read_from[rank]}"
        text = self._coordination.get(key, LOOK_SECS)
        if text is None:
            return []
        self._read_from[rank] += 1
        self._coordination.delete(key)
        messages: list[Any] = decode(text)
        self._read_by[rank] = messages[0]
        return messages[1:]
