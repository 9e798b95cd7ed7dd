"""Jobs of two launchers that are disturbed, with TensorFlow: they end with the bits of an undisturbed one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replicast.storage.journal import committed_updates
from replicast.storage.run_files import ENDED
from tests.hosts.launchers import Launched, Machines, eventually, machines, noted_pid
from tests.hosts.network import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "namespaces")
SCRIPT = Path(__file__).parents[2] / "hosts" / "launched.py"
SECS = 240.0


class Job:
    """Two machines with a launcher each, and `-n` workers on each machine."""

    def __init__(self, two: Machines, workers: int, *more: str, run: str = "run") -> None:
        self.two, self.workers = two, workers
        restarts = ("--max-restarts", "2", *more)
        self.options = ("-n", str(workers), *restarts, "--run-dir", run, str(SCRIPT), ".")
        self.launched: list[Launched] = []

    def start(self) -> None:
        self.launched = self.two.launch_all(*self.options)

    def start_again(self, node: int) -> None:
        listed = ",".join(host.address for host in self.two.hosts)
        self.launched[node] = self.two.launch(node, "--hosts", listed, *self.options)

    def hold(self, attempt: int) -> None:
        (self.two.directory / f"hold-{attempt}").touch()

    def release(self, attempt: int) -> None:
        (self.two.directory / f"hold-{attempt}").unlink()

    def pids(self, attempt: int) -> list[int]:
        """The workers, once all are at step 50."""
        return [
            noted_pid(self.two.directory / f"pid-{attempt}-{rank}", SECS) for rank in range(2 * self.workers)
        ]

    def codes(self) -> list[int]:
        return [one.finish(SECS) for one in self.launched]

    def finals(self) -> list[str]:
        ranks = range(2 * self.workers)
        return [(self.two.directory / f"final-{rank}").read_text() for rank in ranks]

    def bits(self) -> str:
        """The digest of the final state, which all workers must have."""
        (bits,) = {final.rpartition(": ")[2] for final in self.finals()}
        notes = [update.note for update in committed_updates(self.two.directory / "run")]
        assert notes == ["now", "replayed", "later"], "each once"
        return bits


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Machines]:
    with machines(tmp_path) as made:
        yield made


@pytest.fixture(scope="module", params=[1, 2])
def undisturbed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, str]:
    """The number of workers per host, and the bits of a job that nothing disturbs."""
    with machines(tmp_path_factory.mktemp("undisturbed")) as made:
        job = Job(made, request.param)
        job.start()
        assert job.codes() == [0, 0], job.launched[0].text
        return request.param, job.bits()


@pytest.mark.parametrize("host", [0, 1])
def test_a_worker_that_is_killed(two: Machines, undisturbed: tuple[int, str], host: int) -> None:
    workers, bits = undisturbed
    job = Job(two, workers)
    job.hold(0)
    job.start()
    victim = host * workers
    os.kill(job.pids(0)[victim], signal.SIGKILL)
    assert job.codes() == [0, 0]
    for launched in job.launched:
        where = "" if launched.host is two.hosts[host] else f" on {two.hosts[host].address}"
        assert f"restart 1 of 2 because worker {victim}{where} failed (killed by SIGKILL)" in launched.text
        assert "restart 2 of 2" not in launched.text
    assert job.bits() == bits
    assert job.finals()[0].startswith("from 40 to 120 in attempt 1")


@pytest.mark.parametrize("host", [0, 1])
def test_a_launcher_that_is_killed_and_started_again(
    two: Machines, undisturbed: tuple[int, str], host: int
) -> None:
    workers, bits = undisturbed
    job = Job(two, workers)
    job.hold(0)
    job.start()
    job.pids(0)
    job.launched[host].send(signal.SIGKILL)
    job.launched[1 - host].wait_for(f"host {two.hosts[host].address} was lost")
    job.start_again(host)
    assert job.codes() == [0, 0]
    assert job.bits() == bits


def test_a_link_that_is_cut_and_mended(two: Machines, undisturbed: tuple[int, str]) -> None:
    workers, bits = undisturbed
    job = Job(two, workers)
    job.hold(0)
    job.start()
    job.pids(0)
    two.network.cut(two.hosts[1])
    job.launched[0].wait_for("restart 1 of 2 because host 10.77.0.2 was lost; 1 left after it")
    job.launched[1].wait_for("restart 1 of 2 because host 10.77.0.1 was lost")
    two.network.join(two.hosts[1])
    assert job.codes() == [0, 0]
    assert job.bits() == bits


@pytest.mark.parametrize("host", [0, 1])
def test_a_launcher_that_is_told_to_stop(two: Machines, undisturbed: tuple[int, str], host: int) -> None:
    workers, bits = undisturbed
    job = Job(two, workers)
    job.hold(0)
    job.start()
    job.pids(0)
    job.launched[host].send(signal.SIGTERM)
    job.release(0)
    assert job.codes() == [143, 143]
    job.start()
    assert job.codes() == [0, 0]
    assert job.bits() == bits
    assert not job.finals()[0].startswith("from 40 "), "the stop was saved, at a later step"


def test_status_on_the_first_host_shows_all_workers_also_where_the_run_directory_is_not_shared(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    with machines(tmp_path, hidden={1: [runs]}) as two:
        job = Job(two, 1, "--tee", "all", run="runs/first")

        def status() -> list[tuple[Any, ...]]:
            """The host, attempt, step of each worker, and what it waits for."""
            command = [sys.executable, "-m", "replicast", "status", "runs/first", "--json"]
            inside = two.hosts[0].namespaces.inside(command)
            shown = json.loads(subprocess.run(inside, capture_output=True, timeout=SECS, check=True).stdout)
            names = ("host", "attempt", "step", "waiting_for")
            return [tuple(one[name] for name in names) for one in shown["workers"]]

        for attempt in (0, 1):
            job.hold(attempt)
        job.start()
        pids = job.pids(0)
        seen = [("host0", 0, 50, ""), ("host1", 0, 50, "")]
        eventually(lambda: status() == seen, "not all workers are seen", SECS)
        os.kill(pids[1], signal.SIGKILL)
        job.pids(1)
        seen = [(host, 1, step, said) for host, _, step, said in seen]
        eventually(lambda: status() == seen, "not all workers are seen after a restart", SECS)
        job.release(1)
        assert job.codes() == [0, 0]
        assert status() == [("host0", 1, 120, ENDED), ("host1", 1, 120, ENDED)]
        there = two.hosts[1].namespaces.run("find", str(runs), "-type", "f", "-printf", "%P\n").split()
        others = [path for path in there if not path.startswith("first/logs/")]
        made = ["launcher-1.lock", "workers/1.json"]
        assert sorted(others) == [f"first/{name}" for name in made], "for its launcher, and nothing else"
        assert "finished after 1 restart: worker 1 of 2, step 120" in job.launched[1].text
