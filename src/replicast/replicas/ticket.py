"""The ticket of a proposal: its progress, and finally its receipt or the reason for its refusal."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from replicast.core.entries import Receipt
from replicast.core.messages import Tell
from replicast.core.records import Refusal, Stage
from replicast.errors import ReplicasDiverged, ReplicastError, UpdatePending, UpdateRefused
from replicast.update.trial import Trial

logger = logging.getLogger("replicast")

_ORDER = list(Stage)


class Ticket:
    """One proposal of this worker. Any thread may use it."""

    def __init__(
        self,
        id: str,  # noqa: A002 - the update's own word
        number: str,
        wait_for: Callable[[Ticket, float | None], bool],
        trial: Trial | None = None,
    ) -> None:
        self.id = id
        self.number = number
        self.trial = trial
        self.stage = Stage.PROPOSED
        self.step: int | None = None
        self.waits_for = ""
        self.proposed_at = time.time()
        self._wait_for = wait_for
        self.settled = threading.Event()
        self._receipt: Receipt | None = None
        self._error: ReplicastError | None = None

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        return self.settled.is_set()

    def result(self, timeout: float | None = None) -> Receipt:
        """Blocks until every worker has applied the update and the digests agree, at most `timeout` seconds.

        In the training thread, between steps, this succeeds only if all other workers wait as well (in
        `sync`, at the end of the script), or come to the same boundary. Without a timeout, `UpdatePending`
        is raised soon after it is known that this thread has to train first: ask again later, or in
        another thread.
        """
        started = time.monotonic()
        if not self._wait_for(self, timeout) and not self.settled.is_set():
            is_up = timeout is not None and time.monotonic() - started >= timeout
            raise UpdatePending(self._where(timeout if is_up else None), stage=self.stage, update_id=self.id)
        if self._error is not None:
            raise self._error
        if self._receipt is None:
            raise UpdatePending(f"Update {self.id} has no outcome", stage=self.stage, update_id=self.id)
        return self._receipt

    def _where(self, timeout: float | None) -> str:
        if self.stage is Stage.SCHEDULED and self.step is not None:
            ends = f"it is scheduled for step {self.step}"
        elif self.stage is Stage.APPLIED and self.trial is not None:
            ends = f"its trial of {self.trial.steps} steps is not over"
        else:
            ends = f"it is {self.stage}" + (f" and waits for {self.waits_for}" if self.waits_for else "")
        waited = "this thread has to train first" if timeout is None else f"{timeout:g} s have passed"
        return f"Update {self.id}: {waited}, and {ends}. Go on training and ask again"

    def reach(self, stage: Stage) -> None:
        """Advances the stage, as seen by this worker."""
        if not self.done() and _ORDER.index(stage) > _ORDER.index(self.stage):
            self.stage, self.waits_for = stage, ""

    def told(self, tell: Tell) -> None:
        """Records progress reported by the coordinator. The first outcome is final."""
        if self.done():
            return
        self.reach(tell.stage)
        self.step = self.step if tell.step is None else tell.step
        self.waits_for = tell.waits_for
        if not tell.stage.is_final:
            return
        match tell.stage, tell.outcome:
            case ((Stage.VERIFIED | Stage.REVERTED), Receipt()):
                self._receipt, self.stage, self.step = tell.outcome, tell.stage, tell.outcome.step
            case Stage.FAILED, Receipt():
                self._error = diverged(tell.outcome)
            case Stage.WITHDRAWN, _:
                self._error = UpdateRefused("It was withdrawn")
            case _, Refusal():
                self._error = refused(tell.outcome)
            case _:
                self._error = UpdateRefused("It was refused in an earlier attempt of the job")
        self.stage = tell.stage
        self.settled.set()

    def fail(self, stage: Stage, error: ReplicastError) -> None:
        """Settles the ticket with an error. The first outcome is final."""
        if not self.done():
            self._error, self.stage = error, stage
            self.settled.set()


def log_trial(receipt: Receipt) -> None:
    """Logs how the trial of an update ended, if it had one."""
    trial = receipt.trial
    if trial is None:
        return
    if trial.outcome == "kept":
        logger.info("update %s kept after its trial: %s", receipt.id, trial.reason)
        return
    logger.warning(
        "update %s reverted at step %d: %s. All replicas are back at their state before the update "
        "(step %d); the batches of the %d steps since then are not used again",
        receipt.id,
        trial.step,
        trial.reason,
        receipt.step,
        trial.step - receipt.step,
    )


def refused(refusal: Refusal) -> UpdateRefused:
    """The error that the author of a refused proposal gets."""
    if refusal.details is not None and "problem" in refusal.details:
        return UpdateRefused.from_json(refusal.details)
    worker = refusal.workers[0] if refusal.workers else None
    return UpdateRefused(refusal.problem, worker=worker)


def refusal_of(error: UpdateRefused, rank: int) -> Refusal:
    """A worker's refusal in the form that is sent to other processes."""
    details = error.to_json()
    if details["worker"] is None:
        details["worker"] = rank
    return Refusal(error.problem, (rank,), details)


def diverged(receipt: Receipt) -> ReplicasDiverged:
    """The error of an update after which the replicas are not equal."""
    if len(set(receipt.trained)) > 1:
        counted = ", ".join(f"worker {rank}: {count}" for rank, count in enumerate(receipt.trained))
        why = (
            f"the workers had trained different numbers of steps at that boundary (transfers so far: "
            f"{counted}): one has missed a boundary or has called one too many. Every worker must call "
            "replicas.boundary() after each step"
        )
    else:
        groups: dict[str, list[str]] = {}
        for worker, digest in sorted(receipt.digests.items()):
            groups.setdefault(digest, []).append(str(worker))
        said = "; ".join(f"worker {', '.join(workers)}: {digest}" for digest, workers in groups.items())
        what = "the variables it touched are not equal"
        if receipt.trial is not None:
            what = "at the end of its trial the replicas' states are not equal"
        why = (
            f"{what} ({said}). They must have differed before: a worker has assigned to a variable outside "
            "replicast. replicas.sync(source=0) makes them equal"
        )
    return ReplicasDiverged(
        f"Update {receipt.id} was applied by all workers at step {receipt.step}, but {why}",
        digests=dict(receipt.digests),
        update_id=receipt.id,
        step=receipt.step,
    )
