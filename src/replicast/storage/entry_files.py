"""The files of journal entries.

    groups/000003/000017.payload.json      an update before it has a place in the order
    groups/000003/000017.safetensors       its bytes, which are written before the entry
    groups/000003/000018.committed.json    the rename of this file is the commit
    groups/000003/000020.before.json       an update has overwritten values that a revert needs
    groups/000003/000020.before.safetensors    these values, as the update that assigns them

Each entry is sealed, contains its group and number, and is never changed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import msgspec

from replicast.core.entries import (
    Before,
    Committed,
    Decided,
    Entry,
    Payload,
    Receipt,
    Refused,
    Scheduled,
    Started,
    Withdrawn,
)
from replicast.errors import FileDamaged, PayloadRemoved, UpdateRefused
from replicast.files import RunDir, RunPath, read_bytes, read_sealed
from replicast.storage.groups import entry_path, group_directory
from replicast.strictjson import described
from replicast.update.edits import Edit
from replicast.update.inverse import NOT_KEPT
from replicast.update.update import Update

HELD_BY_ALL = "every checkpoint that is kept contains it"
"""Why the bytes of an update are removed."""
PAYLOAD, BEFORE = ".safetensors", ".before.safetensors"


@dataclass(frozen=True, slots=True)
class StoredPayload:
    """The content of a `Payload` entry's file.

    Attributes:
        sha256: The hash of the file with the update's bytes.
        nbytes: The size of that file.
        edits: A summary of each edit: operation, variable, and the shape of what is written. None if omitted,
            as in an index: the entry's own file has it.
    """

    id: str
    digest: str
    author: str
    note: str
    sha256: str
    nbytes: int
    edits: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class StoredBefore:
    """The content of a `Before` entry's file.

    Attributes:
        sequence: The number of the update that has overwritten the values.
        id: Its id.
        sha256: The hash of the file with the values; empty if they are not kept.
        nbytes: The size of that file.
        problem: Why the values are not kept; empty if they are.
    """

    sequence: int
    id: str
    sha256: str = ""
    nbytes: int = 0
    problem: str = ""


Stored: TypeAlias = (
    Started | StoredPayload | Scheduled | Committed | StoredBefore | Decided | Receipt | Withdrawn | Refused
)

KINDS: Mapping[str, type[Stored]] = {
    "started": Started,
    "payload": StoredPayload,
    "scheduled": Scheduled,
    "committed": Committed,
    "before": StoredBefore,
    "decided": Decided,
    "receipt": Receipt,
    "withdrawn": Withdrawn,
    "refused": Refused,
}
_NAMES = {type_: kind for kind, type_ in KINDS.items()}


@dataclass(frozen=True, slots=True)
class EntryFile:
    """An entry and its place.

    Attributes:
        group: The group of workers that wrote it.
        number: Which of its entries it is, from 1.
        written_at: Seconds since 1970.
        stored: The content of the entry.
    """

    group: int
    number: int
    written_at: float
    stored: Stored

    @property
    def kind(self) -> str:
        """The middle part of its file's name."""
        return _NAMES[type(self.stored)]

    @property
    def place(self) -> tuple[int, int]:
        """Its group and number."""
        return self.group, self.number

    @property
    def payload_key(self) -> tuple[str, str] | None:
        """The id and digest of the update, if it is a payload."""
        stored = self.stored
        return (stored.id, stored.digest) if isinstance(stored, StoredPayload) else None

    def path(self, run_dir: RunDir) -> RunPath:
        """Its file."""
        return entry_path(group_directory(run_dir, self.group), self.number, self.kind)

    def payload_path(self, run_dir: RunDir) -> RunPath:
        """The file of its bytes, if it is a payload or has values before an update."""
        return bytes_path(group_directory(run_dir, self.group), self.number, self.kind)

    def entry(self) -> Entry:
        """The entry as the core knows it."""
        stored = self.stored
        if isinstance(stored, StoredPayload):
            content = stored.id, stored.digest
            return Payload(stored.id, stored.digest, content, stored.author, stored.note)
        if isinstance(stored, StoredBefore):
            place = None if stored.problem else self.place
            return Before(stored.sequence, stored.id, place, stored.problem)
        return stored

    def without_edits(self) -> EntryFile:
        """The same without the summary of edits, which may be long."""
        if not isinstance(self.stored, StoredPayload):
            return self
        return replace(self, stored=replace(self.stored, edits=None))

    def fields(self) -> dict[str, Any]:
        """All fields as JSON values, for an index."""
        place = {"kind": self.kind, "group": self.group, "entry": self.number, "written_at": self.written_at}
        return fields_of(self.stored) | place


def bytes_path(directory: RunPath, number: int, kind: str) -> RunPath:
    """The file of an entry's bytes in the directory of a group."""
    return directory / f"{number:06d}{BEFORE if kind == 'before' else PAYLOAD}"


def kind_of(stored: Stored) -> str:
    """The middle part of the name of an entry's file."""
    return _NAMES[type(stored)]


def fields_of(stored: Stored) -> dict[str, Any]:
    """The content of an entry as JSON values. A number that is not finite becomes None: not measured."""
    fields: dict[str, Any] = _finite(msgspec.to_builtins(stored, str_keys=True))
    return fields


def parsed(kind: str, fields: Mapping[str, Any]) -> EntryFile:
    """Parses the output of `fields_of`, together with the entry's place.

    Raises:
        ValueError: It is not an entry.
    """
    if kind not in KINDS:
        raise ValueError(f"this version of replicast does not know entries of the kind {kind!r}")
    place = described(_Place, "place of an entry", fields)
    return EntryFile(place.group, place.entry, place.written_at, described(KINDS[kind], kind, fields))


def read_entry(run_dir: RunDir, group: int, number: int, kind: str) -> EntryFile:
    """Reads an entry from its file.

    Raises:
        FileDamaged: The file is missing or damaged.
    """
    path = entry_path(group_directory(run_dir, group), number, kind)
    try:
        file = parsed(kind, read_sealed(path))
    except ValueError as error:
        raise FileDamaged(path, str(error)) from error
    if (file.group, file.number) != (group, number):
        raise FileDamaged(path, "it contains another entry than its name says")
    return file


def read_before(path: RunPath, stored: StoredBefore) -> Update:
    """Reads the values before an update, as the update that assigns them.

    Raises:
        UpdateRefused: They were not kept, or not for so long; the error says what to do.
        FileDamaged: The file is damaged.
    """
    if stored.problem:
        raise UpdateRefused(stored.problem, remedy=NOT_KEPT)
    try:
        return read_payload(path, stored)
    except PayloadRemoved as error:
        problem = f"The values before update {stored.sequence} are not kept any more: {HELD_BY_ALL}"
        raise UpdateRefused(problem, remedy=NOT_KEPT) from error


def read_payload(path: RunPath, stored: StoredPayload | StoredBefore) -> Update:
    """Reads the update in a payload's file.

    Raises:
        PayloadRemoved: The file was removed.
        FileDamaged: The file is damaged.
    """
    if not path.exists():
        raise PayloadRemoved(stored.id)
    content = read_bytes(path, max_bytes=stored.nbytes, follow=False)
    if hashlib.sha256(content).hexdigest() != stored.sha256:
        raise FileDamaged(path, "its sha256 is not that of its entry", expected=stored.sha256)
    return Update.parse(content, str(path))[0]


def summary(edit: Edit) -> dict[str, Any]:
    """The summary of an edit in an entry: operation, variable, and the shape of what is written."""
    arrays = edit.arrays
    if "a" in arrays:
        shape: list[int] | None = [arrays["a"].shape[0], arrays["b"].shape[1]]
    else:
        written = arrays.get("value", arrays.get("rows", arrays.get("indices")))
        # None: the whole variable, whatever its shape.
        shape = None if written is None else list(written.shape)
    return {"operation": str(edit.operation), "variable": edit.variable, "shape": shape}


@dataclass(frozen=True, slots=True)
class _Place:
    group: int
    entry: int
    written_at: float


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
