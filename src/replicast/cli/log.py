"""`replicast log`: the journal of a run, as a table or as JSON."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from replicast.cli.rundirs import run_argument


@click.command()
@run_argument
@click.option("--json", "as_json", is_flag=True, help="One object a line: record and receipt of an update.")
@click.option("-n", "--last", type=click.IntRange(min=1), metavar="N", help="Only the last N.")
def log(run: Path, as_json: bool, last: int | None) -> None:
    """List the updates that a run has committed, in their order.

    \b
    Examples:
      replicast log runs/first
      replicast log runs/first -n 5
      replicast log runs/first --json | jq .step

    Exit code: 0; 1 when a file of the journal is damaged; 2 when RUN is not a run directory.
    """  # noqa: D301 - click wants a real backspace
    from replicast.cli.standings import committed

    standings = committed(run)
    standings = standings if last is None else standings[-last:]
    if as_json:
        for standing in standings:
            click.echo(json.dumps(standing.to_json()))
    elif not standings:
        from replicast.cli.texts import no_updates_text
        from replicast.runfiles import read_run_info

        click.echo(f"The journal is empty: {no_updates_text(journaled=read_run_info(run).journaled)}.")
    else:
        from replicast.cli.tables import make_console, updates_table

        make_console().print(updates_table(standings, time.time()))
