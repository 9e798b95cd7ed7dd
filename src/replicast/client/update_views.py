"""Where each update of a run is: the journal, the inbox and the refusals seen as one list.

A damaged entry of the journal hides no other: what it said is missing, and `damage_text` names its file.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable

from msgspec.structs import replace

from replicast.client.notes import see
from replicast.core.records import Stage
from replicast.errors import NotFound, UpdateRefused
from replicast.files import RunDir, below
from replicast.storage import inbox
from replicast.storage.inbox import describe
from replicast.storage.updates import Updates, UpdateView
from replicast.strictjson import parse_integer

_MOST_DAMAGED = 5
_MOST_DESCRIBED = 50  # So many waiting updates are described: a status reads their files each time.


def committed_views(run: RunDir, journal: Updates, sequences: Iterable[int]) -> list[UpdateView]:
    """Some of the committed updates, with what the job that runs now has to do about them."""
    seen = see(run)
    attempt = max((note.attempt for note in seen.notes), default=0) if seen.running else 0
    reached = max((note.step for note in seen.notes if note.attempt == attempt), default=0)
    views = []
    for view in map(journal.committed, sequences):
        receipt, step = view.receipt, view.step or 0
        if receipt is not None and receipt.attempt < attempt and step > reached:
            # The job was restarted before its step, and will apply it again there.
            view = replace(view, stage=Stage.COMMITTED)
        elif receipt is None or view.stage is Stage.FAILED:
            note = inbox.answer_of(run, view.id)
            if note is not None:
                applied = receipt is None and note.stage is Stage.APPLIED
                view = replace(view, stage=Stage.APPLIED if applied else view.stage, reason=note.problem)
        views.append(view)
    return views


def waiting_views(run: RunDir, known: Collection[str]) -> list[UpdateView]:
    """What waits in the inbox, the oldest first, without the ids that are known from elsewhere."""
    found = list[UpdateView]()
    for entry in inbox.waiting(run):
        if entry.id not in known:
            view = noted_view(run, entry.id) or UpdateView(id=entry.id, stage=Stage.PROPOSED)
            told = describe(entry.path) if len(found) < _MOST_DESCRIBED else None
            if told is not None:
                given = {name: getattr(told, name) for name in _DESCRIBED}
                view = replace(view, step=told.step if view.step is None else view.step, **given)
            found.append(replace(view, at=entry.submitted_at, path=entry.path, nbytes=entry.nbytes))
    return found


_DESCRIBED = ("author", "note", "edits", "scheduled", "trial", "reverts")


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
    """The update that a person means: by its number, by its id, or by the beginning of its id.

    Digits alone are never the beginning of an id: `revert RUN 7`, where there is no update 7, must not revert
    the one whose random id begins with 7.
    """
    number = None
    with contextlib.suppress(ValueError):
        if (number := parse_integer(given)) in journal.history.committed:
            return committed_views(run, journal, [number])[0]
    noted = noted_view(run, given)
    found = _matching(run, journal, lambda id_: id_ == given) or ([] if noted is None else [noted])
    if not found and given and number is None:
        found = _matching(run, journal, lambda id_: id_.startswith(given))
    ids = sorted({view.id for view in found})
    if not ids:
        hint = "`replicast status` and `log` list them."
        raise NotFound(f"There is no update {given[:200]} in {run}. {hint}\n{damage_text(journal)}".rstrip())
    if len(ids) > 1:
        raise NotFound(f"{given} may be {len(ids)} updates: {', '.join(ids[:5])}. Give more of the id.")
    return found[0]


def _matching(run: RunDir, journal: Updates, matches: Callable[[str], bool]) -> list[UpdateView]:
    """The updates with such an id; of those with the same one, what counts comes first."""
    numbers = [record.sequence for record in journal.history.committed.values() if matches(record.id)]
    views = [*committed_views(run, journal, numbers), *journal.scheduled()]
    known = {view.id for view in views}
    views += waiting_views(run, known)
    views += [
        UpdateView(id=update_id, stage=Stage.WITHDRAWN) for update_id in sorted(journal.history.withdrawn)
    ]
    views += refused_views(run, journal, known)
    return [view for view in views if matches(view.id)]


def damage_text(journal: Updates) -> str:
    """Which entries of the journal are damaged, and what they said; empty if none is."""
    lines = [" ".join(str(one.error).split()) for one in journal.damaged[:_MOST_DAMAGED]]
    if len(journal.damaged) > _MOST_DAMAGED:
        lines.append(f"{len(journal.damaged) - _MOST_DAMAGED} more entries of the journal are damaged.")
    return "\n".join(lines)
