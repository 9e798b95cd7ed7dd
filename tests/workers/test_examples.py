"""An example as people start it, on two workers; tests/long has the others, and more ways."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
DEADLINE_SECS = 120.0
DIGEST = re.compile(r"^digest of the weights: ([0-9a-f]{32})$", re.MULTILINE)


def run(command: list[str], directory: Path, **settings: str) -> str:
    unwanted = ("TF_CONFIG", "FORCE_COLOR")
    environ = {name: value for name, value in os.environ.items() if name not in unwanted}
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=directory,
        env={**environ, "TF_CPP_MIN_LOG_LEVEL": "3", **settings},
        capture_output=True,
        text=True,
        timeout=DEADLINE_SECS,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


def digests_of_workers(script: Path, workers: int, directory: Path) -> list[str]:
    """Runs a script on so many workers and returns the digest that each printed, from its log."""
    run(["-m", "replicast.cli", "run", "-n", str(workers), "--run-dir", "run", str(script)], directory)
    return digests_in_logs(directory / "run" / "logs" / "attempt-0", workers)


def digests_in_logs(logs: Path, workers: int) -> list[str]:
    found = [DIGEST.findall((logs / f"worker-{rank}.log").read_text()) for rank in range(workers)]
    assert [len(digests) for digests in found] == [1] * workers
    return [digests[0] for digests in found]


UPDATED = re.compile(r"^update (\d+) at step (\d+), what it touched: (.+)$", re.MULTILINE)


def test_changes_that_two_workers_start_reach_both_and_leave_equal_weights(tmp_path: Path) -> None:
    assert len(set(digests_of_workers(EXAMPLES / "update.py", 2, tmp_path))) == 1
    logs = tmp_path / "run" / "logs" / "attempt-0"
    first, second = ((logs / f"worker-{rank}.log").read_text() for rank in range(2))
    assert "the bias has drifted by" not in first
    assert "worker 1: the bias has drifted by" in second
    assert UPDATED.findall(first) == UPDATED.findall(second)
    bias, learning_rate = UPDATED.findall(first)
    assert (bias[0], learning_rate[0]) == ("1", "2")
    for _, step, digests in (bias, learning_rate):
        assert int(step) > 58
        digest_0, digest_1 = re.fullmatch(r"worker 0: (\w+), worker 1: (\w+)", digests).groups()
        assert digest_0 == digest_1
    for log in (first, second):
        assert "learning rate: 0.0005" in log
    assert first.count("has the receipt of") == 1
    assert second.count("has the receipt of") == 2


def test_the_slurm_script_is_valid_shell() -> None:
    subprocess.run(["bash", "-n", str(EXAMPLES / "slurm.sh")], check=True)
