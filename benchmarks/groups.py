"""The parent's view of the measured processes: long-lived groups that run one contestant at a time.

A process can be part of only one TensorFlow cluster, so contestants on different strategies run in different
groups. They exist at the same time, and are idle while another one runs: the parent schedules the turns.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, Protocol

from benchmarks.results import TORCH_PYTHON
from benchmarks.runner import Entry, Times
from replicast.launcher import bootstrap
from replicast.launcher.plan import HeldPorts, hold_ports

REPOSITORY = Path(__file__).resolve().parents[1]
START_SECS = 120.0
AFTER_A_FAILURE_SECS = 3.0
"""How long to wait for the other workers of a group after one has failed: they may wait for it forever."""
FAREWELL_SECS = 15.0


class Failed(Exception):  # noqa: N818 - an outcome of a measurement
    """A worker raised, died or did not answer. The message is one line, for the table."""


class Group(Protocol):
    """Long-lived processes that run one contestant at a time."""

    def prepare(self, entry: Entry, timeout_secs: float) -> None:
        """Sets a contestant up and runs it once; no-op if that was already done."""

    def order(self, order: str, entry: Entry, timeout_secs: float) -> list[Times]:
        """Makes all processes carry out an order: "arrange", "race" or "check"; returns their answers."""

    def end(self) -> None:
        """Ends the processes."""


def group_of(pool: str, workers: int) -> Group:
    """The processes of a contestant.

    Args:
        pool: "replicast", "stock" (MWMS as it is), "torch", "mpi", "page" (a job with its server), "picture"
            (a browser), or "hosts" (replicast, each worker on a machine of its own, which namespaces play).
            Links between hosts may have a rate: "hosts:1gbit".
        workers: How many.
    """
    if pool in ("page", "picture"):
        from benchmarks.page import PageGroup, PictureGroup

        return PageGroup() if pool == "page" else PictureGroup()
    if pool.startswith("hosts"):
        from benchmarks.hosts_group import HostWorkers

        return HostWorkers(pool, workers)
    return Workers(pool, workers)


def threads_of_a_worker(workers: int = 2) -> dict[str, str]:
    """Settings that are the same for every process: the cores divided by the number of workers of a group.

    And memory in huge pages, as `replicast run` sets it for its workers.
    """
    share = str(max(1, len(os.sched_getaffinity(0)) // workers))
    return {
        "TF_NUM_INTRAOP_THREADS": share,
        "TF_NUM_INTEROP_THREADS": str(max(2, int(share))),
        "OMP_NUM_THREADS": share,
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }


def mpiexec() -> str | None:
    """The launcher next to this Python, which matches its mpi4py; else the one on the path, or None."""
    return shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or shutil.which("mpiexec")


class Workers:
    """Processes that run the same contestants together. Started on first use, and again after a failure.

    Args:
        pool: What the workers share: a function of `benchmarks.shared`.
        size: The number of workers.
        source: The directory of the replicast that they import.
    """

    def __init__(self, pool: str, size: int, source: Path = REPOSITORY / "src") -> None:
        self._pool = pool
        self._size = size
        self._source = source
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[Connection] = []
        self._ports: HeldPorts | None = None
        self._log: IO[bytes] | None = None
        self._ready: set[Entry] = set()

    def prepare(self, entry: Entry, timeout_secs: float) -> None:
        """Sets a contestant up on every worker and runs it once; no-op if that was already done."""
        if not self._processes:
            self._start()
        if entry not in self._ready:
            self._ask("setup", entry, START_SECS)
            for order in ("arrange", "race"):
                self._ask(order, entry, timeout_secs)
            self._ready.add(entry)

    def order(self, order: str, entry: Entry, timeout_secs: float) -> list[Times]:
        """Makes every worker carry out an order."""
        return self._ask(order, entry, timeout_secs)

    def end(self) -> None:
        """Kills the processes, which have nothing to clean up; those of mpiexec may end by themselves."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            if self._pool == "mpi":
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(FAREWELL_SECS)
            process.kill()
            process.wait()
        if self._ports is not None:
            self._ports.close()
        if self._log is not None:
            self._log.close()
        self._processes, self._connections, self._ready = [], [], set()
        self._ports = self._log = None

    def _start(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the processes
        with (
            tempfile.TemporaryDirectory(prefix="replicast-bench-") as directory,
            socket.socket(socket.AF_UNIX) as listener,
        ):
            listener.bind(f"{directory}/socket")
            listener.listen(self._size)
            listener.settimeout(1.0)
            try:
                self._launch(f"{directory}/socket")
                self._connections = self._accept(listener, time.monotonic() + START_SECS)
            except Failed:
                self.end()
                raise

    def _launch(self, address: str) -> None:
        python = str(TORCH_PYTHON) if self._pool == "torch" else sys.executable
        worker = [python, "-m", "benchmarks.worker", address, f"benchmarks.shared:{self._pool}"]
        if self._pool == "mpi":
            launcher = mpiexec()
            if launcher is None:
                raise Failed("mpiexec is not installed")
            self._popen([launcher, "-n", str(self._size), *worker], {})
            return
        self._ports = hold_ports([0] * (self._size + 1))
        *ports, rendezvous = self._ports.numbers
        addresses = [f"127.0.0.1:{port}" for port in ports]
        for rank in range(self._size):
            self._popen(worker, cluster_of(rank, addresses, rendezvous))

    def _popen(self, command: list[str], cluster: dict[str, str]) -> None:
        inherited = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        paths = [str(self._source), str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
        constant = {
            "PYTHONPATH": ":".join(paths),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "KERAS_BACKEND": "tensorflow",
            "CUDA_VISIBLE_DEVICES": "-1",
        }
        self._processes.append(
            subprocess.Popen(
                # bootstrap.py, so that it ends with us
                [sys.executable, bootstrap.__file__, str(os.getpid()), *command],
                cwd=REPOSITORY,
                env={**inherited, **constant, **threads_of_a_worker(), **cluster},
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for the parent, which then ends its workers
            )
        )

    def _accept(self, listener: socket.socket, until: float) -> list[Connection]:
        """The connections of all workers, by rank."""
        found: dict[int, Connection] = {}
        while len(found) < self._size:
            try:
                connection = Connection(listener.accept()[0].detach())
            except TimeoutError:
                gone = any(process.poll() is not None for process in self._processes)
                if gone or time.monotonic() > until:
                    raise Failed(f"a worker did not start: {self._last_line()}") from None
                continue
            found[pickle.loads(connection.recv_bytes())] = connection
        return [found[rank] for rank in range(self._size)]

    def _ask(self, order: str, entry: Entry, timeout_secs: float) -> list[Any]:
        """The answers of all workers. A group that has lost one is ended; its next use starts it again."""
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `_receive` will tell
                connection.send_bytes(pickle.dumps((order, entry)))
        until = time.monotonic() + timeout_secs
        answers: dict[int, tuple[str, Any]] = {}
        while len(answers) < self._size:
            unheard = [one for rank, one in enumerate(self._connections) if rank not in answers]
            heard: Any = wait(unheard, max(0.0, until - time.monotonic()))
            if not heard:
                break
            for connection in heard:
                answer = self._receive(connection)
                answers[self._connections.index(connection)] = answer
                if answer[0] != "returned":
                    until = min(until, time.monotonic() + AFTER_A_FAILURE_SECS)
        problems = [f"worker {rank}: {said}" for rank, (kind, said) in answers.items() if kind != "returned"]
        lost = [rank for rank in range(self._size) if answers.get(rank, ("lost",))[0] in ("lost", "ended")]
        if lost:
            problems.append(f"worker {lost[0]}: did not answer in time")
            self.end()
        if problems:
            raise Failed(problems[0])
        return [answers[rank][1] for rank in range(self._size)]

    def _receive(self, connection: Connection) -> tuple[str, Any]:
        try:
            kind, value = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return "ended", f"the process has ended: {self._last_line()}"
        return kind, value.strip().splitlines()[-1][:200] if kind == "raised" else value

    def _last_line(self) -> str:
        if self._log is None:
            return ""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines() or [""]
        return lines[-1][:200]


def cluster_of(rank: int, addresses: list[str], rendezvous: int = 0) -> dict[str, str]:
    """The environment of a worker: the addresses of all."""
    cluster = {"worker": addresses}
    config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
    return {
        **({"TF_CONFIG": config} if len(addresses) > 1 else {}),
        "RANK": str(rank),
        "WORLD_SIZE": str(len(addresses)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(rendezvous),
    }
