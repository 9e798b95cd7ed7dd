"""The examples on TensorFlow's own strategy, with two workers of two devices each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import replicast
from replicast.testing.job import eventually
from tests.devices import HAPPENS
from tests.faults.test_updates import finish
from tests.workers.test_examples import EXAMPLES, digests_in_logs

REPOSITORY = EXAMPLES.parent
UPDATED = 8  # the step at which the update from outside is applied


def job(script: str, directory: Path, **plan: Any) -> subprocess.Popen[str]:
    """The job of an example, under the launcher."""
    directory.mkdir()
    command = [
        "-m",
        "replicast",
        "run",
        "-n",
        "2",
        "--run-dir",
        str(directory / "run"),
        "--max-restarts",
        "1",
    ]
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    plan |= {"hold": 2, "file": str(directory / "pushed")}
    return subprocess.Popen(
        [sys.executable, *command, str(REPOSITORY / "tests/devices.py"), "2", str(EXAMPLES / script)],
        cwd=REPOSITORY,
        env={**environ, "TF_CPP_MIN_LOG_LEVEL": "2", HAPPENS: json.dumps(plan)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def push(directory: Path, variable: str) -> Any:
    """Pushes an update from outside, while the workers wait for it."""
    run = directory / "run"
    eventually(lambda: (run / "run.json").exists())
    update = replicast.Update(note="from outside").assign(variable, np.full(10, 0.25, np.float32))
    pushed = replicast.connect(run).push(update, at_step=UPDATED)
    (directory / "pushed").touch()
    return pushed


@pytest.mark.parametrize(
    ("script", "variable", "bias"),
    [("stock_custom_loop.py", "hidden", "out_bias"), ("stock_tf_keras.py", "hidden/kernel", "out/bias")],
)
def test_an_update_a_flipped_bit_and_a_kill_end_with_the_same_bits(
    script: str, variable: str, bias: str, tmp_path: Path
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    running = job(script, whole), job(script, killed, variable=variable, flip=12, kill=40)
    push(whole, bias)
    push(killed, bias)
    ended = [finish(one) for one in running]
    assert [code for code, _ in ended] == [0, 0], ended
    (expected,) = set(digests_in_logs(whole / "run/logs/attempt-0", 2))
    assert digests_in_logs(killed / "run/logs/attempt-1", 2) == [expected, expected]
    run = replicast.connect(killed / "run")
    updates = {one.note: one for one in run.log().updates}
    assert updates["from outside"].step == UPDATED
    found = [
        text
        for text in (killed / "run/logs/attempt-0/worker-0.log").read_text().splitlines()
        if "differs" in text
    ]
    assert f"{variable}: worker 1 (CPU:1) differs from worker 0 (majority)" in "\n".join(found)
