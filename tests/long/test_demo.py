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
ROW = re.compile(r"^ (\S.*?) +([0-9a-f]{8}) +([0-9a-f]{8}) +(yes|NO) *$", re.MULTILINE)


def environment() -> dict[str, str]:
    unwanted = ("TF_CONFIG", "FORCE_COLOR", "COLUMNS", "NO_COLOR")
    return {name: value for name, value in os.environ.items() if name not in unwanted}


def test_the_demo_shows_replicas_that_differ_that_follow_and_that_survive_a_kill(tmp_path: Path) -> None:
    demo = subprocess.run(
        [*COMMAND, str(tmp_path)], env=environment(), capture_output=True, text=True, timeout=DEADLINE_SECS
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert demo.stderr == ""
    rows = [row.groups() for row in ROW.finditer(demo.stdout)]
    assert [(moment, equal) for moment, _, _, equal in rows] == [
        *[("step 0", "yes"), ("step 50", "yes"), ("step 100", "NO"), ("step 150", "NO"), ("step 200", "NO")],
        *[("step 50", "yes"), ("step 100", "yes"), ("step 300", "yes"), ("step 600", "yes")],
        *[("restored, step 225", "yes"), ("recovered, step 600", "yes"), ("part 2, step 600", "yes")],
    ]
    for _, digest_0, digest_1, equal in rows:
        assert (digest_0 == digest_1) == (equal == "yes")
    assigned, proposed, recovered, undisturbed = rows[2], rows[6], rows[10], rows[11]
    assert proposed[1] == assigned[2] != assigned[1]
    assert recovered[1] == undisturbed[1] == rows[8][1]

    words = " ".join(demo.stdout.split())
    assert "classifier/hidden/kernel: worker 1 differs from worker 0" in words
    assert re.findall(r"\d +(\d+) +verified", demo.stdout) == ["100", "300"]
    assert "14 variables are equal on 2 workers" in words
    assert re.search(r"\$ kill -9 \d+ ", words)
    assert "the journal applied the updates after it again, each at its step" in words
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
