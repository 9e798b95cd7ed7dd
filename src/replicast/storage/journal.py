"""The journal: the durable order of all events. Checkpoint + journal = any later state.

It is the concatenation of the logs of all groups of workers, up to the entries that count (`groups.py`). Only
the process of worker 0 writes; any process may read.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import logging
import re
import stat
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any, NamedTuple, TypeAlias

from replicast import faults
from replicast.codec import fields_of
from replicast.core.entries import (
    Before,
    Committed,
    Decided,
    Entry,
    History,
    Payload,
    Receipt,
    Refused,
    Saved,
    Scheduled,
    Started,
    Withdrawn,
)
from replicast.core.records import Content
from replicast.errors import FileDamaged, PayloadRemoved, ReplicastError, UpdateRefused
from replicast.files import (
    MAX_JSON_BYTES,
    TEMPORARY,
    RunDir,
    RunPath,
    below,
    read_bytes,
    read_sealed,
    read_small,
    remove_leftovers,
    sync_directory,
    write_durably,
    write_quickly,
)
from replicast.storage.checkpoints import CheckpointStore
from replicast.storage.claims import (
    Claim,
    Fence,
    entry_kinds,
    entry_path,
    group_directory,
    group_numbers,
    last_claim,
)
from replicast.strictjson import described, parse_object
from replicast.tensorfiles import copied
from replicast.update.edits import Edit
from replicast.update.inverse import NOT_KEPT
from replicast.update.trial import Trial
from replicast.update.update import Update

# The files of journal entries.
#
#     groups/000003/000017.payload.json      an update before it has a place in the order
#     groups/000003/000017.safetensors       its bytes, which are written before the entry
#     groups/000003/000018.committed.json    the rename of this file is the commit
#     groups/000003/000020.before.json       an update has overwritten values that a revert needs
#     groups/000003/000020.before.safetensors    these values, as the update that assigns them
#
# Each entry is sealed, contains its group and number, and is never changed.

HELD_BY_ALL = "every checkpoint that is kept contains it"
"""Why the bytes of an update are removed."""
PAYLOAD, BEFORE = ".safetensors", ".before.safetensors"


@dataclass(frozen=True, slots=True)
class StoredPayload:
    """The content of a `Payload` entry's file."""

    id: str
    digest: str
    author: str
    note: str
    sha256: str
    nbytes: int
    edits: tuple[Mapping[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True)
class StoredBefore:
    """The content of a `Before` entry's file."""

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
    """An entry and its place."""

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


def parsed(kind: str, fields: Mapping[str, Any]) -> EntryFile:
    """Parses what `fields_of` gives, together with the entry's place."""
    if kind not in KINDS:
        raise ValueError(f"this version of replicast does not know entries of the kind {kind!r}")
    place = described(_Place, "place of an entry", fields)
    return EntryFile(place.group, place.entry, place.written_at, described(KINDS[kind], kind, fields))


def read_entry(run_dir: RunDir, group: int, number: int, kind: str) -> EntryFile:
    path = entry_path(group_directory(run_dir, group), number, kind)
    try:
        file = parsed(kind, read_sealed(path))
    except ValueError as error:
        raise FileDamaged(path, str(error)) from error
    if (file.group, file.number) != (group, number):
        raise FileDamaged(path, "it contains another entry than its name says")
    return file


def read_before(path: RunPath, stored: StoredBefore) -> Update:
    """Reads the values before an update, as the update that assigns them."""
    if stored.problem:
        raise UpdateRefused(stored.problem, remedy=NOT_KEPT)
    try:
        return read_payload(path, stored)
    except PayloadRemoved as error:
        problem = f"The values before update {stored.sequence} are not kept any more: {HELD_BY_ALL}"
        raise UpdateRefused(problem, remedy=NOT_KEPT) from error


def read_payload(path: RunPath, stored: StoredPayload | StoredBefore) -> Update:
    """Reads the update in a payload's file."""
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


# An index: many entries of the journal in one file, so that a start need not open each of them.
#
#     groups/000003/000412.index.jsonl     every entry that counts up to the 412th of the third group
#
# The first line says how many entries of which group the index covers, the last line is the seal, and each
# line between them is an entry without its summary of edits. An index is derived data: if it is damaged,
# missing, or covers entries that do not count, readers open the entries instead. So it is written without a
# sync.

FORMAT = 1
_NAME = re.compile(r"([0-9]{6,})\.index\.jsonl")

Covered: TypeAlias = Sequence[tuple[int, int]]
"""Groups in order, each with its number of entries."""


def write_index(run_dir: RunDir, group: int, files: Sequence[EntryFile]) -> None:
    """Writes an index of the entries that count so far, and removes the earlier indexes of this run."""
    covers = covered_by(files)
    own = dict(covers).get(group, 0)
    lines = [_line({"format": FORMAT, "covers": covers})]
    lines.extend(_line(file.without_edits().fields()) for file in files)
    body = "".join(lines)
    path = group_directory(run_dir, group) / f"{own:06d}.index.jsonl"
    write_quickly(path, body + _seal(body))
    for old in indexes_of(run_dir, group):
        if old != path:
            with contextlib.suppress(OSError):
                old.unlink()


def read_index(path: RunPath) -> list[EntryFile]:
    """Reads the entries in an index."""
    text = read_small(path, max_bytes=MAX_JSON_BYTES).decode()
    body = text[: text.rfind("\n", 0, -1) + 1]
    if not body or text != body + _seal(body):
        raise ValueError("its seal does not match its content")
    head, *entries = body.splitlines()
    described = parse_object(head)
    if described.get("format") != FORMAT:
        raise ValueError(f"it has format {described.get('format')!r}")
    files = [parsed(str(fields.get("kind")), fields) for fields in map(parse_object, entries)]
    if described.get("covers") != [list(each) for each in covered_by(files)]:
        raise ValueError("it has other entries than its first line says")
    return files


def covered_by(files: Iterable[EntryFile]) -> list[tuple[int, int]]:
    """The groups of these entries, with the number of entries of each."""
    covers: dict[int, int] = {}
    for file in files:
        if file.number != covers.get(file.group, 0) + 1 or file.group < max(covers, default=0):
            raise ValueError(f"entry {file.number} of group {file.group} is in the wrong place")
        covers[file.group] = file.number
    return list(covers.items())


def counts(covers: Covered, counted: Covered) -> bool:
    """Whether the covered entries are a prefix of those that count."""
    if len(covers) > len(counted):
        return False
    if not covers:
        return True
    (group, entries), (last_group, most) = covers[-1], counted[len(covers) - 1]
    before = len(covers) - 1
    return list(covers[:-1]) == list(counted[:before]) and group == last_group and entries <= most


def indexes_of(run_dir: RunDir, last_group: int) -> Iterator[RunPath]:
    """The indexes of the groups up to this one, the last one first."""
    for group in group_numbers(run_dir):
        directory = group_directory(run_dir, group)
        if group <= last_group and directory.is_dir():
            matches = [_NAME.fullmatch(path.name) for path in directory.iterdir()]
            found = sorted((int(match[1]), match[0]) for match in matches if match is not None)
            yield from (directory / name for _, name in reversed(found))


def _line(fields: object) -> str:
    return json.dumps(fields, sort_keys=True, separators=(",", ":"), allow_nan=False) + "\n"


def _seal(body: str) -> str:
    return _line({"seal": hashlib.sha256(body.encode()).hexdigest()})


# Entries of the journal that count and cannot be read: what each of them said, and whether a start needs
# it.
#
# One bad entry hides no other. Readers leave it out and name its file. A start goes on without an entry
# that cannot change which updates are applied, and stops otherwise:
#
#     started, receipt       never needed
#     before                 never needed: an update that is not reverted needs no values before it
#     payload                needed if it belongs to an update that this start has to apply (`starting.py`)
#     committed              needed
#     scheduled              needed, unless every update stored before it is committed, scheduled or ended
#     decided                needed, unless the state contains every trial without a decision
#     withdrawn, refused     needed if an update that it may concern is scheduled, in the checkpoint or inbox
#     a missing file         may be any of these; the records before and behind it may show that it is no
#     record

_SAID = {
    "started": "which checkpoint an attempt started from",
    "payload": "what an update contains",
    "scheduled": "that an update is scheduled for a step",
    "committed": "that an update was committed, and at which step",
    "before": "which values an update has overwritten",
    "decided": "how a trial ended",
    "receipt": "how an update ended in one attempt",
    "withdrawn": "that an update was withdrawn",
    "refused": "that an update was refused",
}


@dataclass(frozen=True, slots=True)
class DamagedEntry:
    """An entry that counts and cannot be read."""

    group: int
    number: int
    kind: str | None
    error: FileDamaged

    @property
    def place(self) -> tuple[int, int]:
        """Its group and number."""
        return self.group, self.number

    def may_be(self, kind: str) -> bool:
        """Whether it may be an entry of this kind. What another version wrote may be anything."""
        return self.kind not in _SAID or self.kind == kind

    def __str__(self) -> str:
        """Which file is damaged, and what it said, in words."""
        said = _SAID.get(self.kind or "", "something that is not known")
        return f"{str(self.error).removesuffix('.')}. The entry said {said}."


@dataclass(frozen=True, slots=True)
class Start:
    """What a start of the job goes on from."""

    history: History
    damaged: Sequence[DamagedEntry]
    saved: Saved | None
    waiting: Mapping[str, float]

    @property
    def holds(self) -> frozenset[int]:
        """The sequence numbers of the updates that the state contains."""
        return frozenset() if self.saved is None else self.saved.holds

    @property
    def pending(self) -> dict[str, str]:
        """The digests of the updates that the checkpoint proposes again, by id."""
        proposals = () if self.saved is None else self.saved.pending
        left = [one.proposal for one in proposals if not self.history.has_ended(one)]
        return {one.id: one.digest for one in left}


def why_a_record(damaged: DamagedEntry, files: Sequence[EntryFile]) -> str:
    """Why a damaged entry may be the record of a committed update; empty if it cannot be."""
    if not damaged.may_be("committed"):
        return ""
    if damaged.kind is not None and damaged.kind not in _SAID:
        return "this version of replicast does not know entries of its kind"
    before, behind = 0, None
    for file in files:
        if isinstance(file.stored, Committed):
            if file.place > damaged.place:
                behind = file.stored.sequence
                break
            before = file.stored.sequence
    if behind == before + 1 and damaged.kind != "committed":
        return ""
    return f"it may be the record of update {before + 1}, which must be applied again"


def why_needed(damaged: DamagedEntry, files: Sequence[EntryFile], start: Start) -> str:
    """Why a start needs to know what a damaged entry said; empty if it can go on without it."""
    for kind, why in _WHY.items():
        reason = why(damaged, files, start) if damaged.may_be(kind) else ""
        if reason:
            return reason
    return ""


def _why_decided(damaged: DamagedEntry, files: Sequence[EntryFile], start: Start) -> str:
    known = start.history.decided.keys() | start.holds
    for file in files:
        match file.stored:
            case Committed(sequence, trial=Trial()) if file.place < damaged.place and sequence not in known:
                return f"the trial of update {sequence} might be decided differently"
    return ""


def _why_scheduled(damaged: DamagedEntry, files: Sequence[EntryFile], start: Start) -> str:
    """An update is stored before it is scheduled."""
    stored: set[str] = set()
    for file in files:
        match file.stored:
            case StoredPayload(id_):
                if file.place < damaged.place:
                    stored.add(id_)
            case Scheduled(id_) | Committed(_, id_) | Withdrawn(id_) | Refused(id_, whole=True):
                stored.discard(id_)
    unknown = any(one.may_be("payload") and one.place < damaged.place for one in start.damaged)
    return f"update {min(stored, default='?')} may be scheduled" if stored or unknown else ""


def _why_ended(damaged: DamagedEntry, files: Sequence[EntryFile], start: Start) -> str:
    """An update that was withdrawn or refused must not come back."""
    behind = min((file.written_at for file in files if file.place > damaged.place), default=inf)
    places = {file.stored.id: file.place for file in files if isinstance(file.stored, Scheduled)}
    scheduled = [id_ for id_ in start.history.scheduled if places[id_] < damaged.place]
    waiting = [id_ for id_, submitted_at in start.waiting.items() if submitted_at <= behind]
    for ids, where in (
        (scheduled, "scheduled"),
        (sorted(start.pending), "pending in the checkpoint"),
        (waiting, "in the inbox"),
    ):
        if ids:
            return f"update {ids[0]}, which is {where}, may have been withdrawn or refused"
    return ""


_WHY: Mapping[str, Callable[[DamagedEntry, Sequence[EntryFile], Start], str]] = {
    "committed": lambda damaged, files, start: why_a_record(damaged, files),
    "decided": _why_decided,
    "scheduled": _why_scheduled,
    "withdrawn": _why_ended,
    "refused": _why_ended,
}


# The journal entries that count: of each group, those that the next group took over (`groups.py`).

_TRIES = 3


class Counted(NamedTuple):
    """The entries that count."""

    files: list[EntryFile]
    indexed: int
    damaged: list[DamagedEntry]


def counted_entries(run_dir: RunDir) -> Counted:
    """Reads the entries that count: an index, and those after it. A damaged one hides no other."""
    claim = last_claim(run_dir)
    for _ in range(_TRIES):
        counted = _counted_under(run_dir, claim)
        earlier, claim = claim, last_claim(run_dir) if counted.damaged else claim
        if claim == earlier:
            break
        # A group has taken over meanwhile, and has removed files that do not count.
    return counted


def _counted_under(run_dir: RunDir, claim: Claim | None) -> Counted:
    if claim is None:
        return Counted([], 0, [])
    counted = [*claim.counted, (claim.group, sys.maxsize)]
    files = _indexed(run_dir, claim.group, counted)
    indexed, covers = len(files), dict(covered_by(files))
    damaged: list[DamagedEntry] = []
    for group, most in counted:
        if group >= max(covers, default=0):
            _read_group(run_dir, group, covers.get(group, 0) + 1, most, files, damaged)
    return Counted(_in_order(run_dir, files, damaged), indexed, sorted(damaged, key=lambda one: one.place))


def _indexed(run_dir: RunDir, last_group: int, counted: Covered) -> list[EntryFile]:
    """The entries of the last index that is readable and covers only entries that count."""
    for path in indexes_of(run_dir, last_group):
        with contextlib.suppress(OSError, ValueError):
            files = read_index(path)
            if counts(covered_by(files), counted):
                return files
    return []


def _read_group(
    run_dir: RunDir, group: int, first: int, most: int, files: list[EntryFile], damaged: list[DamagedEntry]
) -> None:
    """Adds the entries of a group from `first` to the last one that counts."""
    directory = group_directory(run_dir, group)
    kinds = entry_kinds(directory)
    if len(kinds) < max(kinds, default=0):  # A listing may miss what is renamed into place meanwhile.
        kinds |= entry_kinds(directory)
    last = max(kinds, default=0) if most == sys.maxsize else most
    expected = first
    for number in sorted(number for number in kinds if first <= number <= last):
        if number > expected:
            damaged.append(_missing(directory, group, expected, number - 1))
        expected = number + 1
        try:
            files.append(read_entry(run_dir, group, number, kinds[number]))
        except FileDamaged as error:
            damaged.append(DamagedEntry(group, number, kinds[number], error))
    if expected <= last:
        damaged.append(_missing(directory, group, expected, last))


def _missing(directory: RunPath, group: int, first: int, last: int) -> DamagedEntry:
    if first < last:
        error = FileDamaged(
            directory / f"{first:06d}", f"the entries up to {last:06d} are missing too", verdict="is missing"
        )
        return DamagedEntry(group, first, None, error)
    left = (kind for kind in ("payload", "before") if bytes_path(directory, first, kind).exists())
    error = FileDamaged(directory / f"{first:06d}", "there are later entries", verdict="is missing")
    return DamagedEntry(group, first, next(left, None), error)


def _in_order(run_dir: RunDir, files: Sequence[EntryFile], damaged: list[DamagedEntry]) -> list[EntryFile]:
    """The entries without records whose number does not fit: those are added to the damaged ones.

    Committed updates are numbered consecutively from 1. Each damaged entry between two may be another one.
    """
    kept, expected, last = [], 1, (0, 0)
    for file in files:
        if isinstance(file.stored, Committed):
            sequence, place = file.stored.sequence, file.place
            between = any(last < one.place < place and one.may_be("committed") for one in damaged)
            if sequence != expected and not (between and sequence > expected):
                problem = f"it must be the record of update {expected}. Received: {sequence}"
                error = FileDamaged(file.path(run_dir), problem)
                damaged.append(DamagedEntry(file.group, file.number, file.kind, error))
                continue
            expected, last = sequence + 1, place
        kept.append(file)
    return kept


# What a start of the job needs of the journal, checked before the first step.
#
# Whatever this start has to apply must be known and on disk. Otherwise the start stops, and says which file
# is missing or damaged, what that means, and what to do next.

logger = logging.getLogger("replicast")

_Key = tuple[str, str]


def check_records(run_dir: RunDir, files: Sequence[EntryFile], damaged: Sequence[DamagedEntry]) -> None:
    """Checks that the record of every committed update is known: the next one follows them."""
    for one in damaged:
        why = why_a_record(one, files)
        if why:
            raise stopped(run_dir, one.error, why)


def check_start(
    run_dir: RunDir,
    files: Sequence[EntryFile],
    damaged: Sequence[DamagedEntry],
    payloads: Mapping[_Key, EntryFile],
    saved: Saved | None,
) -> None:
    """Checks that all is known and on disk that a start from a checkpoint has to apply.

    Warns of damaged entries that this start does not need.
    """
    history = History(file.entry() for file in files)
    start = Start(history, damaged, saved, _waiting(run_dir) if damaged else {})
    for one in damaged:
        why = why_needed(one, files, start)
        if why:
            raise stopped(run_dir, one.error, why)
    for key, what in _needed(start):
        _check_payload(run_dir, key, what, payloads.get(key), start)
    for one in damaged:
        logger.warning("%s This start does not need it; the file is left in place", one)


def stopped(run_dir: RunDir, error: FileDamaged, why: str) -> FileDamaged:
    """The error of a start that needs a file: what it means, and what to do next."""
    begin, checkpoint = "start the job in a new run directory", _last_checkpoint(run_dir)
    if checkpoint is not None:
        begin = (
            f"go on in a new run directory: copy {checkpoint} to NEW/checkpoints/ and start the job in NEW"
        )
    problem = f"{error.problem.removesuffix('.')}. The job cannot start without it: {why}"
    expected, received = error.expected, error.received
    remedy = f"Restore the file from a backup, or {begin}"
    return FileDamaged(
        error.path, problem, verdict=error.verdict, expected=expected, received=received, remedy=remedy
    )


def _needed(start: Start) -> Iterator[tuple[_Key, str]]:
    """The id and digest of each update that this start has to apply, and why."""
    for record in start.history.after(start.holds):
        what = f"update {record.sequence}, committed at step {record.step}"
        yield (record.id, record.digest), f"{what}, must be applied again"
    for one in start.history.scheduled.values():
        yield (one.id, one.digest), f"update {one.id} is scheduled for step {one.at_step}"
    for id_, digest in start.pending.items():
        yield (id_, digest), f"the checkpoint proposes update {id_} again"


def _check_payload(run_dir: RunDir, key: _Key, what: str, file: EntryFile | None, start: Start) -> None:
    if file is None or not isinstance(file.stored, StoredPayload):
        lost = [one.error for one in start.damaged if one.may_be("payload")]
        nothing = FileDamaged(below(run_dir) / "groups", f"the journal has no payload of update {key[0]}")
        raise stopped(run_dir, lost[0] if lost else nothing, what)
    path, nbytes = file.payload_path(run_dir), file.stored.nbytes
    try:
        status = path.stat()
    except OSError as error:
        # Retention keeps what any checkpoint needs, so only a start from scratch can need what it removed.
        if isinstance(error, FileNotFoundError) and start.saved is None and _last_checkpoint(run_dir):
            why = "every checkpoint that is kept contains it, and this start has restored none"
            raise PayloadRemoved(key[0], why) from error
        raise stopped(
            run_dir, FileDamaged(path, str(error.strerror), verdict="cannot be read"), what
        ) from error
    if not stat.S_ISREG(status.st_mode) or status.st_size != nbytes:
        found = FileDamaged(
            path, "it has another size", expected=f"{nbytes} bytes", received=f"{status.st_size}"
        )
        raise stopped(run_dir, found, what)


def _last_checkpoint(run_dir: RunDir) -> RunPath | None:
    with contextlib.suppress(ReplicastError, OSError):
        store = CheckpointStore(run_dir)
        last = store.last()
        return None if last is None else store.path(last.step)
    return None


def _waiting(run_dir: RunDir) -> dict[str, float]:
    """When each update in the inbox was submitted, by id."""
    found = {}
    for path in (below(run_dir) / "inbox").glob("*.safetensors"):
        with contextlib.suppress(FileNotFoundError):
            found[path.name.removesuffix(".safetensors")] = path.stat().st_mtime
    return found


# Removal from the journal: bytes that no attempt will need again, and files that do not count.

REVERTIBLE_BYTES = 2**30
"""The newest updates can be reverted even when no restart needs them: so many of their bytes are kept."""


def unneeded_payloads(
    files: Iterable[EntryFile],
    held: Container[int],
    group: int,
    pending: Container[tuple[str, str]] | None,
) -> Iterator[EntryFile]:
    """The entries whose bytes no attempt will need again: payloads, and values before updates.

    Those of the newest updates are kept, up to `REVERTIBLE_BYTES`: somebody may revert them.
    """
    open_: dict[str, dict[str, EntryFile]] = {}  # by id and digest: neither committed nor ended
    kept: dict[int, EntryFile] = {}  # the last values before each update
    applied: dict[int, EntryFile] = {}  # the payloads of committed updates that no start needs
    scheduled: set[str] = set()
    for file in files:
        match file.stored:
            case StoredBefore(sequence, problem=""):
                if sequence in kept:
                    yield kept[sequence]  # A later attempt has applied the update again.
                kept[sequence] = file
            case Committed(sequence, id_, digest):
                payload = open_.get(id_, {}).pop(digest, None)
                if payload is not None and sequence in held:
                    applied[sequence] = payload
            case Scheduled(id_):
                scheduled.add(id_)
            case Withdrawn(id_) | Refused(id_, whole=True):
                yield from open_.pop(id_, {}).values()
            case _ if file.payload_key is not None:
                id_, digest = file.payload_key
                earlier = open_.setdefault(id_, {}).pop(digest, None)
                if earlier is not None:
                    yield earlier  # A later attempt has written the same payload again.
                open_[id_][digest] = file
    yield from _beyond_reverting(applied, {one: file for one, file in kept.items() if one in held})
    for id_, payloads in open_.items():
        for digest, file in payloads.items():
            # An attempt that died has left it. No start brings it back but from a checkpoint or the schedule.
            is_left = file.group < group and id_ not in scheduled
            if is_left and pending is not None and (id_, digest) not in pending:
                yield file


def _beyond_reverting(*kept: Mapping[int, EntryFile]) -> Iterator[EntryFile]:
    """Of the bytes of updates, by number, those that are too old to be kept for a revert."""
    room = REVERTIBLE_BYTES
    for sequence in sorted({sequence for files in kept for sequence in files}, reverse=True):
        files = [one[sequence] for one in kept if sequence in one]
        room -= sum(
            file.stored.nbytes for file in files if isinstance(file.stored, StoredBefore | StoredPayload)
        )
        if room < 0:
            yield from files


def remove_void(run_dir: RunDir, group: int) -> None:
    """Removes files of earlier groups that do not count: they use disk space and would confuse readers."""
    claim = last_claim(run_dir)
    if claim is None or claim.group != group:
        return
    counted = dict(claim.counted)
    for earlier in group_numbers(run_dir):
        if earlier < group:
            _remove_void_of(group_directory(run_dir, earlier), counted.get(earlier, 0))


def _remove_void_of(directory: RunPath, counted: int) -> None:
    remove_leftovers(directory, older_than_secs=0.0)
    kinds = entry_kinds(directory)
    void = [entry_path(directory, number, kind) for number, kind in kinds.items() if number > counted]
    # Not those of an entry that is missing: it may come back from a backup.
    payloads = {
        bytes_path(directory, number, kind)
        for number in range(1, counted + 1)
        for kind in ("payload", "before")
        if kinds.get(number, kind) == kind
    }
    void.extend(path for path in directory.glob(f"*{PAYLOAD}") if path not in payloads)
    for path in void:
        path.unlink(missing_ok=True)


INDEX_EVERY = 1000
"""A group writes an index every this many entries."""
KEPT_BYTES = 1 << 26
"""The most bytes of update values that a journal in memory keeps."""

_BEFORE = " before"
_NO_ENTRY = "A checkpoint is not a journal entry: the checkpoint store writes it"


class NotWritten(ReplicastError):  # noqa: N818 - reads as a sentence: raise NotWritten
    """An entry is certainly not in the journal."""


class PerhapsWritten(ReplicastError):  # noqa: N818 - reads as a sentence: raise PerhapsWritten
    """An entry may be in the journal: only a new attempt can tell."""


class Journal(ABC):
    """The interface of a journal, with or without files. Only one thread writes."""

    @abstractmethod
    def write(self, entry: Entry, update: Update | None = None) -> None:
        """Writes an entry. It is durable when this returns."""

    @abstractmethod
    def load(self, id_: str, digest: str) -> Update:
        """Loads the update of a payload. Any thread may call it."""

    @abstractmethod
    def edits(self, id_: str, digest: str) -> tuple[Mapping[str, Any], ...]:
        """A summary of each edit of a payload, also when its values are not kept; empty if it is not known.

        Any thread may call it.
        """

    @abstractmethod
    def check_start(self, saved: Saved | None) -> None:
        """Checks that all is stored that a start has to apply. Call it before anything is decided."""

    @abstractmethod
    def stage_before(self, before: Update) -> Content:
        """Makes the values before an update durable; they count once a `Before` refers to them."""

    @abstractmethod
    def load_before(self, sequence: int) -> Update | None:
        """Loads the values before an update, as the update that assigns them. Any thread may call it."""

    @abstractmethod
    def history(self) -> History:
        """The entries that count. The content of a payload is the tuple of its id and digest."""

    @abstractmethod
    def remove_payloads(self, held: Container[int], pending: Container[tuple[str, str]] | None) -> int:
        """Removes the bytes of updates that no attempt will need again; the entries stay.

        These are the updates that every kept checkpoint contains, those that were refused or withdrawn, and
        those that an earlier attempt stored and neither scheduled nor committed, unless a kept checkpoint
        proposes them again. Files that cannot be removed are left alone. Only for the thread that writes.
        """


class FileJournal(Journal):
    """The journal in a run directory, for the group that writes it."""

    def __init__(self, run_dir: RunDir, fence: Fence) -> None:
        self._run_dir, self._fence = below(run_dir), fence
        remove_void(self._run_dir, fence.number)
        files, self._indexed, self._damaged = counted_entries(self._run_dir)
        self._files = [file.without_edits() for file in files]
        check_records(self._run_dir, self._files, self._damaged)
        self._payloads = {key: file for file in self._files if (key := file.payload_key) is not None}
        self._before = {
            file.stored.sequence: file for file in self._files if isinstance(file.stored, StoredBefore)
        }
        self._staged = itertools.count(1)
        self._committed = sum(isinstance(file.stored, Committed) for file in self._files)
        self._removed: set[tuple[int, int]] = set()
        if self._indexed < len(self._files):
            self._write_index()

    def write(self, entry: Entry, update: Update | None = None) -> None:
        if isinstance(entry, Committed) and entry.sequence != self._committed + 1:
            raise ValueError(f"The next update is {self._committed + 1}. Received: {entry.sequence}")
        number = self._fence.entries + 1
        kind = "before" if isinstance(entry, Before) else "payload"
        payload = bytes_path(self._fence.directory, number, kind)
        written_at = time.time()
        try:
            stored = _stored(entry, update, payload)
            self._fence.append(kind_of(stored), fields_of(stored) | {"written_at": written_at})
        except OSError as error:
            if self._fence.entries >= number:  # The payload was written before, so `stored` exists.
                self._take_in(EntryFile(self._fence.number, number, written_at, stored))
                raise PerhapsWritten(_perhaps_written(payload, error)) from error
            with contextlib.suppress(OSError):
                payload.unlink(missing_ok=True)
            self._fence.check_not_taken_over()  # A later group removes unfinished files of earlier ones.
            raise NotWritten(_not_written(self._run_dir, error)) from error
        self._take_in(EntryFile(self._fence.number, number, written_at, stored))

    def load(self, id_: str, digest: str) -> Update:
        file = self._payloads.get((id_, digest))
        if file is None or not isinstance(file.stored, StoredPayload):
            raise FileDamaged(self._run_dir / "groups", f"it has no payload for update {id_} ({digest})")
        try:
            return read_payload(file.payload_path(self._run_dir), file.stored)
        except FileDamaged as error:
            raise stopped(self._run_dir, error, f"it has the values of update {id_}") from error

    def edits(self, id_: str, digest: str) -> tuple[Mapping[str, Any], ...]:
        """As in `Journal`. They are read from the entry's file."""
        file = self._payloads.get((id_, digest))
        if file is None:
            return ()
        try:
            stored = read_entry(self._run_dir, file.group, file.number, file.kind).stored
        except FileDamaged:
            return ()
        return (stored.edits or ()) if isinstance(stored, StoredPayload) else ()

    def check_start(self, saved: Saved | None) -> None:
        check_start(self._run_dir, self._files, self._damaged, self._payloads, saved)

    def stage_before(self, before: Update) -> Content:
        # A name that readers ignore: the entry's number is not known yet.
        path = self._fence.directory / f"{TEMPORARY}before-{next(self._staged)}"
        sha256, nbytes = _write_update(path, before)
        return path.name, sha256, nbytes

    def load_before(self, sequence: int) -> Update | None:
        file = self._before.get(sequence)
        if file is None or not isinstance(file.stored, StoredBefore):
            return None
        return read_before(file.payload_path(self._run_dir), file.stored)

    def history(self) -> History:
        return History(file.entry() for file in self._files)

    def remove_payloads(self, held: Container[int], pending: Container[tuple[str, str]] | None) -> int:
        """As in `Journal`. Removes nothing if an entry is damaged, or a later group has taken over."""
        if self._damaged or self._fence.is_taken_over():
            return 0
        unneeded = unneeded_payloads(self._files, held, self._fence.number, pending)
        removed = 0
        for file in [file for file in unneeded if file.place not in self._removed]:
            try:
                file.payload_path(self._run_dir).unlink()
                removed += 1
            except FileNotFoundError:
                pass  # An earlier attempt has removed it.
            except OSError:
                continue  # It is retried next time.
            self._removed.add(file.place)
        return removed

    def _take_in(self, file: EntryFile) -> None:
        file = file.without_edits()
        self._files.append(file)
        if file.payload_key is not None:
            self._payloads[file.payload_key] = file
        if isinstance(file.stored, StoredBefore):
            self._before[file.stored.sequence] = file
        self._committed += isinstance(file.stored, Committed)
        if len(self._files) - self._indexed >= INDEX_EVERY:
            self._write_index()

    def _write_index(self) -> None:
        """An index has no holes: while an entry is damaged, an earlier index stays."""
        if self._damaged:
            return
        self._indexed = len(self._files)
        with contextlib.suppress(OSError):  # The index is derived: the entries have the same content.
            write_index(self._run_dir, self._fence.number, self._files)


class MemoryJournal(Journal):
    """A journal without files: for jobs without durability, and for tests.

    It keeps only the latest updates, up to `KEPT_BYTES` in total.
    """

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._updates: OrderedDict[tuple[str, str], Update] = OrderedDict()
        self._kept_bytes = 0
        self._staged = itertools.count(1)
        self._lock = threading.Lock()

    def write(self, entry: Entry, update: Update | None = None) -> None:
        if isinstance(entry, Saved):
            raise ValueError(_NO_ENTRY)
        if isinstance(entry, Payload):
            update = _checked(entry, update)
            if update.nbytes <= KEPT_BYTES:  # a copy: what was received is in memory that is used again
                arrays = [copied(array) for array in update.arrays()]
                self._keep((entry.id, entry.digest), Update.from_parts(update.describe(), arrays))
            entry = Payload(entry.id, entry.digest, (entry.id, entry.digest), entry.author, entry.note)
        self._entries.append(entry)

    def load(self, id_: str, digest: str) -> Update:
        update = self._updates.get((id_, digest))
        if update is None:
            raise PayloadRemoved(id_, "the journal is in memory", remedy="Propose the update again")
        return update

    def edits(self, id_: str, digest: str) -> tuple[Mapping[str, Any], ...]:
        update = self._updates.get((id_, digest))
        return () if update is None else tuple(summary(edit) for edit in update.edits)

    def check_start(self, saved: Saved | None) -> None:
        """As in `Journal`. What is not in memory is refused when it is loaded."""

    def stage_before(self, before: Update) -> Content:
        number = next(self._staged)
        self._keep((_BEFORE, str(number)), before)
        return number

    def load_before(self, sequence: int) -> Update | None:
        entries = (one for one in reversed(self._entries) if isinstance(one, Before))
        entry = next((one for one in entries if one.sequence == sequence), None)
        if entry is None:
            return None
        before = self._updates.get((_BEFORE, str(entry.content)))
        if before is None:
            gone = f"The values before update {sequence} are not kept any more: the journal is in memory"
            raise UpdateRefused(entry.problem or gone, remedy=NOT_KEPT)
        return before

    def history(self) -> History:
        return History(self._entries)

    def remove_payloads(self, held: Container[int], pending: Container[tuple[str, str]] | None) -> int:
        """As in `Journal`. Removes nothing, since the size is bounded."""
        return 0

    def _keep(self, key: tuple[str, str], update: Update) -> None:
        with self._lock:
            self._forget(key)
            self._updates[key] = update
            self._kept_bytes += update.nbytes
            while self._kept_bytes > KEPT_BYTES:
                self._forget(next(iter(self._updates)))

    def _forget(self, key: tuple[str, str]) -> None:
        update = self._updates.pop(key, None)
        self._kept_bytes -= 0 if update is None else update.nbytes


def _stored(entry: Entry, update: Update | None, path: RunPath) -> Stored:
    """The content of an entry's file. For a payload, first writes its bytes durably."""
    if isinstance(entry, Saved):
        raise ValueError(_NO_ENTRY)
    if isinstance(entry, Before):
        return _stored_before(entry, path)
    if not isinstance(entry, Payload):
        return entry
    update = _checked(entry, update)
    sha256, nbytes = _write_update(path, update)
    faults.point("journal")
    edits = tuple(summary(edit) for edit in update.edits)
    return StoredPayload(entry.id, entry.digest, entry.author, entry.note, sha256, nbytes, edits)


def _stored_before(entry: Before, path: RunPath) -> StoredBefore:
    """Gives values that were staged their final name."""
    if not isinstance(entry.content, tuple):
        return StoredBefore(entry.sequence, entry.id, problem=entry.problem)
    staged, sha256, nbytes = entry.content
    path.with_name(staged).rename(path)
    sync_directory(path.parent)
    return StoredBefore(entry.sequence, entry.id, sha256, nbytes)


def _write_update(path: RunPath, update: Update) -> tuple[str, int]:
    """Writes an update's file durably; gives its sha256 and its size."""
    hasher, nbytes = hashlib.sha256(), 0

    def counted() -> Iterator[bytes | memoryview]:
        nonlocal nbytes
        for chunk in update.file_chunks():
            hasher.update(chunk)
            nbytes += len(chunk)
            yield chunk

    write_durably(path, counted())
    return hasher.hexdigest(), nbytes


def _checked(payload: Payload, update: Update | None) -> Update:
    if update is None or update.id != payload.id:
        received = None if update is None else update.id
        raise ValueError(f"A payload must be written with its update, {payload.id}. Received: {received}")
    return update


def _not_written(run_dir: RunDir, error: OSError) -> str:
    return (
        f"The journal cannot be written ({error.strerror}). "
        f"Free space on the disk of {run_dir}, or repair it, and propose the update again."
    )


def _perhaps_written(path: RunPath, error: OSError) -> str:
    return (
        f"{path.name.partition('.')[0]} of {path.parent} was renamed, and then its directory could not be "
        f"synced ({error.strerror}). Only the next attempt of the job can tell whether it was written."
    )
