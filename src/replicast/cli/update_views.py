"""Where each update of a run is: the journal, the inbox and the refusals seen as one list.

A damaged entry of the journal hides no other: what it said is missing, and `damage_text` names its file.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from replicast.cli import Failed, texts
from replicast.cli.rundirs import is_running
from replicast.cli.tables import make_table
from replicast.core.entries import Receipt
from replicast.core.stage import Stage
from replicast.errors import UpdateRefused
from replicast.storage import inbox
from replicast.storage.runfiles import read_worker_notes
from replicast.storage.updates import CommittedUpdate, ScheduledUpdate, Updates
from replicast.strictjson import described
from replicast.update.edits import RESETS
from replicast.update.trial import TrialOutcome

_MOST_DAMAGED = 5
_STYLES = dict.fromkeys(Stage, "yellow") | {
    Stage.COMMITTED: "cyan",
    Stage.APPLIED: "cyan",
    Stage.VERIFIED: "green",
    Stage.REFUSED: "red",
    Stage.FAILED: "bold red",
}


@dataclass(frozen=True, slots=True)
class UpdateView:
    """One update of a run.

    Attributes:
        at: When it came to its stage, or to the inbox, in seconds since 1970; 0 when that is not known.
        step: Where it was applied, or will be, once that is known.
        journaled: What the journal says of it, if it is committed or scheduled.
        receipts: How it ended, once for each attempt that applied it; the last one counts.
        outcome: How its trial ended.
        refusal: Why it was refused.
        path: Its file, where it waits or lies refused.
        nbytes: The size of its file.
        reason: Why it failed.
        waits_for: What it waits for, as the job says.
        trial_until: The step at which its trial is decided, while it is on trial.
    """

    id: str
    stage: Stage
    at: float = 0.0
    step: int | None = None
    journaled: CommittedUpdate | ScheduledUpdate | None = None
    receipts: tuple[Receipt, ...] = ()
    outcome: TrialOutcome | None = None
    refusal: UpdateRefused | None = None
    path: Path | None = None
    nbytes: int | None = None
    reason: str = ""
    waits_for: str = ""
    trial_until: int | None = None

    @property
    def committed(self) -> CommittedUpdate | None:
        """What the journal says of it, if it is committed."""
        return self.journaled if isinstance(self.journaled, CommittedUpdate) else None

    @property
    def receipt(self) -> Receipt | None:
        """The receipt that counts."""
        return self.receipts[-1] if self.receipts else None

    def to_json(self) -> dict[str, Any]:
        """What is known of it as JSON values: record and last receipt merged, and every receipt."""
        fields: dict[str, Any] = {"id": self.id, "nbytes": self.nbytes, "at": self.at}
        if self.journaled is not None:
            fields |= asdict(self.journaled)
            if fields["trial"] is not None:
                fields["trial"]["before"] = fields.get("before")
        if self.committed is not None:
            fields["content_digest"] = self.committed.digest
        if self.committed is not None or self.receipts:
            last = {} if self.receipt is None else asdict(self.receipt)
            for name in ("digests", "propose_to_applied_secs", "stall_secs", "verified_at"):
                fields[name] = last.get(name)
            fields["receipts"] = [asdict(receipt) for receipt in self.receipts]
        fields["outcome"] = None if self.outcome is None else self.outcome.to_json()
        fields["refusal"] = None if self.refusal is None else self.refusal.to_json()
        fields |= {"reason": self.reason, "waits_for": self.waits_for, "trial_until": self.trial_until}
        duplicates = ("digest", "before", "decided", "at_step")
        kept = {name: value for name, value in fields.items() if name not in duplicates}
        return kept | {"stage": self.stage, "step": self.step}


def committed_views(run: Path, journal: Updates, sequences: Iterable[int]) -> list[UpdateView]:
    """Some of the committed updates."""
    notes = read_worker_notes(run)
    attempt = max((note.attempt for note in notes), default=0) if is_running(notes) else 0
    reached = max((note.step for note in notes if note.attempt == attempt), default=0)
    updates = [journal.committed_update(*journal.committed[sequence]) for sequence in sequences]
    return [_committed_view(run, update, attempt, reached) for update in updates]


def scheduled_views(journal: Updates) -> list[UpdateView]:
    """The updates that wait for the step that their author chose, in the order of the steps."""
    waiting = sorted(journal.scheduled.values(), key=lambda one: one.at_step)
    return [
        UpdateView(one.id, Stage.SCHEDULED, step=one.at_step, journaled=one, nbytes=one.nbytes)
        for one in map(journal.scheduled_update, waiting)
    ]


def waiting_views(run: Path, known: Collection[str]) -> list[UpdateView]:
    """What waits in the inbox, the oldest first, without the ids that are known from elsewhere."""
    found = []
    for entry in inbox.waiting(run):
        if entry.id not in known:
            view = noted_view(run, entry.id) or UpdateView(entry.id, Stage.PROPOSED)
            found.append(replace(view, at=entry.submitted_at, path=entry.path, nbytes=entry.nbytes))
    return found


def refused_views(run: Path, journal: Updates, known: Collection[str]) -> list[UpdateView]:
    """What was refused, the oldest first, without the ids that were accepted or submitted again since."""
    found = []
    reasons = {id_: UpdateRefused(problem) for id_, problem in journal.refused.items()} | inbox.refusals(run)
    for update_id in reasons.keys() - known:
        view = UpdateView(update_id, Stage.REFUSED, refusal=reasons[update_id])
        path = run / "refused" / f"{update_id}.safetensors"
        with contextlib.suppress(OSError):
            view = replace(view, at=(run / "refused" / f"{update_id}.json").stat().st_mtime)
            view = replace(view, nbytes=path.lstat().st_size, path=path)
        found.append(view)
    return sorted(found, key=lambda view: (view.at, view.id))


def noted_view(run: Path, update_id: str) -> UpdateView | None:
    """An update as its note says, which is cheap to read; None without a note.

    The note is all that is left of an update in a job whose journal is in memory.
    """
    note = inbox.stage_of(run, update_id)
    if note is None:
        return None
    receipt, at = _receipt_in(note), note.get("time")
    return UpdateView(
        update_id,
        _stage_in(note),
        float(at) if isinstance(at, int | float) else 0.0,
        _step_in(note, "step") if receipt is None else receipt.step,
        receipts=() if receipt is None else (receipt,),
        outcome=None if receipt is None else receipt.trial,
        reason=str(note.get("reason", "")),
        waits_for=str(note.get("waits_for", "")),
        trial_until=_step_in(note, "trial_until"),
    )


def look(run: Path, update_id: str, *, thoroughly: bool) -> UpdateView:
    """Where one update is: by its note; by the journal when the note may be missing or says too little."""
    noted = noted_view(run, update_id)
    if noted is not None and noted.receipt is not None:
        return noted
    if thoroughly or noted is None or noted.stage.is_final:
        found = _matching(run, Updates(run), lambda id_: id_ == update_id)
        if found:
            return found[0]
    return UpdateView(update_id, Stage.PROPOSED, time.time()) if noted is None else noted


def find(run: Path, given: str, journal: Updates) -> UpdateView:
    """The update that a person means: by its number, by its id, or by the beginning of its id.

    Raises:
        Failed: There is none, or several may be meant.
    """
    if given.isascii() and given.isdigit() and int(given) in journal.committed:
        return committed_views(run, journal, [int(given)])[0]
    noted = noted_view(run, given)
    exact = _matching(run, journal, lambda id_: id_ == given) or ([] if noted is None else [noted])
    found = exact or _matching(run, journal, lambda id_: bool(given) and id_.startswith(given))
    ids = sorted({view.id for view in found})
    if not ids:
        hint = "`replicast status` and `log` list them."
        if journal.damaged:
            hint += f"\n{damage_text(journal)}"
        raise Failed(f"There is no update {texts.printable(given)} in {texts.printable(run)}. {hint}")
    if len(ids) > 1:
        listed = ", ".join(texts.printable(one) for one in ids[:5])
        raise Failed(f"{texts.printable(given)} may be {len(ids)} updates: {listed}. Give more of the id.")
    return found[0]


def _matching(run: Path, journal: Updates, matches: Callable[[str], bool]) -> list[UpdateView]:
    """The updates with such an id; of those with the same one, what counts comes first."""
    numbers = [number for number, (record, _) in journal.committed.items() if matches(record.id)]
    views = [*committed_views(run, journal, numbers), *scheduled_views(journal)]
    known = {view.id for view in views}
    views += waiting_views(run, known)
    views += [UpdateView(update_id, Stage.WITHDRAWN) for update_id in sorted(journal.withdrawn)]
    views += refused_views(run, journal, known)
    return [view for view in views if matches(view.id)]


def damage_text(journal: Updates) -> str:
    """Which entries of the journal are damaged, and what they said; empty if none is."""
    lines = [texts.one_line(one) for one in journal.damaged[:_MOST_DAMAGED]]
    if len(journal.damaged) > _MOST_DAMAGED:
        lines.append(f"{len(journal.damaged) - _MOST_DAMAGED} more entries of the journal are damaged.")
    return "\n".join(lines)


def updates_table(views: Iterable[UpdateView]) -> Table:
    """Committed updates, each with its author and note in a second line."""
    right, whole = ("#", "step", "size", "took"), ("#", "step", "stage", "size", "took", "when")
    table = make_table("#", "step", "stage", "what", "size", "took", "when", right=right, whole=whole)
    for view in views:
        update, receipt = view.committed, view.receipt
        if update is not None:
            table.add_row(
                str(update.sequence),
                str(view.step),
                stage_cell(view.stage),
                what_cell(view),
                texts.size(update.nbytes),
                texts.seconds(receipt.propose_to_applied_secs)
                if receipt and receipt.propose_to_applied_secs
                else "",
                texts.when(update.committed_at),
            )
    return table


def stage_cell(stage: Stage) -> Text:
    """A stage in its colour."""
    return Text(stage, style=_STYLES[stage])


def what_cell(view: UpdateView) -> Text:
    """What an update does in a few words; then its trial, and who proposed it and why."""
    update = view.journaled
    if update is None:
        return Text("")
    cell = Text(texts.one_line(edits_text(update.edits)))
    if not update.nbytes:
        cell = Text("not known: its entry is damaged", style="red")
    if view.outcome is not None:
        style = "green" if view.outcome.outcome == "kept" else "yellow"
        cell.append(f"\ntrial: {texts.outcome(view.outcome)}", style=style)
    elif update.trial is not None:
        cell.append(f"\non trial: {texts.trial(update.trial)}", style="cyan")
    who = ": ".join(texts.one_line(text) for text in (update.author, update.note) if text)
    return cell.append(f"\n{who}", style="dim") if who else cell


def _committed_view(run: Path, update: CommittedUpdate, attempt: int, reached: int) -> UpdateView:
    receipt, stage, reason = update.receipts[-1] if update.receipts else None, update.stage, ""
    if receipt is not None and receipt.attempt < attempt and update.step > reached:
        stage = Stage.COMMITTED  # The job was restarted before its step, and will apply it again there.
    elif receipt is None or stage is Stage.FAILED:
        note = inbox.stage_of(run, update.id) or {}
        reason = str(note.get("reason", ""))
        if receipt is None and _stage_in(note) is Stage.APPLIED:
            stage = Stage.APPLIED
    at = update.committed_at if receipt is None else receipt.verified_at
    until = update.step + update.trial.steps if update.trial is not None and receipt is None else None
    view = UpdateView(update.id, stage, at, update.step, update, update.receipts, nbytes=update.nbytes)
    return replace(view, outcome=_outcome(update), reason=reason, trial_until=until)


def _outcome(update: CommittedUpdate) -> TrialOutcome | None:
    decided, trial = update.decided, update.trial
    if decided is None or trial is None:
        return None
    kept: Any = "kept" if decided.kept else "reverted"
    measured = update.before, decided.during
    return TrialOutcome(update.sequence, kept, decided.step, trial.metric, *measured, decided.reason)


def edits_text(edits: Iterable[Mapping[str, Any]], most: int = 2) -> str:
    """Edits in a few words: "add dense/bias, scale optimizer/learning_rate (+3)"."""
    listed = list(edits)
    asked = [edit for edit in listed if edit.get("operation") not in RESETS]
    shown = [
        f"{str(edit.get('operation')).replace('_', ' ')} {edit.get('variable')}" for edit in asked[:most]
    ]
    more = f" (+{len(asked) - most})" if len(asked) > most else ""
    resets = len(listed) - len(asked)
    return ", ".join(shown) + more + (f", reset {resets} slots" if resets else "")


def _stage_in(note: Mapping[str, Any]) -> Stage:
    try:
        return Stage(note["stage"])
    except (KeyError, ValueError):
        return Stage.PROPOSED


def _step_in(note: Mapping[str, Any], name: str) -> int | None:
    step = note.get(name)
    return step if type(step) is int else None


def _receipt_in(note: Mapping[str, Any]) -> Receipt | None:
    with contextlib.suppress(ValueError):
        if isinstance(note.get("receipt"), dict):
            return described(Receipt, "receipt", note["receipt"])
    return None
