"""How a running job is asked for an audit, and what keeps it from making one."""

from __future__ import annotations

import time
from pathlib import Path

from replicast.audits.report import AuditReport, workers_text
from replicast.client.notes import ABSENT_SECS, age, is_running, not_running_text, polls
from replicast.errors import NoAnswer, RequestFailed
from replicast.storage.auditfiles import answer_to, request_audit, withdraw_request
from replicast.storage.runfiles import WorkerNote, read_run_info, read_worker_notes

_LATE_SECS = 3.0  # A worker writes a note every second: below this, which note is the oldest is chance.


def audit(run: Path, timeout_secs: float) -> AuditReport:
    """Asks the job for an audit and waits for the report, at most `timeout_secs`.

    Raises:
        NoAnswer: The job is not running or has ended, or the time has passed.
        RequestFailed: The request cannot be written.
    """
    notes = read_worker_notes(run)
    if not is_running(notes):
        raise NoAnswer(f"{not_running_text(notes)}: only a running job can make an audit.")
    try:
        request = request_audit(run)
    except OSError as error:
        raise RequestFailed(
            f"The request cannot be written to {run / 'inbox'} ({error.strerror})."
        ) from error
    try:
        for notes, _, _ in polls(run, timeout_secs):
            report = answer_to(run, request)  # After the notes: a job may write it just before it ends.
            if report is not None:
                return report
            if not is_running(notes):
                raise NoAnswer(f"{not_running_text(notes)}: it ended without an audit.")
        waited_for = _waited_for(read_worker_notes(run), read_run_info(run).workers)
        raise NoAnswer(f"{timeout_secs:g} s have passed without an audit. {waited_for}")
    finally:
        withdraw_request(run, request)


def _waited_for(notes: list[WorkerNote], workers: int) -> str:
    """What keeps an audit from being made, as far as the workers' notes tell."""
    now = time.time()
    heard = {note.rank: note for note in notes if now - note.time <= ABSENT_SECS}
    silent = [rank for rank in range(workers) if rank not in heard]
    if silent:
        return f"Waited for {workers_text(silent)}, not heard of for {age(ABSENT_SECS)} or more."
    if not any(note.training for note in heard.values()):
        return "Waited for the training to begin: no worker is inside a training loop."
    steps = sorted({note.step for note in heard.values()})
    if len(steps) > 1:
        behind = workers_text(sorted(note.rank for note in heard.values() if note.step == steps[0]))
        verb = "are" if " and " in behind else "is"
        return f"Waited for the next step: {behind} {verb} behind, at step {steps[0]}, others at {steps[-1]}."
    oldest = min(heard.values(), key=lambda note: note.time)
    told = f"; worker {oldest.rank} was not heard of for the longest, {age(now - oldest.time)}"
    return (
        f"Waited for the next step: every worker is at step {steps[0]}, and one that hangs keeps the "
        f"others there{told if now - oldest.time > _LATE_SECS else ''}. Look into the logs of all."
    )
