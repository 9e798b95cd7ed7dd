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
from replicast.faults import Action, Fault
from replicast.storage import inbox
from replicast.storage.journal import committed_updates
from tests.jobs import read_fired

PUSHED = "pushed"
TRAIN = Path(__file__).with_name("train.py")
ROOT = TRAIN.parents[2]
LOOK_SECS = 0.1
END_SECS = 30.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended.

    Attributes:
        code: The launcher's exit code; None if the job timed out.
        finals: The final step of each worker, and the digest of its state.
        updates: The id and step of each committed update; the order of the journal depends on timing.
        verified: The ids of those that have a receipt with equal digests.
        twice: Ids that are in the journal more than once.
        fired: The faults that fired, as recorded.
        attempts: The number of attempts.
        left_behind: The files that are still in shared memory.
        said: The output of the launcher.
    """

    code: int | None
    finals: tuple[str, ...]
    updates: frozenset[tuple[str, int]]
    verified: frozenset[str]
    twice: tuple[str, ...]
    fired: tuple[dict[str, Any], ...]
    attempts: int
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
    """Runs a job to its end. An update waits in its inbox from the beginning."""
    shared = directory / "shm"
    shared.mkdir(parents=True)
    pushed = Update(id=PUSHED, note="waits in the inbox").add("dense/bias", np.ones(4, "float32"))
    inbox.submit(directory, pushed, at_step=30)
    options = ["-n", str(workers), "--run-dir", str(directory), "--max-restarts", str(max_restarts)]
    command = [sys.executable, "-m", "replicast", "run", *options, str(TRAIN)]
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
    """Waits for the end, and continues stopped workers when their time has passed."""
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
    """Continues a worker if it still exists and is stopped: its pid may have been reused."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1]
        if state == "T":
            os.kill(pid, signal.SIGCONT)
    except (FileNotFoundError, ProcessLookupError):
        pass


def _end(job: subprocess.Popen[bytes]) -> None:
    """Stops a job that is still running. Its workers always exit with the launcher."""
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
        attempts=len(list((directory / "logs").glob("attempt-*"))),
        left_behind=tuple(sorted(path.name for path in (directory / "shm").iterdir())),
        said=said,
    )


def losses(outcome: Outcome, undisturbed: Outcome) -> list[str]:
    """The differences between a job and an undisturbed one: empty if the promises are kept."""
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
