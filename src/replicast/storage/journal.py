"""The journal: the durable order of all events. Checkpoint + journal = any later state.

It is the concatenation of the logs of all groups of workers, up to the lines that count (`claims.py`). Only
the process of worker 0 writes; any process may read.

The bytes of updates are files beside the log, which a line names with their digest:

    groups/000003/000017.safetensors           the update of line 17
    groups/000003/000002.before.safetensors    values that an update has overwritten, for a revert

**Damage.** A line that counts and cannot be read hides no other from readers: they report it and go on. The
next line tells what it was (`claims.py`). A start stops at a line that it needs, or that may be any line:

    Payload           needed if the update must be applied (`check_start`)
    Before            not needed: a revert is refused. Values of an earlier attempt are not taken instead
    Receipt           not needed: without it, the update is applied again, as after a power failure
    Started, Claim    not needed: they are for people, unless it is the last claim
    all others        needed: they say what becomes of an update

A start reports what it ignores, and removes no file beside a damaged log: only the damaged line may name it,
and the log may come back from a backup. Half a line, whose writer was killed, does not count.

**Retention.** The bytes of updates that every kept checkpoint contains are removed, except the newest, which
somebody may revert; lines are never removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NotRequired, TypeAlias, TypedDict

import msgspec
from msgspec import UNSET

from replicast import faults
from replicast.codec import View
from replicast.core.entries import (
    Before,
    Committed,
    Content,
    Decided,
    Entry,
    History,
    Payload,
    Receipt,
    Refused,
    Saved,
    Scheduled,
    Stage,
    Withdrawn,
)
from replicast.core.operations.apply import outcome_of, why_not
from replicast.errors import FileDamaged, JobFailed, PayloadRemoved, ReplicastError, UpdateRefused, printable
from replicast.files import RunDir, RunPath, below, remove_leftovers, write_durably
from replicast.mapped_memory import copied
from replicast.storage import claims
from replicast.storage.checkpoints import CheckpointStore
from replicast.storage.claims import GROUPS, Claim, DamagedLines, Fence, LogLine, Subject
from replicast.storage.run_files import Annotation, Around
from replicast.update.edits import RESETS, Edit, EditKind
from replicast.update.schema import NOT_KEPT, disturbs, inverse
from replicast.update.tensorfiles import read_bytes
from replicast.update.trial import Effect, Trial, TrialOutcome
from replicast.update.update import Update

logger = logging.getLogger("replicast")

HELD_BY_ALL = "every checkpoint that is kept contains it"
REVERTIBLE_BYTES = 2**30  # Of the newest updates, these are kept for reverts.
KEPT_BYTES = 1 << 26  # Of the newest updates, these are kept by a journal in memory.
_NOT_AN_ENTRY = "A checkpoint is not a journal entry: the checkpoint store writes it"
_BEFORE = " before"
_NO_EDITS = msgspec.Raw(b"[]")


def counted_lines(run_dir: RunDir) -> Iterator[LogLine | DamagedLines]:
    """The entries that count, and what is known of those that cannot be read, in order."""
    sequence, skips = 0, False
    for line in claims.counted_log(run_dir, claims.last_claim(run_dir)):
        if isinstance(line, DamagedLines):
            skips |= is_needed(line)
        elif isinstance(line.entry, Committed):
            # Updates are numbered consecutively from 1; a damaged line may be another record.
            received, must = line.entry.sequence, f"the record of update {sequence + 1}"
            if received != sequence + 1 and not (skips and received > sequence):
                problem = f"entry {line.number} must be {must}. Received: {received}"
                error, skips = FileDamaged(claims.log_path(run_dir, line.group), problem), True
                yield DamagedLines(line.group, line.number, line.number, error)
                continue
            sequence = received
        if line.number or isinstance(line, DamagedLines):
            yield line


def is_needed(lost: DamagedLines) -> bool:
    """Whether every start needs a damaged line."""
    ignored = ("Claim", "Started", "Payload", "Before", "Receipt")
    return lost.subject is None or lost.subject.kind not in ignored


def read_stored(run_dir: RunDir, line: LogLine) -> Update:
    entry = line.entry
    assert isinstance(entry, Payload | Before)
    if isinstance(entry, Before) and entry.problem:
        raise UpdateRefused(entry.problem, remedy=NOT_KEPT)
    path = stored_path(run_dir, line)
    if not path.exists():
        if isinstance(entry, Payload):
            raise PayloadRemoved(entry.id)
        problem = f"The values before update {entry.sequence} are not kept any more: {HELD_BY_ALL}"
        raise UpdateRefused(problem, remedy=NOT_KEPT)
    content = read_bytes(path, max_bytes=entry.nbytes)
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise FileDamaged(path, "its sha256 is not that of its entry", expected=entry.sha256)
    return Update.parse(content, str(path))[0]


def stored_path(run_dir: RunDir, line: LogLine) -> RunPath:
    return claims.group_directory(run_dir, line.group) / getattr(line.entry, "file", "")


class EditSummary(TypedDict):
    operation: EditKind
    variable: str
    shape: list[int] | None
    value: NotRequired[float]  # of a factor, or of what has one element


def _summaries(line: LogLine) -> tuple[Mapping[str, Any], ...]:
    edits = line.entry.edits if isinstance(line.entry, Payload) else _NO_EDITS
    try:
        return msgspec.json.decode(edits, type=tuple[EditSummary, ...])
    except (ValueError, RecursionError):  # A line with a valid seal may still have anything here.
        return ()


def summary(edit: Edit, *, outline: bool = False) -> dict[str, Any]:
    """What an edit does, without its values; of one in outline, values are not known."""
    arrays, value = edit.arrays, edit.factor
    if "a" in arrays:
        shape: list[int] | None = [arrays["a"].shape[0], arrays["b"].shape[1]]
    else:
        written = arrays.get("value", arrays.get("rows", arrays.get("indices")))
        # None: the whole variable, whatever its shape.
        shape = None if written is None else list(written.shape)
        if written is not None and written.size == 1 and "value" in arrays and value is None and not outline:
            value = float(written.reshape(-1)[0])
    found = {"operation": str(edit.operation), "variable": edit.variable, "shape": shape}
    return found | {"value": value} if value is not None and math.isfinite(value) else found


def _stopped(run_dir: RunDir, error: FileDamaged, why: str) -> FileDamaged:
    """The error of a start that needs a file: what it means, and what to do next."""
    begin, there = "start the job in a new run directory", _last_checkpoint(run_dir)
    if there is not None:
        begin = f"continue in a new run directory: copy {there} to NEW/checkpoints/ and start the job in NEW"
    problem = f"{error.problem.removesuffix('.')}. The job cannot start without it: {why}"
    kept = {name: getattr(error, name) for name in ("verdict", "expected", "received")}
    return FileDamaged(error.path, problem, **kept, remedy=f"Restore the file from a backup, or {begin}")


def _last_checkpoint(run_dir: RunDir) -> RunPath | None:
    with contextlib.suppress(ReplicastError, OSError):
        store = CheckpointStore(run_dir)
        last = store.last()
        return None if last is None else store.path(last.step)
    return None


def unneeded_payloads(
    files: Iterable[LogLine], held: Container[int], group: int, pending: Container[tuple[str, str]] | None
) -> Iterator[LogLine]:
    """The entries whose bytes no attempt will need again: payloads, and values before updates.

    Those of the newest updates are kept, up to `REVERTIBLE_BYTES`: somebody may revert them.
    """
    open_: dict[str, dict[str, LogLine]] = {}  # by id and digest: neither committed nor ended
    kept: dict[int, LogLine] = {}  # the last values before each update
    applied: dict[int, LogLine] = {}  # the payloads of committed updates that no start needs
    scheduled: set[str] = set()
    for file in files:
        match file.entry:
            case Before(sequence, problem=""):
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
            case Payload(id_, digest):
                earlier = open_.setdefault(id_, {}).pop(digest, None)
                if earlier is not None:
                    yield earlier  # A later attempt has written the same payload again.
                open_[id_][digest] = file
    room = REVERTIBLE_BYTES
    for sequence in sorted({*applied, *(one for one in kept if one in held)}, reverse=True):
        old = [one[sequence] for one in (applied, kept) if sequence in one]
        room -= sum(getattr(file.entry, "nbytes", 0) for file in old)
        if room < 0:
            yield from old
    for id_, payloads in open_.items():
        for digest, file in payloads.items():
            # An attempt that died has left it. No start brings it back but from a checkpoint or the schedule.
            is_left = file.group < group and id_ not in scheduled
            if is_left and pending is not None and (id_, digest) not in pending:
                yield file


class NotWritten(ReplicastError):  # noqa: N818 - reads as a sentence: raise NotWritten
    """An entry is certainly not in the journal."""


class PerhapsWritten(ReplicastError):  # noqa: N818 - reads as a sentence: raise PerhapsWritten
    """An entry may be in the journal: only a new attempt can tell."""


class StoredJournal:
    def __init__(self, run_dir: RunDir) -> None:
        self.run_dir = below(run_dir)
        self.lines = list[LogLine]()
        self.payloads = dict[tuple[str, str], LogLine]()
        self.before = dict[int, LogLine]()
        self.damaged = list[DamagedLines]()
        for line in counted_lines(self.run_dir):
            if isinstance(line, LogLine):
                self._add(line)
                continue
            self.damaged.append(line)
            if line.subject is not None and line.subject.kind == "Before":
                # Those of an earlier attempt may be others: another training may have led to them.
                self.before.pop(line.subject.sequence, None)

    def _add(self, line: LogLine) -> None:
        self.lines.append(line)
        if isinstance(line.entry, Payload):
            self.payloads[line.entry.id, line.entry.digest] = line
        elif isinstance(line.entry, Before):
            self.before[line.entry.sequence] = line

    def history(self) -> History:
        return History(line.entry for line in self.lines if not isinstance(line.entry, Claim))

    def load(self, id_: str, digest: str) -> Update:
        line = self.payloads.get((id_, digest))
        if line is None:
            problem = f"the journal has no payload of update {id_} ({digest})"
            raise self._lost_payload(id_) or FileDamaged(self.run_dir / GROUPS, problem)
        return read_stored(self.run_dir, line)

    def _lost_payload(self, id_: str) -> FileDamaged | None:
        return next((one.error for one in self.damaged if one.subject == Subject("Payload", id_)), None)

    def load_before(self, sequence: int) -> Update | None:
        """The values before an update, as the update that assigns them."""
        line = self.before.get(sequence)
        return None if line is None else read_stored(self.run_dir, line)

    def edits(self, id_: str, digest: str) -> tuple[Mapping[str, Any], ...]:
        """A summary of each edit of a payload, also when its values are not kept; empty if not known."""
        line = self.payloads.get((id_, digest))
        return () if line is None else _summaries(line)


class FileJournal(StoredJournal):
    """The journal in a run directory, for the group that writes it. Only one thread writes; any may read."""

    def __init__(self, run_dir: RunDir, fence: Fence) -> None:
        self._fence = fence
        self._staged = itertools.count(1)
        self._committed = 0
        self._removed: set[tuple[int, int]] = set()
        super().__init__(run_dir)
        for one in self.damaged:
            if is_needed(one):
                says = "may say" if one.subject is None else "says"
                raise _stopped(self.run_dir, one.error, f"it {says} what became of an update")
            logger.warning("%s The job starts without it.", printable(one.error))
        if self._fence.is_taken_over():
            return
        # Files of earlier groups that no line which counts can name only use disk space.
        named = {
            (line.group, line.entry.file) for line in self.lines if isinstance(line.entry, Payload | Before)
        }
        for group in claims.group_numbers(self.run_dir):
            if group < self._fence.number and all(one.group != group for one in self.damaged):
                directory = claims.group_directory(self.run_dir, group)
                remove_leftovers(directory, older_than_secs=0.0)
                for path in directory.glob("*.safetensors"):
                    if (group, path.name) not in named:
                        path.unlink(missing_ok=True)

    def _add(self, line: LogLine) -> None:
        if isinstance(line.entry, Payload):  # The summary of its edits may be long: it is read again.
            entry = msgspec.structs.replace(line.entry, edits=_NO_EDITS)
            line = msgspec.structs.replace(line, entry=entry)
        self._committed += isinstance(line.entry, Committed)
        super()._add(line)

    def write(self, entry: Entry, update: Update | None = None) -> None:
        """Writes an entry. It is durable when this returns, or for a payload or a receipt at the next `sync`.

        So an author waits for one fsync instead of three. The commit syncs the payload before it; so does a
        checkpoint that needs the payload. If a power failure takes a receipt, the next attempt applies the
        committed update again and writes another one.
        """
        if isinstance(entry, Committed) and entry.sequence != self._committed + 1:
            raise ValueError(f"The next update is {self._committed + 1}. Received: {entry.sequence}")
        if isinstance(entry, Saved):
            raise ValueError(_NOT_AN_ENTRY)
        number, file = self._fence.last.number + 1, ""
        try:
            if isinstance(entry, Payload):
                file, update = f"{number:06d}.safetensors", _checked(entry, update)
                stored = self._write_update(file, update)
                faults.point("journal")
                edits = msgspec.Raw(msgspec.json.encode([summary(edit) for edit in update.edits]))
                entry = msgspec.structs.replace(entry, content=UNSET, **stored, edits=edits)
            elif isinstance(entry, Before):
                stored = entry.content or {}
                file = stored.get("file", "")
                entry = msgspec.structs.replace(entry, content=UNSET, **stored)
            self._add(self._fence.append(entry, sync=not isinstance(entry, Payload | Receipt)))
        except OSError as error:
            if self._fence.last.number >= number:
                raise PerhapsWritten(
                    f"Entry {number} of {self._fence.directory / claims.LOG} was written, and could not be "
                    f"synced ({error.strerror}). Only the next attempt can tell whether it is on disk."
                ) from error
            if file:
                with contextlib.suppress(OSError):
                    (self._fence.directory / file).unlink(missing_ok=True)
            self._fence.check_not_taken_over()  # A later group removes unfinished files of earlier ones.
            raise NotWritten(
                f"The journal cannot be written ({error.strerror}). "
                f"Free space on the disk of {self.run_dir}, or repair it, and propose the update again."
            ) from error

    def sync(self) -> None:
        try:
            self._fence.sync()
        except OSError as error:
            problem = f"What was written to {self._fence.directory / claims.LOG} cannot be synced"
            raise JobFailed(
                f"{problem} ({error.strerror}). Only a restart can tell what is on disk"
            ) from error

    def _write_update(self, file: str, update: Update) -> dict[str, Any]:
        hasher, nbytes = hashlib.sha256(), 0

        def counted() -> Iterator[bytes | memoryview]:
            nonlocal nbytes
            for chunk in update.file_chunks():
                hasher.update(chunk)
                nbytes += len(chunk)
                yield chunk

        write_durably(self._fence.directory / file, counted())
        return {"file": file, "sha256": hasher.hexdigest(), "nbytes": nbytes}

    def load(self, id_: str, digest: str) -> Update:
        try:
            return super().load(id_, digest)
        except FileDamaged as error:
            raise _stopped(self.run_dir, error, f"it has the values of update {id_}") from error

    def edits(self, id_: str, digest: str) -> tuple[Mapping[str, Any], ...]:
        line = self.payloads.get((id_, digest))
        try:
            return () if line is None else _summaries(claims.line_again(self.run_dir, line))
        except (OSError, ValueError):
            return ()

    def check_start(self, saved: Saved | None) -> None:
        """Checks that every update is stored that a start has to apply, before anything is decided."""
        history, pending = self.history(), () if saved is None else saved.pending
        needed: list[Any] = history.after(frozenset() if saved is None else saved.holds)
        needed += history.scheduled.values()
        needed += [one.proposal for one in pending if not history.has_ended(one)]
        for one in needed:
            line = self.payloads.get((one.id, one.digest))
            path = self.run_dir / GROUPS if line is None else stored_path(self.run_dir, line)
            if line is None or not path.is_file():
                missing = self._lost_payload(one.id)
                # Retention keeps what a checkpoint needs: only a start from scratch can need what it removed.
                if line is not None and missing is None and saved is None and _last_checkpoint(self.run_dir):
                    raise PayloadRemoved(one.id, f"{HELD_BY_ALL}, and this start has restored none")
                missing = missing or FileDamaged(path, "the values of an update are missing")
                raise _stopped(self.run_dir, missing, f"update {one.id} must be applied again")

    def stage_before(self, before: Update) -> Content:
        """Makes the values before an update durable; they count once a `Before` names them. Any thread."""
        # With its final name: until a line names it, it is void, and the next group removes it.
        file = f"{next(self._staged):06d}.before.safetensors"
        return self._write_update(file, before)

    def remove_payloads(self, held: Container[int], pending: Container[tuple[str, str]] | None) -> int:
        """Removes the bytes of updates that no attempt will need again; the entries stay.

        These are the updates that every kept checkpoint contains, those that were refused or withdrawn, and
        those that an earlier attempt stored and neither scheduled nor committed, unless a kept checkpoint
        proposes them again. Files that cannot be removed are left alone; all are if a later group has taken
        over. Only for the thread that writes.
        """
        if self._fence.is_taken_over():
            return 0
        removed = 0
        for line in list(unneeded_payloads(self.lines, held, self._fence.number, pending)):
            if (place := (line.group, line.number)) not in self._removed:
                try:
                    stored_path(self.run_dir, line).unlink()
                    removed += 1
                except FileNotFoundError:
                    pass  # An earlier attempt has removed it.
                except OSError:
                    continue  # It is retried next time.
                self._removed.add(place)
        return removed


class MemoryJournal(StoredJournal):
    """The same without files. It keeps only the latest updates, up to `KEPT_BYTES` in total."""

    def __init__(self) -> None:
        self.lines, self.payloads, self.before, self.damaged = [], {}, {}, []
        self._updates: OrderedDict[tuple[str, str], Update] = OrderedDict()
        self._kept_bytes = 0
        self._staged = itertools.count(1)
        self._lock = threading.Lock()

    def write(self, entry: Entry, update: Update | None = None) -> None:
        if isinstance(entry, Saved):
            raise ValueError(_NOT_AN_ENTRY)
        if isinstance(entry, Payload):
            update = _checked(entry, update)
            if update.nbytes <= KEPT_BYTES:  # a copy: what was received is in memory that is used again
                copies = [
                    replace(edit, arrays={name: copied(array) for name, array in edit.arrays.items()})
                    for edit in update.edits
                ]
                self._keep((entry.id, entry.digest), update.with_edits(copies))
            entry = msgspec.structs.replace(entry, content=UNSET)
        self._add(LogLine(len(self.lines) + 1, entry, time.time(), ""))

    def sync(self) -> None:
        """Nothing is on disk."""

    def load(self, id_: str, digest: str) -> Update:
        update = self._updates.get((id_, digest))
        if update is None:
            raise PayloadRemoved(id_, "the journal is in memory", remedy="Propose the update again")
        return update

    def edits(self, id_: str, digest: str) -> tuple[Mapping[str, Any], ...]:
        update = self._updates.get((id_, digest))
        return () if update is None else tuple(summary(edit) for edit in update.edits)

    def check_start(self, saved: Saved | None) -> None:
        """What is not in memory is refused when it is loaded."""

    def stage_before(self, before: Update) -> Content:
        number = next(self._staged)
        self._keep((_BEFORE, str(number)), before)
        return number

    def load_before(self, sequence: int) -> Update | None:
        line = self.before.get(sequence)
        if line is None or not isinstance(entry := line.entry, Before):
            return None
        before = self._updates.get((_BEFORE, str(entry.content)))
        if before is None:
            gone = f"The values before update {sequence} are not kept any more: the journal is in memory"
            raise UpdateRefused(entry.problem or gone, remedy=NOT_KEPT)
        return before

    def remove_payloads(self, held: Container[int], pending: Container[tuple[str, str]] | None) -> int:
        return 0  # The size is bounded.

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


Journal: TypeAlias = FileJournal | MemoryJournal


def _checked(payload: Payload, update: Update | None) -> Update:
    if update is None or update.id != payload.id:
        received = None if update is None else update.id
        raise ValueError(f"A payload must be written with its update, {payload.id}. Received: {received}")
    return update


# Everything known about each update of a run: one reader of the journal, and one record for what it tells.
# `client/directory.py` adds what the inbox and the notes of workers say.

_FROM_RECORD = ("sequence", "step", "attempt", "workers", "trial", "before", "heals", "reverts")
_FROM_RECEIPT = ("digests", "propose_to_applied_secs", "stall_secs", "verified_at")
_GIVEN: dict[str, str] = {EditKind.ASSIGN: "to ", EditKind.SCALE: "by ", EditKind.BLEND: "with weight "}


class UpdateView(View, frozen=True, kw_only=True):
    """What is known of an update, as `log`, `show` and `status` tell it; None or empty where it is not.

    Attributes:
        id: Its id.
        stage: The last stage that it has reached.
        at: When that was, in seconds since 1970.
        step: The boundary at which it was, or will be, applied.
        nbytes: The size of its file.
        sequence: Its number in the journal, from its commit on.
        author: Who has proposed it.
        note: Why.
        edits: What each edit does: its operation, variable, and value or shape.
        detailed: Whether `edits` have norms and more, as `show` finds them by reading the values.
        scheduled: Whether its author chose its step.
        heals: Whether an audit made it.
        reverts: The number of the update that it reverts.
        reverted_by: The number of the update that has reverted it.
        attempt: The attempt that committed it.
        committed_at: When.
        timings: From when to when it was prepared, applied and verified, and training stopped ("prepare",
            "apply", "verify", "stall"), in seconds since 1970.
        workers: The number of workers then.
        content_digest: The digest of its content.
        sha256: That of its file.
        trial: The trial that it was proposed with.
        before: The metric of the trial before it.
        receipts: One of each attempt that has applied it.
        outcome: How its trial ended.
        refusal: Why it was refused.
        withdrawn_by: Who has withdrawn it.
        around: The loss, or else the first metric, before and after it.
        others: The other metrics before and after it.
        annotation: What people have noted about it since.
        path: Its file in the inbox.
        reason: Why it waits there.
        waits_for: What it waits for in the job.
        trial_until: The step at which its trial ends.
        damage: What of it cannot be read.
    """

    id: str
    stage: Stage
    at: float = 0.0
    step: int | None = None
    nbytes: int | None = None
    sequence: int | None = None
    author: str = ""
    note: str = ""
    edits: tuple[Mapping[str, Any], ...] = ()
    detailed: bool = False
    scheduled: bool = False
    heals: bool = False
    reverts: int | None = None
    reverted_by: int | None = None
    attempt: int | None = None
    committed_at: float | None = None
    timings: Mapping[str, tuple[float, float]] = {}
    workers: int | None = None
    content_digest: str = ""
    sha256: str = ""
    trial: Trial | None = None
    before: float | None = None
    receipts: tuple[Receipt, ...] = ()
    outcome: TrialOutcome | None = None
    refusal: UpdateRefused | None = None
    withdrawn_by: str = ""
    around: Around | None = None
    others: tuple[Around, ...] = ()
    annotation: Annotation = Annotation()
    path: RunPath | None = None
    reason: str = ""
    waits_for: str = ""
    trial_until: int | None = None
    damage: str = ""

    @property
    def receipt(self) -> Receipt | None:
        return self.receipts[-1] if self.receipts else None

    @property
    def effects(self) -> tuple[Effect, ...]:
        """What it has done to each variable, in the attempt that applied it last."""
        return () if self.receipt is None else self.receipt.effects or ()

    @property
    def texts(self) -> tuple[str, ...]:
        """What each edit does or has done, but resets: "assign optimizer/learning_rate 0.001 → 0.0005"."""
        done, found = {effect.variable: str(effect) for effect in self.effects}, []
        for edit in self.edits:
            operation, name = str(edit.get("operation")), str(edit.get("variable"))
            if operation not in RESETS:
                value = edit.get("value", edit.get("factor"))
                given = "" if value is None else f"{_GIVEN.get(operation, '')}{float(value):.6g}"
                found.append(f"{operation.replace('_', ' ')} {name} {done.pop(name, given)}".rstrip())
        return tuple(found)

    def words(self, most: int = 2) -> str:
        """The same in one line: "add dense/bias 0.5 → 0.7, scale optimizer/learning_rate by 0.5 (+3)"."""
        more = f" (+{len(self.texts) - most})" if len(self.texts) > most else ""
        resets = len(self.edits) - len(self.texts)
        return ", ".join(self.texts[:most]) + more + (f", reset {resets} slots" if resets else "")

    def to_json(self) -> dict[str, Any]:
        made = super().to_json()
        del made["path"]
        if self.trial is not None:
            made["trial"] |= {"before": self.before}
        last = made["receipts"][-1] if self.receipts else {}
        return made | {name: last.get(name) for name in _FROM_RECEIPT} | {"texts": list(self.texts)}


class Updates:
    """The updates of a run according to the journal; `read_on` adds what was written since."""

    def __init__(self, journal: RunDir | StoredJournal) -> None:
        self.journal = journal if isinstance(journal, StoredJournal) else StoredJournal(journal)
        self.damaged = self.journal.damaged
        self.history = History()
        self.ended: dict[str, UpdateView] = {}  # Refused, without those accepted later, and withdrawn; by id.
        self._chosen: set[str] = set()  # Updates with a step that their author chose.
        # Of the first `Committed`, `Decided` and `Receipt` of an update.
        self._written_at: dict[tuple[type, int], float] = {}
        self._receipts: dict[int, list[Receipt]] = {}
        self._digests: dict[str, str] = {}
        self._read = 0
        self.read_on()

    def read_on(self) -> None:
        lines = self.journal.lines[self._read :]
        self._read += len(lines)
        for line in lines:
            if isinstance(line.entry, Claim):
                continue
            self.history.add(line.entry)
            match line.entry:
                case Payload(id_, digest):
                    self._digests[id_] = digest
                    self.ended.pop(id_, None)
                case Scheduled(id_):
                    self._chosen.add(id_)
                case Committed(sequence) | Decided(sequence):
                    self._written_at[type(line.entry), sequence] = line.written_at
                case Receipt(sequence) as receipt:
                    self._written_at.setdefault((Receipt, sequence), line.written_at)
                    self._receipts.setdefault(sequence, []).append(receipt)
                case (Refused(id_, whole=True) | Withdrawn(id_)) as end:
                    refusal = UpdateRefused(end.problem) if isinstance(end, Refused) else None
                    stage = Stage.WITHDRAWN if refusal is None else Stage.REFUSED
                    told = self._payload(id_, self._digests.get(id_, ""))
                    self.ended[id_] = UpdateView(stage=stage, at=line.written_at, refusal=refusal, **told)

    def has_promised(self, id_: str) -> bool:
        """Whether an update is committed or scheduled, so that every attempt of the job will apply it."""
        if id_ in self.history.scheduled or id_ in self.history.by_id:
            return True
        for one in self.damaged:
            if is_needed(one) and (one.subject is None or one.subject.id == id_):
                raise one.error
        return False

    def committed(self, sequence: int) -> UpdateView:
        """What is known of a committed update; without author, note and edits if their entry is damaged."""
        record = self.history.committed[sequence]
        trial, decided = record.trial, self.history.decided.get(sequence)
        outcome = None if trial is None or decided is None else outcome_of(trial, record, decided)
        receipts = tuple(self._receipts.get(sequence, ()))
        committed_at = self._written_at[Committed, sequence]
        return UpdateView(
            stage=receipts[-1].stage if receipts else Stage.COMMITTED,
            at=receipts[-1].verified_at if receipts else committed_at,
            scheduled=record.id in self._chosen,
            reverted_by=self.history.reverted_by(sequence),
            committed_at=committed_at,
            timings=self._timings(record),
            content_digest=record.digest,
            receipts=receipts,
            outcome=outcome,
            trial_until=record.step + trial.steps if trial and not (receipts or decided) else None,
            **{name: getattr(record, name) for name in _FROM_RECORD},
            **self._payload(record.id, record.digest),
        )

    def _timings(self, record: Committed) -> dict[str, tuple[float, float]]:
        """By its first receipt. Between hosts they are as exact as the clocks agree."""
        receipt = next(iter(self._receipts.get(record.sequence, ())), None)
        if receipt is None:
            return {}
        applied_at = receipt.verified_at
        found = {"stall": (applied_at - receipt.stall_secs, applied_at)}
        if receipt.attempt == record.attempt:  # else a restart came between: it did not take that long
            payload = self.journal.payloads.get((record.id, record.digest))
            if payload is not None and receipt.propose_to_applied_secs:
                found["prepare"] = applied_at - receipt.propose_to_applied_secs, payload.written_at
            found["apply"] = self._written_at[Committed, record.sequence], applied_at
            decided_at = self._written_at.get((Decided, record.sequence), applied_at)
            found["verify"] = decided_at, self._written_at[Receipt, record.sequence]
        return {name: (begun, max(begun, ended)) for name, (begun, ended) in found.items()}

    def scheduled(self) -> list[UpdateView]:
        """The updates that wait for the step that their author chose, in the order of the steps."""
        known: dict[str, Any] = {"stage": Stage.SCHEDULED, "scheduled": True}
        return [
            UpdateView(step=one.at_step, trial=one.trial, **known, **self._payload(one.id, one.digest))
            for one in sorted(self.history.scheduled.values(), key=lambda one: one.at_step)
        ]

    def _payload(self, id_: str, digest: str) -> dict[str, Any]:
        line = self.journal.payloads.get((id_, digest))
        if line is None or not isinstance(line.entry, Payload):
            return {"id": id_, "nbytes": 0}
        found = {name: getattr(line.entry, name) for name in ("id", "author", "note", "nbytes", "sha256")}
        return found | {"edits": self.journal.edits(id_, digest)}


def committed_updates(run_dir: RunDir) -> list[UpdateView]:
    """The committed updates in their order; raises `FileDamaged` if any that a start needs is damaged."""
    run = Updates(run_dir)
    for one in filter(is_needed, run.damaged):
        raise one.error
    return [run.committed(sequence) for sequence in run.history.committed]


def load_update(run_dir: RunDir, sequence: int) -> Update:
    run = Updates(run_dir)
    record = run.history.committed.get(sequence)
    if record is None:
        raise FileDamaged(below(run_dir) / GROUPS, f"the journal has no update {sequence}")
    return run.journal.load(record.id, record.digest)


# The update that undoes an update of the journal, for a job and for processes outside it.


@dataclass(frozen=True, slots=True)
class Undo:
    record: Committed
    update: Update
    since: tuple[str, ...] = ()

    def check(self) -> None:
        """Raises `UpdateRefused` if later updates have changed what it would change."""
        if self.since:
            raise UpdateRefused(
                f"Update {self.record.sequence} is not the last one: {'; '.join(self.since)}",
                remedy="Revert those first, or revert it all the same: force=True",
            )


def undo(run_dir: RunDir, sequence: int, *, forced: bool = False) -> Undo:
    """The update that undoes a committed update of a run. Changes nothing."""
    run = Updates(run_dir)
    if problem := why_not(run.history, sequence, forced=forced):
        raise UpdateRefused(problem)
    return undo_of(run.journal, sequence)


def undo_of(journal: Journal | StoredJournal, sequence: int, *, id_: str | None = None) -> Undo:
    """The update that undoes another one, from what the journal keeps of it."""
    history = journal.history()
    record = history.committed[sequence]
    try:
        update = journal.load(record.id, record.digest)
    except PayloadRemoved as error:
        problem = f"The values of update {sequence} are not kept any more: {HELD_BY_ALL}"
        raise UpdateRefused(problem, remedy=NOT_KEPT) from error
    note = f"revert update {sequence} ({record.id})"
    back = inverse(update, journal.load_before(sequence), id_=id_, note=note)
    return Undo(record, back, _changes_since(journal, history, record, back))


def _changes_since(
    journal: Journal | StoredJournal, history: History, first: Committed, back: Update
) -> tuple[str, ...]:
    """What later updates have done that the undoing of one would discard or be wrong for, in words."""
    undoes = {edit.variable: edit.operation for edit in back.edits}
    found = []

    def is_later(record: Committed | None) -> bool:
        return record is not None and (record.step, record.sequence) > (first.step, first.sequence)

    for record in filter(is_later, history.after(frozenset())):
        decided = history.decided.get(record.sequence)
        if history.reverted_by(record.sequence) is not None or (decided is not None and not decided.kept):
            continue
        if record.reverts is not None and is_later(history.committed.get(record.reverts)):
            continue  # What undoes a later update leaves nothing of it.
        done: dict[str, None] = {}
        edits = journal.edits(record.id, record.digest)
        for edit in edits:
            name, operation = edit["variable"], EditKind(edit["operation"])
            if name in undoes and disturbs(operation, undoes[name], heals=record.heals):
                done[f"{_DONE[operation]} {name}"] = None
        if done or not edits:
            found.append(f"update {record.sequence} has {', '.join(done) or 'unknown edits'} since then")
    return tuple(found)


_DONE = {
    EditKind.ADD: "added to",
    EditKind.ADD_ROWS: "added to rows of",
    EditKind.ADD_LOW_RANK: "added to",
    EditKind.SCALE: "scaled",
    EditKind.BLEND: "blended",
    EditKind.ASSIGN: "assigned",
    EditKind.ASSIGN_ROWS: "assigned rows of",
    EditKind.RESET: "reset",
    EditKind.RESET_ROWS: "reset rows of",
}
