"""Where the updates of a run stand, gathered from journal, inbox and refusals."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from replicast import inbox
from replicast.edits import RESETS
from replicast.errors import UpdateRefused
from replicast.journal import Journal
from replicast.records import Receipt, Record
from replicast.runfiles import read_worker_notes
from replicast.trial import TrialOutcome
from replicast.update import Stage

_RECEIPT_ONLY = ("digests", "propose_to_applied_secs", "stall_secs", "verified_at")


@dataclass(frozen=True, slots=True)
class Standing:
    """Where one update stands.

    Attributes:
        id: The update's id.
        stage: How far it has come.
        at: When it came there, or to the inbox, in seconds since 1970.
        step: The step it is committed for or was applied at, once that is known.
        record: What the journal says of it.
        receipt: How it ended.
        refusal: Why it was refused.
        path: Its file, where it waits or lies refused.
        nbytes: The size of its file.
        reason: Why it failed, in words, if it did and that is known.
        trial: How its trial ended, if it was on trial and that is decided.
    """

    id: str
    stage: Stage
    at: float
    step: int | None = None
    record: Record | None = None
    receipt: Receipt | None = None
    refusal: UpdateRefused | None = None
    path: Path | None = None
    nbytes: int | None = None
    reason: str = ""
    trial: TrialOutcome | None = None

    def to_json(self) -> dict[str, Any]:
        """Record and receipt merged, or what there is instead of them, as JSON values."""
        fields: dict[str, Any] = {"id": self.id, "nbytes": self.nbytes, "at": self.at}
        if self.record is not None:
            fields |= self.record.to_json() | dict.fromkeys(_RECEIPT_ONLY)
        if self.receipt is not None:
            fields |= {name: value for name, value in self.receipt.to_json().items() if name != "trial"}
        if self.trial is not None:
            fields["outcome"] = self.trial.to_json()
        if self.refusal is not None:
            fields["refusal"] = self.refusal.to_json()
        if self.reason:
            fields["reason"] = self.reason
        return fields | {"stage": str(self.stage), "step": self.step}


def committed(run_dir: Path) -> list[Standing]:
    """What the journal holds, in its order.

    Raises:
        FileDamaged: A file of the journal is not what was written.
    """
    journal = Journal(run_dir)
    records = journal.records()
    receipts, outcomes, withdrawn = journal.receipts(), journal.outcomes(), journal.withdrawn()
    attempt, reached = _reached(run_dir)
    standings = []
    for record in records:
        standing = _of_record(run_dir, record, receipts.get(record.sequence))
        # A start that begins before its step applies it again: until then its replicas do not have it.
        if record.attempt < attempt and (standing.step or 0) > reached:
            standing = replace(standing, stage=Stage.COMMITTED)
        if record.sequence in withdrawn:
            standing = replace(standing, stage=Stage.WITHDRAWN)
        standings.append(replace(standing, trial=outcomes.get(record.sequence)))
    return standings


def waiting(run_dir: Path, known: Iterable[str]) -> list[Standing]:
    """What waits in the inbox, the oldest first, without the ids that are known to be committed."""
    ids = set(known)
    found = []
    for entry in inbox.waiting(run_dir):
        if entry.id not in ids:
            noted = inbox.stage_of(run_dir, entry.id) or {}
            stage = _stage(noted, Stage.PROPOSED)
            found.append(
                Standing(
                    entry.id,
                    stage,
                    entry.submitted_at,
                    _step(noted),
                    path=entry.path,
                    nbytes=entry.nbytes,
                )
            )
    return found


def refused(run_dir: Path) -> list[Standing]:
    """What was refused, the oldest first.

    Raises:
        FileDamaged: A file is not what was written.
    """
    found = []
    for update_id, reason in inbox.refusals(run_dir).items():
        at, nbytes, path = 0.0, None, Path(run_dir) / "refused" / f"{update_id}.safetensors"
        with contextlib.suppress(FileNotFoundError):
            at = (Path(run_dir) / "refused" / f"{update_id}.json").stat().st_mtime
            nbytes = path.lstat().st_size
        there = None if nbytes is None else path
        found.append(Standing(update_id, Stage.REFUSED, at, refusal=reason, path=there, nbytes=nbytes))
    return sorted(found, key=lambda standing: standing.at)


def every(run_dir: Path) -> list[Standing]:
    """All updates of a run: committed, waiting, refused.

    Raises:
        FileDamaged: A file of the run is not what was written.
    """
    in_journal = committed(run_dir)
    waits = waiting(run_dir, [standing.id for standing in in_journal])
    return [*in_journal, *waits, *refused(run_dir)]


def matching(run_dir: Path, given: str) -> list[Standing]:
    """The updates that a person may mean: by sequence number, by id, or by the beginning of an id.

    Raises:
        FileDamaged: A file of the run is not what was written.
    """
    found = every(run_dir)
    if given.isascii() and given.isdigit():
        by_sequence = [one for one in found if one.record is not None and one.record.sequence == int(given)]
        if by_sequence:
            return by_sequence
    exact = [one for one in found if one.id == given]
    if exact:
        # The journal's comes first: one that was refused may have been corrected since. One that was
        # withdrawn may have come again.
        return sorted(exact, key=lambda one: (one.record is None, one.stage is Stage.WITHDRAWN))[:1]
    noted = of_note(run_dir, given)
    if noted is not None:
        return [noted]
    return [one for one in found if one.id.startswith(given)] if given else []


def of_note(run_dir: Path, update_id: str) -> Standing | None:
    """An update of which only the last note is left, as in a job whose journal is in memory."""
    noted = inbox.stage_of(run_dir, update_id)
    if noted is None:
        return None
    receipt = receipt_in(noted)
    at = noted.get("time")
    return Standing(
        update_id,
        _stage(noted, Stage.PROPOSED),
        float(at) if isinstance(at, int | float) else 0.0,
        receipt.step if receipt is not None else _step(noted),
        receipt=receipt,
        reason=str(noted.get("reason", "")),
        trial=None if receipt is None else receipt.trial,
    )


def receipt_in(noted: Mapping[str, Any]) -> Receipt | None:
    """The receipt that a note carries, if it does."""
    described = noted.get("receipt")
    if isinstance(described, dict):
        with contextlib.suppress(ValueError):
            return Receipt.from_json(described)
    return None


def what_text(edits: Iterable[Mapping[str, Any]], most: int = 2) -> str:
    """The edits of a record in a few words: "add dense/bias, scale optimizer/learning_rate (+3)"."""
    listed = list(edits)
    asked = [edit for edit in listed if edit.get("operation") not in RESETS]
    shown = [f"{words(str(edit.get('operation')))} {edit.get('variable')}" for edit in asked[:most]]
    text = ", ".join(shown)
    if len(asked) > most:
        text += f" (+{len(asked) - most})"
    resets = len(listed) - len(asked)
    return f"{text}, reset {resets} slots" if resets else text


def words(operation: str) -> str:
    """An operation as people say it."""
    return operation.replace("_", " ")


def _reached(run_dir: Path) -> tuple[int, int]:
    """The present start of the job, and the step that it has come to."""
    notes = read_worker_notes(run_dir)
    attempt = max((note.attempt for note in notes), default=0)
    return attempt, max((note.step for note in notes if note.attempt == attempt), default=0)


def _of_record(run_dir: Path, record: Record, receipt: Receipt | None) -> Standing:
    if receipt is not None:
        stage, at, step = receipt.stage, receipt.verified_at, receipt.step
    else:
        stage, at, step = Stage.COMMITTED, record.committed_at, record.step
    reason = ""
    if stage is not Stage.VERIFIED:
        noted = inbox.stage_of(run_dir, record.id) or {}
        reason = str(noted.get("reason", ""))
        if stage is Stage.COMMITTED and _stage(noted, stage) is Stage.APPLIED:
            stage = Stage.APPLIED
    return Standing(
        record.id, stage, at, step, record=record, receipt=receipt, nbytes=record.nbytes, reason=reason
    )


def _stage(noted: Mapping[str, Any], otherwise: Stage) -> Stage:
    try:
        return Stage(noted.get("stage", otherwise))
    except ValueError:
        return otherwise


def _step(noted: Mapping[str, Any]) -> int | None:
    step = noted.get("step")
    return step if type(step) is int else None
