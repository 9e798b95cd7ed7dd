"""A job of bare workers, without a launcher, on the machines of a :class:`~tests.hosts.network.Network`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.hosts.network import Host, Network, missing

ROOT = Path(__file__).parents[2]
TRAIN = ROOT / "tests" / "hosts" / "train.py"
FIRST_PORT = 2222
STARTS_SECS = 240.0
"""Far more than a start takes, also on a busy machine."""


def need_machines() -> None:
    """For the top of a test module: one clear skip of all its tests where no machines can be played."""
    why = missing()
    if why:
        pytest.skip(f"No machines can be played by namespaces: {why}", allow_module_level=True)


class HostJob:
    """The workers of one attempt after another, ``per_host`` on each machine. A context manager."""

    def __init__(
        self,
        network: Network,
        directory: Path,
        *,
        per_host: int = 1,
        run_dir: Path | None = None,
        script: Path = TRAIN,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.hosts = [host for host in network.hosts for _ in range(per_host)]
        self.addresses = [
            f"{host.address}:{FIRST_PORT + rank % per_host}" for rank, host in enumerate(self.hosts)
        ]
        self.run_dir = run_dir or directory / "run"
        self.reports = directory / "reports"
        self.directory = directory
        self.attempt = -1
        self.workers: list[subprocess.Popen[bytes]] = []
        self._ended: dict[int, float] = {}
        self._script = script
        self._environ = dict(environ or {})
        self.reports.mkdir(parents=True, exist_ok=True)

    def start(self, *ranks: int, **environ: str) -> None:
        """Start the next attempt; with ``ranks``, only these workers."""
        self.attempt += 1
        self._ended.clear()
        self.workers = [self._start(rank, environ) for rank in ranks or range(len(self.hosts))]

    def _start(self, rank: int, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        cluster = {"cluster": {"worker": self.addresses}, "task": {"type": "worker", "index": rank}}
        given = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]),
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "TF_CONFIG": json.dumps(cluster),
            "REPLICAST_ATTEMPT": str(self.attempt),
            "JOB_RUN_DIR": str(self.run_dir),
            "JOB_REPORTS": str(self.reports),
            **self._environ,
            **environ,
        }
        with self.log(rank).open("wb") as log:
            return self.host_of(rank).start([sys.executable, str(self._script)], env=given, stdout=log)

    def host_of(self, rank: int) -> Host:
        return self.hosts[rank]

    def log(self, rank: int, attempt: int | None = None) -> Path:
        return self.directory / f"attempt-{self.attempt if attempt is None else attempt}-worker-{rank}.log"

    def until(self, reached: Callable[[], bool], secs: float = STARTS_SECS) -> None:
        """Wait until something is so; a worker that has ended, or the time limit, is a failure."""
        ends = time.monotonic() + secs
        while not reached():
            assert time.monotonic() < ends, f"not within {secs:.0f} s\n{self.logs()}"
            assert all(worker.poll() is None for worker in self.workers), f"a worker ended\n{self.logs()}"
            time.sleep(0.05)

    def until_all_train(self) -> None:
        reports = [self.reports / f"trains-{self.attempt}-{rank}" for rank in range(len(self.hosts))]
        self.until(lambda: all(report.exists() for report in reports))

    def ends(self, secs: float, since: float | None = None) -> list[tuple[float, int] | None]:
        """When each worker ended, in seconds since a moment, and its exit code; None: not within ``secs``.

        What an earlier call has seen is remembered.
        """
        began = time.monotonic() if since is None else since
        while len(self._ended) < len(self.workers) and time.monotonic() - began < secs:
            for place, worker in enumerate(self.workers):
                if place not in self._ended and worker.poll() is not None:
                    self._ended[place] = time.monotonic()
            time.sleep(0.02)
        return [
            (self._ended[place] - began, worker.returncode) if place in self._ended else None
            for place, worker in enumerate(self.workers)
        ]

    def finals(self) -> list[str]:
        """What each worker says of its state at the end of its training."""
        paths = [self.reports / f"final-{rank}" for rank in range(len(self.hosts))]
        return [path.read_text().strip() if path.exists() else "none" for path in paths]

    def logs(self) -> str:
        paths = [self.log(rank) for rank in range(len(self.hosts))]
        return "\n".join(f"--- {path.name}\n{path.read_text()}" for path in paths if path.exists())

    def kill(self) -> None:
        for worker in self.workers:
            worker.send_signal(signal.SIGKILL)
            worker.wait()

    def __enter__(self) -> HostJob:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
