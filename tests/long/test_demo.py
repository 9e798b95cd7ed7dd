"""`replicast demo` as users start it: with real workers, and a check of each claim; and how it fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

DEADLINE_SECS = 240.0
COMMAND = [sys.executable, "-m", "replicast", "demo", "--run-dir"]


def environment() -> dict[str, str]:
    unwanted = ("TF_CONFIG", "FORCE_COLOR", "COLUMNS", "NO_COLOR")
    return {name: value for name, value in os.environ.items() if name not in unwanted}


def test_the_demo_shows_replicas_that_differ_that_follow_and_that_survive_a_kill(tmp_path: Path) -> None:
    demo = subprocess.run(
        [*COMMAND, str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=DEADLINE_SECS
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert demo.stderr == ""
    words = " ".join(demo.stdout.split())
    assert "classifier/hidden/kernel: worker 1 differs from worker 0" in words
    assert re.findall(r"\d +(\d+) +verified", demo.stdout) == ["100", "250"]
    assert "14 variables are equal on 2 workers" in words
    assert re.search(r"\$ kill -9 \d+ ", words)
    assert "All 14 variables are equal, bit for bit" in words
    assert "All of this happened" in words


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_demo_and_its_workers_without_a_traceback(
    signum: signal.Signals, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [*COMMAND, str(tmp_path)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as demo:
        end = time.monotonic() + DEADLINE_SECS
        while not list(tmp_path.glob("*/assign/logs/attempt-0/worker-1.log")) and time.monotonic() < end:
            time.sleep(0.05)
        demo.send_signal(signum)
        _, errors = demo.communicate(timeout=DEADLINE_SECS)
    assert (demo.returncode, errors) == (130, "Stopped.\n")
    (output,) = tmp_path.glob("*/run.log")
    assert output.read_text().endswith("stopped by Ctrl-C; all workers have exited\n")
