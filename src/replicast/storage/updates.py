"""Everything known about each update of a run: one reader of the journal, and one record for what it tells.

`client/directory.py` adds what the inbox and the notes of workers say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from replicast.core.entries import Committed, History, Receipt, Refused, Scheduled
from replicast.core.operations.revert import why_not
from replicast.core.records import Stage
from replicast.errors import FileDamaged, PayloadRemoved, UpdateRefused
from replicast.files import RunDir, RunPath, below
from replicast.storage.claims import GROUPS, StoredPayload
from replicast.storage.journal import HELD_BY_ALL, Journal, StoredJournal
from replicast.strictjson import View, parse_integer
from replicast.update.edits import EditKind
from replicast.update.inverse import NOT_KEPT, disturbs, inverse
from replicast.update.trial import Trial, TrialOutcome, TrialVerdict
from replicast.update.update import Update

_FROM_RECEIPT = ("digests", "propose_to_applied_secs", "stall_secs", "verified_at")


class UpdateView(View, frozen=True, kw_only=True):
    """All that is known of one update of a run, wherever it is."""

    id: str
    stage: Stage
    at: float = 0.0
    step: int | None = None
    nbytes: int | None = None
    sequence: int | None = None
    author: str = ""
    note: str = ""
    edits: tuple[Mapping[str, Any], ...] = ()
    detailed: bool = False  # Whether `edits` are those of an examination, and not only summaries.
    scheduled: bool = False
    heals: bool = False
    reverts: int | None = None
    reverted_by: int | None = None
    attempt: int | None = None
    committed_at: float | None = None
    workers: int | None = None
    content_digest: str = ""
    sha256: str = ""
    trial: Trial | None = None
    before: float | None = None
    receipts: tuple[Receipt, ...] = ()
    outcome: TrialOutcome | None = None
    refusal: UpdateRefused | None = None
    path: RunPath | None = None
    reason: str = ""
    waits_for: str = ""
    trial_until: int | None = None
    damage: str = ""

    @property
    def receipt(self) -> Receipt | None:
        return self.receipts[-1] if self.receipts else None

    @property
    def words(self) -> str:
        """What it does in a few words: "add dense/bias (+3)"."""
        if self.reverts is not None:
            return f"reverts update {self.reverts}"
        if not self.edits:
            return "no edits"
        first = f"{self.edits[0]['operation']}".replace("_", " ") + f" {self.edits[0]['variable']}"
        return first + (f" (+{len(self.edits) - 1})" if len(self.edits) > 1 else "")

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values, with those of the last receipt beside them."""
        made = super().to_json()
        del made["path"]
        if self.trial is not None:
            made["trial"] |= {"before": self.before}
        last = made["receipts"][-1] if self.receipts else {}
        return made | {name: last.get(name) for name in _FROM_RECEIPT}


class Updates:
    """The updates of a run according to the journal, at the moment when it is read."""

    def __init__(self, run_dir: RunDir) -> None:
        self.journal = StoredJournal(run_dir)
        self.damaged = self.journal.damaged
        self.history = History()
        self.refused: dict[str, str] = {}  # The reasons, by id, without updates accepted later.
        self._chosen: set[str] = set()  # Updates with a step that their author chose.
        self._committed_at: dict[int, float] = {}
        self._receipts: dict[int, list[Receipt]] = {}
        for line in self.journal.lines:
            self.history.add(line.entry())
            match line.stored:
                case StoredPayload(id_):
                    self.refused.pop(id_, None)
                case Scheduled(id_):
                    self._chosen.add(id_)
                case Committed(sequence):
                    self._committed_at[sequence] = line.written_at
                case Receipt(sequence) as receipt:
                    self._receipts.setdefault(sequence, []).append(receipt)
                case Refused(id_, _, problem, whole=True):
                    self.refused[id_] = problem

    def check_whole(self) -> None:
        if self.damaged:
            raise self.damaged[0].error

    def has_promised(self, id_: str) -> bool:
        """Whether an update is committed or scheduled, so that every attempt of the job will apply it."""
        if id_ in self.history.scheduled or id_ in self.history.by_id:
            return True
        self.check_whole()
        return False

    def committed(self, sequence: int) -> UpdateView:
        """What is known of a committed update; without author, note and edits if their entry is damaged."""
        record = self.history.committed[sequence]
        trial, decided = record.trial, self.history.decided.get(sequence)
        outcome = None
        if trial is not None and decided is not None:
            measured = record.before, decided.during
            kept: TrialVerdict = "kept" if decided.kept else "reverted"
            outcome = TrialOutcome(sequence, kept, decided.step, trial.metric, *measured, decided.reason)
        receipts = tuple(self._receipts.get(sequence, ()))
        return UpdateView(
            stage=receipts[-1].stage if receipts else Stage.COMMITTED,
            at=receipts[-1].verified_at if receipts else self._committed_at[sequence],
            step=record.step,
            sequence=sequence,
            scheduled=record.id in self._chosen,
            heals=record.heals,
            reverts=record.reverts,
            reverted_by=self.history.reverted_by(sequence),
            attempt=record.attempt,
            committed_at=self._committed_at[sequence],
            workers=record.workers,
            content_digest=record.digest,
            trial=trial,
            before=record.before,
            receipts=receipts,
            outcome=outcome,
            trial_until=record.step + trial.steps if trial is not None and not receipts else None,
            **self._payload(record.id, record.digest),
        )

    def scheduled(self) -> list[UpdateView]:
        """The updates that wait for the step that their author chose, in the order of the steps."""
        return [
            UpdateView(
                stage=Stage.SCHEDULED,
                step=one.at_step,
                scheduled=True,
                trial=one.trial,
                **self._payload(one.id, one.digest),
            )
            for one in sorted(self.history.scheduled.values(), key=lambda one: one.at_step)
        ]

    def _payload(self, id_: str, digest: str) -> dict[str, Any]:
        line = self.journal.payloads.get((id_, digest))
        if line is None or not isinstance(line.stored, StoredPayload):
            return {"id": id_, "nbytes": 0}
        found = {name: getattr(line.stored, name) for name in ("id", "author", "note", "nbytes", "sha256")}
        return found | {"edits": self.journal.edits(id_, digest)}


def committed_updates(run_dir: RunDir) -> list[UpdateView]:
    """The committed updates in their order; raises `FileDamaged` if any entry is missing or damaged."""
    run = Updates(run_dir)
    run.check_whole()
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


def undo(run_dir: RunDir, which: int | str, *, forced: bool = False) -> Undo:
    """The update that undoes a committed update of a run. Changes nothing."""
    run = Updates(run_dir)
    by_id = run.history.by_id.get(str(which))
    sequence = by_id.sequence if by_id is not None else number_of(which)
    problem = why_not(run.history, sequence, forced=forced)
    if problem:
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
    for record in history.after(frozenset()):
        if not _counts_after(history, record, first):
            continue
        done: dict[str, None] = {}
        for edit in journal.edits(record.id, record.digest):
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
