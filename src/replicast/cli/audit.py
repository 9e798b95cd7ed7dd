"""`replicast audit`: what the audits of a run have found, and a request for one now."""

from __future__ import annotations

import json
import signal
import sys

import click

from replicast.cli import Failed, texts
from replicast.cli.arguments import run_argument, timeout_option
from replicast.client import Run
from replicast.errors import NoAnswer
from replicast.update.audit_report import AuditReport

NO_ANSWER = 3
_MOST_LINES = 10  # Of each audit in the list: two for a variable that differs on one worker.


@click.command()
@run_argument
@click.option(
    "-n",
    "--last",
    type=click.IntRange(min=1),
    default=10,
    metavar="N",
    help="Number of reports to show. [default: 10]",
)
@click.option("--json", "as_json", is_flag=True, help="One object per line: everything about an audit.")
@click.option("--now", is_flag=True, help="Ask the running job for an audit, and show what it finds.")
@timeout_option
def audit(run: Run, last: int, as_json: bool, now: bool, timeout: float) -> None:
    """Show whether the replicas of a run were equal, and which were not, where and since when.

    An audit compares every bit of the state between all workers, at one step. A job makes one at regular
    intervals, and with --now at its next step. What follows from a difference is up to the job's
    on_divergence: with "raise", its workers raise. TensorFlow is not needed here.

    \b
    Examples:
      replicast audit runs/first
      replicast audit runs/first --now
      replicast audit runs/first --last 1 --json | jq .differences[].variable

    Exit code: 0 when the last audit found all replicas equal, or has made them so, or there is none yet; 1
    when they differ; 2 when the command is wrong; 3 when --now finds no running job, or --timeout has passed;
    130 after Ctrl-C.
    """
    try:
        reports = [run.audit(timeout)] if now else run.audits(last)
    except NoAnswer as error:
        raise Failed(texts.printable(error), NO_ANSWER) from error
    except KeyboardInterrupt:
        click.echo("Stopped waiting. The request is withdrawn.", err=True)
        sys.exit(128 + signal.SIGINT)
    for report in reports:
        if as_json:
            click.echo(json.dumps(report.to_json()))
        else:
            _print(report, most=None if now else _MOST_LINES)
    if not reports and not as_json:
        click.echo(_none_yet(run))
    sys.exit(reports[-1].diverged if reports else 0)


def _print(report: AuditReport, most: int | None) -> None:
    head, *details = report.lines()
    click.echo(texts.printable(f"{texts.when(report.time)}  {head}"))
    for line in details[:most]:
        click.echo(texts.printable(f"  {line}"))
    if most is not None and len(details) > most:
        click.echo(f"    and {texts.counted(len(details) - most, 'more line')}: --json has them")


def _none_yet(run: Run) -> str:
    brief = run.brief()
    if brief.running:
        return "No audit has been made yet. To ask the running job for one, give --now."
    return f"No audit was made. {texts.printable(brief.sentence)}."
