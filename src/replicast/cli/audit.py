"""`replicast audit`: what the audits of a run have found, and how to ask for one now."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import click

from replicast.cli.rundirs import run_argument, timeout_option


@click.command()
@run_argument
@click.option(
    "-n",
    "--last",
    type=click.IntRange(min=1),
    default=10,
    metavar="N",
    show_default=True,
    help="So many of the last ones.",
)
@click.option("--json", "as_json", is_flag=True, help="One object a line: everything about an audit.")
@click.option("--now", is_flag=True, help="Ask the running job for an audit, and show what it finds.")
@timeout_option("--now")
def audit(run: Path, last: int, as_json: bool, now: bool, timeout: float) -> None:
    """Show whether the replicas of a run were equal, and which were not, where and since when.

    An audit compares every bit of the state between all workers, at one step. A job makes one every so many
    steps, and with --now at its next step: what becomes of a difference is what the job asks for, as with
    every audit; with on_divergence="raise" its workers raise. TensorFlow is not needed here.

    \b
    Examples:
      replicast audit runs/first
      replicast audit runs/first --now
      replicast audit runs/first --last 1 --json | jq .differences[].variable

    Exit code: 0 when the last audit found all replicas equal, or has made them so, or there is none yet; 1
    when they differ; 2 when the command is wrong; 3 when --now finds no running job, or --timeout has passed;
    130 after Ctrl-C.
    """  # noqa: D301 - click wants a real backspace
    from replicast.auditfiles import last_audits

    if now:
        sys.exit(_ask(run, timeout, as_json=as_json))
    reports = last_audits(run, last)
    if as_json:
        for report in reports:
            click.echo(json.dumps(report.to_json()))
    elif not reports:
        click.echo(_none_yet(run))
    else:
        from replicast.cli.auditing import audits_table
        from replicast.cli.tables import make_console

        make_console().print(audits_table(reports, time.time()))
    sys.exit(reports[-1].diverged if reports else 0)


def _none_yet(run: Path) -> str:
    from replicast.cli.rundirs import is_running, not_running_text
    from replicast.runfiles import read_worker_notes

    notes = read_worker_notes(run)
    if is_running(notes, time.time()):
        return "No audit has been made yet. To ask the running job for one, give --now."
    return f"No audit was made. {not_running_text(notes, time.time())}: nobody can make one now."


def _ask(run: Path, timeout_secs: float, *, as_json: bool) -> int:
    from replicast.cli.auditing import NO_ANSWER, NoAnswer, ask
    from replicast.cli.texts import printable

    try:
        report = ask(run, timeout_secs)
    except NoAnswer as reason:
        click.echo(str(reason), err=True)
        return NO_ANSWER
    except KeyboardInterrupt:
        click.echo("Stopped waiting. The request is taken back.", err=True)
        return 128 + signal.SIGINT
    if as_json:
        click.echo(json.dumps(report.to_json()))
    else:
        for line in report.lines():
            click.echo(printable(line))
    return int(report.diverged)
