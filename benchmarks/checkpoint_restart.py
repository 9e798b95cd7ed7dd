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
TRAINS, READY = "replicast: 2 workers, attempt 0", "replicast: standby: 2 processes wait"
"""The lines of the launcher after which a worker may be killed: without standby processes, and with them."""


@dataclass(frozen=True, slots=True)
class JobTimes:
    """One job, in milliseconds: from the command to its first step, and from the kill to the next one."""

    cold: float | None
    restarted: float | None
    problem: str | None = None


def measure(rounds: int, say: Say) -> Result:
    """Starts jobs, one after the other, by turns without and with standby processes. Each is killed once.

    Args:
        rounds: How many jobs of each kind, if time allows.
        say: Called with a progress message.
    """
    begun = time.monotonic()
    plain: list[JobTimes] = []
    standby: list[JobTimes] = []
    while len(plain) < rounds and (not plain or time.monotonic() - begun < BUDGET_SECS):
        say(f"checkpoint: restart, round {len(plain) + 1} of {rounds}")
        plain.append(_job())
        standby.append(_job("--standby"))
        if plain[-1].problem is not None or standby[-1].problem is not None:
            break
    return table(plain, standby)


def table(plain: list[JobTimes], standby: list[JobTimes]) -> Result:
    """The table of jobs without and with standby processes.

    Args:
        plain: The jobs without.
        standby: The jobs with them, as many.
    """

    def row(name: str, jobs: list[JobTimes], field: str, role: Role = "part") -> Row:
        return Row(name, tuple(getattr(job, field) for job in jobs), jobs[-1].problem, role)

    restarted = row("kill -9 to the next step", plain, "restarted", "ours")
    cold = row("cold start: command to the first step", plain, "cold")
    called = row("kill -9 to the next step, --standby", standby, "restarted", "ours")
    cold_too = row("cold start: command to the first step, --standby", standby, "cold")
    return Result(
        name="restart",
        title=f"Restart of a job of {WORKERS} workers with a state of 100 MB",
        unit=f"ms, {len(plain)} jobs of each kind, by turns",
        rows=(restarted, cold, called, cold_too),
        ratios=(
            divided("kill to next step / cold start", restarted, cold, "at most", 1.2),
            divided("kill to next step / cold start, --standby", called, cold_too, "at most", 0.5),
        ),
        notes=(
            "A ratio is of two times of one job: the launcher detects the exit, ends the group, restarts it.",
            "The next step is the first one of the new group, including compilation as in a cold start.",
            "With --standby, the kill comes when the standby processes wait.",
        ),
    )


def _job(*options: str) -> JobTimes:
    with tempfile.TemporaryDirectory(prefix="replicast-bench-") as directory:
        notes = Path(directory) / "notes"
        arguments = ["-n", str(WORKERS), "--max-restarts", "1", "--run-dir", f"{directory}/run"]
        start = time.monotonic_ns()
        launcher = subprocess.Popen(
            [
                *(sys.executable, "-m", "replicast", "run", *arguments, "--tee", "none", *options),
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
        said = ""
        with launcher:
            for line in launcher.stderr or ():
                said += line
                if line.startswith(READY if options else TRAINS):
                    notes.with_suffix(".go").touch()
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
