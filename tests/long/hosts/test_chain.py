"""The chain of hosts over real links: lossy, cut for a while, and with hosts that die or freeze."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hosts.network import Network, missing
from tests.hosts.transfer import TIMEOUT_SECS, FileCoordination

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
HOSTS = 3
START_SECS = 60.0


class Job:
    """One worker on each host, which wait for `go`."""

    def __init__(self, network: Network, directory: Path) -> None:
        self.network = network
        self.keys = FileCoordination(directory)
        cluster = {"worker": [f"{host.address}:2222" for host in network.hosts]}
        self.workers: list[subprocess.Popen[bytes]] = []
        for rank, host in enumerate(network.hosts):
            config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})
            command = [sys.executable, "-m", "tests.hosts.transfer", str(rank), str(HOSTS), str(directory)]
            environ = {"TF_CONFIG": config, "PYTHONPATH": ":".join(sys.path)}
            self.workers.append(host.start(command, env=environ))

    def go(self) -> None:
        for rank in range(HOSTS):
            assert self.keys.get(f"ready/{rank}", START_SECS) is not None, f"worker {rank} did not start"
        self.network.shape("200mbit")  # the bytes take a second, and a fault comes in the middle of them
        self.keys.put("go", "")

    def until_some_arrived_at(self, rank: int) -> None:
        assert self.keys.get(f"arrived/{rank}", START_SECS) is not None

    def outcome(self, rank: int) -> dict[str, Any]:
        said = self.keys.get(f"done/{rank}", START_SECS)
        assert said is not None, f"worker {rank} has not ended its transfer"
        outcome: dict[str, Any] = json.loads(said)
        assert outcome["kind"] == "ChainTransport"
        return outcome

    def end(self) -> None:
        self.keys.put("end", "")
        for worker in self.workers:
            try:
                worker.wait(20)
            finally:
                worker.kill()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Network(HOSTS) as network:
        job = Job(network, tmp_path)
        yield job
        job.end()


def test_bytes_arrive_over_links_that_lose_packets(job: Job) -> None:
    job.network.lose(2)
    job.go()
    assert [job.outcome(rank)["intact"] for rank in range(HOSTS)] == [True] * HOSTS


def test_a_link_that_is_cut_for_longer_than_a_silence_is_used_again_and_all_bytes_arrive(job: Job) -> None:
    job.go()
    job.until_some_arrived_at(2)
    job.network.cut(job.network.hosts[1])
    time.sleep(3.0)  # the fault lasts three silences
    job.network.join(job.network.hosts[1])
    assert [job.outcome(rank)["intact"] for rank in range(HOSTS)] == [True] * HOSTS


def test_a_host_that_is_killed_is_named_by_the_hosts_after_it(job: Job) -> None:
    job.go()
    job.until_some_arrived_at(2)
    began = time.monotonic()
    job.workers[1].send_signal(signal.SIGKILL)
    assert "from worker 1" in job.outcome(2)["refused"]
    assert time.monotonic() - began < TIMEOUT_SECS + 10.0
    assert job.outcome(0)["intact"]


def test_a_frozen_source_is_named_by_all_other_hosts(job: Job) -> None:
    job.go()
    job.until_some_arrived_at(2)
    job.workers[0].send_signal(signal.SIGSTOP)
    refused = [job.outcome(rank)["refused"] for rank in (1, 2)]
    job.workers[0].send_signal(signal.SIGCONT)
    assert all("from worker 0" in one for one in refused), refused
