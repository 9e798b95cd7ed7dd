"""`replicast status`: the workers of a run, its metrics, its last updates and what waits."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from replicast.cli.rundirs import run_argument

WATCH_SECS = 1.0


@click.command()
@run_argument
@click.option("--json", "as_json", is_flag=True, help="As one JSON object; with --watch one a line.")
@click.option("--watch", is_flag=True, help="Look again every second, until Ctrl-C.")
def status(run: Path, as_json: bool, watch: bool) -> None:
    """Show the workers, the metrics and the updates of a run.

    \b
    Examples:
      replicast status runs/first
      replicast status runs/first --watch
      replicast status runs/first --json | jq .workers[].step

    Exit code: 0, also when the job is not running; 1 when a file of the run is damaged; 2 when RUN is no run
    directory.
    """  # noqa: D301 - click wants a real backspace
    if not watch:
        _show(run, as_json=as_json)
        return
    try:
        _watch(run, as_json=as_json)
    except KeyboardInterrupt:  # The way to end it.
        return


def _show(run: Path, *, as_json: bool) -> None:
    from replicast.cli.overview import look, rendered
    from replicast.cli.tables import make_console

    seen = look(run, time.time())
    if as_json:
        click.echo(json.dumps(seen.to_json()))
    else:
        make_console().print(rendered(seen))


def _watch(run: Path, *, as_json: bool) -> None:
    from replicast.cli.tables import make_console

    console = make_console()
    if as_json or not console.is_terminal or console.is_dumb_terminal:
        while True:
            _show(run, as_json=as_json)
            time.sleep(WATCH_SECS)
    from rich.live import Live

    from replicast.cli.overview import look, rendered

    # Drawn by this thread alone: nothing is left behind when Ctrl-C comes.
    with Live(console=console, auto_refresh=False) as live:
        while True:
            live.update(rendered(look(run, time.time())), refresh=True)
            time.sleep(WATCH_SECS)
