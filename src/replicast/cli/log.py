"""`replicast log`: the committed updates of a run, as a table or as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import click

from replicast.cli import Failed
from replicast.cli.rundirs import run_argument
from replicast.cli.tables import make_console
from replicast.cli.update_views import committed_views, damage_text, updates_table
from replicast.storage.runfiles import read_run_info
from replicast.storage.updates import Updates


@click.command()
@run_argument
@click.option(
    "--json", "as_json", is_flag=True, help="One object per line: record and receipts of an update."
)
@click.option("-n", "--last", type=click.IntRange(min=1), metavar="N", help="Only the last N.")
def log(run: Path, as_json: bool, last: int | None) -> None:
    """List the updates that a run has committed, in their order.

    \b
    Examples:
      replicast log runs/first
      replicast log runs/first -n 5
      replicast log runs/first --json | jq .step

    Exit code: 0; 1 when a file of the journal is damaged, which is named after all others are listed; 2 when
    RUN is not a run directory.
    """  # noqa: D301 - click wants a real backspace
    journal = Updates(run)
    sequences = sorted(journal.committed)
    views = committed_views(run, journal, sequences if last is None else sequences[-last:])
    if as_json:
        for view in views:
            click.echo(json.dumps(view.to_json()))
    elif views:
        make_console().print(updates_table(views))
    else:
        click.echo(f"The journal is empty: {no_updates_text(run)}.")
    if journal.damaged:
        raise Failed(damage_text(journal))


def no_updates_text(run: Path) -> str:
    """Why a journal is empty."""
    if read_run_info(run).journaled:
        return "no update has been committed yet"
    return 'the job keeps no journal (durability="memory")'
