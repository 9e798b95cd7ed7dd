"""The restart table: from `kill -9` to the next step of a job, and from its command to the first one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.fit import Say
from benchmarks.report import Ratio, Result, Row
from benchmarks.workers import REPOSITORY

WORKERS = 2
BUDGET_SECS = 75.0
"""No round but the first begins after this."""
PATIENCE_SECS = 180.0
FIRST_STEP, KILLED = "first-step", "killed"
"""The words of the job's notes."""


@dataclass(frozen=True, slots=True)
class Lives:
    """One job, in milliseconds: from the command to its first step, and from the kill to the next one."""

    cold: float | None
    restarted: float | None
    problem: str | None = None


def measure(rounds: int, say: Say) -> Result:
    """Starts jobs, one after the other. Each is killed once: it gives both figures.

    Args:
        rounds: How many jobs, if time allows.
        say: Told what is being done now.
    """
    begun = time.monotonic()
    jobs: list[Lives] = []
    while len(jobs) < rounds and (not jobs or time.monotonic() - begun < BUDGET_SECS):
        say(f"checkpoint: restart, job {len(jobs) + 1} of {rounds}")
        jobs.append(_job())
        if jobs[-1].problem is not None:
            break
    problem = jobs[-1].problem
    restarted = Row("kill -9 to the next step", tuple(job.restarted for job in jobs), problem)
    cold = Row("cold start: command to the first step", tuple(job.cold for job in jobs), problem)
    return Result(
        title=f"restart of a job of {WORKERS} workers with a state of 100 MB",
        unit=f"ms, {len(jobs)} jobs",
        rows=(restarted, cold),
        ratios=(Ratio.of("kill to next step / cold start", restarted, cold, "at most", 1.5),),
        notes=(
            "Both in the life of one job: the launcher notices, ends the group and starts it again.",
            "The next step is the first that the new group trains, compiled anew as in a cold start.",
        ),
    )


def _job() -> Lives:
    with tempfile.TemporaryDirectory(prefix="replicast-bench-") as directory:
        notes = Path(directory) / "notes"
        arguments = [
            "-n",
            str(WORKERS),
            "--max-restarts",
            "1",
            "--run-dir",
            f"{directory}/run",
            "--tee",
            "none",
        ]
        start = time.monotonic_ns()
        try:
            ended = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "replicast.cli",
                    "run",
                    *arguments,
                    "-m",
                    "benchmarks.checkpoint_job",
                    notes,
                ],
                cwd=REPOSITORY,
                env=_environment(),
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PATIENCE_SECS,
            )
        except subprocess.TimeoutExpired:
            return Lives(None, None, f"did not end within {PATIENCE_SECS:.0f} s")
        if ended.returncode != 0:
            return Lives(None, None, f"exit code {ended.returncode}: {ended.stderr.strip()[-200:]}")
        return read_notes(notes.read_text(), start)


def read_notes(notes: str, start: int) -> Lives:
    """The figures of one job from its notes and the time at which its command was started."""
    words = [line.split() for line in notes.splitlines()]
    if [word for word, _ in words] != [FIRST_STEP, KILLED, FIRST_STEP]:
        return Lives(None, None, f"the job did not go as planned: {[word for word, _ in words]}")
    first, killed, following = (int(moment) for _, moment in words)
    return Lives(cold=(first - start) / 1e6, restarted=(following - killed) / 1e6)


def _environment() -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if name != "TF_CONFIG"},
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "KERAS_BACKEND": "tensorflow",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
