"""`replicast withdraw`: takes back an update that is not applied yet."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING

import click

from replicast.cli.rundirs import run_argument

if TYPE_CHECKING:
    from replicast.cli.standings import Standing

_LISTEN_SECS = 5.0
_ANSWER_SECS = 30.0
_LOOK_SECS = 0.1


@click.command()
@run_argument
@click.argument("update_id", metavar="ID")
def withdraw(run: Path, update_id: str) -> None:
    """Take back an update that no replica of RUN has applied yet.

    It may wait in the inbox, behind a trial, or for the step that it is scheduled for. A running job is
    asked, and answers within a few steps of its training. ID may be the beginning of one.

    \b
    Examples:
      replicast withdraw runs/first 3f2a91c4

    Exit code: 0 when it is gone and will not be applied; 1 when it is too late, or there is no such update.
    """  # noqa: D301 - click wants a real backspace
    from replicast import inbox
    from replicast.cli import Refused
    from replicast.cli.show import the_one
    from replicast.cli.texts import printable
    from replicast.update import Stage

    full_id = the_one(run, update_id).id
    try:
        withdrawn = inbox.withdraw(run, full_id, job_is_running=partial(_is_heard_of, run))
    except OSError as error:
        raise Refused(f"It cannot be removed from {run / 'inbox'} ({error.strerror}).") from error
    if withdrawn:
        click.echo(f"withdrawn {printable(full_id)}: it will not be applied.")
        return
    standing = the_one(run, full_id)
    if standing.stage in (Stage.PROPOSED, Stage.STAGED, Stage.COMMITTED) and _is_running(run):
        standing = _asked(run, full_id)
        if standing.stage is Stage.WITHDRAWN:
            click.echo(f"withdrawn {printable(full_id)}: it will not be applied.")
            return
    if standing.stage in (Stage.REFUSED, Stage.WITHDRAWN):
        raise Refused(f"Update {printable(full_id)} was {standing.stage}: there is nothing to withdraw.")
    step = "" if standing.step is None else f", step {standing.step}"
    raise Refused(f"Too late: update {printable(full_id)} is {standing.stage}{step}. The job has taken it.")


def _is_running(run: Path) -> bool:
    from replicast.cli.rundirs import is_running
    from replicast.runfiles import read_worker_notes

    return is_running(read_worker_notes(run), time.time())


def _asked(run: Path, update_id: str) -> Standing:
    """Asks the job to take an update back, and waits for what becomes of it.

    Blocks until the job has taken it back or applied it, at most `_ANSWER_SECS`: it may be far from its next
    boundary, in an evaluation for example.
    """
    from replicast import inbox
    from replicast.cli.show import the_one
    from replicast.update import Stage

    request = inbox.request_withdrawal(run, update_id)
    try:
        for _ in range(round(_ANSWER_SECS / _LOOK_SECS)):
            sleep(_LOOK_SECS)
            standing = the_one(run, update_id)
            if standing.stage not in (Stage.PROPOSED, Stage.STAGED, Stage.COMMITTED) or not _is_running(run):
                return standing
    finally:
        request.unlink(missing_ok=True)
    return the_one(run, update_id)


def _is_heard_of(run: Path) -> bool:
    """Whether the job runs. Who has said something lately does, by this host's clock or by any other.

    Blocks for a few seconds when the workers' last words seem old: their clock may be another, and whoever
    runs says something every second.
    """
    from replicast.cli.rundirs import is_running
    from replicast.runfiles import ENDED, read_worker_notes

    before = [note for note in read_worker_notes(run) if note.waiting_for != ENDED]
    if not before or is_running(before, time.time()):
        return bool(before)
    click.echo("A job has taken it. Listening whether that one still runs ...", err=True)
    for _ in range(round(_LISTEN_SECS / _LOOK_SECS)):
        sleep(_LOOK_SECS)
        if any(note not in before for note in read_worker_notes(run) if note.waiting_for != ENDED):
            return True
    return False
