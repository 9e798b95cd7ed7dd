"""The launcher's use of the run directory: its default name, its lock, the logs, and what it held before."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from replicast.errors import LaunchRefused, printable
from replicast.files import RunDir, RunPath, below, make_durably
from replicast.launcher.failure import short_path
from replicast.launcher.plan import log_path

RUNS = Path("runs")
_SHOWN_UPDATES = 3


def make_run_dir(chosen: Path | None, *, program: str, now: datetime) -> Path:
    """Creates the run directory: the chosen one, or a new one under `runs/`."""
    path = chosen if chosen is not None else RUNS / f"{now:%Y%m%d-%H%M%S}-{program}"
    with _created(path, "--run-dir"):
        path.mkdir(parents=True, exist_ok=True)
    return path.resolve()


def make_attempt_dir(log_dir: RunPath, attempt: int) -> RunPath:
    """Creates the directory of one attempt's logs, and checks that it is writable."""
    path = log_dir / f"attempt-{attempt}"
    with _created(path, "--log-dir"):
        make_durably(path)
        with path.entered() as directory:
            if not os.access(".", os.W_OK | os.X_OK, dir_fd=directory):
                raise LaunchRefused(
                    f"{path} is not writable", remedy="Choose another directory with --log-dir"
                )
    return path


@contextlib.contextmanager
def _created(path: object, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise LaunchRefused(
            f"{path} cannot be created ({error.strerror})", remedy=f"Choose another directory with {option}"
        ) from None


def next_attempt(log_dir: RunPath, ranks: Sequence[int]) -> int:
    """The first attempt for which none of these workers has a log yet.

    On a file system shared by several hosts, each host's launcher counts its own workers only.
    """
    attempt = 0
    while any(log_path(log_dir, attempt, rank).exists() for rank in ranks):
        attempt += 1
    return attempt


@contextlib.contextmanager
def locked(run_dir: RunDir, first_rank: int) -> Iterator[None]:
    """Locks the run directory against a second launcher, as a context manager."""
    try:
        lock = _take_lock(run_dir, first_rank)
    except OSError as error:
        received = "" if error.filename is None else f". Received: {error.filename}"
        raise LaunchRefused(
            f"{run_dir} cannot be used as a run directory ({error.strerror}){received}",
            remedy="Make it writable, free space on its disk, or choose another directory with --run-dir",
        ) from error
    try:
        yield
    finally:
        os.close(lock)


def _take_lock(run_dir: RunDir, first_rank: int) -> int:
    """Takes the lock, writes into its file which process of which host has it, and returns the descriptor."""
    path = below(run_dir) / f"launcher-{first_rank}.lock"
    lock = path.open(os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()} on {socket.gethostname()}\n".encode())
    except BlockingIOError:
        holder = os.pread(lock, 400, 0).decode(errors="replace").strip()
        os.close(lock)
        process = f" (process {holder})" if holder else ""
        raise LaunchRefused(
            f"Another `replicast run`{process} is using {run_dir}",
            remedy="Wait for it to finish, stop it, or choose another --run-dir",
        ) from None
    except OSError:
        os.close(lock)
        raise
    return lock


def what_is_taken_over(run_dir: RunDir) -> str:
    """One line: what a start finds in a run directory that was used before; empty if nothing."""
    if not (below(run_dir) / "groups").is_dir():
        return ""
    try:
        found = _contents(run_dir)
    except OSError as error:  # This line is a courtesy: the workers say what they cannot read.
        found = [f"a file that cannot be read ({error})"]
    return f"replicast: {short_path(run_dir)} was used before; it has {'; '.join(found)}" if found else ""


def _contents(run_dir: RunDir) -> list[str]:
    from replicast.errors import FileDamaged
    from replicast.storage import inbox  # These import numpy: not for a new run.
    from replicast.storage.checkpoints import CheckpointStore
    from replicast.storage.inbox import describe
    from replicast.storage.journal import Updates

    found = []
    try:
        last = CheckpointStore(run_dir).last()
        if last is not None:
            found.append(f"a checkpoint of step {last.step}")
        journal = Updates(run_dir)
        found += _counted(len(journal.history.committed), "in the journal")
        found += _counted(len(journal.history.scheduled), "scheduled")
    except FileDamaged as error:
        found.append(f"a damaged file ({error})")
    waiting = inbox.waiting(run_dir)
    shown = []
    for one in waiting[:_SHOWN_UPDATES]:
        told = describe(one.path)
        reverts = "" if told is None or told.reverts is None else f"reverts update {told.reverts}"
        words = "" if told is None else f" ({told.words(1) or reverts or 'no edits'})"
        shown.append(printable(one.id[:8] + words))
    shown += ["…"] if len(waiting) > _SHOWN_UPDATES else []
    in_inbox = _counted(len(waiting), "waiting in the inbox, for its first step")
    return found + [f"{one}: {', '.join(shown)}" for one in in_inbox]


def _counted(count: int, where: str) -> list[str]:
    return [f"{count} update{'s' if count > 1 else ''} {where}"] if count else []
