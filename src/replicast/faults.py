"""Fault injection: named points in the handling of updates and checkpoints at which a process can fail.

A plan says which worker fails at which point, on which occurrence, and how. It is read from the environment
of a worker that `replicast run` has started, or set by a test:

    REPLICAST_FAULTS='[{"worker": 1, "point": "apply", "occurrence": 2, "action": "kill"}]'

A fault is written to `faults.jsonl` in the run directory before it fires, so that a test can distinguish a
job that survived from one to which nothing happened. Without a plan a point is one comparison with None.
"""

from __future__ import annotations

import enum
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from replicast.codec import View
from replicast.config import FAULTS, decoded, read_cluster, read_launch
from replicast.errors import logger

FIRED = "faults.jsonl"  # in the run directory: the faults that fired
_EXAMPLE = 'For example [{"worker": 1, "point": "apply", "action": "kill"}]'


class Point(enum.StrEnum):
    """Where a process can fail. The comments name what has happened | what happens next."""

    PROPOSE = "propose"  # The author's bytes can be fetched | the proposal is posted.
    STAGE = "stage"  # A worker is told to stage | it fetches the bytes.
    READY = "ready"  # A worker has fetched and checked the bytes | it acknowledges them.
    JOURNAL = "journal"  # Worker 0: the payload has its final name | the record is written.
    COMMIT = "commit"  # Worker 0: the record is durable | the workers are told to apply the update.
    APPLY = "apply"  # A worker has stopped at the boundary | its state changes.
    ACK = "ack"  # A worker's state has changed | it reports the digest.
    VERIFY = "verify"  # Worker 0: all digests have arrived | the receipt is written.
    DECIDE = "decide"  # Worker 0: the trial's measurements have arrived | its outcome is written.
    SETTLE = "settle"  # A worker is told how a trial ended | its state is kept or reverted.
    SNAPSHOT = "snapshot"  # A checkpoint is due | worker 0 copies the state, the others digest theirs.
    WRITE = "write"  # A file's bytes, or a line of a log, are written | they are fsynced.
    RENAME = "rename"  # A file or checkpoint is complete under a temporary name | it gets its final one.


class Action(enum.StrEnum):
    KILL = "kill"  # As with kill -9: nothing is cleaned up.
    RAISE = "raise"  # As with a bug in the code: raises `FaultInjected` in the thread that is there.
    STOP = "stop"  # As with SIGSTOP: silent, and perhaps continued long after the others gave up on it.


class FaultInjected(RuntimeError):  # noqa: N818 - reads as a sentence: raise FaultInjected
    """An error that a fault plan asked for. Not a `ReplicastError`: no handler of those may catch it."""


class Fault(View, frozen=True, forbid_unknown_fields=True):
    worker: Annotated[int, msgspec.Meta(ge=0)]
    point: Point
    occurrence: Annotated[int, msgspec.Meta(ge=1)] = 1
    action: Action = Action.KILL
    attempt: Annotated[int, msgspec.Meta(ge=0)] = 0


def read_faults(environ: Mapping[str, str]) -> tuple[Fault, ...]:
    return decoded(environ, FAULTS, tuple[Fault, ...], _EXAMPLE) or ()


class FaultPlan:
    """The faults planned for this process, and how often it has reached each point. Thread-safe."""

    def __init__(
        self, faults: Sequence[Fault], *, worker: int, attempt: int = 0, run_dir: Path | None = None
    ) -> None:
        self._planned = [fault for fault in faults if (fault.worker, fault.attempt) == (worker, attempt)]
        self._run_dir = run_dir
        self._reached: Counter[Point] = Counter()
        self._lock = threading.Lock()
        self.fired: list[Fault] = []  # in order

    def reach(self, name: str) -> None:
        """Counts that a thread has reached a point, and fails there if the plan says so."""
        here = Point(name)
        with self._lock:
            self._reached[here] += 1
            occurrence = (here, self._reached[here])
            due = [fault for fault in self._planned if (fault.point, fault.occurrence) == occurrence]
            self.fired += due
            for fault in due:
                if self._run_dir is None:
                    break
                line = json.dumps({**fault.to_json(), "pid": os.getpid(), "time": time.time()}) + "\n"
                access = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
                with os.fdopen(os.open(self._run_dir / FIRED, access, 0o666), "wb", buffering=0) as file:
                    file.write(line.encode())
                    os.fsync(file.fileno())
        for fault in due:  # outside of the lock: a process that is stopped may be continued
            if fault.action is Action.RAISE:
                raise FaultInjected(
                    f"The fault plan asked for an error at the point {fault.point}. Unset {FAULTS} to run "
                    f"without faults. Received: {fault.to_json()}"
                )
            os.kill(os.getpid(), signal.SIGKILL if fault.action is Action.KILL else signal.SIGSTOP)


def point(name: str) -> None:
    """Marks a point at which this process fails if the plan says so. Almost free without a plan."""
    if _plan is not None:
        _plan.reach(name)


def set_plan(
    faults: Sequence[Fault], *, worker: int = 0, attempt: int = 0, run_dir: Path | None = None
) -> FaultPlan | None:
    """Replaces this process's plan; for tests."""
    global _plan
    _plan = FaultPlan(faults, worker=worker, attempt=attempt, run_dir=run_dir) if faults else None
    return _plan


def take_plan(environ: Mapping[str, str]) -> FaultPlan | None:
    """Makes the plan in the environment of a worker this process's.

    The launcher and the other commands share that environment, and ignore the plan.
    """
    launch = read_launch(environ)
    faults = read_faults(environ) if launch.launched else ()
    cluster = read_cluster(environ) if faults else None
    worker = 0 if cluster is None else cluster.rank
    for fault in faults:
        if (fault.worker, fault.attempt) == (worker, launch.attempt):
            logger.warning("%s is set: this worker will fail on purpose: %s", FAULTS, fault.to_json())
    return set_plan(faults, worker=worker, attempt=launch.attempt, run_dir=launch.run_dir)


_plan: FaultPlan | None
take_plan(os.environ)
