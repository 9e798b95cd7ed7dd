"""Runs the job of `replicast bench` through the launcher, follows it, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from replicast.bench.figures import Figure, combine, parse
from replicast.bench.plan import MEASURES, Plan, check_room
from replicast.config import SECRETS, shared_memory_directory, without
from replicast.launcher import bootstrap
from replicast.transport.files import remove_leftovers

WARM_UP = -1
"""The number of the round that does not count."""
SILENCE_SECS = 300.0
"""How long the workers may take for their start, or for one measure."""
STOP_SECS = 45.0
"""Longer than the launcher waits for its workers to exit."""
LOOK_SECS = 0.1
_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "-1",  # Workers on one GPU would compete for its memory.
    "KERAS_BACKEND": "tensorflow",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}


class BenchFailed(Exception):  # noqa: N818 - reads as a sentence: raise BenchFailed
    """The job has failed; the message has its output."""


def figures_file(run_dir: Path, rank: int) -> Path:
    """Where a worker writes its times."""
    return run_dir / f"bench-{rank}.jsonl"


def measure(plan: Plan, progress: Callable[[int, int, str], None]) -> list[Figure]:
    """Starts the workers, and returns what they have measured. All files are removed, whatever happens."""
    check_room(plan, Path(tempfile.gettempdir()))
    with tempfile.TemporaryDirectory(prefix="replicast-bench-") as directory:
        try:
            return _run(plan, Path(directory), progress)
        finally:
            remove_leftovers(shared_memory_directory(os.environ))  # of workers that were killed


def _run(plan: Plan, directory: Path, progress: Callable[[int, int, str], None]) -> list[Figure]:
    run_dir, output = directory / "run", directory / "output"
    command = ["run", "-n", str(plan.workers), "--run-dir", str(run_dir), "--tee", "none"]
    job = ["-m", "replicast.bench.job", str(plan.nbytes), str(plan.rounds)]
    inherited = without(os.environ, "TF_CONFIG", *SECRETS)
    with output.open("wb") as file:
        launcher = subprocess.Popen(
            # bootstrap.py, so that the launcher ends with us; -P, so that no file here replaces a module
            [
                *(sys.executable, bootstrap.__file__, str(os.getpid())),
                *(sys.executable, "-P", "-m", "replicast.cli", *command, *job),
            ],
            env={**inherited, **_ENVIRONMENT},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            process_group=0,  # Ctrl-C is for us, and we stop the job.
        )
    try:
        problem = _follow(launcher, plan, run_dir, progress)
    finally:
        _stop(launcher)
    if problem is not None:
        said = output.read_text(encoding="utf-8", errors="replace").strip()
        raise BenchFailed(f"{problem}. The launcher said:\n{said}")
    times = [parse(figures_file(run_dir, rank).read_text()) for rank in range(plan.workers)]
    return combine(times, plan.rounds)


def _follow(
    launcher: subprocess.Popen[bytes],
    plan: Plan,
    run_dir: Path,
    progress: Callable[[int, int, str], None],
) -> str | None:
    """Waits for the end of the job; returns what went wrong, or None."""
    total = len(MEASURES) * (plan.rounds - WARM_UP)
    done, heard = 0, time.monotonic()
    while launcher.poll() is None:
        counts = [_count(figures_file(run_dir, rank)) for rank in range(plan.workers)]
        if min(counts) > done:
            done, heard = min(counts), time.monotonic()
        progress(done, total, "starting the workers" if done == 0 else _doing(done, plan.rounds))
        if time.monotonic() - heard > SILENCE_SECS:
            slow = counts.index(min(counts))
            return f"Worker {slow} has measured nothing for {SILENCE_SECS:.0f} s"
        time.sleep(LOOK_SECS)
    return None if launcher.returncode == 0 else f"The job ended with exit code {launcher.returncode}"


def _count(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _doing(done: int, rounds: int) -> str:
    finished, measures = divmod(done, len(MEASURES))
    number = min(finished + WARM_UP, rounds - 1)
    name = list(MEASURES.values())[measures].split(":")[0]
    return f"warming up: {name}" if number < 0 else f"round {number + 1} of {rounds}: {name}"


def _stop(launcher: subprocess.Popen[bytes]) -> None:
    """Ends the job if it still runs: the launcher stops its workers, and they end with it at the latest."""
    if launcher.poll() is None:
        launcher.send_signal(signal.SIGINT)
    try:
        launcher.wait(STOP_SECS)
    except subprocess.TimeoutExpired:
        launcher.kill()
        launcher.wait()
