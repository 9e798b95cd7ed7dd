"""`replicast log`: the committed updates of a run, as a table or as JSON."""

from __future__ import annotations

import json

import click

from replicast.cli import Failed, texts
from replicast.cli.arguments import run_argument
from replicast.cli.tables import make_console
from replicast.cli.update_tables import updates_table
from replicast.client import Run


@click.command()
@run_argument
@click.option(
    "--json", "as_json", is_flag=True, help="One object per line: record and receipts of an update."
)
@click.option("-n", "--last", type=click.IntRange(min=1), metavar="N", help="Only the last N.")
def log(run: Run, as_json: bool, last: int | None) -> None:
    """List the updates that a run has committed, in the order in which they are applied.

    \b
    Examples:
      replicast log runs/first
      replicast log runs/first -n 5
      replicast log runs/first --json | jq .step

    Exit code: 0; 1 when a file of the journal is damaged, which is named after all others are listed; 2 when
    RUN is not a run directory.
    """
    views, seen = run.log(last), run.status()
    if as_json:
        for view in views:
            click.echo(json.dumps(view.to_json()))
    elif views:
        make_console().print(updates_table(views))
    else:
        click.echo(f"The journal is empty: {texts.no_updates(journaled=seen.journaled)}.")
    if seen.problem:
        raise Failed(texts.printable_lines(seen.problem))
