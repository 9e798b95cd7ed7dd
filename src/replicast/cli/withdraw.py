"""`replicast withdraw`: takes back an update that is not committed yet."""

from __future__ import annotations

from pathlib import Path

import click

from replicast.cli import Failed, texts
from replicast.cli.rundirs import is_running, not_running_text, polls, run_argument
from replicast.cli.update_views import UpdateView, find, look
from replicast.core.stage import Stage
from replicast.storage import inbox
from replicast.storage.runfiles import ENDED, read_worker_notes
from replicast.storage.updates import Updates

_LISTEN_SECS = 5.0
_ANSWER_SECS = 30.0
_WITHDRAWABLE = (Stage.PROPOSED, Stage.PREPARED, Stage.SCHEDULED)


@click.command()
@run_argument
@click.argument("update_id", metavar="ID")
def withdraw(run: Path, update_id: str) -> None:
    """Take back an update of RUN that is not committed yet.

    It may wait in the inbox, behind a trial, or for the step that it is scheduled for. A running job is
    asked, and answers within a few steps of its training. ID may be the beginning of one.

    \b
    Examples:
      replicast withdraw runs/first 3f2a91c4

    Exit code: 0 when it is gone and will not be applied; 1 when it is too late, there is no such update, or
    the job does not answer.
    """  # noqa: D301 - click wants a real backspace
    view = find(run, update_id, Updates(run))
    name = texts.printable(view.id)
    if view.stage in (Stage.REFUSED, Stage.WITHDRAWN):
        raise Failed(f"Update {name} was {view.stage}: there is nothing to withdraw.")
    try:
        withdrawn = inbox.withdraw(run, view.id, job_is_running=lambda: _is_heard_of(run))
    except OSError as error:
        raise Failed(f"It cannot be removed from {run / 'inbox'} ({error.strerror}).") from error
    if not withdrawn:
        view = _requested(run, find(run, view.id, Updates(run)))
    if withdrawn or view.stage is Stage.WITHDRAWN:
        click.echo(f"withdrawn {name}: it will not be applied.")
        return
    if view.stage is Stage.REFUSED:
        raise Failed(f"Update {name} was refused: there is nothing to withdraw.")
    if view.stage not in _WITHDRAWABLE:
        step = "" if view.step is None else f", step {view.step}"
        raise Failed(f"Too late: update {name} is {view.stage}{step}.")
    notes = read_worker_notes(run)
    why = "The job has not answered in time" if is_running(notes) else not_running_text(notes)
    raise Failed(f"{why}: update {name} is still {view.stage}. Withdraw it again when the job is training.")


def _requested(run: Path, view: UpdateView) -> UpdateView:
    """Asks a running job to withdraw an update, and waits for what becomes of it.

    Blocks until the job has answered or ended, at most `_ANSWER_SECS`: it may be far from its next boundary,
    for example in an evaluation.
    """
    if view.stage not in _WITHDRAWABLE or not is_running(read_worker_notes(run)):
        return view
    request = inbox.request_withdrawal(run, view.id)
    try:
        for notes, is_fresh, is_last in polls(run, _ANSWER_SECS):
            view = look(run, view.id, thoroughly=is_fresh or is_last)
            if view.stage not in _WITHDRAWABLE or not is_running(notes):
                break
        return view
    finally:
        request.unlink(missing_ok=True)


def _is_heard_of(run: Path) -> bool:
    """Whether the job runs: a worker has written a note lately, by this host's clock or by any other.

    Blocks for a few seconds when the notes seem old: the workers' clock may be another one, and a running
    worker writes a note every second.
    """
    before = [note for note in read_worker_notes(run) if note.waiting_for != ENDED]
    if not before or is_running(before):
        return bool(before)
    click.echo("A job has taken it. Waiting for a sign that it still runs ...", err=True)
    return any(
        note not in before
        for notes, _, _ in polls(run, _LISTEN_SECS)
        for note in notes
        if note.waiting_for != ENDED
    )
