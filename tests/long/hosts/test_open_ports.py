"""Who can connect to TensorFlow's port, on machines played by namespaces. Real workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts.network import Host, Network, missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "-")

SECS = 120.0
TRAINING = """
import pathlib, sys, time
import replicast
strategy = replicast.Strategy()
pathlib.Path(sys.argv[1], f"joined-{strategy.rank}").touch()
ends = time.monotonic() + 100
while not pathlib.Path(sys.argv[1], "end").exists() and time.monotonic() < ends:
    time.sleep(0.1)
"""
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2)"
PORTS = "pathlib.Path(sys.argv[1], 'ports').write_text(os.environ['TF_CONFIG'])"


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(3) as network:
        yield network


class Job:
    """Two workers, on one host or on two, that wait until they are told to end."""

    def __init__(self, hosts: list[Host], directory: Path, *options: str, trusted: str = "") -> None:
        self._directory = directory
        script = directory / "train.py"
        script.write_text(f"import os, pathlib, sys\nif os.environ['RANK'] == '0':\n    {PORTS}\n{TRAINING}")
        launch = [sys.executable, "-m", "replicast", "run", "--run-dir", str(directory / "run"), *options]
        if len(hosts) == 1:
            launch += ["-n", "2"]
        else:
            launch += ["--hosts", ",".join(host.address for host in hosts)]
        environ = {**os.environ, "REPLICAST_TRUSTED_NETWORKS": trusted}
        self._log = (directory / "log").open("wb")
        self._launchers = [
            host.start(
                [
                    *launch,
                    *(["--node-rank", str(rank)] if len(hosts) > 1 else []),
                    str(script),
                    str(directory),
                ],
                env=environ,
                stdout=self._log,
            )
            for rank, host in enumerate(hosts)
        ]

    def said(self) -> str:
        return (self._directory / "log").read_text()

    def port(self) -> int:
        """The port of worker 0, once both workers have joined."""
        ends = time.monotonic() + SECS
        while not all((self._directory / f"joined-{rank}").exists() for rank in (0, 1)):
            assert all(launcher.poll() is None for launcher in self._launchers), self.said()
            assert time.monotonic() < ends, self.said()
            time.sleep(0.1)
        cluster = json.loads((self._directory / "ports").read_text())["cluster"]["worker"]
        return int(cluster[0].rpartition(":")[2])

    def end(self) -> None:
        (self._directory / "end").touch()
        try:
            assert [launcher.wait(SECS) for launcher in self._launchers] == [0] * len(self._launchers)
        finally:
            for launcher in self._launchers:
                launcher.kill()
            self._log.close()


def reaches(host: Host, address: str, port: int) -> bool:
    """Whether a process on a host can connect."""
    done = subprocess.run(
        host.namespaces.inside([sys.executable, "-c", CONNECT, address, str(port)]),
        capture_output=True,
        timeout=SECS,
    )
    return done.returncode == 0


def test_a_job_of_one_machine_is_reachable_from_outside_only_if_it_trusts_any(
    network: Network, tmp_path: Path
) -> None:
    first, second, _ = network.hosts
    job = Job([first], tmp_path, trusted="any")
    port = job.port()
    assert reaches(second, first.address, port)
    job.end()


def test_by_default_it_is_reachable_on_the_loopback_alone(network: Network, tmp_path: Path) -> None:
    first, second, _ = network.hosts
    job = Job([first], tmp_path)
    port = job.port()
    assert not reaches(second, first.address, port)
    assert not reaches(first, first.address, port)
    assert reaches(first, "127.0.0.1", port)
    assert "can run code" not in job.said()
    job.end()


def test_a_job_between_machines_is_reachable_by_the_trusted_ones_alone(
    network: Network, tmp_path: Path
) -> None:
    first, second, third = network.hosts
    job = Job([first, second], tmp_path, trusted=f"{first.address},{second.address}")
    port = job.port()
    assert reaches(second, first.address, port)
    assert not reaches(third, first.address, port)
    assert "can run code" not in job.said()
    job.end()


def test_a_job_between_machines_warns_when_nothing_limits_who_may_connect(
    network: Network, tmp_path: Path
) -> None:
    first, second, third = network.hosts
    job = Job([first, second], tmp_path)
    port = job.port()
    assert reaches(third, first.address, port)
    assert f"any process that can reach {first.address}" in job.said()
    job.end()
