"""Where each update of a run is: the journal, the inbox and the refusals seen as one list.

A damaged entry of the journal hides no other: what it said is missing, and `damage_text` names its file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from replicast.client.examination import EditView
from replicast.client.notes import see
from replicast.codec import fields_of
from replicast.core.entries import Receipt
from replicast.core.records import Stage
from replicast.errors import NotFound, UpdateRefused
from replicast.files import RunDir, RunPath, below
from replicast.storage import inbox
from replicast.storage.updates import CommittedUpdate, Updates, describe
from replicast.strictjson import described, parse_integer, reading
from replicast.update.trial import Trial, TrialOutcome

_MOST_DAMAGED = 5
_MOST_DESCRIBED = 50
"""So many of the waiting updates are described: a status reads their files each time."""
_FROM_RECEIPT = ("digests", "propose_to_applied_secs", "stall_secs", "verified_at")


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateView:
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
    path: RunPath | None = field(default=None, compare=False)
    reason: str = ""
    waits_for: str = ""
    trial_until: int | None = None
    details: tuple[EditView, ...] | None = None
    damage: str = ""

    @property
    def receipt(self) -> Receipt | None:
        """The receipt that counts."""
        return self.receipts[-1] if self.receipts else None

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values, with those of the last receipt beside them."""
        made = {
            one.name: getattr(self, one.name) for one in fields(self) if one.name not in ("path", "details")
        }
        last = {} if self.receipt is None else fields_of(self.receipt)
        return made | {
            "edits": [dict(edit) for edit in self.edits]
            if self.details is None
            else [edit.to_json() for edit in self.details],
            "detailed": self.details is not None,
            "trial": None if self.trial is None else self.trial.to_json() | {"before": self.before},
            "receipts": [fields_of(receipt) for receipt in self.receipts],
            "outcome": None if self.outcome is None else self.outcome.to_json(),
            "refusal": None if self.refusal is None else self.refusal.to_json(),
            **{name: last.get(name) for name in _FROM_RECEIPT},
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> UpdateView:
        """Reads what `to_json` wrote."""
        with reading("update", fields):
            known = {name: value for name, value in fields.items() if name not in ("path", "details")}
            view = described(cls, "update", known)
            if not fields["detailed"]:
                return view
            return replace(view, details=tuple(EditView.from_json(edit) for edit in fields["edits"]))


def committed_views(run: RunDir, journal: Updates, sequences: Iterable[int]) -> list[UpdateView]:
    """Some of the committed updates."""
    seen = see(run)
    attempt = max((note.attempt for note in seen.notes), default=0) if seen.running else 0
    reached = max((note.step for note in seen.notes if note.attempt == attempt), default=0)
    updates = [journal.committed_update(*journal.committed[sequence]) for sequence in sequences]
    return [_committed_view(run, update, attempt, reached) for update in updates]


def scheduled_views(journal: Updates) -> list[UpdateView]:
    """The updates that wait for the step that their author chose, in the order of the steps."""
    waiting = sorted(journal.scheduled.values(), key=lambda one: one.at_step)
    return [
        UpdateView(
            id=one.id,
            stage=Stage.SCHEDULED,
            step=one.at_step,
            nbytes=one.nbytes,
            author=one.author,
            note=one.note,
            edits=one.edits,
            scheduled=True,
            trial=one.trial,
        )
        for one in map(journal.scheduled_update, waiting)
    ]


def waiting_views(run: RunDir, known: Collection[str]) -> list[UpdateView]:
    """What waits in the inbox, the oldest first, without the ids that are known from elsewhere."""
    found = list[UpdateView]()
    for entry in inbox.waiting(run):
        if entry.id not in known:
            view = noted_view(run, entry.id) or UpdateView(id=entry.id, stage=Stage.PROPOSED)
            view = _described(view, entry.path) if len(found) < _MOST_DESCRIBED else view
            found.append(replace(view, at=entry.submitted_at, path=entry.path, nbytes=entry.nbytes))
    return found


def _described(view: UpdateView, path: RunPath) -> UpdateView:
    """A waiting update with what its file says of it."""
    told = describe(path)
    if told is None:
        return view
    return replace(
        view,
        author=told.author,
        note=told.note,
        edits=told.edits,
        step=told.at_step if view.step is None else view.step,
        scheduled=told.at_step is not None,
        trial=told.trial,
        reverts=told.reverts,
    )


def refused_views(run: RunDir, journal: Updates, known: Collection[str]) -> list[UpdateView]:
    """What was refused, the oldest first, without the ids that were accepted or submitted again since."""
    found = []
    reasons = {id_: UpdateRefused(problem) for id_, problem in journal.refused.items()} | inbox.refusals(run)
    for update_id in reasons.keys() - known:
        view = UpdateView(id=update_id, stage=Stage.REFUSED, refusal=reasons[update_id])
        path = below(run) / "refused" / f"{update_id}.safetensors"
        with contextlib.suppress(OSError):
            view = replace(view, at=(below(run) / "refused" / f"{update_id}.json").stat().st_mtime)
            view = replace(view, nbytes=path.stat().st_size, path=path)
        found.append(view)
    return sorted(found, key=lambda view: (view.at, view.id))


def noted_view(run: RunDir, update_id: str) -> UpdateView | None:
    """An update as its note says, which is cheap to read; None without a note.

    The note is all that is left of an update in a job whose journal is in memory.
    """
    note = inbox.answer_of(run, update_id)
    if note is None:
        return None
    receipt = note.receipt
    return UpdateView(
        id=update_id,
        stage=note.stage,
        at=note.time,
        step=note.step if receipt is None else receipt.step,
        receipts=() if receipt is None else (receipt,),
        outcome=None if receipt is None else receipt.trial,
        reason=note.problem,
        waits_for=note.waits_for,
        trial_until=note.trial_until,
    )


def look(run: RunDir, update_id: str, *, thoroughly: bool) -> UpdateView:
    """Where one update is: by its note; by the journal when the note is missing or says too little."""
    noted = noted_view(run, update_id)
    if noted is not None and noted.receipt is not None:
        return noted
    if thoroughly or noted is None or noted.stage.is_final:
        found = _matching(run, Updates(run), lambda id_: id_ == update_id)
        if found:
            return found[0]
    if noted is None:
        raise NotFound(f"Nothing is known of update {update_id} in {run}: it may have been withdrawn.")
    return noted


def find(run: RunDir, given: str, journal: Updates) -> UpdateView:
    """The update that a person means: by its number, by its id, or by the beginning of its id."""
    with contextlib.suppress(ValueError):
        if (number := parse_integer(given)) in journal.committed:
            return committed_views(run, journal, [number])[0]
    noted = noted_view(run, given)
    exact = _matching(run, journal, lambda id_: id_ == given) or ([] if noted is None else [noted])
    found = exact or _matching(run, journal, lambda id_: bool(given) and id_.startswith(given))
    ids = sorted({view.id for view in found})
    if not ids:
        hint = "`replicast status` and `log` list them."
        raise NotFound(f"There is no update {given[:200]} in {run}. {hint}\n{damage_text(journal)}".rstrip())
    if len(ids) > 1:
        raise NotFound(f"{given} may be {len(ids)} updates: {', '.join(ids[:5])}. Give more of the id.")
    return found[0]


def _matching(run: RunDir, journal: Updates, matches: Callable[[str], bool]) -> list[UpdateView]:
    """The updates with such an id; of those with the same one, what counts comes first."""
    numbers = [number for number, (record, _) in journal.committed.items() if matches(record.id)]
    views = [*committed_views(run, journal, numbers), *scheduled_views(journal)]
    known = {view.id for view in views}
    views += waiting_views(run, known)
    views += [UpdateView(id=update_id, stage=Stage.WITHDRAWN) for update_id in sorted(journal.withdrawn)]
    views += refused_views(run, journal, known)
    return [view for view in views if matches(view.id)]


def damage_text(journal: Updates) -> str:
    """Which entries of the journal are damaged, and what they said; empty if none is."""
    lines = [" ".join(str(one.error).split()) for one in journal.damaged[:_MOST_DAMAGED]]
    if len(journal.damaged) > _MOST_DAMAGED:
        lines.append(f"{len(journal.damaged) - _MOST_DAMAGED} more entries of the journal are damaged.")
    return "\n".join(lines)


_COMMITTED = (
    *(
        "sequence",
        "step",
        "attempt",
        "committed_at",
        "workers",
        "author",
        "note",
        "edits",
        "nbytes",
        "sha256",
    ),
    *("scheduled", "heals", "reverts", "reverted_by", "trial", "before", "receipts"),
)
"""What a view says as the journal does."""


def _committed_view(run: RunDir, update: CommittedUpdate, attempt: int, reached: int) -> UpdateView:
    receipt, stage, reason = update.receipts[-1] if update.receipts else None, update.stage, ""
    if receipt is not None and receipt.attempt < attempt and update.step > reached:
        stage = Stage.COMMITTED  # The job was restarted before its step, and will apply it again there.
    elif receipt is None or stage is Stage.FAILED:
        note = inbox.answer_of(run, update.id)
        if note is not None:
            reason = note.problem
        if note is not None and receipt is None and note.stage is Stage.APPLIED:
            stage = Stage.APPLIED
    at = update.committed_at if receipt is None else receipt.verified_at
    return UpdateView(
        id=update.id,
        stage=stage,
        at=at,
        content_digest=update.digest,
        outcome=_outcome(update),
        reason=reason,
        trial_until=update.step + update.trial.steps
        if update.trial is not None and receipt is None
        else None,
        **{name: getattr(update, name) for name in _COMMITTED},
    )


def _outcome(update: CommittedUpdate) -> TrialOutcome | None:
    decided, trial = update.decided, update.trial
    if decided is None or trial is None:
        return None
    kept: Any = "kept" if decided.kept else "reverted"
    measured = update.before, decided.during
    return TrialOutcome(update.sequence, kept, decided.step, trial.metric, *measured, decided.reason)
