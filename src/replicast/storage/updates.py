"""Everything known about each update of a run, joined from the journal. For readers, in any process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replicast.core.entries import Committed, Decided, Receipt, Refused, Scheduled, Withdrawn
from replicast.core.history import History
from replicast.core.stage import Stage
from replicast.errors import FileDamaged
from replicast.files import RunDir, below
from replicast.storage.counted import counted_entries
from replicast.storage.damage import DamagedEntry
from replicast.storage.entry_files import EntryFile, StoredBefore, StoredPayload, read_entry, read_payload
from replicast.update.trial import Trial
from replicast.update.update import Update


@dataclass(frozen=True, slots=True)
class CommittedUpdate:
    """A committed update.

    Attributes:
        sequence: Its place in the order, from 1.
        id: Its id.
        digest: The digest of its content: equal for updates that do the same.
        step: The boundary at which every worker applies it.
        attempt: The attempt of the job that committed it.
        committed_at: Seconds since 1970.
        workers: The number of workers of the job.
        author: Who proposed it.
        note: Why.
        edits: A summary of each edit: operation, variable, shape of what is written. Empty, as author and
            note, if the entry that has them is damaged.
        nbytes: The size of its file; 0 if that is not known.
        sha256: The hash of its file; empty if that is not known.
        scheduled: Whether the author chose the step.
        heals: Whether an audit made it.
        reverts: The number of the update that it undoes, if any.
        reverted_by: The number of the update that has undone it, if any.
        trial: The condition of its trial, if any.
        before: For a trial: the metric before the update.
        decided: How its trial ended.
        receipts: One for each attempt that applied it, in order; the last one counts.
    """

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
    """An update that waits for the step that its author chose.

    Attributes:
        id: Its id.
        at_step: The step.
        trial: The condition of its trial, if any.
        author: Who proposed it.
        note: Why.
        edits: A summary of each edit, as in `CommittedUpdate`.
        nbytes: The size of its file; 0 if that is not known.
    """

    id: str
    at_step: int
    trial: Trial | None
    author: str
    note: str
    edits: tuple[Mapping[str, Any], ...]
    nbytes: int


def committed_updates(run_dir: RunDir, last: int | None = None) -> list[CommittedUpdate]:
    """The committed updates in their order.

    Args:
        run_dir: The run directory.
        last: The number of latest updates to return; less is read then. Default: all.

    Raises:
        FileDamaged: An entry is missing or damaged: `Updates` has the others.
    """
    run = Updates(run_dir)
    run.check_whole()
    records = list(run.committed.values())
    wanted = records if last is None else records[max(0, len(records) - last) :]
    return [run.committed_update(*record) for record in wanted]


def scheduled_updates(run_dir: RunDir) -> list[ScheduledUpdate]:
    """The updates that wait for their step, in the order of the steps.

    Raises:
        FileDamaged: As in `committed_updates`.
    """
    run = Updates(run_dir)
    run.check_whole()
    return [run.scheduled_update(one) for one in sorted(run.scheduled.values(), key=lambda one: one.at_step)]


def withdrawn_ids(run_dir: RunDir) -> frozenset[str]:
    """The ids of the updates that are known to be withdrawn.

    Raises:
        FileDamaged: The claim of the last group is damaged.
    """
    return frozenset(Updates(run_dir).withdrawn)


def refused(run_dir: RunDir) -> dict[str, str]:
    """The reasons of the known refusals in the journal, by update id, without updates accepted later.

    Raises:
        FileDamaged: As in `withdrawn_ids`.
    """
    return Updates(run_dir).refused


def has_promised(run_dir: RunDir, id_: str) -> bool:
    """Whether an update is committed or scheduled, so that every attempt of the job will apply it.

    Raises:
        FileDamaged: A damaged entry may say so.
    """
    run = Updates(run_dir)
    if id_ in run.scheduled or any(record.id == id_ for record, _ in run.committed.values()):
        return True
    for damaged in run.damaged:
        if damaged.may_be("committed") or damaged.may_be("scheduled"):
            raise damaged.error
    return False


def load_update(run_dir: RunDir, sequence: int) -> Update:
    """A committed update with its values.

    Raises:
        FileDamaged: It is missing, was removed, or is damaged.
    """
    run = Updates(run_dir)
    if sequence not in run.committed:
        raise FileDamaged(below(run_dir) / "groups", f"the journal has no update {sequence}")
    record, _ = run.committed[sequence]
    file, payload = run.payload(record.id, record.digest)
    return read_payload(file.payload_path(run_dir), payload)


class Updates:
    """The updates of a run according to the journal, at the moment when it is read.

    Args:
        run_dir: The run directory.

    Attributes:
        committed: The record of each committed update and when it was written, by sequence number.
        scheduled: The updates that wait for their step, by id.
        withdrawn: The ids of withdrawn updates.
        history: The same as the core reads it.
        refused: Why updates were refused, by id; without those that were accepted later.
        before: Where the values before each update are, by sequence number.
        damaged: The entries that are missing or damaged. Whatever they said is not among the above.

    Raises:
        FileDamaged: The claim of the last group, which says what counts, is damaged.
    """

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self.committed: dict[int, tuple[Committed, float]] = {}
        self.scheduled: dict[str, Scheduled] = {}
        self.withdrawn: set[str] = set()
        self.refused: dict[str, str] = {}
        self._payloads: dict[tuple[str, str], tuple[EntryFile, StoredPayload]] = {}
        self._chosen: set[str] = set()
        self._decided: dict[int, Decided] = {}
        self._receipts: dict[int, list[Receipt]] = {}
        self.before: dict[int, tuple[EntryFile, StoredBefore]] = {}
        self.history = History()
        files, _, self.damaged = counted_entries(self._run_dir)
        for file in files:
            self._add(file)
            self.history.add(file.entry())

    def check_whole(self) -> None:
        """Raises `FileDamaged` if any entry is missing or damaged."""
        if self.damaged:
            raise self.damaged[0].error

    def _add(self, file: EntryFile) -> None:
        match file.stored:
            case StoredPayload() as payload:
                self._payloads[payload.id, payload.digest] = file, payload
                self.refused.pop(payload.id, None)
            case StoredBefore() as before:
                self.before[before.sequence] = file, before
            case Scheduled() as scheduled:
                self.scheduled[scheduled.id] = scheduled
                self._chosen.add(scheduled.id)
            case Committed() as committed:
                self.committed[committed.sequence] = committed, file.written_at
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

    def payload(self, id_: str, digest: str) -> tuple[EntryFile, StoredPayload]:
        """The payload of an update, and its place.

        Raises:
            FileDamaged: There is none.
        """
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
            edits=payload.edits or (),
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
            edits=payload.edits or (),
            nbytes=payload.nbytes,
        )

    def _described(self, id_: str, digest: str) -> StoredPayload:
        """The payload of an update; without author, note and edits if its entry is damaged.

        An index omits the edits: they are read from the entry's own file.
        """
        found = self._payloads.get((id_, digest))
        if found is None:
            return StoredPayload(id_, digest, "", "", "", 0)
        file, payload = found
        if payload.edits is None:
            try:
                own = read_entry(self._run_dir, file.group, file.number, file.kind).stored
                payload = own if isinstance(own, StoredPayload) else payload
            except FileDamaged as error:
                if all(one.place != file.place for one in self.damaged):
                    self.damaged.append(DamagedEntry(file.group, file.number, file.kind, error))
        return payload
