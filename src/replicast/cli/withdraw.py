"""`replicast withdraw`: takes back an update that is not committed yet."""

from __future__ import annotations

import click

from replicast.cli import texts
from replicast.cli.arguments import run_argument
from replicast.client import Run


@click.command()
@run_argument
@click.argument("update_id", metavar="ID")
def withdraw(run: Run, update_id: str) -> None:
    """Take back an update of RUN that is not committed yet.

    It may wait in the inbox, behind a trial, or for the step that it is scheduled for. A running job is
    asked, and answers within a few steps of its training. ID may be the beginning of one.

    \b
    Examples:
      replicast withdraw runs/first 3f2a91c4
      replicast withdraw https://host:8080/first 3f2a91c4

    Exit code: 0 when it is gone and will not be applied; 1 when it is too late, there is no such update, or
    the job does not answer.
    """
    click.echo(f"withdrawn {texts.printable(run.withdraw(update_id).id)}: it will not be applied.")
