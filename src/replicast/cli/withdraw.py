"""`replicast withdraw`: takes an update out of the inbox, if the job has not taken it yet."""

from __future__ import annotations

import time
from pathlib import Path

import click

from replicast.cli.rundirs import run_argument


@click.command()
@run_argument
@click.argument("update_id", metavar="ID")
def withdraw(run: Path, update_id: str) -> None:
    """Take back an update that still waits in the inbox of RUN.

    A job that runs takes an update within a fraction of a second; from then on it is too late. ID may be the
    beginning of one.

    \b
    Examples:
      replicast withdraw runs/first 3f2a91c4

    Exit code: 0 when it is gone and will not be applied; 1 when it is too late, or there is no such update.
    """  # noqa: D301 - click wants a real backspace
    from replicast import inbox
    from replicast.cli import Refused
    from replicast.cli.rundirs import is_running
    from replicast.cli.show import the_one
    from replicast.cli.texts import printable
    from replicast.runfiles import read_worker_notes
    from replicast.update import Stage

    full_id = the_one(run, update_id).id
    running = is_running(read_worker_notes(run), time.time())
    try:
        withdrawn = inbox.withdraw(run, full_id, job_is_running=running)
    except OSError as error:
        raise Refused(f"It cannot be removed from {run / 'inbox'} ({error.strerror}).") from error
    if withdrawn:
        click.echo(f"withdrawn {printable(full_id)}: it will not be applied.")
        return
    standing = the_one(run, full_id)
    if standing.stage is Stage.REFUSED:
        raise Refused(f"Update {printable(full_id)} was refused: there is nothing to withdraw.")
    step = "" if standing.step is None else f", step {standing.step}"
    raise Refused(f"Too late: update {printable(full_id)} is {standing.stage}{step}. The job has taken it.")
