"""`replicast audit`: what the audits of a run have found, and a request for one now."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import click

from replicast.audits.report import AuditReport, workers_text
from replicast.cli import Failed, texts
from replicast.cli.rundirs import (
    ABSENT_SECS,
    is_running,
    not_running_text,
    polls,
    run_argument,
    timeout_option,
)
from replicast.storage.auditfiles import answer_to, last_audits, request_audit, withdraw_request
from replicast.storage.runfiles import WorkerNote, read_run_info, read_worker_notes

NO_ANSWER = 3
_MOST_LINES = 10  # Of each audit in the list: two for a variable that differs on one worker.
_LATE_SECS = 3.0  # A worker writes a note every second: below this, which note is the oldest is chance.


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
def audit(run: Path, last: int, as_json: bool, now: bool, timeout: float) -> None:
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
    """  # noqa: D301 - click wants a real backspace
    try:
        reports = [_requested(run, timeout)] if now else last_audits(run, last)
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


def _none_yet(run: Path) -> str:
    notes = read_worker_notes(run)
    if is_running(notes):
        return "No audit has been made yet. To ask the running job for one, give --now."
    return f"No audit was made. {not_running_text(notes)}."


def _requested(run: Path, timeout_secs: float) -> AuditReport:
    """Asks the job for an audit and waits for the report, at most `timeout_secs`.

    Raises:
        Failed: The job is not running or has ended, the time has passed, or the request cannot be written.
    """
    notes = read_worker_notes(run)
    if not is_running(notes):
        raise Failed(f"{not_running_text(notes)}: only a running job can make an audit.", NO_ANSWER)
    try:
        request = request_audit(run)
    except OSError as error:
        raise Failed(f"The request cannot be written to {run / 'inbox'} ({error.strerror}).") from error
    try:
        for notes, _, _ in polls(run, timeout_secs):
            report = answer_to(run, request)  # After the notes: a job may write it just before it ends.
            if report is not None:
                return report
            if not is_running(notes):
                raise Failed(f"{not_running_text(notes)}: it ended without an audit.", NO_ANSWER)
        waited_for = _waited_for(read_worker_notes(run), read_run_info(run).workers)
        raise Failed(f"{timeout_secs:g} s have passed without an audit. {waited_for}", NO_ANSWER)
    finally:
        withdraw_request(run, request)


def _waited_for(notes: list[WorkerNote], workers: int) -> str:
    """What keeps an audit from being made, as far as the workers' notes tell."""
    now = time.time()
    heard = {note.rank: note for note in notes if now - note.time <= ABSENT_SECS}
    silent = [rank for rank in range(workers) if rank not in heard]
    if silent:
        return f"Waited for {workers_text(silent)}, not heard of for {texts.age(ABSENT_SECS)} or more."
    if not any(note.training for note in heard.values()):
        return "Waited for the training to begin: no worker is inside a training loop."
    steps = sorted({note.step for note in heard.values()})
    if len(steps) > 1:
        behind = workers_text(sorted(note.rank for note in heard.values() if note.step == steps[0]))
        verb = "are" if " and " in behind else "is"
        return f"Waited for the next step: {behind} {verb} behind, at step {steps[0]}, others at {steps[-1]}."
    oldest = min(heard.values(), key=lambda note: note.time)
    told = f"; worker {oldest.rank} was not heard of for the longest, {texts.age(now - oldest.time)}"
    return (
        f"Waited for the next step: every worker is at step {steps[0]}, and one that hangs keeps the "
        f"others there{told if now - oldest.time > _LATE_SECS else ''}. Look into the logs of all."
    )
