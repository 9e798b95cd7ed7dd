"""One job of `train.py` under the launcher, with a fault plan, and its outcome."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from replicast import Update
from replicast.faults import Action, Fault, read_fired
from replicast.storage import inbox
from replicast.storage.updates import committed_updates

PUSHED = "pushed"
TRAIN = Path(__file__).with_name("train.py")
ROOT = TRAIN.parents[2]
LOOK_SECS = 0.1
END_SECS = 30.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended.

    Attributes:
        code: The launcher's exit code; None when it was given up after too long a time.
        finals: What each worker said at the end: its step and the digest of its state.
        updates: Each committed update's id and step; the order of the journal depends on who was quicker.
        verified: The ids of those that have a receipt with equal digests.
        twice: Ids that are in the journal more than once.
        fired: The faults that fired, as they were written down.
        lives: How many groups of workers there were.
        left_behind: What is still in shared memory.
        said: What the launcher printed.
    """

    code: int | None
    finals: tuple[str, ...]
    updates: frozenset[tuple[str, int]]
    verified: frozenset[str]
    twice: tuple[str, ...]
    fired: tuple[dict[str, Any], ...]
    lives: int
    left_behind: tuple[str, ...]
    said: str = field(repr=False)


def run_job(
    directory: Path,
    plan: Sequence[Fault] = (),
    *,
    workers: int,
    max_restarts: int = 0,
    give_up_secs: float,
    continue_after: Callable[[dict[str, Any]], float] = lambda fired: 3600.0,
) -> Outcome:
    """Runs a job to its end. An update waits in its inbox from the beginning.

    Args:
        directory: Empty; becomes the run directory.
        plan: What fails, and where.
        workers: How many.
        max_restarts: How often the group may be started again.
        give_up_secs: A job that lasts longer hangs, and is ended.
        continue_after: How many seconds a worker that a fault has stopped stays so.
    """
    shared = directory / "shm"
    shared.mkdir(parents=True)
    pushed = Update(id=PUSHED, note="waits in the inbox").add("dense/bias", np.ones(4, "float32"))
    inbox.submit(directory, pushed, at_step=30)
    options = ["-n", str(workers), "--run-dir", str(directory), "--max-restarts", str(max_restarts)]
    command = [sys.executable, "-m", "replicast.cli", "run", *options, str(TRAIN)]
    environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    environ |= {
        "TF_CPP_MIN_LOG_LEVEL": "2",
        "REPLICAST_SHM_DIR": str(shared),
        "REPLICAST_FAULTS": json.dumps([fault.to_json() for fault in plan]),
    }
    said = directory / "said.txt"
    with said.open("w") as output:
        # In a session of its own: Ctrl-C is for us, and we pass it on.
        job = subprocess.Popen(
            command, cwd=ROOT, env=environ, stdout=output, stderr=output, start_new_session=True
        )
        try:
            code = _watch(job, directory, give_up_secs, continue_after)
        finally:
            _end(job)
    return _outcome(directory, code, said.read_text(errors="replace"))


def _watch(
    job: subprocess.Popen[bytes],
    directory: Path,
    give_up_secs: float,
    continue_after: Callable[[dict[str, Any]], float],
) -> int | None:
    """Waits for the end, and continues those that were stopped when their time has come."""
    ends = time.monotonic() + give_up_secs
    wake: dict[int, float] = {}
    while time.monotonic() < ends:
        try:
            return job.wait(LOOK_SECS)
        except subprocess.TimeoutExpired:
            pass
        for fired in read_fired(directory):
            if fired["action"] == Action.STOP:
                wake.setdefault(fired["pid"], time.monotonic() + continue_after(fired))
        for pid in [pid for pid, due in wake.items() if time.monotonic() >= due]:
            wake[pid] = float("inf")
            _continue(pid)
    return None


def _continue(pid: int) -> None:
    """Continues a worker, if it is still there and still stopped: its number may be another's by now."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
        if state == "T":
            os.kill(pid, signal.SIGCONT)
    except (FileNotFoundError, ProcessLookupError):
        pass


def _end(job: subprocess.Popen[bytes]) -> None:
    """Ends a job that is still there. Its workers end with the launcher, whatever happens to it."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        if job.poll() is None:
            job.send_signal(signum)
            try:
                job.wait(END_SECS)
            except subprocess.TimeoutExpired:
                continue


def _outcome(directory: Path, code: int | None, said: str) -> Outcome:
    records = committed_updates(directory)
    ids = [record.id for record in records]
    return Outcome(
        code=code,
        finals=tuple(path.read_text().strip() for path in sorted(directory.glob("final-*.txt"))),
        updates=frozenset((record.id, record.step) for record in records),
        verified=frozenset(
            record.id
            for record in records
            if record.receipts and len(set(record.receipts[-1].digests.values())) == 1
        ),
        twice=tuple(sorted({id_ for id_ in ids if ids.count(id_) > 1})),
        fired=tuple(read_fired(directory)),
        lives=len(list((directory / "logs").glob("attempt-*"))),
        left_behind=tuple(sorted(path.name for path in (directory / "shm").iterdir())),
        said=said,
    )


def losses(outcome: Outcome, undisturbed: Outcome) -> list[str]:
    """In what a job differs from one to which nothing happened: nothing, if the promises are kept."""
    found = []
    if outcome.code != 0:
        found.append("it hung" if outcome.code is None else f"it ended with exit code {outcome.code}")
    elif outcome.finals != undisturbed.finals:
        found.append(f"another state at the end: {outcome.finals}, expected {undisturbed.finals}")
    if outcome.code == 0 and outcome.updates != undisturbed.updates:
        missing = sorted(undisturbed.updates - outcome.updates)
        more = sorted(outcome.updates - undisturbed.updates)
        found.append(f"other updates: missing {missing}, too many {more}")
    lost = sorted(outcome.verified - {id_ for id_, _ in outcome.updates})
    if lost:
        found.append(f"verified, and not in the journal: {lost}")
    if outcome.twice:
        found.append(f"twice in the journal: {list(outcome.twice)}")
    if outcome.code == 0 and outcome.left_behind:
        found.append(f"left in shared memory: {list(outcome.left_behind)}")
    return found
