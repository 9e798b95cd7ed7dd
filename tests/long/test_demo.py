"""`replicast demo` that is interrupted, or whose workers fail."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

from tests.workers.test_demo import COMMAND, DEADLINE_SECS, environment


def test_an_interrupt_ends_the_demo_and_its_workers_without_a_traceback(tmp_path: Path) -> None:
    with subprocess.Popen(
        [*COMMAND, str(tmp_path)],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as demo:
        log = tmp_path / "logs" / "attempt-0" / "worker-1.log"
        end = time.monotonic() + DEADLINE_SECS
        while not log.exists() and time.monotonic() < end:
            time.sleep(0.05)
        demo.send_signal(signal.SIGINT)
        shown, errors = demo.communicate(timeout=DEADLINE_SECS)
    assert demo.returncode == 130
    assert shown.endswith("stopped by Ctrl-C; all workers have exited\n")
    assert errors == ""


def test_when_the_workers_fail_the_demo_shows_why_and_fails(tmp_path: Path) -> None:
    (tmp_path / "keras.py").write_text("raise RuntimeError('broken on purpose')")
    demo = subprocess.run(
        [*COMMAND, str(tmp_path / "run")],
        env={**environment(), "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECS,
    )
    assert demo.returncode == 1
    assert "RuntimeError: broken on purpose" in demo.stderr
    assert "Not as it should be: the workers ended with exit code 1." in demo.stdout
    assert "equal?" not in demo.stdout
