"""What is asked of a job, on its way in and back: a worker's proposals, and worker 0's side of the inbox.

An id that the training thread gives to a proposal is the same in every attempt, so that what a restarted
script proposes again is applied only once. It is made of the worker, the moment of the training, and a count.
A proposal of another thread has no definite moment: it gets a random id.

Requests from outside the job become proposals and operations, and their outcomes become answers:

    inbox/<id>.…      ──► first: updates that the attempt begins with, before its first step
                      ──► look: refused alone, left for later, or handed to the coordinator
    an outcome        ──► a queue ──► take_outcomes ──► (still our run?) ──► settle: answer, then remove it
    the job exits     ──► audited, left: answered at once, by the training thread
                      ──► finish: requests that still wait are refused, updates wait for the next start

The thread `run-files` calls `look`, `take_outcomes` and `settle`. The training thread calls `first`, not at
the same time, and `finish` after that thread has stopped. Any thread may report an outcome. Between taking
an outcome and acting on it, the caller checks that the run still belongs to this group: one that was
presumed dead must answer nothing.

A disk error never loses a request: it stays where it is, and is tried again later. Whatever else goes wrong
is the fault of that one request, which is refused.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import numpy.typing as npt

from replicast import faults
from replicast.codec import fields_of
from replicast.core import messages as m
from replicast.core.entries import Proposal, Receipt, Stage
from replicast.core.messages import OUTSIDE, Ended, Propose, Refusal, Request, Tell, Withdraw
from replicast.core.operations.audit import PulledRows
from replicast.errors import (
    FileDamaged,
    JobFailed,
    ReplicasDiverged,
    ReplicastError,
    UpdatePending,
    UpdateRefused,
    printable,
)
from replicast.errors import refusal_of as unexpected_refusal
from replicast.files import RunDir, RunPath
from replicast.processes import Deadline, this_process
from replicast.replicas.replica import Function, StateReplica
from replicast.storage import inbox
from replicast.storage.inbox import InboxAnswer, InboxRequest
from replicast.update.audit_report import AuditReport
from replicast.update.schema import check_outline, planned
from replicast.update.trial import Trial
from replicast.update.update import MAX_STEP, Update, checked_integer, checked_step, checked_text

logger = logging.getLogger("replicast")

RETRY_SECS = 10.0  # How long a request is left alone after a disk error: others need not wait for it.
# How long one look at the updates, or at the others, may take: the thread also writes notes.
INBOX_SECS = 0.3
# Before an attempt trains: how long it takes updates, and how many bytes. Its last one may go beyond both.
FIRST_SECS, FIRST_BYTES = 5.0, 2**28
CLEAN_SECS = 60.0
MAX_PULL_BYTES = 1 << 30

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
    _outcome: Receipt | ReplicastError | None = None

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
            waited = f"{timeout:g} s have passed" if is_up else "this thread has to train first"
            if self.stage is Stage.SCHEDULED and self.step is not None:
                ends = f"it is scheduled for step {self.step}"
            elif self.stage is Stage.APPLIED and self.trial is not None:
                ends = f"its trial of {self.trial.steps} steps is not over"
            else:
                ends = f"it is {self.stage}" + (f" and waits for {self.waits_for}" if self.waits_for else "")
            problem = f"Update {self.id}: {waited}, and {ends}. Continue training and ask again"
            raise UpdatePending(problem, stage=self.stage, update_id=self.id)
        if isinstance(self._outcome, Receipt):
            return self._outcome
        problem = f"Update {self.id} has no outcome"
        raise self._outcome or UpdatePending(problem, stage=self.stage, update_id=self.id)

    def reach(self, stage: Stage) -> None:
        if not self.done() and _ORDER.index(stage) > _ORDER.index(self.stage):
            self.stage, self.waits_for = stage, ""

    def told(self, tell: Tell) -> None:
        if self.done():  # the first outcome is final
            return
        self.reach(tell.stage)
        self.step = self.step if tell.step is None else tell.step
        self.waits_for = tell.waits_for
        if not tell.stage.is_final:
            return
        self._outcome, self.stage = outcome_of(tell), tell.stage
        if isinstance(self._outcome, Receipt):
            self.step = self._outcome.step
        self.settled.set()

    def fail(self, stage: Stage, error: ReplicastError) -> None:
        if not self.done():
            self._outcome, self.stage = error, stage
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


def outcome_of(tell: Tell) -> Receipt | ReplicastError:
    match tell.stage, tell.outcome:
        case ((Stage.VERIFIED | Stage.REVERTED), Receipt() as receipt):
            return receipt
        case Stage.FAILED, Receipt() as receipt:
            return diverged(receipt)
        case Stage.WITHDRAWN, _:
            return UpdateRefused("It was withdrawn")
        case _, Refusal() as refusal:
            return refused(refusal)
        case _:
            return UpdateRefused("It was refused in an earlier attempt of the job")


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
    in_outbox: Callable[[Callable[[], object]], None]
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
        self, update: Update | Function, source: int | None, at_step: int | None, trial: Trial | None
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
        sequence = checked_integer(number, MAX_STEP, "A revert needs the number of an update")
        note = checked_text("note", note)
        ticket = self._ticket(self._new_id(f"revert-{sequence}-worker-{self.rank}"))
        return self._propose(ticket, note=note, reverts=sequence, forced=force)

    def propose_update(self, update: Update, at_step: int | None, trial: Trial | None) -> Ticket:
        ticket = self._ticket(update.id, trial)
        self.in_outbox(lambda: self._publish(update, ticket, at_step))
        return ticket

    def propose_function(
        self, id_: str, function: Function, source: int, at_step: int | None, trial: Trial | None = None
    ) -> Ticket:
        """Proposes a function to be run on worker `source`, which must propose it too."""
        if source == self.rank:
            self.replica.functions[id_] = function
        return self._propose(self._ticket(id_, trial), at_step=at_step, source=source)

    def _propose(self, ticket: Ticket, **fields: Any) -> Ticket:
        """Proposes what has no bytes yet."""
        author, proposed_at = f"worker {self.rank}", ticket.proposed_at
        proposal = Proposal(
            ticket.id, "", trial=ticket.trial, author=author, proposed_at=proposed_at, **fields
        )
        self.in_outbox(lambda: self.post(Propose(ticket.number, proposal)))
        return ticket

    def request(self, kind: str, asked_by: tuple[str, ...] = (), arguments: tuple[Any, ...] = ()) -> None:
        """Requests an operation of all workers at one of the next boundaries. Signal handlers may call it."""
        self.in_outbox(lambda: self.post(Request(kind, asked_by, arguments)))

    # On worker 0, from outside the job.

    def propose_from_outside(
        self, ticket: str, update: Update, at_step: int | None, trial: Trial | None
    ) -> None:
        """Proposes an update from the inbox. Blocks while its bytes are copied."""
        proposal = self._published(update, _outside(ticket), at_step, trial, time.time())
        self.post(m.FromWorker(OUTSIDE, Propose(ticket, proposal)))

    def revert_from_outside(self, ticket: str, update: Update, sequence: int, *, forced: bool) -> None:
        known: dict[str, Any] = {"author": update.author, "note": update.note, "proposed_at": time.time()}
        proposal = Proposal(update.id, "", reverts=sequence, forced=forced, **known)
        self.post(m.FromWorker(OUTSIDE, Propose(ticket, proposal)))

    def withdraw_from_outside(self, ticket: str, id_: str) -> None:
        self.post(m.FromWorker(OUTSIDE, Withdraw(ticket, id_)))

    def close_from_outside(self, ticket: str, stage: Stage) -> None:
        self.replica.release_later(lambda: self.replica.parcels.release_ticket(_outside(ticket), stage))

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
            self.replica.release_later(lambda: self.replica.parcels.release_ticket(number, tell.stage))

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


def checked_worker(source: Any, size: int) -> int:
    return checked_integer(source, size, "There is no such worker", f"source from 0 to {size - 1}")


# The inbox.

_Outcome: TypeAlias = Tell | tuple[InboxAnswer, npt.NDArray[Any] | None]


@dataclass(slots=True)
class _Taken:
    path: RunPath
    request: InboxRequest | None = None  # None: an update
    noted: dict[str, Any] | None = None


@dataclass(eq=False, repr=False)
class InboxReader:
    """The requests of others, from the first look to their answer. Each method may raise OSError."""

    proposals: Proposals
    operations: Callable[[], list[dict[str, Any]]]  # the current ones
    attempt: int
    warn: Callable[[RunDir, str, Exception], None]
    may_save: Callable[[], bool] = lambda: True

    def __post_init__(self) -> None:
        self._replica = self.proposals.replica
        self._taken: dict[str, _Taken] = {}  # by the ticket of an update, by the id of another request
        self._outcomes: queue.SimpleQueue[tuple[str, _Outcome]] = queue.SimpleQueue()
        self._unsettled: dict[str, _Outcome] = {}
        self._retry_at: dict[RunPath, float] = {}
        self._lost: set[str] = set()  # ids of updates that were withdrawn before they could be read
        self._arrived: dict[str, float | None] | None = None
        self._cleaned_at = -CLEAN_SECS
        self.arrivals: inbox.Arrivals | None = None  # woken by each outcome, which has to be answered

    def first(self, run_dir: RunDir) -> None:
        """Takes what waits when an attempt begins to train, in order, up to the first trial or revert.

        A trial needs a step to measure, and a revert may be of an update that the journal applies again
        first. The next looks take them, and what would delay the start or fill the memory, in their order.
        """
        deadline, room, known = Deadline(FIRST_SECS), FIRST_BYTES, self._known()
        for one in inbox.waiting(run_dir):
            if one.path not in known:
                before = len(self._taken)
                self._process(run_dir, one.path, partial(self._propose, first=True))
                if len(self._taken) > before:
                    room -= one.nbytes
                elif one.path.exists():
                    return
            if room <= 0 or deadline.has_passed():
                return

    def look(self, run_dir: RunDir, *, training: bool) -> None:
        """Takes what is new, while a training runs: otherwise the script may be over."""
        now = time.monotonic()
        if now - self._cleaned_at >= CLEAN_SECS:
            self._cleaned_at = now
            inbox.clean(run_dir)
        if training:
            self._each(run_dir, [one.path for one in inbox.waiting(run_dir)], self._propose)
        paths = inbox.requests(run_dir)
        # The author's clock may be another one: a request that comes from now on has its time by the clock of
        # this process. Of those that were there at the first look, only the wall clock tells the age.
        before = dict.fromkeys(map(inbox.id_of, paths)) if self._arrived is None else self._arrived
        self._arrived = {id_: before.get(id_, now) for id_ in map(inbox.id_of, paths)}
        self._each(run_dir, paths, partial(self._consider, training=training))

    def take_outcomes(self, run_dir: RunDir) -> None:
        """Takes the outcomes that have come, for `settle`: check in between whose run it is."""
        while not self._outcomes.empty():
            key, outcome = self._outcomes.get()
            if key in self._taken:
                self._unsettled[key] = outcome

    def settle(self, run_dir: RunDir) -> None:
        """Answers what has its outcome, and notes the stage of the other updates."""
        for key, outcome in list(self._unsettled.items()):
            taken = self._taken[key]
            if self._process(run_dir, taken.path, partial(self._settle, taken, outcome)):
                del self._unsettled[key], self._taken[key]
        updates = [taken for taken in self._taken.values() if taken.request is None]
        under_way = {one["id"]: one for one in self.operations()} if updates else {}
        for taken in updates:
            one = under_way.get(inbox.id_of(taken.path))
            if one is not None and taken.noted != one:
                taken.noted = one
                waits = {name: one[name] for name in ("step", "waits_for", "trial_until")}
                inbox.note_stage(run_dir, one["id"], Stage(one["stage"]), taken_by=this_process(), **waits)

    def finish(self, run_dir: RunDir) -> None:
        """The same at the end of the job: there is no later retry, and what is left over is told."""
        self._retry_at.clear()
        self.settle(run_dir)
        ended = UpdateRefused(f"The job has ended at step {self._step}")
        for path in inbox.requests(run_dir):
            self._process(run_dir, path, lambda run_dir, path: self._refuse(run_dir, path, ended))
        known = self._known()
        left = [ascii(one.id[:8]) for one in inbox.waiting(run_dir) if one.path not in known]
        if left:
            logger.warning(
                "%s not applied, because no step was trained since; kept in the inbox for the next start: %s",
                "1 update was" if len(left) == 1 else f"{len(left)} updates were",
                ", ".join(left[:5]) + (", …" if len(left) > 5 else ""),
            )

    # Outcomes.

    @property
    def _step(self) -> int:
        return self._replica.machine.step

    def on_outcome(self, ticket: str, tell: Tell) -> None:
        """An update or a withdrawal has its outcome. Called by the event loop."""
        self._put((ticket, tell))

    def _put(self, outcome: tuple[str, _Outcome]) -> None:
        self._outcomes.put(outcome)
        if self.arrivals is not None:
            self.arrivals.wake()

    def ended(self, ended: Ended) -> None:
        """An operation has ended: its requests will be answered. Any thread."""
        values = self._replica.pulled.pop(ended.id, None)
        result = ended.outcome.result
        if ended.kind == "leave" and ended.outcome.stage is Stage.VERIFIED:
            return  # the process exits: `left` has answered
        step = self._step if ended.step is None else ended.step
        for id_ in ended.asked_by:
            if isinstance(result, Refusal):
                answer = self._answer(id_, Stage.REFUSED, step, result.problem)
            elif isinstance(result, PulledRows):
                details = fields_of(result) | {"equal": result.equal}
                answer = self._answer(id_, Stage.VERIFIED, step, details=details)
            elif ended.kind == "save" and result is not None:
                answer = self._answer(id_, Stage.VERIFIED, int(result))
            elif ended.kind == "save":
                problem = "The checkpoint was skipped: another one was being written"
                answer = self._answer(id_, Stage.REFUSED, step, problem)
            elif ended.kind == "audit":
                continue  # `audited` has answered
            else:
                answer = self._answer(id_, Stage.VERIFIED, step)
            self._put((id_, (answer, values)))

    def audited(self, run_dir: RunDir | None, report: AuditReport) -> None:
        """An audit has its report. Called before a training thread raises it, which may end the process."""
        for id_ in report.requests:
            answer = self._answer(id_, Stage.VERIFIED, report.step, details=report.to_json())
            self._answer_now(run_dir, id_, answer)

    def left(self, run_dir: RunDir | None, problem: str) -> None:
        """All workers exit on request. Called in the training thread."""
        for id_, taken in list(self._taken.items()):
            if taken.request is not None and taken.request.kind == "leave":
                self._answer_now(run_dir, id_, self._answer(id_, Stage.VERIFIED, self._step, problem))

    def _answer_now(self, run_dir: RunDir | None, id_: str, answer: InboxAnswer) -> None:
        if run_dir is None:
            return
        try:
            inbox.answer(run_dir, id_, answer)
        except OSError as error:
            logger.warning("an answer cannot be written, and will be retried: %s", printable(error))
        self._put((id_, (answer, None)))  # `settle` tries again, or finds the request gone

    def _answer(
        self, id_: str, stage: Stage, step: int, problem: str = "", details: dict[str, Any] | None = None
    ) -> InboxAnswer:
        taken = self._taken.get(id_)
        request = None if taken is None else taken.request
        return InboxAnswer(
            stage,
            time.time(),
            step,
            problem,
            kind="" if request is None else request.kind,
            author="" if request is None else request.author,
            attempt=self.attempt,
            details=details or {},
        )

    # One request.

    def _known(self) -> set[RunPath]:
        return {taken.path for taken in self._taken.values()}

    def _each(
        self, run_dir: RunDir, paths: Iterable[RunPath], act: Callable[[RunDir, RunPath], None]
    ) -> None:
        deadline, known = Deadline(INBOX_SECS), self._known()
        for path in paths:
            if path not in known:
                self._process(run_dir, path, act)
            if deadline.has_passed():
                return

    def _process(self, run_dir: RunDir, path: RunPath, act: Callable[[RunDir, RunPath], None]) -> bool:
        """Does something with one request; returns whether that is done, or is to be tried again.

        A full disk may have space again, so it is retried; not often, since an answer is fsynced. Any other
        error is caused by the request itself: it is refused, and the job continues.
        """
        if time.monotonic() < self._retry_at.get(path, 0.0):
            return False
        self._retry_at.pop(path, None)
        try:
            try:
                act(run_dir, path)
            except (UpdateRefused, FileDamaged) as error:
                self._refuse(run_dir, path, error, durably=False)
            except (OSError, ReplicastError):
                raise
            except Exception as error:
                logger.exception("%s is refused: unexpected error while processing it", path)
                self._refuse(run_dir, path, error)
        except OSError as error:
            self._retry_at[path] = time.monotonic() + RETRY_SECS
            self.warn(path, f"{path} stays in the inbox and will be retried after the others", error)
            return False
        return True

    def _refuse(self, run_dir: RunDir, path: RunPath, error: Exception, *, durably: bool = True) -> None:
        if path.name.endswith(".safetensors"):
            inbox.refuse(run_dir, path, error, durably=durably)
        else:
            id_ = inbox.id_of(path)
            problem = str(error) if isinstance(error, ReplicastError) else f"{type(error).__name__}: {error}"
            inbox.answer(run_dir, id_, self._answer(id_, Stage.REFUSED, self._step, problem))

    def _propose(self, run_dir: RunDir, path: RunPath, *, first: bool = False) -> None:
        def check(found: inbox.Submitted) -> None:
            """Refuses by its header alone what does not fit the state; a revert gets its edits later."""
            if first and (found.trial is not None or found.reverts is not None):
                raise UpdatePending("It waits for training", update_id=found.update.id)
            if found.update.edits:
                check_outline(found.update, self._replica.state.schema, self._replica.limits)

        try:
            status = path.stat()
            taken = inbox.take(run_dir, path, self._replica.limits.max_bytes, check)
        except (FileNotFoundError, UpdatePending):
            return  # withdrawn just now, or it waits for training
        # Identifies this file: the same update may be submitted again after a refusal.
        ticket = f"{path.name}@{status.st_ino}-{status.st_mtime_ns}"
        if taken is None:  # withdrawn just now; who has done so may believe that it was taken, and ask
            self._lost.add(inbox.id_of(path))
            return
        self._lost.discard(taken.update.id)
        if taken.reverts is None:
            self.proposals.propose_from_outside(ticket, taken.update, taken.at_step, taken.trial)
        else:
            self.proposals.revert_from_outside(ticket, taken.update, taken.reverts, forced=taken.forced)
        self._taken[ticket] = _Taken(path)

    def _consider(self, run_dir: RunDir, path: RunPath, *, training: bool) -> None:
        if inbox.answer_of(run_dir, inbox.id_of(path)) is not None:
            path.unlink(missing_ok=True)  # A job died between its answer and this: it must not stop twice.
            return
        try:
            request = inbox.read_request(path)
        except FileNotFoundError:
            return  # its author has given up just now
        if self._is_late(request):
            raise UpdateRefused("The deadline passed before the job could do it")
        if not training or (request.kind == "save" and not self.may_save()):
            return
        arguments: tuple[Any, ...] = ()
        if request.kind == "pull":
            variable = self._replica.state.schema.resolve(request.name)
            nbytes = inbox.checked_rows(variable, request.rows)
            if nbytes > MAX_PULL_BYTES:
                raise UpdateRefused(
                    "These are too many values for one pull",
                    variable=variable.name,
                    expected=f"at most {MAX_PULL_BYTES} bytes",
                    received=f"{nbytes} bytes",
                    remedy="Pull some rows at a time",
                )
            arguments = variable.name, request.rows
            if any(one.request is not None and one.request.kind == "pull" for one in self._taken.values()):
                return  # one copy in memory at a time
        self._taken[request.id] = _Taken(path, request)
        # Another update may have the id of one that is lost: the next look takes it.
        is_lost = request.name in self._lost and not path.with_name(f"{request.name}.safetensors").exists()
        if request.kind == "withdraw" and is_lost:
            self.on_outcome(request.id, Tell(request.name, (request.id,), Stage.WITHDRAWN))
        elif request.kind == "withdraw":
            self.proposals.withdraw_from_outside(request.id, request.name)
        else:
            self.proposals.request(request.kind, (request.id,), arguments)

    def _is_late(self, request: InboxRequest) -> bool:
        arrived = None if self._arrived is None else self._arrived.get(request.id)
        if arrived is None:
            return time.time() > request.deadline
        return time.monotonic() - arrived >= request.deadline - request.requested_at

    def _settle(self, taken: _Taken, told: _Outcome, run_dir: RunDir, path: RunPath) -> None:
        if isinstance(told, tuple):
            inbox.answer(run_dir, inbox.id_of(path), *told)
            return
        outcome = outcome_of(told)
        if (request := taken.request) is not None:  # a withdrawal
            stage, problem = Stage.REFUSED, "" if isinstance(outcome, Receipt) else outcome.problem
            if told.stage is Stage.WITHDRAWN:
                stage, problem = Stage.WITHDRAWN, ""
                update, who, why = path.with_name(f"{request.name}.safetensors"), request.author, request.note
                inbox.note_end(run_dir, update, Stage.WITHDRAWN, withdrawn_by=who, why=why)
            inbox.answer(run_dir, request.id, self._answer(request.id, stage, self._step, problem))
            return
        if isinstance(outcome, Receipt):
            inbox.note_stage(run_dir, told.id, told.stage, step=told.step, receipt=outcome)
        elif isinstance(outcome, ReplicasDiverged):
            logger.error("%s", outcome)
            inbox.note_stage(run_dir, told.id, Stage.FAILED, step=told.step, problem=str(outcome))
        elif told.stage is Stage.WITHDRAWN:
            inbox.note_end(run_dir, path, Stage.WITHDRAWN)
            inbox.note_stage(run_dir, told.id, Stage.WITHDRAWN)
        else:
            inbox.refuse(run_dir, path, outcome)
            return
        path.unlink(missing_ok=True)
