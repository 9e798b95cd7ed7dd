"""The measured processes: pools of long-lived workers that run one contestant at a time.

A process can be part of only one TensorFlow cluster, so contestants on different strategies run in different
pools. All pools exist at the same time, and are idle while another one runs: the parent schedules the turns.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from replicast.supervisor import HeldPorts, hold_free_ports
from replicast.supervisor.bootstrap import die_with

REPOSITORY = Path(__file__).resolve().parents[1]
START_SECS = 90.0
AFTER_A_FAILURE_SECS = 3.0
"""How long to wait for the other workers of a pool after one has failed: they may wait for it forever."""
_DESCRIPTOR = "BENCHMARK_SOCKET"
_PARENT = "BENCHMARK_PARENT"


class Failed(Exception):  # noqa: N818 - an outcome of a measurement
    """A worker raised, died or did not answer. The message is one line, for the table."""


@dataclass(frozen=True, slots=True)
class Ready:
    """A call on a worker: `module:function(strategy, *args)` returns the function that is run and timed."""

    factory: str
    args: tuple[Any, ...]


def threads_of_a_worker(workers: int = 2) -> dict[str, str]:
    """Thread settings, the same for every process: the cores divided by the number of workers of a pool."""
    share = str(max(1, len(os.sched_getaffinity(0)) // workers))
    return {
        "TF_NUM_INTRAOP_THREADS": share,
        "TF_NUM_INTEROP_THREADS": str(max(2, int(share))),
        "OMP_NUM_THREADS": share,
    }


class WorkerPool:
    """Workers that run the same contestants together. Started on first use, and again after a failure.

    Args:
        strategy: `module:function()` that each worker calls first, or None.
        size: The number of workers.
    """

    def __init__(self, strategy: str | None, size: int) -> None:
        self._strategy = strategy
        self._size = size
        self._workers: list[_Worker] = []
        self._ports: HeldPorts | None = None
        self._ready: set[Ready] = set()

    def start(self) -> None:
        """Starts the processes; does not wait for them."""
        self._ports = hold_free_ports(self._size + 1)
        self._workers = [_Worker(rank, self._ports.numbers, self._strategy) for rank in range(self._size)]

    def prepare(self, contestant: Ready, timeout_secs: float) -> None:
        """Builds a contestant on every worker and runs it once; no-op if that was already done."""
        if not self._workers:
            self.start()
        if contestant in self._ready:
            return
        self._ask(("prepare", contestant), START_SECS)
        self._ask(("run", contestant), timeout_secs)
        self._ready.add(contestant)

    def seconds(self, contestant: Ready, timeout_secs: float) -> float:
        """The time of a prepared contestant on the slowest worker."""
        return max(self._ask(("run", contestant), timeout_secs))

    def end(self) -> None:
        """Kills the processes, which have nothing to clean up."""
        for worker in self._workers:
            worker.kill()
        if self._ports is not None:
            self._ports.release()
        self._workers, self._ports, self._ready = [], None, set()

    def _ask(self, question: Any, timeout_secs: float) -> list[Any]:
        for worker in self._workers:
            worker.send(question)
        until = time.monotonic() + timeout_secs
        answers: list[Any] = []
        problems: list[str] = []
        silent = False
        for worker in self._workers:
            try:
                answers.append(worker.answer(until))
            except Failed as failure:
                problems.append(str(failure))
                until = min(until, time.monotonic() + AFTER_A_FAILURE_SECS)
            except (TimeoutError, EOFError, OSError) as error:
                problems.append(f"worker {worker.rank}: {worker.how_it_is(error)}")
                silent = True
        if silent:
            self.end()
        if problems:
            raise Failed(problems[0])
        return answers


class _Worker:
    """The parent's view of one process."""

    def __init__(self, rank: int, ports: tuple[int, ...], strategy: str | None) -> None:
        self.rank = rank
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.workers", *([strategy] if strategy else [])],
                cwd=REPOSITORY,
                env=_environment(rank, ports, theirs.fileno()),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the parent, which then ends its workers
            )
        self._connection = Connection(ours.detach())

    def send(self, question: Any) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `answer` will tell
            self._connection.send_bytes(pickle.dumps(question))

    def answer(self, until: float) -> Any:
        if not self._connection.poll(max(0.0, until - time.monotonic())):
            raise TimeoutError
        kind, value = pickle.loads(self._connection.recv_bytes())
        if kind == "raised":
            raise Failed(f"worker {self.rank}: {value.strip().splitlines()[-1][:200]}")
        return value

    def how_it_is(self, error: Exception) -> str:
        if isinstance(error, TimeoutError):
            return "did not answer in time"
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines() or [""]
        return f"left with exit code {self._process.poll()}: {lines[-1][:200]}"

    def kill(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()
        self._log.close()


def _environment(rank: int, ports: tuple[int, ...], descriptor: int) -> dict[str, str]:
    *workers, rendezvous = ports
    cluster = {"worker": [f"127.0.0.1:{port}" for port in workers]}
    config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
    return {
        **{name: value for name, value in os.environ.items() if name != "TF_CONFIG"},
        **({"TF_CONFIG": config} if len(workers) > 1 else {}),
        **threads_of_a_worker(),
        "RANK": str(rank),
        "WORLD_SIZE": str(len(workers)),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(rendezvous),
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "KERAS_BACKEND": "tensorflow",
        "CUDA_VISIBLE_DEVICES": "-1",
        _DESCRIPTOR: str(descriptor),
        _PARENT: str(os.getpid()),
    }


def main(strategy_factory: str | None) -> None:
    """The main loop of a worker: answers requests until it is killed."""
    die_with(int(os.environ[_PARENT]))
    connection = Connection(int(os.environ[_DESCRIPTOR]))
    strategy: Any = None
    runs: dict[Ready, Callable[[], None]] = {}

    def act(order: str, contestant: Ready) -> float | None:
        nonlocal strategy
        if order == "prepare":
            if strategy_factory is not None and strategy is None:
                strategy = _load(strategy_factory)()
            runs[contestant] = _load(contestant.factory)(strategy, *contestant.args)
            return None
        begun = time.perf_counter()
        runs[contestant]()
        return time.perf_counter() - begun

    while True:
        try:
            question = pickle.loads(connection.recv_bytes())
        except (EOFError, ConnectionResetError):
            os._exit(0)
        try:
            answer = ("returned", act(*question))
        except Exception:
            answer = ("raised", traceback.format_exc())
        connection.send_bytes(pickle.dumps(answer))


def _load(address: str) -> Any:
    module, name = address.split(":")
    return getattr(importlib.import_module(module), name)


if __name__ == "__main__":
    # Under its importable name, so that this process can unpickle the parent's objects.
    importlib.import_module("benchmarks.workers").main(sys.argv[1] if len(sys.argv) > 1 else None)
