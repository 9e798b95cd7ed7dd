"""What the commands about a run share: the argument RUN, whether the job is running, waiting for it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from time import monotonic, sleep

import click

from replicast.cli import texts
from replicast.storage.runfiles import ENDED, WorkerNote, read_worker_notes

ABSENT_SECS = 10.0
"""A worker writes a note every second; after this long without one it counts as not running."""
_POLL_SECS = 0.1
_READ_NOTES_SECS = 1.0

run_argument = click.argument(
    "run", type=click.Path(path_type=Path), callback=lambda _context, _parameter, path: checked_run(path)
)
timeout_option = click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    default=300.0,
    metavar="SECS",
    show_default=True,
    help="How long to wait for the job.",
)


def polls(run: Path, timeout_secs: float) -> Iterator[tuple[list[WorkerNote], bool, bool]]:
    """Looks at a job ten times a second until the time is up; blocks at most `timeout_secs` in all.

    Yields:
        What the workers last said, whether that was read just now, and whether the time is up.
    """
    ends = monotonic() + timeout_secs
    notes, read_at = read_worker_notes(run), monotonic()
    yield notes, True, timeout_secs <= 0
    while (left := ends - monotonic()) > 0:
        sleep(min(_POLL_SECS, left))
        is_fresh = monotonic() - read_at >= _READ_NOTES_SECS
        if is_fresh:
            notes, read_at = read_worker_notes(run), monotonic()
        yield notes, is_fresh, monotonic() >= ends


def is_running(notes: list[WorkerNote]) -> bool:
    """Whether a worker has written a note lately, and not that it has ended."""
    return any(time.time() - note.time <= ABSENT_SECS for note in notes if note.waiting_for != ENDED)


def not_running_text(notes: list[WorkerNote]) -> str:
    """Says that the job is not running, and since when."""
    if not notes:
        return "The job is not running (no worker has written a note yet)"
    silent = time.time() - max(note.time for note in notes)
    return f"The job is not running (last heard of {texts.age(silent)} ago)"


def running_beside(run: Path) -> str:
    """Which further `Replicas` of the same script are running, in a sentence; empty when none is."""
    found = [child for child in sorted(run.glob("replicas-*")) if is_run(child)]
    running = [texts.printable(child) for child in found if is_running(read_worker_notes(child))]
    if not running:
        return ""
    return f"Another Replicas of the same script is running: give {' or '.join(running)} instead."


def is_run(path: Path) -> bool:
    """Whether a job has written its description into this directory."""
    return next(path.glob("groups/*/run.json"), None) is not None


def checked_run(path: Path, *, checkpoints_suffice: bool = False) -> Path:
    """The path, if it is a run directory; else a usage error that names those near it.

    Args:
        path: What was given.
        checkpoints_suffice: Also accept a directory that has nothing but checkpoints.
    """
    if is_run(path) or (checkpoints_suffice and (path / "checkpoints").is_dir()):
        return path
    name = texts.printable(path)
    if not path.is_dir():
        raise click.BadParameter(f"There is no directory {name}. Give the --run-dir of the job.")
    if not os.access(path, os.R_OK | os.X_OK):
        raise click.BadParameter(f"The directory {name} cannot be read by this user.")
    near = [texts.printable(child) for child in (*sorted(path.iterdir()), path.parent) if is_run(child)][-5:]
    if near:
        raise click.BadParameter(f"{name} is not a run directory. Perhaps: {', '.join(near)}.")
    raise click.BadParameter(f"{name} has no run.json yet: is the job still starting?")
