"""Encodes messages of the core as text; `decode(encode(value))` equals `value`.

Scalars encode as themselves, containers as a list that starts with their kind. Only the classes listed here
can be decoded.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from replicast.audits.distances import Deviation
from replicast.core import entries, messages, operation, proposal, refusal, reports
from replicast.core.operations import audit, function, keep, leave, pull, revert, save, sync, trial, update
from replicast.core.stage import Stage
from replicast.runtime.note import Note
from replicast.transport import Parcel, Piece
from replicast.update.trial import Trial, TrialOutcome

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
    """Encodes a message, or a list of messages, as text.

    Raises:
        TypeError: A part has a type that messages cannot contain.
    """
    return json.dumps(_packed(value), separators=(",", ":"))


def decode(text: str) -> Any:
    """Decodes the output of `encode`.

    Raises:
        ValueError: The text was not written by `encode`.
    """
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
