"""How an update is taken back: out of the inbox, or by asking the job that has taken it."""

from __future__ import annotations

import contextlib

from replicast.client.notes import not_running_text, polls, see
from replicast.client.updates import UpdateView, find, look
from replicast.core.records import Stage
from replicast.errors import NoAnswer, UpdateRefused
from replicast.files import RunDir, below
from replicast.storage import inbox
from replicast.storage.updates import Updates

_ANSWER_SECS = 30.0
_WITHDRAWABLE = (Stage.PROPOSED, Stage.PREPARED, Stage.SCHEDULED)


def withdraw(run: RunDir, update_id: str) -> UpdateView:
    """Takes back an update, as `Run.withdraw` says."""
    with contextlib.suppress(OSError):  # Then the update is not found, or cannot be removed: that is told.
        inbox.put_back(run)  # Of a withdrawal that was killed.
    view = find(run, update_id, Updates(run))
    if view.stage in (Stage.REFUSED, Stage.WITHDRAWN):
        raise UpdateRefused(f"Update {view.id} was {view.stage}: there is nothing to withdraw")
    try:
        withdrawn = inbox.withdraw(run, view.id, job_is_running=lambda: see(run).running)
    except OSError as error:
        raise UpdateRefused(f"It cannot be removed from {below(run) / 'inbox'} ({error.strerror})") from error
    if withdrawn:
        return UpdateView(id=view.id, stage=Stage.WITHDRAWN)
    view = _requested(run, find(run, view.id, Updates(run)))
    if view.stage is Stage.WITHDRAWN:
        return view
    if view.stage is Stage.REFUSED:
        raise UpdateRefused(f"Update {view.id} was refused: there is nothing to withdraw")
    if view.stage not in _WITHDRAWABLE:
        step = "" if view.step is None else f", step {view.step}"
        raise UpdateRefused(f"Too late: update {view.id} is {view.stage}{step}")
    seen = see(run)
    why = "The job has not answered in time" if seen.running else not_running_text(seen)
    raise NoAnswer(
        f"{why}: update {view.id} is still {view.stage}. Withdraw it again when the job is training."
    )


def _requested(run: RunDir, view: UpdateView) -> UpdateView:
    """Asks a running job to withdraw an update, and waits for what becomes of it.

    Blocks until the job has answered or ended, at most `_ANSWER_SECS`: it may be far from its next boundary,
    for example in an evaluation.
    """
    if view.stage not in _WITHDRAWABLE or not see(run).running:
        return view
    request = inbox.request_withdrawal(run, view.id)
    try:
        for seen, is_fresh, is_last in polls(run, _ANSWER_SECS):
            view = look(run, view.id, thoroughly=is_fresh or is_last)
            if view.stage not in _WITHDRAWABLE or not seen.running:
                break
        return view
    finally:
        request.unlink(missing_ok=True)
