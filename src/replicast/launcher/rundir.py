"""The launcher's use of the run directory: its default name, its lock, the next attempt's logs."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
from collections.abc import Iterator, Sequence
from datetime import datetime
from pathlib import Path

from replicast.errors import LaunchRefused
from replicast.launcher.plan import log_path
from replicast.paths import RunDir, RunPath, below, make_durably

RUNS = Path("runs")


def make_run_dir(chosen: Path | None, *, program: str, now: datetime) -> Path:
    """Creates the run directory: the chosen one, or a new one under `runs/`."""
    path = chosen if chosen is not None else RUNS / f"{now:%Y%m%d-%H%M%S}-{program}"
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_made(path, error, "--run-dir") from None
    return path.resolve()


def make_attempt_dir(log_dir: RunPath, attempt: int) -> RunPath:
    """Creates the directory of one attempt's logs, and checks that it is writable."""
    path = log_dir / f"attempt-{attempt}"
    try:
        make_durably(path)
        with path.entered() as directory:
            if not os.access(".", os.W_OK | os.X_OK, dir_fd=directory):
                raise LaunchRefused(
                    f"{path} is not writable", remedy="Choose another directory with --log-dir"
                )
    except OSError as error:
        raise _not_made(path, error, "--log-dir") from None
    return path


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
        raise LaunchRefused(
            f"{run_dir} cannot be used as a run directory ({error.strerror}). Received: {error.filename}"
            if error.filename is not None
            else f"{run_dir} cannot be used as a run directory ({error.strerror})",
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
        raise LaunchRefused(
            f"Another `replicast run` (process {holder}) is using {run_dir}"
            if holder
            else f"Another `replicast run` is using {run_dir}",
            remedy="Wait for it to finish, stop it, or choose another --run-dir",
        ) from None
    except OSError:
        os.close(lock)
        raise
    return lock


def _not_made(path: object, error: OSError, option: str) -> LaunchRefused:
    return LaunchRefused(
        f"{path} cannot be created ({error.strerror})", remedy=f"Choose another directory with {option}"
    )
