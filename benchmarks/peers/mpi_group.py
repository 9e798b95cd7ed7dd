"""The parent's view of the processes under mpiexec: started once, controlled through named pipes."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from benchmarks.runner import Entry
from benchmarks.workers import AFTER_A_FAILURE_SECS, REPOSITORY, Failed, threads_of_a_worker
from replicast.supervisor import bootstrap

ANSWERS = "answers"
"""The pipe that all ranks write to; a line is short enough to be written atomically."""
FAREWELL_SECS = 5.0


@dataclass(frozen=True, slots=True)
class Line:
    """The answer of a rank: `RANK TEXT`."""

    rank: int
    text: str

    def __str__(self) -> str:
        return f"{self.rank} {self.text}"

    @classmethod
    def parse(cls, line: str) -> Line:
        rank, text = line.split(" ", 1)
        return cls(int(rank), text)


def orders_of(directory: Path, rank: int) -> Path:
    """The pipe that this rank reads from."""
    return directory / f"orders-{rank}"


def mpiexec() -> str | None:
    """The launcher next to this Python, which matches its mpi4py; else the one on the path, or None."""
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


class MpiGroup:
    """A group of MPI processes. Started on first use, and again after a failure.

    Args:
        size: The number of ranks.
        directory: The directory for the pipes.
    """

    def __init__(self, size: int, directory: Path) -> None:
        self._size = size
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._orders: list[int] = []
        self._answers = -1
        self._unread = b""
        self._ready: set[Entry] = set()

    def prepare(self, entry: Entry, timeout_secs: float) -> None:
        """Sets a contestant up on every rank and runs it once; no-op if that was already done."""
        if self._process is None:
            self._start(timeout_secs)
        if entry not in self._ready:
            for order in ("prepare", "arrange", "race"):
                self._ask(order, entry, timeout_secs)
            self._ready.add(entry)

    def order(self, order: str, entry: Entry, timeout_secs: float) -> None:
        """Makes every rank carry out an order."""
        self._ask(order, entry, timeout_secs)

    def end(self) -> None:
        """Closes the pipes of orders; kills processes that do not exit."""
        for descriptor in [*self._orders, *([self._answers] if self._answers >= 0 else [])]:
            os.close(descriptor)
        if self._process is not None:
            try:
                self._process.wait(FAREWELL_SECS)
            except subprocess.TimeoutExpired:
                self._process.terminate()  # mpiexec passes it on to the ranks
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(FAREWELL_SECS)
                self._process.kill()
                self._process.wait()
        if self._log is not None:
            self._log.close()
        self._log = None
        self._process, self._orders, self._answers, self._unread = None, [], -1, b""
        self._ready = set()

    def _start(self, timeout_secs: float) -> None:
        launcher = mpiexec()
        if launcher is None:
            raise Failed("mpiexec is not installed")
        pipes = [orders_of(self._directory, rank) for rank in range(self._size)]
        for pipe in [*pipes, self._directory / ANSWERS]:
            pipe.unlink(missing_ok=True)
            os.mkfifo(pipe)
        # Opened for both directions, so that opening does not wait for the other side.
        self._orders = [os.open(pipe, os.O_RDWR) for pipe in pipes]
        self._answers = os.open(self._directory / ANSWERS, os.O_RDWR)
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        rank = [sys.executable, "-m", "benchmarks.peers.mpi", str(self._directory)]
        self._process = subprocess.Popen(
            # bootstrap.py, so that mpiexec ends with us
            [sys.executable, bootstrap.__file__, str(os.getpid()), launcher, "-n", str(self._size), *rank],
            cwd=REPOSITORY,
            env={**os.environ, **threads_of_a_worker()},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._collect("here", timeout_secs)

    def _ask(self, order: str, entry: Entry, timeout_secs: float) -> None:
        for descriptor in self._orders:
            os.write(descriptor, f"{order} {entry.contestant}\n".encode())
        self._collect("done", timeout_secs)

    def _collect(self, wanted: str, timeout_secs: float) -> None:
        until = time.monotonic() + timeout_secs
        waiting = set(range(self._size))
        problems: list[str] = []
        while waiting:
            line = self._next_line(until)
            if line is None:
                problems.append(self._how_it_is(waiting))
                self.end()
                break
            waiting.discard(line.rank)
            if line.text != wanted:
                problems.append(f"rank {line.rank}: {line.text}")
                until = min(until, time.monotonic() + AFTER_A_FAILURE_SECS)
        if problems:
            raise Failed(problems[0])

    def _next_line(self, until: float) -> Line | None:
        """The next answer; None when the time is up or mpiexec is gone."""
        while b"\n" not in self._unread:
            readable, _, _ = select.select([self._answers], [], [], 0.2)
            if readable:
                self._unread += os.read(self._answers, 4096)
            elif time.monotonic() > until or self._process is None or self._process.poll() is not None:
                return None
        text, self._unread = self._unread.split(b"\n", 1)
        return Line.parse(text.decode())

    def _how_it_is(self, waiting: set[int]) -> str:
        code = self._process.poll() if self._process is not None else None
        if code is None or self._log is None:
            return f"rank {min(waiting)}: did not answer in time"
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines() or [""]
        return f"mpiexec left with exit code {code}: {lines[-1][:200]}"
