"""Worker 0's side of the inbox: requests become proposals and operations, their outcomes become answers.

    inbox/<id>.…      ──► look: refused alone, left for later, or handed to the coordinator
    an outcome        ──► a queue ──► take_outcomes ──► (still our run?) ──► settle: answer, then remove it
    the job exits     ──► audited, left: answered at once, by the training thread
                      ──► finish: requests that still wait are refused, updates wait for the next start

The thread `run-files` calls `look`, `take_outcomes` and `settle`; `finish` is for the training thread, after
that thread has stopped. Any thread may report an outcome. Between taking an outcome and acting on it, the
caller checks that the run still belongs to this group: one that was presumed dead must answer nothing.

A disk error never loses a request: it stays where it is, and is tried again later. Whatever else goes wrong
is the fault of that one request, which is refused.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy.typing as npt

from replicast.core.entries import Receipt
from replicast.core.events import Ended
from replicast.core.messages import Tell
from replicast.core.operations.pull import PulledRows
from replicast.core.records import Refusal, Stage
from replicast.deadline import Deadline
from replicast.errors import FileDamaged, ReplicastError, UpdateRefused, printable
from replicast.files import RunDir, RunPath
from replicast.processes import this_process
from replicast.replicas.proposals import diverged, refused
from replicast.replicas.session import Session
from replicast.storage import inbox
from replicast.storage.inbox import InboxAnswer, InboxRequest
from replicast.update.schema import check_outline
from replicast.update.update import Update

logger = logging.getLogger("replicast")

RETRY_SECS = 10.0  # How long a request is left alone after a disk error: others need not wait for it.
LOOK_SECS = 0.3  # How long one look at the updates, or at the others, may take: the thread also writes notes.
CLEAN_SECS = 60.0
MAX_PULL_BYTES = 1 << 30

_NOTHING: Mapping[str, Any] = {}
_Outcome: TypeAlias = Tell | tuple[InboxAnswer, npt.NDArray[Any] | None]


@dataclass(slots=True)
class _Taken:
    path: RunPath
    request: InboxRequest | None = None  # None: an update
    noted: dict[str, Any] | None = None


@dataclass(eq=False, repr=False)
class InboxReader:
    """The requests of others, from the first look to their answer. Each method may raise OSError."""

    session: Session
    warn: Callable[[RunDir, str, Exception], None]
    may_save: Callable[[], bool] = lambda: True

    def __post_init__(self) -> None:
        self._taken: dict[str, _Taken] = {}  # by the ticket of an update, by the id of another request
        self._outcomes: queue.SimpleQueue[tuple[str, _Outcome]] = queue.SimpleQueue()
        self._unsettled: dict[str, _Outcome] = {}
        self._retry_at: dict[RunPath, float] = {}
        self._lost: set[str] = set()  # ids of updates that were withdrawn before they could be read
        self._arrived: dict[str, float | None] | None = None
        self._cleaned_at = -CLEAN_SECS
        self.arrivals: inbox.Arrivals | None = None  # woken by each outcome, which has to be answered

    def look(self, run_dir: RunDir, *, training: bool) -> None:
        """Takes what is new, while a training runs: otherwise the script may be over."""
        now = time.monotonic()
        if now - self._cleaned_at >= CLEAN_SECS:
            self._cleaned_at = now
            inbox.clean(run_dir)
        if training:
            self._each(run_dir, (one.path for one in inbox.waiting(run_dir)), self._propose)
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
        self._note_stages(run_dir)

    def finish(self, run_dir: RunDir) -> None:
        """The same at the end of the job: there is no later retry, and what is left over is told."""
        self._retry_at.clear()
        self.settle(run_dir)
        ended = UpdateRefused(f"The job has ended at step {self.session.step}")
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

    def on_outcome(self, ticket: str, tell: Tell) -> None:
        """An update or a withdrawal has its outcome. Called by the event loop."""
        self._put((ticket, tell))

    def _put(self, outcome: tuple[str, _Outcome]) -> None:
        self._outcomes.put(outcome)
        if self.arrivals is not None:
            self.arrivals.wake()

    def ended(self, ended: Ended) -> None:
        """An operation has ended: its requests will be answered. Any thread."""
        values = self.session.replica.pulled.pop(ended.id, None)
        result = ended.outcome.result
        if ended.kind == "leave" and ended.outcome.stage is Stage.VERIFIED:
            return  # the process exits: `left` has answered
        step = self.session.step if ended.step is None else ended.step
        for id_ in ended.asked_by:
            if isinstance(result, Refusal):
                answer = self._answer(id_, Stage.REFUSED, step, result.problem)
            elif isinstance(result, PulledRows):
                rows = [list(one) for one in result.rows]
                digests = {str(rank): digest for rank, digest in result.digests.items()}
                details = {"name": result.name, "rows": rows, "digests": digests, "equal": result.equal}
                answer = self._answer(id_, Stage.VERIFIED, step, details=details)
            elif ended.kind == "save" and result is not None:
                answer = self._answer(id_, Stage.VERIFIED, int(result))
            elif ended.kind == "save":
                problem = "The checkpoint was skipped: another one was being written"
                answer = self._answer(id_, Stage.REFUSED, step, problem)
            else:
                continue  # an audit: `audited` has answered
            self._put((id_, (answer, values)))

    def audited(self, run_dir: RunDir, ids: tuple[str, ...], step: int, report: Mapping[str, Any]) -> None:
        """An audit has its report. Called before a training thread raises it, which may end the process."""
        for id_ in ids:
            self._answer_now(run_dir, id_, self._answer(id_, Stage.VERIFIED, step, details=dict(report)))

    def left(self, run_dir: RunDir, problem: str) -> None:
        """All workers exit on request. Called in the training thread."""
        for id_, taken in list(self._taken.items()):
            if taken.request is not None and taken.request.kind == "leave":
                step = self.session.step
                self._answer_now(run_dir, id_, self._answer(id_, Stage.VERIFIED, step, problem))

    def _answer_now(self, run_dir: RunDir, id_: str, answer: InboxAnswer) -> None:
        try:
            inbox.answer(run_dir, id_, answer)
        except OSError as error:
            logger.warning("an answer cannot be written, and will be retried: %s", printable(error))
        self._put((id_, (answer, None)))  # `settle` tries again, or finds the request gone

    def _answer(
        self, id_: str, stage: Stage, step: int, problem: str = "", details: Mapping[str, Any] = _NOTHING
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
            attempt=self.session.attempt,
            details=dict(details),
        )

    # One request.

    def _known(self) -> set[RunPath]:
        return {taken.path for taken in self._taken.values()}

    def _each(
        self, run_dir: RunDir, paths: Iterable[RunPath], act: Callable[[RunDir, RunPath], None]
    ) -> None:
        deadline, known = Deadline(LOOK_SECS), self._known()
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
            inbox.answer(run_dir, id_, self._answer(id_, Stage.REFUSED, self.session.step, problem))

    def _propose(self, run_dir: RunDir, path: RunPath) -> None:
        proposals = self.session.proposals
        try:
            # Identifies this file: the same update may be submitted again after a refusal.
            status = path.stat()
        except FileNotFoundError:
            return  # withdrawn just now
        ticket = f"{path.name}@{status.st_ino}-{status.st_mtime_ns}"
        taken = inbox.take(run_dir, path, self.session.limits.max_bytes, self._check)
        if taken is None:  # withdrawn just now; who has done so may believe that it was taken, and ask
            self._lost.add(inbox.id_of(path))
            return
        self._lost.discard(taken.update.id)
        if taken.reverts is None:
            proposals.propose_from_outside(ticket, taken.update, taken.at_step, taken.trial)
        else:
            proposals.revert_from_outside(ticket, taken.update, taken.reverts, forced=taken.forced)
        self._taken[ticket] = _Taken(path)

    def _check(self, update: Update) -> None:
        """Refuses by its header alone what does not fit the state; a revert gets its edits later."""
        if update.edits:
            check_outline(update, self.session.replica.state.schema, self.session.limits)

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
            arguments = self._resolved(request)
            if any(one.request is not None and one.request.kind == "pull" for one in self._taken.values()):
                return  # one copy in memory at a time
        self._taken[request.id] = _Taken(path, request)
        if request.kind == "withdraw" and request.name in self._lost:
            self.on_outcome(request.id, Tell(request.name, (request.id,), Stage.WITHDRAWN))
        elif request.kind == "withdraw":
            self.session.proposals.withdraw_from_outside(request.id, request.name)
        else:
            self.session.request(request.kind, (request.id,), arguments)

    def _is_late(self, request: InboxRequest) -> bool:
        arrived = None if self._arrived is None else self._arrived.get(request.id)
        if arrived is None:
            return time.time() > request.deadline
        return time.monotonic() - arrived >= request.deadline - request.requested_at

    def _resolved(self, request: InboxRequest) -> tuple[Any, ...]:
        variable = self.session.replica.state.schema.resolve(request.name)
        nbytes = inbox.checked_rows(variable, request.rows)
        if nbytes > MAX_PULL_BYTES:
            raise UpdateRefused(
                "These are too many values for one pull",
                variable=variable.name,
                expected=f"at most {MAX_PULL_BYTES} bytes",
                received=f"{nbytes} bytes",
                remedy="Pull some rows at a time",
            )
        return variable.name, request.rows

    def _note_stages(self, run_dir: RunDir) -> None:
        updates = [taken for taken in self._taken.values() if taken.request is None]
        under_way = {one["id"]: one for one in self.session.operations()} if updates else {}
        for taken in updates:
            one = under_way.get(inbox.id_of(taken.path))
            if one is not None and taken.noted != one:
                taken.noted = one
                waits = {name: one[name] for name in ("step", "waits_for", "trial_until")}
                inbox.note_stage(run_dir, one["id"], Stage(one["stage"]), taken_by=this_process(), **waits)

    def _settle(self, taken: _Taken, outcome: _Outcome, run_dir: RunDir, path: RunPath) -> None:
        if isinstance(outcome, tuple):
            inbox.answer(run_dir, inbox.id_of(path), *outcome)
        elif taken.request is not None:
            stage, problem = Stage.WITHDRAWN, ""
            if outcome.stage is not Stage.WITHDRAWN:
                stage, problem = Stage.REFUSED, _refusal(outcome).problem
            else:
                request, update = taken.request, path.with_name(f"{taken.request.name}.safetensors")
                who, why = request.author, request.note
                inbox.note_end(run_dir, update, Stage.WITHDRAWN, withdrawn_by=who, why=why)
            id_ = taken.request.id
            inbox.answer(run_dir, id_, self._answer(id_, stage, self.session.step, problem))
        else:
            self._settle_update(outcome, run_dir, path)

    def _settle_update(self, tell: Tell, run_dir: RunDir, path: RunPath) -> None:
        match tell.stage, tell.outcome:
            case ((Stage.VERIFIED | Stage.REVERTED), Receipt()):
                inbox.note_stage(run_dir, tell.id, tell.stage, step=tell.step, receipt=tell.outcome)
            case Stage.FAILED, Receipt():
                error = diverged(tell.outcome)
                logger.error("%s", error)
                inbox.note_stage(run_dir, tell.id, tell.stage, step=tell.step, problem=str(error))
            case Stage.WITHDRAWN, _:
                inbox.note_end(run_dir, path, Stage.WITHDRAWN)
                inbox.note_stage(run_dir, tell.id, Stage.WITHDRAWN)
            case _:
                inbox.refuse(run_dir, path, _refusal(tell))
                return
        path.unlink(missing_ok=True)


def _refusal(tell: Tell) -> UpdateRefused:
    earlier = Refusal("It was refused in an earlier attempt")
    return refused(earlier if tell.outcome is None else tell.outcome)
