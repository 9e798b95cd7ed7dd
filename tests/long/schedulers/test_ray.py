"""examples/ray_train.py on a real Ray: a worker is killed, another is told to end. `make test-ray`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("ray") is None, reason="needs Ray in an environment of its own: make test-ray"
)

ROOT = Path(__file__).parents[3]
EXAMPLE = str(ROOT / "examples/ray_train.py")
EPOCHS, STEPS_PER_EPOCH, SECS = 40, 29, 280.0
ENVIRON = {
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "120",  # TensorFlow is imported several times, on few cores
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]),
}


class RayJob:
    """The example as a process, and the run directory that it writes."""

    def __init__(self, directory: Path, epochs: int) -> None:
        self.run_dir = directory / "run"
        self.log = directory / "log"
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, EXAMPLE, f"--epochs={epochs}", f"--run-dir={self.run_dir}"],
                cwd=directory,
                env={**os.environ, **ENVIRON},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def note(self, rank: int) -> dict[str, Any]:
        try:
            found: dict[str, Any] = json.loads((self.run_dir / "workers" / f"{rank}.json").read_text())
        except (OSError, ValueError):
            return {"attempt": -1, "step": 0}
        return found

    def wait(self, is_so: Callable[[], bool], what: str) -> None:
        ends = time.monotonic() + SECS
        while not is_so():
            assert self.process.poll() is None, f"ended before {what}:\n{self.said()[-5000:]}"
            assert time.monotonic() < ends, f"no {what} after {SECS:.0f} s:\n{self.said()[-5000:]}"
            time.sleep(0.1)

    def trains(self, attempt: int, step: int) -> Callable[[], bool]:
        return lambda: self.note(1)["attempt"] == attempt and self.note(1)["step"] >= step

    def finish(self) -> str:
        assert self.process.wait(SECS) == 0, self.said()[-5000:]
        return re.findall(r"digest of the weights: (\w+)", self.said())[-1]


def test_a_killed_and_a_terminated_worker_cost_no_step_and_the_bits_are_those_of_an_undisturbed_run(
    tmp_path: Path,
) -> None:
    job = RayJob(tmp_path, EPOCHS)
    try:
        job.wait(job.trains(0, 60), "step 60 in attempt 0")
        os.kill(job.note(1)["pid"], signal.SIGKILL)
        job.wait(job.trains(1, 100), "step 100 in attempt 1")
        os.kill(job.note(0)["pid"], signal.SIGTERM)
        job.wait(lambda: "was told to exit: the state is saved" in job.said(), "the last checkpoint")
        digest = job.finish()
    finally:
        job.process.kill()
    # Ray shows what workers print, sometimes twice.
    first, killed, told = sorted({int(step) for step in re.findall(r"resumes after step (\d+)", job.said())})
    assert first == 0
    assert 20 <= killed < 100, "the last checkpoint before the kill"
    assert told >= 100, "the checkpoint that SIGTERM made"
    assert f"trained {EPOCHS * STEPS_PER_EPOCH} steps" in job.said()
    status = subprocess.run(
        [sys.executable, "-m", "replicast", "status", "--json", str(job.run_dir)],
        capture_output=True,
        text=True,
        env={**os.environ, **ENVIRON},
        timeout=SECS,
        check=True,
    )
    assert {worker["attempt"] for worker in json.loads(status.stdout)["workers"]} == {2}

    (tmp_path / "again").mkdir()
    undisturbed = RayJob(tmp_path / "again", EPOCHS)
    try:
        assert undisturbed.finish() == digest
    finally:
        undisturbed.process.kill()
