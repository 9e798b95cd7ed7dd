"""What the commands about a run share: RUN, --timeout, whether the job is running. Loads nothing heavy."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from replicast.runfiles import WorkerNote

ABSENT_SECS = 10.0
"""A worker says something every second; after so many without a word it counts as not running."""

_Command = TypeVar("_Command", bound=Callable[..., Any])
_MOST_NEAR = 5


def run_argument(command: _Command) -> _Command:
    """Adds the argument RUN, a run directory that is checked to be one."""
    argument = click.argument(
        "run",
        type=click.Path(path_type=Path),
        metavar="RUN",
        callback=lambda _context, _parameter, path: checked_run(path),
    )
    return argument(command)


def run_option(command: _Command) -> _Command:
    """Adds the option --run, for commands that can do without."""
    option = click.option(
        "--run",
        type=click.Path(path_type=Path),
        metavar="RUN",
        callback=lambda _context, _parameter, path: None if path is None else checked_run(path),
        help="The run directory of the job that is to be changed: its variables are looked up.",
    )
    return option(command)


def timeout_option(waiting: str) -> Callable[[_Command], _Command]:
    """Adds the option --timeout, for commands that wait for a job when they are told to by `waiting`."""
    return click.option(
        "--timeout",
        type=click.FloatRange(min=0),
        default=300.0,
        metavar="SECS",
        show_default=True,
        help=f"How long {waiting} waits.",
    )


def silent_secs(notes: list[WorkerNote], now: float) -> float | None:
    """How long no worker has said anything; None when none ever has."""
    return min((max(0.0, now - note.time) for note in notes), default=None)


def is_running(notes: list[WorkerNote], now: float) -> bool:
    """Whether a worker has said something lately, and not that it has ended."""
    from replicast.runfiles import ENDED

    silent = silent_secs([note for note in notes if note.waiting_for != ENDED], now)
    return silent is not None and silent <= ABSENT_SECS


def not_running_text(notes: list[WorkerNote], now: float) -> str:
    """Says that the job is not running, and since when."""
    from replicast.cli.texts import age_text

    silent = silent_secs(notes, now)
    heard = "no worker has written a note yet" if silent is None else f"last heard of {age_text(silent)} ago"
    return f"The job is not running ({heard})"


def running_beside(run: Path, now: float) -> str:
    """Which further `Replicas` of the same script are running, in a sentence; nothing when none is."""
    from replicast.cli.texts import printable
    from replicast.runfiles import read_worker_notes

    found = [child for child in sorted(run.glob("replicas-*")) if is_run(child)]
    running = [printable(str(child)) for child in found if is_running(read_worker_notes(child), now)]
    if not running:
        return ""
    return f"Another Replicas of the same script is running: give {' or '.join(running)} instead."


def is_run(path: Path) -> bool:
    """Whether a job has written into this directory what it is about."""
    return next(path.glob("groups/*/run.json"), None) is not None


def checked_run(path: Path) -> Path:
    """The path, if it is a run directory; else a usage error that names those near it."""
    if is_run(path):
        return path
    from replicast.cli.texts import printable

    name = printable(str(path))
    if not path.is_dir():
        raise click.BadParameter(f"There is no directory {name}. Give the --run-dir of the job.")
    if not os.access(path, os.R_OK | os.X_OK):
        raise click.BadParameter(f"The directory {name} cannot be read by this user.")
    near = [printable(str(child)) for child in sorted(path.iterdir()) if is_run(child)][-_MOST_NEAR:]
    if near:
        raise click.BadParameter(f"{name} is not a run directory. Perhaps: {', '.join(near)}.")
    raise click.BadParameter(
        f"{name} has no groups/*/run.json yet. Give the --run-dir of the job; if it is that, its program has "
        "not made its replicast.Replicas yet."
    )
