"""Starts the examples and reads their output, for tests/long; and a script that cannot be started here."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from pathlib import Path

from tests.jobs import environ

EXAMPLES = Path(__file__).parents[2] / "examples"
SILENT_SECS = 120.0  # of a script on a busy machine that prints, logs and measures nothing
DIGEST = re.compile(r"^digest of the weights: ([0-9a-f]{32})$", re.MULTILINE)


def run(command: list[str], directory: Path, **settings: str) -> str:
    """Runs until the end, however long a busy machine takes, as long as there is progress."""
    with (directory / "printed.log").open("w+") as printed:
        process = subprocess.Popen(
            [sys.executable, *command], cwd=directory, env=environ(**settings), stdout=printed, stderr=printed
        )
        try:
            code, known = None, -1
            while code is None:
                known, before = progress(directory), known
                assert known != before, f"no progress for {SILENT_SECS:g} s"
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = process.wait(SILENT_SECS)
        finally:
            process.kill()
            process.wait()
        printed.seek(0)
        found = printed.read()
    assert code == 0, found
    return found


def progress(directory: Path) -> int:
    """How much is in the logs and the metrics."""
    return sum(path.stat().st_size for name in ("*.log", "metrics.jsonl") for path in directory.rglob(name))


def digests_of_workers(script: Path, workers: int, directory: Path) -> list[str]:
    """Runs a script on so many workers and returns the digest that each printed, from its log."""
    run(["-m", "replicast", "run", "-n", str(workers), "--run-dir", "run", str(script)], directory)
    return digests_in_logs(directory / "run" / "logs" / "attempt-0", workers)


def digests_in_logs(logs: Path, workers: int) -> list[str]:
    found = [DIGEST.findall((logs / f"worker-{rank}.log").read_text()) for rank in range(workers)]
    assert [len(digests) for digests in found] == [1] * workers
    return [digests[0] for digests in found]


UPDATED = re.compile(r"^update (\d+) at step (\d+), digests: (.+)$", re.MULTILINE)


def test_the_slurm_script_is_valid_shell() -> None:
    subprocess.run(["bash", "-n", str(EXAMPLES / "slurm.sh")], check=True)
