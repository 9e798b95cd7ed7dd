"""Jobs under `replicast run` in a directory of their own: started, ended, and what is left of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from replicast import faults

DEADLINE_SECS = 280.0
"""Far more than some attempts take, also on a busy machine."""


def environ(**settings: str) -> dict[str, str]:
    """That of a job which belongs to no other, and whose output is read by a test."""
    unwanted = ("TF_CONFIG", "FORCE_COLOR")
    kept = {name: value for name, value in os.environ.items() if name not in unwanted}
    return {**kept, "TF_CPP_MIN_LOG_LEVEL": "2", **settings}


def start(
    directory: Path,
    script: str,
    *options: str,
    arguments: Sequence[str] = (),
    workers: int = 2,
    **settings: str,
) -> subprocess.Popen[str]:
    """A job with the run directory `run`, and with shared memory of its own in `shm`."""
    (directory / "shm").mkdir(parents=True, exist_ok=True)
    (directory / "train.py").write_text(script)
    launcher = [sys.executable, "-m", "replicast", "run", "-n", str(workers), "--run-dir", "run", *options]
    return subprocess.Popen(
        [*launcher, "train.py", *arguments],
        cwd=directory,
        env=environ(**{"REPLICAST_SHM_DIR": str(directory / "shm"), **settings}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(job: subprocess.Popen[str]) -> tuple[int, str]:
    """Its exit code, and all that it said."""
    with job:
        try:
            out, err = job.communicate(timeout=DEADLINE_SECS)
        except BaseException:
            job.terminate()
            raise
    return job.returncode, out + err


def logs(directory: Path, attempt: int = 0) -> list[str]:
    """What each worker has said in an attempt, by rank."""
    found = sorted((directory / "run" / "logs" / f"attempt-{attempt}").glob("worker-*.log"))
    return [log.read_text() for log in found]


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie that nobody has reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def read_fired(run_dir: Path) -> list[dict[str, Any]]:
    """Returns the faults that fired in a run, in order: their fields, `pid` and `time`."""
    path = run_dir / faults.FIRED
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
