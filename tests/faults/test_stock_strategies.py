"""A custom loop on TensorFlow's own strategy, with two workers of two devices each; tests/long has `fit`."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

import replicast
from replicast.core.entries import Stage
from tests import devices, jobs
from tests.threads import eventually
from tests.workers.test_examples import EXAMPLES, digests_in_logs

UPDATED = 8  # the step at which the update from outside is applied
DEVICES = Path(devices.__file__).read_text()


def job(example: str, directory: Path, **plan: Any) -> subprocess.Popen[str]:
    """The job of an example, whose workers wait for the update before their second boundary."""
    plan |= {"hold": 2, "file": str(directory / "pushed")}
    arguments = ["2", str(EXAMPLES / example)]
    settings = {devices.HAPPENS: json.dumps(plan)}
    return jobs.start(directory, DEVICES, "--max-restarts", "1", arguments=arguments, **settings)


def push(directory: Path, variable: str) -> None:
    """Pushes an update from outside, for which the workers wait."""
    run = directory / "run"
    eventually(lambda: any(run.glob("groups/*/run.json")))
    update = replicast.Update(note="from outside").assign(variable, np.full(10, 0.25, np.float32))
    pushed = replicast.connect(run).push(update, at_step=UPDATED)
    eventually(lambda: pushed.view().stage is Stage.SCHEDULED)
    (directory / "pushed").touch()


def assert_same_bits(example: str, variable: str, bias: str, directory: Path) -> None:
    """Runs the example twice with an update from outside, once with a flipped bit and a kill."""
    whole, killed = directory / "whole", directory / "killed"
    running = job(example, whole), job(example, killed, variable=variable, flip=12, kill=40)
    for directory in (whole, killed):
        push(directory, bias)
    ended = [jobs.finish(one) for one in running]
    assert [code for code, _ in ended] == [0, 0], ended
    (expected,) = set(digests_in_logs(whole / "run/logs/attempt-0", 2))
    assert digests_in_logs(killed / "run/logs/attempt-1", 2) == [expected, expected]
    updates = {one.note: one for one in replicast.connect(killed / "run").log()}
    assert (updates["from outside"].step, updates["from outside"].stage) == (UPDATED, "verified")
    assert f"{variable}: worker 1 (CPU:1) differs from worker 0 (majority)" in jobs.logs(killed)[0]


def test_an_update_a_flipped_bit_and_a_kill_end_with_the_same_bits(tmp_path: Path) -> None:
    assert_same_bits("stock_custom_loop.py", "hidden", "out_bias", tmp_path)
