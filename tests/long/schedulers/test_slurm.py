"""examples/slurm.sh on a real Slurm of two machines: preemption, requeue, cancelling. `make test-slurm`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hosts import network as hosts
from tests.hosts.network import Network
from tests.long.schedulers import slurm
from tests.long.schedulers.slurm import Slurm

pytestmark = pytest.mark.skipif(
    bool(hosts.missing() or slurm.missing()), reason=hosts.missing() or slurm.missing() or "-"
)

ROOT = Path(__file__).parents[3]
TRAINING = Path(__file__).with_name("slow_training.py")
STEPS, SECS = 60, 120.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    with Network(2) as network, Slurm(tmp_path_factory.mktemp("slurm"), network) as slurm:
        command = slurm.directory / "bin" / "replicast"
        command.parent.mkdir()
        command.write_text(f'#!/bin/sh\nexec {sys.executable} -m replicast "$@"\n')
        command.chmod(0o755)
        slurm.environ["PATH"] = f"{command.parent}:{slurm.environ['PATH']}"
        yield slurm


def submit(cluster: Slurm, directory: Path, pause_secs: float, *more: str) -> str:
    """The id of a job with one worker on each machine."""
    script = [str(ROOT / "examples/slurm.sh"), str(TRAINING), str(STEPS), str(pause_secs)]
    options = ["--parsable", f"--chdir={directory}", "--cpus-per-task=1", f"--output={directory}/output"]
    return cluster.run("sbatch", *options, *more, *script, WORKERS="1")


def output(directory: Path) -> str:
    path = directory / "output"
    return path.read_text(errors="replace") if path.exists() else ""


def steps_done(cluster: Slurm, directory: Path, job: str) -> int:
    """The step that worker 0 notes."""
    note = directory / "runs" / job / "workers" / "0.json"
    found = re.search(r'"step":\s*(\d+)', note.read_text()) if note.exists() else None
    return int(found[1]) if found else 0


def ended(cluster: Slurm, job: str, *states: str) -> bool:
    return cluster.field(job, "JobState") in states


def test_a_preempted_job_saves_requeues_itself_and_ends_with_the_bits_of_an_undisturbed_one(
    cluster: Slurm, tmp_path: Path
) -> None:
    disturbed, undisturbed = tmp_path / "disturbed", tmp_path / "undisturbed"
    disturbed.mkdir()
    undisturbed.mkdir()
    job = submit(cluster, disturbed, 0.5)
    cluster.wait(lambda: steps_done(cluster, disturbed, job) >= 5, "step 5", SECS)
    high = ["--parsable", "--partition=high", "--nodes=2", "--exclusive", "--output=/dev/null"]
    cluster.run("sbatch", *high, "--wrap=sleep 3")
    cluster.wait(lambda: cluster.field(job, "Restarts") == "1", "requeue", SECS)
    cluster.wait(lambda: ended(cluster, job, "COMPLETED", "FAILED"), "end", SECS)
    said = output(disturbed)
    assert cluster.field(job, "JobState") == "COMPLETED", said
    resumed = re.findall(r"resumes after step (\w+)", said)
    assert resumed[0] == "None"
    assert int(resumed[-1]) >= 5, said
    assert f"trained {STEPS} steps" in said

    other = submit(cluster, undisturbed, 0.0)
    cluster.wait(lambda: ended(cluster, other, "COMPLETED", "FAILED"), "end", SECS)
    assert re.findall(r"digest (\w+)", output(undisturbed))[0] == re.findall(r"digest (\w+)", said)[-1]


def test_a_cancelled_job_saves_and_is_not_requeued(cluster: Slurm, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, 0.5)
    cluster.wait(lambda: steps_done(cluster, tmp_path, job) >= 3, "step 3", SECS)
    cluster.run("scancel", job)
    cluster.wait(lambda: ended(cluster, job, "CANCELLED"), "end of the cancelled job", SECS)
    checkpoints = tmp_path / "runs" / job / "checkpoints"
    cluster.wait(lambda: any(checkpoints.glob("*/manifest.json")), "last checkpoint", SECS)
    assert cluster.field(job, "Restarts") == "0"


def test_a_job_that_reaches_its_time_limit_saves_and_requeues_itself(cluster: Slurm, tmp_path: Path) -> None:
    job = submit(cluster, tmp_path, 5.0, "--time=2", "--signal=TERM@75")  # Slurm counts in minutes
    cluster.wait(lambda: cluster.field(job, "Restarts") == "1", "requeue", SECS)
    checkpoints = tmp_path / "runs" / job / "checkpoints"
    assert any(checkpoints.glob("*/manifest.json")), output(tmp_path)
    cluster.run("scancel", job)


def test_a_job_whose_script_fails_is_failed_and_not_requeued(cluster: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text("raise ValueError('broken')\n")
    options = ["--parsable", f"--chdir={tmp_path}", "--cpus-per-task=1", f"--output={tmp_path}/output"]
    job = cluster.run("sbatch", *options, str(ROOT / "examples/slurm.sh"), str(script), WORKERS="1")
    cluster.wait(lambda: ended(cluster, job, "FAILED"), "failure", SECS)
    assert cluster.field(job, "Restarts") == "0"
    assert "ValueError: broken" in output(tmp_path)


def test_the_example_is_valid_bash() -> None:
    subprocess.run(["bash", "-n", str(ROOT / "examples/slurm.sh")], check=True, timeout=10)
