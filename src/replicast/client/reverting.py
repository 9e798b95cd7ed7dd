"""How an update is undone from outside the job: what that would do, and how the job is asked for it."""

from __future__ import annotations

from msgspec.structs import replace

from replicast.client.author import this_user
from replicast.client.examination import Examination, examine
from replicast.client.notes import schema_of, see
from replicast.client.submission import check_running
from replicast.client.updates import find
from replicast.errors import UpdateRefused
from replicast.files import RunDir, below
from replicast.storage import inbox
from replicast.storage.updates import Undo, Updates, undo
from replicast.update.inverse import meaning
from replicast.update.update import Update


def examine_revert(run: RunDir, which: str | int, *, force: bool) -> Examination:
    """What undoing an update would do, as `Run.revert` says. Nothing is sent to the job."""
    plan = _undo(run, which, force=force)
    found = examine(plan.update, schema_of(run))
    meanings = dict.fromkeys(f"{edit.variable}: {meaning(edit)}" for edit in plan.update.edits)
    unless = "" if force else ": it is refused unless it is forced (--force, force=True)"
    return replace(found, notes=(*meanings, *(f"{one}{unless}" for one in plan.since)))


def submit_revert(
    run: RunDir, which: str | int, note: str, author: str, *, force: bool, next_start: bool
) -> tuple[str, str]:
    """Asks the job to undo an update, as `Run.revert` says."""
    plan = _undo(run, which, force=force)
    if not force:
        plan.check()
    sequence = plan.record.sequence
    revert = Update(note=note or plan.update.note, author=author or this_user())
    warning = check_running(run, revert, see(run), next_start=next_start)
    try:
        inbox.submit(run, revert, reverts=sequence, forced=force)
    except OSError as error:
        raise UpdateRefused(
            f"The request cannot be written to {below(run) / 'inbox'} ({error.strerror})",
            remedy="Free some space there, or let this user write there, and revert it again",
        ) from error
    return revert.id, warning


def _undo(run: RunDir, which: str | int, *, force: bool) -> Undo:
    view = find(run, str(which), Updates(run))
    if view.sequence is None:
        raise UpdateRefused(
            f"Update {view.id} is {view.stage}: it was not applied, so there is nothing to revert",
            remedy="replicast withdraw takes back what is not committed",
        )
    return undo(run, view.sequence, forced=force)
