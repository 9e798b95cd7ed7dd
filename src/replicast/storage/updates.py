"""Everything known about each update of a run, joined from the journal. For readers, in any process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from replicast.core.entries import Committed, Decided, History, Receipt, Refused, Scheduled, Withdrawn
from replicast.core.operations.revert import why_not
from replicast.core.records import Stage
from replicast.errors import FileDamaged, PayloadRemoved, UpdateRefused
from replicast.files import RunDir, RunPath, below, open_plain
from replicast.storage.claims import LogLine, StoredBefore, StoredPayload
from replicast.storage.journal import HELD_BY_ALL, NO_EDITS, counted_lines, read_stored, summary
from replicast.strictjson import parse_integer
from replicast.tensorfiles import check_header, header_bytes
from replicast.update.edits import EditKind
from replicast.update.inverse import NOT_KEPT, disturbs, inverse
from replicast.update.trial import Trial
from replicast.update.update import MAX_TENSORS, Update


@dataclass(frozen=True, slots=True)
class CommittedUpdate:
    """A committed update."""

    sequence: int
    id: str
    digest: str
    step: int
    attempt: int
    committed_at: float
    workers: int
    author: str
    note: str
    edits: tuple[Mapping[str, Any], ...]
    nbytes: int
    sha256: str
    scheduled: bool
    heals: bool
    reverts: int | None
    reverted_by: int | None
    trial: Trial | None
    before: float | None
    decided: Decided | None
    receipts: tuple[Receipt, ...]

    @property
    def stage(self) -> Stage:
        """Its stage according to the last receipt; committed while there is none."""
        return self.receipts[-1].stage if self.receipts else Stage.COMMITTED


@dataclass(frozen=True, slots=True)
class ScheduledUpdate:
    """An update that waits for the step that its author chose."""

    id: str
    at_step: int
    trial: Trial | None
    author: str
    note: str
    edits: tuple[Mapping[str, Any], ...]
    nbytes: int


def committed_updates(run_dir: RunDir, last: int | None = None) -> list[CommittedUpdate]:
    """The committed updates in their order."""
    run = Updates(run_dir)
    run.check_whole()
    records = list(run.committed.values())
    wanted = records if last is None else records[max(0, len(records) - last) :]
    return [run.committed_update(*record) for record in wanted]


def scheduled_updates(run_dir: RunDir) -> list[ScheduledUpdate]:
    """The updates that wait for their step, in the order of the steps."""
    run = Updates(run_dir)
    run.check_whole()
    return [run.scheduled_update(one) for one in sorted(run.scheduled.values(), key=lambda one: one.at_step)]


def withdrawn_ids(run_dir: RunDir) -> frozenset[str]:
    """The ids of the updates that are known to be withdrawn."""
    return frozenset(Updates(run_dir).withdrawn)


def refused(run_dir: RunDir) -> dict[str, str]:
    """The reasons of the known refusals in the journal, by update id, without updates accepted later."""
    return Updates(run_dir).refused


def has_promised(run_dir: RunDir, id_: str) -> bool:
    """Whether an update is committed or scheduled, so that every attempt of the job will apply it."""
    run = Updates(run_dir)
    if id_ in run.scheduled or any(record.id == id_ for record, _ in run.committed.values()):
        return True
    run.check_whole()
    return False


def load_update(run_dir: RunDir, sequence: int) -> Update:
    """A committed update with its values."""
    run = Updates(run_dir)
    if sequence not in run.committed:
        raise FileDamaged(below(run_dir) / "groups", f"the journal has no update {sequence}")
    record, _ = run.committed[sequence]
    return read_stored(run_dir, run.payload(record.id, record.digest))


class Updates:
    """The updates of a run according to the journal, at the moment when it is read."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self.committed: dict[int, tuple[Committed, float]] = {}
        self.scheduled: dict[str, Scheduled] = {}
        self.withdrawn: set[str] = set()
        self.refused: dict[str, str] = {}
        self._payloads: dict[tuple[str, str], LogLine] = {}
        self._chosen: set[str] = set()
        self._decided: dict[int, Decided] = {}
        self._receipts: dict[int, list[Receipt]] = {}
        self.before: dict[int, LogLine] = {}
        self.history = History()
        lines, self.damaged = counted_lines(self._run_dir)
        for line in lines:
            self._add(line)
            self.history.add(line.entry())

    def check_whole(self) -> None:
        """Raises `FileDamaged` if any entry is missing or damaged."""
        if self.damaged:
            raise self.damaged[0].error

    def _add(self, line: LogLine) -> None:
        match line.stored:
            case StoredPayload() as payload:
                self._payloads[payload.id, payload.digest] = line
                self.refused.pop(payload.id, None)
            case StoredBefore() as before:
                self.before[before.sequence] = line
            case Scheduled() as scheduled:
                self.scheduled[scheduled.id] = scheduled
                self._chosen.add(scheduled.id)
            case Committed() as committed:
                self.committed[committed.sequence] = committed, line.written_at
                self.scheduled.pop(committed.id, None)
            case Decided() as decided:
                self._decided[decided.sequence] = decided
            case Receipt() as receipt:
                self._receipts.setdefault(receipt.sequence, []).append(receipt)
            case Withdrawn(id_):
                self.withdrawn.add(id_)
                self.scheduled.pop(id_, None)
            case Refused(id_, _, problem, whole=True):
                self.refused[id_] = problem
                self.scheduled.pop(id_, None)

    def payload(self, id_: str, digest: str) -> LogLine:
        """The line that names the payload of an update."""
        found = self._payloads.get((id_, digest))
        if found is None:
            raise FileDamaged(below(self._run_dir) / "groups", f"the journal has no payload of update {id_}")
        return found

    def committed_update(self, record: Committed, committed_at: float) -> CommittedUpdate:
        """Joins what is known about a committed update."""
        payload = self._described(record.id, record.digest)
        return CommittedUpdate(
            sequence=record.sequence,
            id=record.id,
            digest=record.digest,
            step=record.step,
            attempt=record.attempt,
            committed_at=committed_at,
            workers=record.workers,
            author=payload.author,
            note=payload.note,
            edits=payload.summaries(),
            nbytes=payload.nbytes,
            sha256=payload.sha256,
            scheduled=record.id in self._chosen,
            heals=record.heals,
            reverts=record.reverts,
            reverted_by=self.history.reverted_by(record.sequence),
            trial=record.trial,
            before=record.before,
            decided=self._decided.get(record.sequence),
            receipts=tuple(self._receipts.get(record.sequence, ())),
        )

    def scheduled_update(self, scheduled: Scheduled) -> ScheduledUpdate:
        """Joins what is known about an update that waits for its step."""
        payload = self._described(scheduled.id, scheduled.digest)
        return ScheduledUpdate(
            id=scheduled.id,
            at_step=scheduled.at_step,
            trial=scheduled.trial,
            author=payload.author,
            note=payload.note,
            edits=payload.summaries(),
            nbytes=payload.nbytes,
        )

    def _described(self, id_: str, digest: str) -> StoredPayload:
        """The payload of an update; without author, note and edits if its entry is damaged."""
        line = self._payloads.get((id_, digest))
        if line is None or not isinstance(line.stored, StoredPayload):
            return StoredPayload(id_, digest, "", "", "", "", 0, NO_EDITS)
        return line.stored


# What an update in the inbox says of itself: from the header of its file alone, which is cheap to read.

_MAX_HEADER_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Description:
    """What an update would do, as its author wrote it; a job has not examined it."""

    author: str
    note: str
    edits: tuple[Mapping[str, Any], ...]
    at_step: int | None
    trial: Trial | None
    reverts: int | None

    @property
    def words(self) -> str:
        """What it does in a few words: "add dense/bias (+3)"."""
        if self.reverts is not None:
            return f"reverts update {self.reverts}"
        if not self.edits:
            return "no edits"
        first = f"{self.edits[0]['operation']}".replace("_", " ") + f" {self.edits[0]['variable']}"
        return first + (f" (+{len(self.edits) - 1})" if len(self.edits) > 1 else "")


def describe(path: RunPath) -> Description | None:
    """The description in a file of the inbox; None if it is gone, very long, or not that of an update."""
    with contextlib.suppress(OSError, FileDamaged, UpdateRefused, ValueError, TypeError, AttributeError):
        return _read(path)
    return None


def _read(path: RunPath) -> Description | None:
    descriptor = open_plain(path)
    try:
        length = header_bytes(os.pread(descriptor, 8, 0))
        if length > _MAX_HEADER_BYTES:
            return None
        begin, nbytes = os.pread(descriptor, length, 0), os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)
    outline = check_header(begin, nbytes, path.name, max_tensors=MAX_TENSORS)
    update, extra = Update.of_file(outline, path.name)
    trial, step, reverts = extra.get("trial"), extra.get("at_step"), extra.get("reverts")
    return Description(
        author=update.author,
        note=update.note,
        edits=tuple(summary(edit) for edit in update.edits),
        at_step=step if type(step) is int else None,
        trial=None if trial is None else Trial.from_json(trial),
        reverts=reverts if type(reverts) is int else None,
    )


# The update that undoes an update of the journal, for a job and for processes outside it.


@dataclass(frozen=True, slots=True)
class Undo:
    """How an update of the journal is undone."""

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


def undo(
    run_dir: RunDir, which: int | str, *, note: str = "", author: str = "", forced: bool = False
) -> Undo:
    """The update that undoes a committed update of a run. Changes nothing."""
    run = Updates(run_dir)
    by_id = run.history.by_id.get(str(which))
    sequence = by_id.sequence if by_id is not None else number_of(which)
    problem = why_not(run.history, sequence, forced=forced)
    if problem:
        raise UpdateRefused(problem)
    record = run.history.committed[sequence]

    def load() -> Update:
        return read_stored(run_dir, run.payload(record.id, record.digest))

    def load_before() -> Update | None:
        line = run.before.get(sequence)
        return None if line is None else read_stored(run_dir, line)

    def edits_of(one: Committed) -> tuple[Mapping[str, Any], ...]:
        return run.committed_update(*run.committed[one.sequence]).edits

    update = inverse_of(record, load, load_before, note=note, author=author)
    return Undo(record, update, changes_since(run.history, record, update, edits_of))


def changes_since(
    history: History,
    first: Committed,
    back: Update,
    edits_of: Callable[[Committed], Iterable[Mapping[str, Any]]],
) -> tuple[str, ...]:
    """What later updates have done that the undoing of one would discard or be wrong for, in words."""
    undoes = {edit.variable: edit.operation for edit in back.edits}
    found = []
    for record in history.after(frozenset()):
        if not _counts_after(history, record, first):
            continue
        done: dict[str, None] = {}
        for edit in edits_of(record):
            name, operation = edit["variable"], EditKind(edit["operation"])
            if name in undoes and disturbs(operation, undoes[name], heals=record.heals):
                done[f"{_DONE[operation]} {name}"] = None
        if done:
            found.append(f"update {record.sequence} has {', '.join(done)} since then")
    return tuple(found)


def _counts_after(history: History, record: Committed, first: Committed) -> bool:
    """Whether an update was applied after another one and still has an effect."""
    if (record.step, record.sequence) <= (first.step, first.sequence):
        return False
    decided = history.decided.get(record.sequence)
    if history.reverted_by(record.sequence) is not None or (decided is not None and not decided.kept):
        return False
    undone = None if record.reverts is None else history.committed.get(record.reverts)
    # What undoes a later update leaves nothing of it.
    return undone is None or (undone.step, undone.sequence) <= (first.step, first.sequence)


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


def inverse_of(
    record: Committed,
    load: Callable[[], Update],
    load_before: Callable[[], Update | None],
    *,
    id_: str | None = None,
    note: str = "",
    author: str = "",
) -> Update:
    """The update that undoes another one, from what the journal keeps of it."""
    try:
        update = load()
    except PayloadRemoved as error:
        problem = f"The values of update {record.sequence} are not kept any more: {HELD_BY_ALL}"
        raise UpdateRefused(problem, remedy=NOT_KEPT) from error
    note = note or f"revert update {record.sequence} ({record.id})"
    return inverse(update, load_before(), id_=id_, note=note, author=author)


def number_of(which: int | str) -> int:
    """The number of an update, as somebody gave it."""
    try:
        return parse_integer(str(which))
    except ValueError as error:
        raise UpdateRefused(
            "There is no such update",
            expected="the number or the id of a committed update",
            received=str(which)[:200],
            remedy="replicast log lists them",
        ) from error
