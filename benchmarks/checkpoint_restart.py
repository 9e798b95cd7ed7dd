"""The restart table: from `kill -9` to the next step of a job, and from its command to the first one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.groups import REPOSITORY
from benchmarks.question import Say
from benchmarks.results import Result, Role, Row, divided

WORKERS = 2
BUDGET_SECS = 150.0
"""After this time no further round starts."""
TIMEOUT_SECS = 180.0
FIRST_STEP, KILLED = "first-step", "killed"
"""The events in the job's notes."""


@dataclass(frozen=True, slots=True)
class JobTimes:
    """One job, in milliseconds: from the command to its first step, and from the kill to the next one."""

    cold: float | None
    restarted: float | None
    problem: str | None = None


def measure(rounds: int, say: Say) -> Result:
    """Starts jobs, one after the other. Each is killed once.

    Args:
        rounds: How many jobs, if time allows.
        say: Called with a progress message.
    """
    begun = time.monotonic()
    jobs: list[JobTimes] = []
    while len(jobs) < rounds and (not jobs or time.monotonic() - begun < BUDGET_SECS):
        say(f"checkpoint: restart, round {len(jobs) + 1} of {rounds}")
        jobs.append(_job())
        if jobs[-1].problem is not None:
            break
    return table(jobs)


def table(jobs: list[JobTimes]) -> Result:
    def row(name: str, field: str, role: Role = "part") -> Row:
        return Row(name, tuple(getattr(job, field) for job in jobs), jobs[-1].problem, role)

    restarted = row("kill -9 to the next step", "restarted", "ours")
    cold = row("cold start: command to the first step", "cold")
    return Result(
        name="restart",
        title=f"Restart of a job of {WORKERS} workers with a state of 100 MB",
        unit=f"ms, {len(jobs)} jobs",
        rows=(restarted, cold),
        ratios=(divided("kill to next step / cold start", restarted, cold, "at most", 1.2),),
        notes=(
            "A ratio is of two times of one job: the launcher detects the exit, ends the group, restarts it.",
            "The next step is the first one of the new group, including compilation as in a cold start.",
        ),
    )


def _job() -> JobTimes:
    with tempfile.TemporaryDirectory(prefix="replicast-bench-") as directory:
        notes = Path(directory) / "notes"
        arguments = ["-n", str(WORKERS), "--max-restarts", "1", "--run-dir", f"{directory}/run"]
        start = time.monotonic_ns()
        launcher = subprocess.Popen(
            [
                *(sys.executable, "-m", "replicast", "run", *arguments, "--tee", "none"),
                *("-m", "benchmarks.checkpoint_job", notes),
            ],
            cwd=REPOSITORY,
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        timer = threading.Timer(TIMEOUT_SECS, launcher.terminate)
        timer.start()
        said = "" if launcher.stderr is None else launcher.stderr.read()
        launcher.wait()
        timer.cancel()
        if launcher.returncode != 0:
            return JobTimes(None, None, f"exit code {launcher.returncode}: {said.strip()[-200:]}")
        return read_notes(notes.read_text(), start)


def read_notes(notes: str, start: int) -> JobTimes:
    """The figures of one job from its notes and the time at which its command was started."""
    noted = [line.split() for line in notes.splitlines()]
    events = [event for event, _ in noted]
    if events != [FIRST_STEP, KILLED, FIRST_STEP]:
        return JobTimes(None, None, f"unexpected events of the job: {events}")
    first, killed, following = (int(time_ns) for _, time_ns in noted)
    return JobTimes(cold=(first - start) / 1e6, restarted=(following - killed) / 1e6)


def _environment() -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if name != "TF_CONFIG"},
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "KERAS_BACKEND": "tensorflow",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
