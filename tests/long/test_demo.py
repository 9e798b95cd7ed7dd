"""`replicast demo` that is stopped, whose workers fail, or whose claims do not hold."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from rich.console import Console

from replicast.demo.job import DemoFailed
from replicast.demo.story import TRAIN, play
from tests.workers.test_demo import COMMAND, DEADLINE_SECS, environment


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
        shown, errors = demo.communicate(timeout=DEADLINE_SECS)
    assert demo.returncode == 130
    assert shown.endswith("Stopped.\n")
    assert errors == ""
    (output,) = tmp_path.glob("*/run.log")
    assert output.read_text().endswith("stopped by Ctrl-C; all workers have exited\n")


def test_when_the_workers_fail_the_demo_shows_why_and_fails(tmp_path: Path) -> None:
    (tmp_path / "keras.py").write_text("raise RuntimeError('broken on purpose')")
    demo = subprocess.run(
        [*COMMAND, str(tmp_path / "run")],
        env={
            **environment(),
            "PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
        },
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECS,
    )
    assert demo.returncode == 1
    assert "Failed: The job should end with exit code 0. Received: exit code 1." in demo.stderr
    assert "RuntimeError: broken on purpose" in demo.stderr
    assert "equal?" not in demo.stdout


def test_the_demo_fails_when_its_first_claim_does_not_hold(tmp_path: Path) -> None:
    tampered = tmp_path / "tampered.py"
    source = TRAIN.read_text()
    assert source.count("replicas.rank == 1") == 1
    tampered.write_text(source.replace("replicas.rank == 1", "True"))  # All workers assign: nothing differs.
    (tmp_path / "demo").mkdir()
    screen = io.StringIO()
    with pytest.raises(DemoFailed, match="The replicas should differ at step 100"):
        play(tmp_path / "demo", Console(file=screen, width=80, markup=False), tampered)
    assert "NO" not in screen.getvalue()
    assert "Part 2" not in screen.getvalue()
