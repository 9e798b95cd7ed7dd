"""The proposals of one worker: their ids, their tickets, and the bytes that it publishes.

An id that the training thread gives is the same in every attempt, so that what a restarted script proposes
again is applied only once. It is made of the worker, the moment of the training, and a count. A proposal of
another thread has no definite moment: it gets a random id.
"""

from __future__ import annotations

import itertools
import logging
import operator
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from replicast import faults
from replicast.core import events as e
from replicast.core.entries import Receipt
from replicast.core.messages import OUTSIDE, Propose, Tell, Withdraw
from replicast.core.records import Proposal, Refusal, Stage
from replicast.errors import (
    JobFailed,
    ReplicasDiverged,
    ReplicastError,
    UpdatePending,
    UpdateRefused,
    printable,
)
from replicast.errors import refusal_of as unexpected_refusal
from replicast.replicas.lanes import Lane
from replicast.replicas.replica import Function, StateReplica
from replicast.update.schema import planned
from replicast.update.trial import Trial
from replicast.update.update import MAX_STEP, Update, checked_text

logger = logging.getLogger("replicast")

_ORDER = list(Stage)


@dataclass(eq=False, repr=False)
class Ticket:
    """The progress of a proposal, and finally its receipt or why it was refused. Any thread may use it."""

    id: str
    number: str
    _wait_for: Callable[[Ticket, float | None], bool]
    trial: Trial | None = None
    stage: Stage = Stage.PROPOSED
    step: int | None = None
    waits_for: str = ""
    proposed_at: float = field(default_factory=time.time)
    settled: threading.Event = field(default_factory=threading.Event)
    _receipt: Receipt | None = None
    _error: ReplicastError | None = None

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
        return f"Update {self.id}: {waited}, and {ends}. Continue training and ask again"

    def reach(self, stage: Stage) -> None:
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
        if not self.done():
            self._error, self.stage = error, stage
            self.settled.set()


def log_trial(receipt: Receipt) -> None:
    trial = receipt.trial
    if trial is not None and trial.outcome == "kept":
        logger.info("update %s kept after its trial: %s", receipt.id, trial.reason)
    elif trial is not None:
        logger.warning(
            f"update {receipt.id} reverted at step {trial.step}: {trial.reason}. All replicas are back at "
            f"their state before the update (step {receipt.step}); the batches of the "
            f"{trial.step - receipt.step} steps since then are not used again"
        )


def refused(refusal: Refusal) -> UpdateRefused:
    if refusal.details is not None and "problem" in refusal.details:
        return UpdateRefused.from_json(refusal.details)
    worker = refusal.workers[0] if refusal.workers else None
    return UpdateRefused(refusal.problem, worker=worker)


def refusal_of(error: UpdateRefused, rank: int) -> Refusal:
    """A worker's refusal in the form that is sent to other processes."""
    details = error.to_json()
    details["worker"] = rank if details["worker"] is None else details["worker"]
    return Refusal(error.problem, (rank,), details)


def diverged(receipt: Receipt) -> ReplicasDiverged:
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


@dataclass(eq=False, repr=False)
class Proposals:
    """The proposals of one worker, and on worker 0 those from outside the job. Any thread may propose."""

    replica: StateReplica
    outbox: Lane
    size: int
    in_training_thread: Callable[[], bool]
    post: Callable[[Any], None]
    wait_for: Callable[[Ticket, float | None], bool]

    def __post_init__(self) -> None:
        self.rank = self.replica.rank
        self._numbers = itertools.count(1)
        # Unique to this process: a refusal in the journal names tickets, and must never match a later one.
        self._unique = f"worker-{self.rank}-{uuid.uuid4().hex[:12]}"
        self._tickets: dict[str, Ticket] = {}
        self._has_trained = False
        self._last_ids: dict[str, tuple[str, int]] = {}
        self._moment = (-1, "")

    # The moment that ids are made of.

    def set_moment(self, moment: str, step: int) -> None:
        """Assigns the training thread's proposals, from here to the next boundary, to this moment."""
        self._moment = self.replica.machine.step, f"step-{step}-{moment}"

    def training_continues(self) -> None:
        """From now on proposals belong to their step; those before training, even after a restore, to 0."""
        self._has_trained = True

    def _new_id(self, prefix: str) -> str:
        if not self.in_training_thread():
            return f"{prefix}-{uuid.uuid4().hex}"
        step = self.replica.machine.step
        since, moment = self._moment
        now = moment if since == step else f"step-{step if self._has_trained else 0}"
        last, count = self._last_ids.get(prefix, (now, 0))
        count = count + 1 if last == now else 1
        self._last_ids[prefix] = (now, count)
        return f"{prefix}-{now}-{count}"

    # Of this worker. All return at once.

    def propose(
        self,
        update: Update | Function,
        *,
        source: int | None = None,
        at_step: int | None = None,
        trial: Trial | None = None,
    ) -> Ticket:
        if trial is not None and not isinstance(trial, Trial):
            raise UpdateRefused(
                "trial is not a Trial", expected="replicast.Trial(steps=...)", received=repr(trial)[:200]
            )
        at_step = checked_step(at_step)
        if isinstance(update, Update):
            if source is not None:
                raise UpdateRefused(
                    "source is only for functions, not for updates", received=f"source={source}"
                )
            if not update.id_was_given and self.in_training_thread():
                update = update.with_id(self._new_id(f"worker-{self.rank}"))
            return self.propose_update(update.signed(f"worker {self.rank}"), at_step, trial)
        if not callable(update):
            raise UpdateRefused(
                "Only an Update or a function can be proposed",
                expected="Update().assign(name, value), or a function of the live values",
                received=type(update).__name__,
            )
        runs_on = self.rank if source is None else checked_worker(source, self.size)
        if runs_on != self.rank and not self.in_training_thread():
            raise UpdateRefused(
                f"Worker {self.rank} cannot send a function to worker {runs_on}",
                remedy=f"Propose it on worker {runs_on}, or in the training thread of every worker",
            )
        return self.propose_function(self._new_id(f"function-{runs_on}"), update, runs_on, at_step, trial)

    def revert(self, number: Any, note: str, *, force: bool) -> Ticket:
        """As `Replicas.revert`: worker 0 makes the update that undoes it."""
        sequence = checked_step(number)
        if sequence is None:
            raise UpdateRefused("A revert needs the number of an update", received="None")
        note = checked_text("note", note)
        ticket = self._ticket(self._new_id(f"revert-{sequence}-worker-{self.rank}"))
        return self._propose(ticket, note=note, reverts=sequence, forced=force)

    def propose_update(self, update: Update, at_step: int | None, trial: Trial | None) -> Ticket:
        ticket = self._ticket(update.id, trial)
        self.outbox.do(lambda: self._publish(update, ticket, at_step))
        return ticket

    def propose_function(
        self,
        id_: str,
        function: Function,
        source: int,
        at_step: int | None = None,
        trial: Trial | None = None,
    ) -> Ticket:
        """Proposes a function to be run on worker `source`, which must propose it too."""
        if source == self.rank:
            self.replica.functions[id_] = function
        return self._propose(self._ticket(id_, trial), at_step=at_step, source=source)

    def _propose(self, ticket: Ticket, **fields: Any) -> Ticket:
        """Proposes what has no bytes yet."""
        known: dict[str, Any] = {
            "trial": ticket.trial,
            "author": f"worker {self.rank}",
            "proposed_at": ticket.proposed_at,
        }
        proposal = Proposal(ticket.id, "", **known, **fields)
        self.outbox.do(lambda: self.post(Propose(ticket.number, proposal)))
        return ticket

    # On worker 0, from outside the job.

    def propose_from_outside(
        self, ticket: str, update: Update, at_step: int | None, trial: Trial | None
    ) -> None:
        """Proposes an update from the inbox. Blocks while its bytes are copied."""
        proposal = self._published(update, _outside(ticket), at_step, trial, time.time())
        self.post(e.FromWorker(OUTSIDE, Propose(ticket, proposal)))

    def revert_from_outside(self, ticket: str, update: Update, sequence: int, *, forced: bool) -> None:
        known: dict[str, Any] = {"author": update.author, "note": update.note, "proposed_at": time.time()}
        proposal = Proposal(update.id, "", reverts=sequence, forced=forced, **known)
        self.post(e.FromWorker(OUTSIDE, Propose(ticket, proposal)))

    def withdraw_from_outside(self, ticket: str, id_: str) -> None:
        self.post(e.FromWorker(OUTSIDE, Withdraw(ticket, id_)))

    def close_from_outside(self, ticket: str, stage: Stage) -> None:
        """Releases a proposal from outside that has its outcome. Called by the event loop."""
        self.replica.releasing.do(lambda: self.replica.parcels.release_ticket(_outside(ticket), stage))

    # What becomes of them.

    def told(self, number: str, tell: Tell) -> None:
        """Passes on progress reported by the coordinator. Called by the event loop."""
        ticket = self._tickets.get(number)
        if ticket is None:
            return
        ticket.told(tell)
        if tell.stage is Stage.REFUSED:
            problem = tell.outcome.problem if isinstance(tell.outcome, Refusal) else "in an earlier attempt"
            logger.warning("update %s is refused: %s", tell.id, printable(problem))
        if ticket.done():
            del self._tickets[number]
            self.replica.releasing.do(lambda: self.replica.parcels.release_ticket(number, tell.stage))

    def reach(self, id_: str, stage: Stage) -> None:
        for ticket in list(self._tickets.values()):
            if ticket.id == id_:
                ticket.reach(stage)

    def end(self, step: int) -> None:
        """Fails all open tickets: the job ended at this step."""
        for ticket in list(self._tickets.values()):
            meant = "" if ticket.step is None else f" for step {ticket.step}"
            said = f"The job ended at step {step}; update {ticket.id} is {ticket.stage}{meant}"
            ticket.fail(ticket.stage, UpdatePending(said, stage=ticket.stage, update_id=ticket.id))

    def _ticket(self, id_: str, trial: Trial | None = None) -> Ticket:
        number = f"{self._unique}-{next(self._numbers)}"
        ticket = self._tickets[number] = Ticket(id_, number, self.wait_for, trial)
        return ticket

    def _publish(self, update: Update, ticket: Ticket, at_step: int | None) -> None:
        try:
            proposal = self._published(update, ticket.number, at_step, ticket.trial, ticket.proposed_at)
        except UpdateRefused as error:
            self._tickets.pop(ticket.number, None)
            ticket.fail(Stage.REFUSED, error)
            return
        faults.point("propose")
        self.post(Propose(ticket.number, proposal))

    def _published(
        self, update: Update, owner: str, at_step: int | None, trial: Trial | None, proposed_at: float
    ) -> Proposal:
        try:
            # Values are checked later, once all workers have them: each worker checks a share.
            update = planned(update, self.replica.state.schema, self.replica.limits, look_at=lambda _: False)
            self.replica.check_by_guard(update)
            parcel = self.replica.parcels.publish(update, owner)
        except (UpdateRefused, JobFailed):
            raise
        except Exception as error:
            logger.exception("update %s refused: unexpected error while checking it", update.id)
            raise unexpected_refusal(error) from error
        known: dict[str, Any] = {"author": update.author, "note": update.note, "proposed_at": proposed_at}
        return Proposal(update.id, parcel.digest, parcel, at_step, trial, **known)


def _outside(ticket: str) -> str:
    return f"outside {ticket}"


def checked_step(at_step: Any) -> int | None:
    """The step that an author chose, if it can be one. Whether it is past, only the coordinator knows."""
    if at_step is None:
        return None
    step = -1 if isinstance(at_step, bool) else _integer(at_step)
    if not 0 <= step < MAX_STEP:
        raise UpdateRefused(
            "at_step must be a number of steps", expected="an integer from 0 on", received=repr(at_step)[:200]
        )
    return step


def checked_worker(source: Any, size: int) -> int:
    number = _integer(source)
    if not 0 <= number < size:
        expected = f"source from 0 to {size - 1}"
        raise UpdateRefused("There is no such worker", expected=expected, received=repr(source))
    return number


def _integer(value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        return -1
