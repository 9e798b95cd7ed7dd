"""Says on the screen what became of an attempt."""

from __future__ import annotations

import sys

from replicast.config import TOLD_TO_END
from replicast.launcher.attempts import Verdict
from replicast.launcher.report import failure_line, interruption_line, others_line, sigterm_line, tail_box
from replicast.launcher.screen import Screen
from replicast.paths import RunDir


def report_verdict(verdict: Verdict, screen: Screen, run_dir: RunDir, attempt: int | None) -> None:
    """Says who failed first, how the others ended, and who stopped the job."""
    end = verdict.end
    if end.first_failure is not None:
        if end.first_failure.code == TOLD_TO_END and attempt is not None:
            screen.tell(sigterm_line(end.first_failure, _told_by(run_dir, attempt)))
        else:
            if not end.first_failure.lost:
                screen.tell(tail_box(end.first_failure, sys.stderr))
            screen.tell(failure_line(end.first_failure))
        others = others_line(end)
        if others:
            screen.tell(others)
    if end.interrupted_by is not None:
        screen.tell(interruption_line(end.interrupted_by, end, verdict.stopped_on, verdict.unreached))


def _told_by(run_dir: RunDir, attempt: int) -> str:
    """Who has asked the job to stop, and where it did; empty if nobody has."""
    from replicast.storage.requests import stopped_by  # Imports numpy, which nothing else here needs.

    told = stopped_by(run_dir, attempt)
    return "" if told is None else f"stopped by {told.author} at step {told.step}"
