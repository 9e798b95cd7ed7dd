"""A worker process as pytest controls it: start, calls, stack traces, end."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

from tests.pool.messages import PARENT, SOCKET, STACKS, WITH_STRATEGY, Died, Outcome, Raised

REPOSITORY = Path(__file__).resolve().parents[2]
LOG_LINES_SHOWN = 40


@contextlib.contextmanager
def held_ports(count: int) -> Iterator[list[int]]:
    """Free loopback ports that stay ours: bound, not listening, and TensorFlow's server may bind them too."""
    with contextlib.ExitStack() as stack:
        ports = []
        for _ in range(count):
            held = stack.enter_context(socket.socket())
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            held.bind(("127.0.0.1", 0))
            ports.append(held.getsockname()[1])
        yield ports


class WorkerProcess:
    """One worker. A job of one gets no `TF_CONFIG`."""

    def __init__(self, rank: int, ports: list[int], directory: Path, *, strategy: bool | int) -> None:
        self.rank = rank
        self.log = directory / f"worker-{rank}.log"
        self._stacks = directory / f"worker-{rank}.stacks"
        ours, theirs = socket.socketpair()
        with theirs, self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.pool.worker"],
                cwd=REPOSITORY,
                env=self._environment(ports, theirs.fileno(), strategy=strategy),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for pytest, which then ends its workers
            )
        self.connection = Connection(ours.detach())

    def _environment(self, ports: list[int], descriptor: int, *, strategy: bool | int) -> dict[str, str]:
        inherited = {
            name: value
            for name, value in os.environ.items()
            if name != "TF_CONFIG"
            and (not name.startswith("REPLICAST_") or name == "REPLICAST_TEST_STRATEGY")
        }
        cluster = {"worker": [f"127.0.0.1:{port}" for port in ports]}
        task = {"type": "worker", "index": self.rank}
        several = {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task})} if len(ports) > 1 else {}
        return {
            **inherited,
            **several,
            "RANK": str(self.rank),
            "WORLD_SIZE": str(len(ports)),
            "TF_NUM_INTRAOP_THREADS": "1",
            "TF_NUM_INTEROP_THREADS": "2",
            "OMP_NUM_THREADS": "1",
            "TF_GRPC_REUSE_PORT": "true",  # the pool holds the port so that nobody else takes it
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "KERAS_BACKEND": "tensorflow",
            "CUDA_VISIBLE_DEVICES": "-1",
            SOCKET: str(descriptor),
            STACKS: str(self._stacks),
            PARENT: str(os.getpid()),
            WITH_STRATEGY: str(strategy),
        }

    def send(self, message: bytes) -> None:
        """Hands over a pickled call. If the process is gone, `receive` will tell."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(message)

    def receive(self) -> Outcome | None:
        """What became of the call, or None while it runs. Does not block."""
        exited = self.process.poll() is not None  # asked first: it may have answered and then left
        try:
            if not self.connection.poll():
                return Died(self._how_it_ended()) if exited else None
            message = self.connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            return Died(self._how_it_ended())
        try:
            outcome: Outcome = pickle.loads(message)
        except Exception as error:
            return Raised(f"The result cannot be read by pytest: {error!r}\n")
        return outcome

    def stacks(self) -> str:
        """Where each of its threads stands now."""
        before = self._stacks.stat().st_size if self._stacks.exists() else 0
        self.process.send_signal(signal.SIGUSR1)
        written, ends = before, time.monotonic() + 2
        while time.monotonic() < ends:
            time.sleep(0.1)
            size = self._stacks.stat().st_size
            if size == written > before:
                return self._stacks.read_text(errors="replace")[before:]
            written = size
        return "It does not answer: stopped by a signal, or not yet up."

    def log_tail(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES_SHOWN:]) if lines else "(empty)"

    def leave(self, until: float) -> str | None:
        """What was wrong with the end of a worker whose connection is closed; SIGKILL when time is up."""
        try:
            self.process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            stacks = self.stacks()
            self.kill()
            return f"did not leave by itself\n{stacks}"
        return None if self.process.returncode == 0 else self._how_it_ended()

    def kill(self) -> None:
        """Ends it at once."""
        self.connection.close()
        self.process.kill()
        self.process.wait()

    def _how_it_ended(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)
        code = self.process.returncode
        if code is None:
            return "closed its connection and goes on running"
        return f"died of {signal.Signals(-code).name}" if code < 0 else f"left with exit code {code}"
