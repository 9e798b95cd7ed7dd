"""A worker's part in the protocol: proposes, stages, stops and applies.

    proposer thread    validates what this worker proposes, makes its bytes available, posts the proposal
    follower thread    reads the log in order: stages and answers, puts stops in the training thread's way,
                       settles tickets
    training thread    applies at its boundaries what was decided (`Gate`), reports the digest

Everything that can fail or wait happens in the two background threads, before the decision.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from replicast import faults
from replicast.errors import ReplicastError, UpdateRefused, refusal_of
from replicast.guard import Guard
from replicast.journal import Receipt
from replicast.protocol.audit_messages import Audited, Examine, Lend, Weigh
from replicast.protocol.channel import Channel
from replicast.protocol.examining import Examiner
from replicast.protocol.functions import Function, computed_update
from replicast.protocol.gate import Gate
from replicast.protocol.messages import (
    WITHDRAW,
    Advance,
    Again,
    Aim,
    Answer,
    Applied,
    Compute,
    Computed,
    Drop,
    Failed,
    Free,
    Go,
    Hold,
    Parked,
    Paused,
    Proposal,
    Replay,
    Request,
    Resume,
    Stage,
    Verified,
)
from replicast.protocol.outcomes import Outcomes
from replicast.protocol.patience import Patience
from replicast.protocol.shelf import Shelf, by_worker
from replicast.protocol.stop import Order
from replicast.protocol.threads import Threads
from replicast.protocol.ticket import Since, Ticket
from replicast.protocol.trial_messages import Cut, Settle
from replicast.protocol.trying import Trying
from replicast.state import State
from replicast.transport import Transport
from replicast.trial import Trial
from replicast.update import Stage as Standing
from replicast.update import Update
from replicast.validate import Limits, planned

logger = logging.getLogger("replicast")


class Member:
    """One worker. `propose` may be called by any thread; `arrive`, `pause` by the training thread.

    Args:
        check: Raises when the job has failed elsewhere, so that no wait outlives it.
    """

    def __init__(
        self,
        channel: Channel,
        transport: Transport,
        state: State,
        *,
        patience: Patience | None = None,
        limits: Limits | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.channel = channel
        self.transport = transport
        self.state = state
        self.patience = patience or Patience()
        self.limits = limits or Limits()
        self.threads = Threads(on_death=lambda: self.gate.wake())
        self._check_elsewhere = check
        self.gate = Gate(self, self._check, self.patience.decide_secs, self._say_parked)
        self.outcomes = Outcomes()
        self.shelf = Shelf(channel, transport, state.schema, self.limits)
        self._outbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._functions: dict[str, Function] = {}
        self._numbers = itertools.count(1)
        self._token = 0
        self.pausing: int | None = None
        """The token of the pause in which the training thread is. Written by that thread."""
        self.intent = ""
        """What that pause is for."""
        self._resumed: dict[int, dict[str, Any] | None] = {}
        self.actions: dict[str, Callable[[], None]] = {}
        """What all workers may be asked to do at a boundary, by name. Written before the first one."""
        self.trained: Callable[[], int] = lambda: 0
        """How much this worker has trained, in a unit that all workers count alike."""
        self.guard: Guard | None = None
        """What this worker lets nobody propose. Written before the threads start."""
        self.applied: set[int] = set()
        """The sequence numbers of what this worker's state holds. Written by the training thread."""
        self.examiner = Examiner(self)
        """This worker's part in audits."""
        self.trying = Trying(self)
        """This worker's part in trials."""
        self._training_thread: threading.Thread | None = None
        self.has_arrived = False
        """Whether this life has come to where its training goes on. Written by the training thread."""

    def start(self) -> None:
        """Starts the background threads. The calling thread is taken for the training thread."""
        self._training_thread = threading.current_thread()
        self.threads.start("follower", self._follow)
        self.threads.start("proposer", self._send)

    def propose(self, update: Update, at_step: int | None = None, trial: Trial | None = None) -> Ticket:
        """Proposes an update. Returns at once."""
        ticket = self._ticket(update.id, "", trial)
        self._outbox.put(lambda: self._post_update(update, ticket, at_step))
        return ticket

    def refuse(self, id_: str, error: UpdateRefused) -> Ticket:
        """A ticket for what is refused before it leaves this worker."""
        ticket = self._ticket(id_, "")
        self.outcomes.refuse(ticket, error)
        return ticket

    def propose_function(
        self, id_: str, function: Function, source: int, at_step: int | None, trial: Trial | None = None
    ) -> Ticket:
        """Proposes what a function will compute on worker `source`, which must propose it too."""
        ticket = self._ticket(id_, f"function-{id_}", trial)
        if source == self.channel.rank:
            self._functions[id_] = function
        proposal = self._proposal(ticket, source=source, at_step=at_step)
        self._outbox.put(lambda: self.channel.post(proposal))
        return ticket

    def wish(self, action: str) -> None:
        """Asks for an action of all workers at one of the next boundaries. A signal handler may call it."""
        request = Request(action, self.channel.rank)
        self._outbox.put(lambda: self.channel.post(request))  # a SimpleQueue may be interrupted in its `put`

    def withdraw(self, id_: str) -> None:
        """Takes an update back, if no worker has applied it yet. Its tickets are refused then."""
        self.wish(f"{WITHDRAW}{id_}")

    def send(self, act: Callable[[], None]) -> None:
        """Has the proposer thread do something that may take a moment, after what it was given before."""
        self._outbox.put(act)

    def arrive(self, step: int) -> None:
        """The training thread stands at a boundary; see `Gate.arrive`."""
        self._training_thread = threading.current_thread()
        self.has_arrived = self.has_arrived or step > self.gate.step
        self.gate.arrive(step)

    @property
    def history(self) -> list[Receipt]:
        """The receipts of all verified updates so far, in order."""
        return self.outcomes.history

    def in_training_thread(self) -> bool:
        """Whether the caller is the thread that comes to the boundaries."""
        return threading.current_thread() is self._training_thread

    def pause(self, intent: str) -> None:
        """Waits at the current boundary until all workers have come here with the same intent.

        Everything that was proposed before, by anyone, is settled when it returns. Blocks as long as the
        others run; raises when one of them fails.
        """
        self._training_thread = threading.current_thread()
        self._token += 1
        token = self.pausing = self._token
        self.intent = intent
        paused = Paused(token, self.channel.rank, self.gate.step, intent)
        try:  # Said when it stands: whoever hears it may ask at once where this worker is.
            self.gate.park(
                lambda: token in self._resumed,
                None,
                announce=lambda: self._outbox.put(lambda: self.channel.post(paused)),
            )
        finally:
            self.pausing, self.intent = None, ""
        error = self._resumed.pop(token)
        if error is not None:
            self.channel.check_nobody_left()  # then that is why they are not at the same place
            raise UpdateRefused.from_json(error)

    def stop(self, timeout_secs: float = 5.0) -> None:
        """Ends the background threads; open tickets say that the job is over."""
        self.threads.stop(timeout_secs)
        self.outcomes.end(self.gate.step)
        self.transport.close()

    def abandon(self) -> None:
        """The process ends, in whatever state: nothing of it must stay in shared memory."""
        self.threads.stopping.set()
        self.transport.close()

    # What the training thread does at a boundary.

    def apply(self, go: Go, step: int, since: float) -> None:
        """Applies committed updates, in order, and reports each."""
        if go.action:
            self.actions[go.action]()
        self.trying.begin(go, step)
        for sequence, id_ in go.updates:
            staged = self.shelf.take(id_)
            faults.point("apply")
            self.state.apply(staged.update.edits)
            self.applied.add(sequence)
            applied_at = time.time()
            digest = self.state.digest(self.examiner.to_be_equal(staged.update.edits))
            # Giving back the memory takes as long as applying: not in this thread.
            self._outbox.put(partial(self.shelf.let_go, staged))
            del staged
            stall_secs = time.monotonic() - since
            self.channel.applied(sequence, Applied(digest, step, applied_at, stall_secs, self.trained()))
            self.outcomes.note_stage(id_, Standing.APPLIED)

    def compute(self, order: Order) -> None:
        """Runs the function, if this worker is the source, and makes what it returns available."""
        if not isinstance(order, Compute):
            self.examiner.obey(order)
            return
        if order.source != self.channel.rank:
            return
        try:
            with self.gate.in_function():
                update = computed_update(order, self._functions.pop(order.id, None), self.state)
            update = planned(update, self.state.schema, self.limits)
            if order.variables is None:  # else these are a replica's own values, for the others
                self._check_by_guard(update)
            computed = Computed(self.shelf.publish(update, f"function-{order.id}").to_json())
        except UpdateRefused as error:
            computed = Computed(error=by_worker(error, self.channel.rank))
        except BaseException as error:  # sys.exit, Ctrl-C: this worker ends, but nobody must wait for it
            said = UpdateRefused(f"The function ended worker {order.source} ({type(error).__name__})")
            self.channel.computed(order.round, Computed(error=by_worker(said, self.channel.rank)))
            raise
        self.channel.computed(order.round, computed)

    # The proposer thread.

    def _send(self) -> None:
        while not self.threads.stopping.is_set():
            send = self.threads.take(self._outbox)
            if send is not None:
                send()

    def _check_by_guard(self, update: Update) -> None:
        if self.guard is not None:
            self.guard.check(update.edits, self.state.schema, self.state.read)

    def _post_update(self, update: Update, ticket: Ticket, at_step: int | None) -> None:
        try:
            # Its values are looked at when all workers have them, each worker at its share.
            update = planned(update, self.state.schema, self.limits, look_at=lambda _: False)
            self._check_by_guard(update)
            parcel = self.shelf.publish(update.labelled("", ""), ticket=ticket.number)
        except Exception as error:
            if isinstance(error, ReplicastError) and not isinstance(error, UpdateRefused):
                raise  # of the job, not of this update
            if not isinstance(error, UpdateRefused):
                logger.exception("update %s is refused: checking it caused an unexpected error", update.id)
            self.outcomes.refuse(ticket, refusal_of(error))
            self.gate.wake()
            return
        ticket.content_digest = parcel.digest
        faults.point("propose")
        label = {"author": update.author, "note": update.note}
        self.channel.post(self._proposal(ticket, parcel=parcel.to_json(), at_step=at_step, **label))

    # The follower thread.

    def _follow(self) -> None:
        number = 0
        while not self.threads.stopping.is_set():
            message = self.channel.entry(number)
            if message is None:
                continue
            answer = self._heed(message)
            if answer is not None:
                self.channel.answer(number, answer)
            number += 1

    def _heed(self, message: Any) -> Answer | None:
        match message:
            case Stage():
                return self.trying.answer(message, self._stage(message))
            case Hold(round_):
                step, parked = self.gate.hold(round_)
                return Answer(step=step, parked=parked)
            case Aim(round_, step):
                self.gate.aim(round_, step)
            case Advance():
                self.gate.bring_forward()
            case Compute():
                self.outcomes.note_step(message.id, message.step)
                self.gate.compute(message)
            case Examine() | Lend() | Weigh() | Audited():
                self.examiner.heed(message)
            case Cut() | Settle():
                self.trying.heed(message)
            case Go():
                self.outcomes.note_committed(message)
                self.gate.go(message)
            case Free(round_):
                self.gate.free(round_)
            case Replay(stops, unyielding):
                for round_, step in stops:
                    self.gate.schedule(round_, step, yields=round_ not in unyielding)
            case Resume(tokens, error):
                if error is None:  # else they may stand at different boundaries
                    self.gate.bring_forward()
                self._resumed[tokens[self.channel.rank]] = error
                self.gate.wake()
            case Again(id_, step, trial):
                self.outcomes.note_again(id_, step, trial)
                self.gate.wake()
            case Drop() | Verified() | Failed():
                self._settle(message)
        return None

    def _settle(self, message: Drop | Verified | Failed) -> None:
        self.shelf.settle(self.outcomes.settle(message), message)
        self.gate.wake()

    def _stage(self, message: Stage) -> Answer:
        answer = self.shelf.stage(message, self.patience.stage_secs)
        if answer.error is None:
            self.outcomes.note_stage(message.id, Standing.STAGED)
            faults.point("ready")
            # Not one that only rests in `result`, with a time limit: staging may take others longer.
            step = self.gate.hold_here(message.round) if message.round and self.pausing else None
            if step is not None:
                return Answer(step=step, parked=True)
        return answer

    # Waiting.

    def _proposal(self, ticket: Ticket, **content: Any) -> Proposal:
        known_by, trial = ticket.content_digest, None if ticket.trial is None else ticket.trial.to_json()
        who = (self.channel.rank, ticket.number, ticket.proposed_at)
        return Proposal(ticket.id, known_by, *who, **content, trial=trial)

    def _ticket(self, id_: str, content_digest: str, trial: Trial | None = None) -> Ticket:
        number = f"{self.channel.rank}-{next(self._numbers)}"
        ticket = Ticket(id_, number, content_digest, self._wait_for, trial)
        self.outcomes.add(ticket)
        return ticket

    def _wait_for(self, ticket: Ticket, timeout: float | None) -> bool:
        if self.in_training_thread():
            hopeless = Since(lambda: self.gate.needs_steps(ticket.step))
            park_secs = self.patience.park_secs
            self.gate.park(lambda: ticket.done() or hopeless.secs() > park_secs, timeout)
            return ticket.done()
        ends = None if timeout is None else time.monotonic() + timeout
        while not ticket.wait(0.5 if ends is None else max(0.0, min(0.5, ends - time.monotonic()))):
            self._check()
            if ends is not None and time.monotonic() >= ends:
                return False
        return True

    def _say_parked(self, step: int) -> None:
        parked = Parked(self.channel.rank, step)
        self._outbox.put(lambda: self.channel.post(parked))

    def _check(self) -> None:
        self._check_elsewhere()
        self.threads.check()
