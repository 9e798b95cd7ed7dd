"""What `replicast audit` does: asks a running job for an audit, and shows what audits have found."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from rich.table import Table
from rich.text import Text

from replicast.audit import AuditReport, Difference, workers_text
from replicast.auditfiles import answer_to, request_audit, withdraw_request
from replicast.cli import Refused
from replicast.cli.rundirs import ABSENT_SECS, is_running, not_running_text
from replicast.cli.tables import make_table
from replicast.cli.texts import age_text, counted, one_line, when_text
from replicast.runfiles import WorkerNote, read_run_info, read_worker_notes

NO_ANSWER = 3
LOOK_SECS = 0.1
_LOOK_AT_WORKERS_SECS = 1.0
_MOST_VARIABLES = 5
_LATE_SECS = 3.0  # A worker says something every second: sooner, the oldest note is a matter of chance.
_STYLES = {"equal": "green", "healed": "yellow", "warned": "red", "raised": "red"}


class NoAnswer(Exception):  # noqa: N818 - reads as a sentence: raise NoAnswer
    """The job has not made the audit that was asked for; the message says why, or who is waited for."""


def ask(run: Path, timeout_secs: float, pause: Callable[[float], None] = time.sleep) -> AuditReport:
    """Asks the job for an audit and waits for the report, at most `timeout_secs`.

    Args:
        run: The run directory.
        timeout_secs: How long to wait.
        pause: Waits for so many seconds.

    Raises:
        NoAnswer: The job is not running or has ended, or the time has passed. The request is taken back.
        Refused: The request cannot be written.
    """
    notes = read_worker_notes(run)
    if not is_running(notes, time.time()):
        raise NoAnswer(f"{not_running_text(notes, time.time())}: there is nobody to make an audit.")
    try:
        request = request_audit(run)
    except OSError as error:
        raise Refused(f"The request cannot be written to {run / 'inbox'} ({error.strerror}).") from error
    try:
        return _wait(run, request, timeout_secs, pause)
    finally:
        withdraw_request(run, request)


def _wait(run: Path, request: str, timeout_secs: float, pause: Callable[[float], None]) -> AuditReport:
    ends = time.monotonic() + timeout_secs
    looked = time.monotonic()
    while True:
        # Before the report is looked for: a job may write it as its last word.
        ended, left = None, ends - time.monotonic()
        if time.monotonic() - looked >= _LOOK_AT_WORKERS_SECS or left <= 0:
            notes, looked = read_worker_notes(run), time.monotonic()
            if not is_running(notes, time.time()):
                ended = f"{not_running_text(notes, time.time())}, and has left without an audit."
            elif left <= 0:
                workers = read_run_info(run).workers
                ended = f"{timeout_secs:g} s have passed without an audit. {waited_for(notes, workers)}"
        report = answer_to(run, request)
        if report is not None:
            return report
        if ended is not None:
            raise NoAnswer(ended)
        pause(min(LOOK_SECS, max(0.0, left)))


def waited_for(notes: list[WorkerNote], workers: int) -> str:
    """Who keeps an audit from being made, as far as the workers' notes tell."""
    now = time.time()
    heard = {note.rank: note for note in notes if now - note.time <= ABSENT_SECS}
    silent = [rank for rank in range(workers) if rank not in heard]
    if silent:
        return f"Waited for {workers_text(silent)}, not heard of for {age_text(ABSENT_SECS)} or more."
    if not any(note.training for note in heard.values()):
        return "Waited for the training to begin: no worker is inside a training loop."
    steps = sorted({note.step for note in heard.values()})
    if len(steps) == 1:
        oldest = min(heard.values(), key=lambda note: note.time)
        silent_secs = now - oldest.time
        told = f"; worker {oldest.rank} was not heard of for the longest, {age_text(silent_secs)}"
        return (
            f"Waited for the next step: every worker is at step {steps[0]}, and one that hangs keeps the "
            f"others there{told if silent_secs > _LATE_SECS else ''}. Look into the logs of all."
        )
    behind = workers_text(sorted(note.rank for note in heard.values() if note.step == steps[0]))
    verb = "are" if " and " in behind else "is"
    return f"Waited for the next step: {behind} {verb} behind, at step {steps[0]}, others at {steps[-1]}."


def audits_table(reports: Iterable[AuditReport], now: float) -> Table:
    """One row for each audit; of one that found differences, a row for each variable."""
    table = make_table(
        "step",
        "when",
        "equal",
        "what differs",
        "worker",
        "since",
        "done",
        right=("step",),
        whole=("when", "since"),
    )
    for report in reports:
        head = [str(report.step), when_text(report.time, now)]
        verdict = Text("yes" if report.equal else "no", style=_STYLES[report.outcome])
        if report.equal:
            table.add_row(*head, verdict, *_equal_cells(report))
            continue
        done = Text(_done(report), style=_STYLES[report.outcome])
        first, *others = report.differences
        table.add_row(*head, verdict, _what_cell(first), _who(first), _since(report), done)
        for difference in others[: _MOST_VARIABLES - 1]:
            table.add_row("", "", "", _what_cell(difference), _who(difference), "", "")
        left = len(others) - (_MOST_VARIABLES - 1)
        if left > 0:
            table.add_row("", "", "", Text(f"and {counted(left, 'more variable')}", style="dim"), "", "", "")
    return table


def audit_line(report: AuditReport, now: float) -> Text:
    """The last audit in one line, for `replicast status`."""
    ago = f"  ({age_text(now - report.time)} ago)"
    return Text(one_line(str(report)), style=_STYLES[report.outcome]).append(ago, style="dim")


def _equal_cells(report: AuditReport) -> list[str | Text]:
    free = report.variables - report.alike
    said = f"{counted(report.alike, 'variable')} on {counted(report.workers, 'worker')}"
    return [Text(f"{said}; {free} may differ" if free else said, style="dim"), "", "", ""]


def _what_cell(difference: Difference) -> Text:
    worst = max(difference.differing.values(), key=lambda found: found.count, default=None)
    cell = Text(one_line(difference.variable))
    if worst is None:
        return cell
    where = f", first {worst.place}" if worst.place else ""
    return cell.append(f"\n{worst.share}{where}", style="dim")


def _who(difference: Difference) -> Text:
    """The workers that differ from the one whose value counts; without a majority, whose that is."""
    cell = Text(", ".join(map(str, difference.minority)))
    if difference.rule == "coordinator":
        cell.append(f"\nno majority:\nworker {difference.reference}'s\nvalue counts", style="dim")
    return cell


def _done(report: AuditReport) -> str:
    """What was done, and the numbers of the updates that did it."""
    return f"{report.outcome} #{', #'.join(map(str, report.healed))}" if report.healed else report.outcome


def _since(report: AuditReport) -> str:
    if report.last_equal is None:
        return f"≤ {report.found_at}"
    if report.last_equal >= report.found_at:
        return str(report.found_at)
    return f"{report.last_equal}…{report.found_at}"
