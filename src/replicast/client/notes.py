"""What the workers' notes tell of a job: whether it is running, how far it is, and when it changes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import monotonic, sleep

from replicast.storage.runfiles import ENDED, WorkerNote, read_worker_notes

ABSENT_SECS = 10.0
"""A worker writes a note every second; after this long without one it counts as not running."""
POLL_SECS = 0.1
_READ_NOTES_SECS = 1.0
_LISTEN_SECS = 5.0


def polls(run: Path, timeout_secs: float) -> Iterator[tuple[list[WorkerNote], bool, bool]]:
    """Looks at a job ten times a second until the time is up; blocks at most `timeout_secs` in all.

    Yields:
        What the workers last said, whether that was read just now, and whether the time is up.
    """
    notes, read_at = read_worker_notes(run), monotonic()
    is_fresh = True
    for is_last in ticks(timeout_secs, POLL_SECS):
        if not is_fresh and monotonic() - read_at >= _READ_NOTES_SECS:
            is_fresh, notes, read_at = True, read_worker_notes(run), monotonic()
        yield notes, is_fresh, is_last
        is_fresh = False


def ticks(timeout_secs: float, every_secs: float) -> Iterator[bool]:
    """Waits between two looks at something; says whether the look is the last one, since the time is up."""
    ends = monotonic() + timeout_secs
    yield timeout_secs <= 0
    while (left := ends - monotonic()) > 0:
        sleep(min(every_secs, left))
        yield monotonic() >= ends


def is_running(notes: Sequence[WorkerNote]) -> bool:
    """Whether a worker has written a note lately, and not that it has ended."""
    return any(time.time() - note.time <= ABSENT_SECS for note in notes if note.waiting_for != ENDED)


def is_heard_of(run: Path) -> bool:
    """Whether the job runs: a worker has written a note lately, by this host's clock or by any other.

    Blocks for a few seconds when the notes seem old: the workers' clock may be another one, and a running
    worker writes a note every second.
    """
    before = [note for note in read_worker_notes(run) if note.waiting_for != ENDED]
    if not before or is_running(before):
        return bool(before)
    return any(
        note not in before
        for notes, _, _ in polls(run, _LISTEN_SECS)
        for note in notes
        if note.waiting_for != ENDED
    )


def not_running_text(notes: Sequence[WorkerNote]) -> str:
    """Says that the job is not running, and since when."""
    if not notes:
        return "The job is not running (no worker has written a note yet)"
    silent = time.time() - max(note.time for note in notes)
    return f"The job is not running (last heard of {age(silent)} ago)"


def running_beside(run: Path) -> str:
    """Which further `Replicas` of the same script are running, in a sentence; empty when none is."""
    found = [child for child in sorted(run.glob("replicas-*")) if is_run(child)]
    running = [str(child) for child in found if is_running(read_worker_notes(child))]
    if not running:
        return ""
    return f"Another Replicas of the same script is running: give {' or '.join(running)} instead."


def is_run(path: Path) -> bool:
    """Whether a job has written its description into this directory."""
    return next(path.glob("groups/*/run.json"), None) is not None


def age(secs: float) -> str:
    """How long ago, roughly."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if secs >= 2 * length:
            return f"{secs / length:.0f} {unit}"
    return f"{max(0.0, secs):.0f} s"
