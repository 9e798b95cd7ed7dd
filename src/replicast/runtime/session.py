"""One worker's part in a job: drives the state machines of the core with real threads, messages and files.

    training thread    comes to boundaries, rests, waits for tickets; carries out orders there   (`Gate`)
    loop               the only thread that calls `Worker` and, on worker 0, `Coordinator`       (`Loop`)
    readers            hand messages of other workers to the loop                                (`Channel`)
    outbox             publishes what this worker proposes, in order; then the loop is told
    prepare            fetches and checks the bytes of updates, in the order of the log
    release            gives memory back, loads payloads of the journal
    journal, saver     worker 0: write entries, write checkpoints

The loop never waits for anything but the coordination service; everything else that may take time has a lane.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from replicast import faults
from replicast.core import commands as c
from replicast.core import events as e
from replicast.core.coordinator import Coordinator
from replicast.core.entries import Entry, Receipt, Saved
from replicast.core.messages import OUTSIDE, Propose, Request, Tell, Withdraw
from replicast.core.operation import Outcome, Timeouts
from replicast.core.operations.save import TakeSnapshot
from replicast.core.operations.update import Load
from replicast.core.proposal import Proposal
from replicast.core.refusal import Refusal, Refuse
from replicast.core.stage import Stage
from replicast.core.worker import Worker
from replicast.errors import ClusterError, JobFailed, ReplicastError, UpdatePending, UpdateRefused
from replicast.errors import refusal_of as unexpected_refusal
from replicast.guard import Guard
from replicast.runtime.channel import Channel
from replicast.runtime.exchange import Exchange
from replicast.runtime.functions import Function
from replicast.runtime.gate import Gate
from replicast.runtime.loop import Loop
from replicast.runtime.parcels import Parcels
from replicast.runtime.replica import StateReplica
from replicast.runtime.threads import Threads
from replicast.runtime.ticket import Ticket, log_trial, refusal_of
from replicast.runtime.writer import Writer
from replicast.state import State
from replicast.transport import Transport
from replicast.trial import Trial
from replicast.update import Update
from replicast.validate import Limits, planned

logger = logging.getLogger("replicast")

UNBEGUN_SECS = 5.0
"""How long a training thread waits for a ticket before training: until all begin, nothing is decided."""
_ToCoordinator = e.FromWorker | e.Written


class Session:
    """One worker. Methods are for the training thread unless they say otherwise.

    Args:
        exchange: How its training thread talks to the others' directly.
        channel: How messages travel.
        transport: How bytes do.
        state: The variables.
        writer: On worker 0: writes what the coordinator decides.
        attempt: Which start of the job this is.
        timeouts: How long is waited for whom.
        limits: What is refused as too large.
        guard: What this worker lets nobody propose.
        audit_policy: What becomes of replicas that differ.
        check: Raises when the job has failed elsewhere, so that no wait outlives it.

    Attributes:
        replica: This worker's copy of the state.
        exchange: See above.
        begun: Whether what earlier attempts left is taken up: nothing is decided before.
        receipts: Those of all updates that were verified so far, in order, the same on every worker.
        on_ended: On worker 0: told of each operation that ended and that nobody holds a ticket for.
        on_long_wait: Told the step at which the training thread has waited for some time, and None when it
            goes on after that. Called in the background.
        on_inbox: On worker 0: told of each proposal from outside that has its outcome.
    """

    def __init__(
        self,
        exchange: Exchange,
        channel: Channel,
        transport: Transport,
        state: State,
        *,
        writer: Writer | None = None,
        attempt: int = 0,
        timeouts: Timeouts | None = None,
        limits: Limits | None = None,
        guard: Guard | None = None,
        audit_policy: str = "heal",
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self.exchange = exchange
        self.rank, self.size = channel.rank, channel.size
        self.timeouts = timeouts or Timeouts()
        self.limits = limits or Limits()
        self._channel = channel
        self._transport = transport
        self._check_elsewhere = check
        self._lock = threading.Lock()
        self.threads = Threads(on_death=lambda: self._gate.let_go())
        self._loop = Loop(self._handle, self.threads.stopping.is_set)
        self._gate = Gate(self.check, self._note_long_wait, self._performed)
        self._outbox = self.threads.lane("outbox")
        self._preparing = self.threads.lane("prepare")
        self._releasing = self.threads.lane("release")
        self._parcels = Parcels(transport, exchange.name, self.rank, state.schema, self.limits)
        self.replica = self._gate.replica = StateReplica(
            self.rank,
            state,
            self._parcels,
            self._gate,
            self._releasing,
            self.limits,
            self.timeouts.prepare_secs - 10.0,
        )
        self.replica.step = lambda: self.step
        self.replica.guard = guard
        self.replica.on_stage = self._note_stage
        self._worker = Worker(self.rank, timeouts=self.timeouts)
        self._coordinator: Coordinator | None = None
        self._writer = writer
        if writer is not None:
            self.replica.journal = writer.journal
            self._coordinator = Coordinator(
                self.size,
                writer.history(),
                attempt=attempt,
                timeouts=self.timeouts,
                audit_policy=audit_policy,
            )
        self._numbers = itertools.count(1)
        # Of this process: a refusal in the journal names tickets, and must never mean a later one.
        self._unique = f"worker-{self.rank}-{uuid.uuid4().hex[:12]}"
        self._tickets: dict[str, Ticket] = {}
        self._closed = False
        self.begun = False
        self.receipts: list[Receipt] = []
        self.on_ended: Callable[[c.Ended], None] = lambda ended: None
        self.on_inbox: Callable[[str, Tell], None] = lambda ticket, tell: None
        self.on_long_wait: Callable[[int | None], None] = lambda step: None

    def start(self) -> None:
        """Starts the threads. The calling thread is taken for the training thread."""
        self._gate.thread = threading.current_thread()
        self.threads.start("loop", self._run_loop)
        if self._writer is not None:
            self._writer.start(self.threads)
            for rank in range(1, self.size):
                self.threads.start(f"reader-{rank}", partial(self._read_from, rank))
        else:
            self.threads.start("reader", self._read)

    def stop(self, timeout_secs: float = 5.0) -> None:
        """Ends the threads; open tickets say that the job is over."""
        self._closed = True
        self.threads.stopping.set()
        self._loop.post(None)
        self.threads.stop(timeout_secs)
        for ticket in list(self._tickets.values()):
            meant = "" if ticket.step is None else f" for step {ticket.step}"
            said = f"The job ended at step {self.step}; update {ticket.id} is {ticket.stage}{meant}"
            ticket.fail(ticket.stage, UpdatePending(said, stage=ticket.stage, update_id=ticket.id))
        self._transport.close()

    def abandon(self) -> None:
        """The process ends, in whatever state: nothing of it must stay in shared memory."""
        self.threads.stopping.set()
        self._transport.close()

    # The training thread.

    @property
    def step(self) -> int:
        """The last boundary that the training thread has come to. Any thread."""
        return self._worker.step

    def in_training_thread(self) -> bool:
        """Whether the caller is the thread that comes to the boundaries. Any thread."""
        return threading.current_thread() is self._gate.thread

    def arrive(self, step: int) -> None:
        """The training thread has finished `step` steps. Returns when it may start the next one.

        Costs one uncontended lock when nothing is going on.
        """
        self._gate.check_not_in_function()
        with self._lock:
            passes = self._worker.passes(step)
        if passes:
            self._gate.thread = threading.current_thread()
            self.check()
        else:
            self._gate.enter(lambda: self._loop.post(e.Arrived(step)))

    def rest(self, *intent: Any) -> Any:
        """Waits at this boundary until all workers have come here with the same intent.

        What was proposed before, by anyone, is settled when it returns. Blocks as long as the others run.

        Returns:
            What came of it.

        Raises:
            ClusterError: The workers wait for each other at different places.
        """
        outcome = self._gate.enter(lambda: self._outbox.do(lambda: self._loop.post(e.Rested(intent))))
        if isinstance(outcome, Refusal):
            self.exchange.check_nobody_left()  # then that is why they are not at the same place
            raise ClusterError(
                outcome.problem, remedy="Every worker must come to the same calls of replicast"
            )
        return outcome.result if isinstance(outcome, Outcome) else outcome

    def begin(self) -> None:
        """All workers are about to do something together: what earlier attempts left comes first."""
        if not self.begun:
            self.rest("begin")
            self.begun = True

    def report(self, kind: str, value: Callable[[], Any]) -> None:
        """Reports what every worker does by itself at this boundary. Returns at once.

        Args:
            kind: "save" or "audit".
            value: Called in the background, after what this worker proposed before.
        """
        self._outbox.do(lambda: self._loop.post(e.Reported(kind, value())))

    def start_from(self, saved: Saved) -> None:
        """The state is that of a checkpoint. All workers, before training begins."""
        with self._lock:
            self._worker.step = saved.step
            if self._coordinator is not None:
                self._coordinator.start = saved
        self.replica.holds = set(saved.holds)

    def set_audit_policy(self, policy: str) -> None:
        """What becomes of replicas that differ from now on."""
        if self._coordinator is not None:
            self._coordinator.audit_policy = policy

    def raise_later(self, error: Exception) -> None:
        """The training thread raises this when it goes on from where it stands."""
        self._gate.error = error

    def script_ends(self) -> None:
        """Nothing has to end the script any more."""
        self._gate.ends = True

    # Proposals: any thread.

    def propose(self, update: Update, at_step: int | None = None, trial: Trial | None = None) -> Ticket:
        """Proposes an update. Returns at once."""
        ticket = self._ticket(update.id, trial)
        self._outbox.do(lambda: self._publish(update, ticket, at_step))
        return ticket

    def propose_function(
        self, id_: str, function: Function, source: int, at_step: int | None, trial: Trial | None = None
    ) -> Ticket:
        """Proposes what a function will compute on worker `source`, which must propose it too."""
        ticket = self._ticket(id_, trial)
        if source == self.rank:
            self.replica.add_function(id_, function)
        author = f"worker {self.rank}"
        proposal = Proposal(
            id_, "", None, at_step, trial, source, author=author, proposed_at=ticket.proposed_at
        )
        self._outbox.do(lambda: self._loop.post(e.Proposed(ticket.number, proposal)))
        return ticket

    def refuse(self, id_: str, error: UpdateRefused) -> Ticket:
        """A ticket for what is refused before it leaves this worker."""
        ticket = self._ticket(id_)
        self._settle(ticket, Stage.REFUSED, error)
        return ticket

    def request(self, kind: str, asked_by: tuple[str, ...] = ()) -> None:
        """Asks for an operation of all workers at a next boundary. A signal handler may call it."""
        self._outbox.do(lambda: self._loop.post(Request(kind, asked_by)))

    def propose_from_outside(
        self, ticket: str, update: Update, at_step: int | None, trial: Trial | None
    ) -> None:
        """Worker 0: an update from the inbox. Blocks while its bytes are copied.

        Raises:
            UpdateRefused: It cannot be applied to this state, or the guard does not allow it.
        """
        proposal = self._published(update, "outside " + ticket, at_step, trial, time.time())
        self._loop.post(e.FromWorker(OUTSIDE, Propose(ticket, proposal)))

    def withdraw_from_outside(self, ticket: str, id_: str) -> None:
        """Worker 0: somebody outside takes an update back."""
        self._loop.post(e.FromWorker(OUTSIDE, Withdraw(ticket, id_)))

    def operations(self) -> list[dict[str, Any]]:
        """Worker 0: what is under way, in order. Any thread."""
        if self._coordinator is None:
            return []
        with self._lock:
            return [
                {
                    "id": one.id,
                    "kind": one.kind,
                    "stage": str(one.stage),
                    "step": one.step,
                    "waits_for": one.waits_for,
                    "author": "" if one.proposal is None else one.proposal.author,
                    "note": "" if one.proposal is None else one.proposal.note,
                }
                for one in self._coordinator.operations.values()
            ]

    def _ticket(self, id_: str, trial: Trial | None = None) -> Ticket:
        number = f"{self._unique}-{next(self._numbers)}"
        ticket = Ticket(id_, number, self._wait_for, trial)
        self._tickets[number] = ticket
        return ticket

    def _publish(self, update: Update, ticket: Ticket, at_step: int | None) -> None:
        try:
            proposal = self._published(update, ticket.number, at_step, ticket.trial, ticket.proposed_at)
        except UpdateRefused as error:
            self._settle(ticket, Stage.REFUSED, error)
            return
        faults.point("propose")
        self._loop.post(e.Proposed(ticket.number, proposal))

    def _published(
        self, update: Update, owner: str, at_step: int | None, trial: Trial | None, proposed_at: float
    ) -> Proposal:
        try:
            # Its values are looked at when all workers have them, each worker at its share.
            update = planned(update, self.replica.state.schema, self.limits, look_at=lambda _: False)
            self.replica.check_by_guard(update)
            parcel = self._parcels.publish(update, owner)
        except (UpdateRefused, JobFailed):
            raise
        except Exception as error:
            logger.exception("update %s is refused: checking it caused an unexpected error", update.id)
            raise unexpected_refusal(error) from error
        return Proposal(
            update.id,
            parcel.digest,
            parcel,
            at_step,
            trial,
            author=update.author,
            note=update.note,
            proposed_at=proposed_at,
        )

    def _settle(self, ticket: Ticket, stage: Stage, error: ReplicastError) -> None:
        self._tickets.pop(ticket.number, None)
        ticket.fail(stage, error)

    def _wait_for(self, ticket: Ticket, timeout: float | None) -> bool:
        if ticket.done() or self._closed:
            return ticket.done()
        if self.in_training_thread():
            secs = UNBEGUN_SECS if timeout is None and not self.begun else timeout
            awaited = e.Awaited(ticket.number, secs)
            self._gate.enter(lambda: self._outbox.do(lambda: self._loop.post(awaited)))
            return ticket.done()
        ends = None if timeout is None else time.monotonic() + timeout
        while not ticket.wait(0.5 if ends is None else max(0.0, min(0.5, ends - time.monotonic()))):
            self.check()
            if ends is not None and time.monotonic() >= ends:
                return False
        return True

    # The event loop.

    def _run_loop(self) -> None:
        self._loop.run()
        self._wake_readers()

    def _handle(self, event: Any) -> None:
        pending = [] if event is None else [event]  # None only wakes the loop up
        while pending:
            pending = [more for one in pending for more in self._handle_one(one)]

    def _handle_one(self, event: Any) -> list[Any]:
        """Hands one event to its machine and carries out the commands; gives the events that follow here."""
        if isinstance(event, Request):
            return self._dispatch([c.Send(event)])
        if isinstance(event, tuple):  # a timer of one of the machines
            machine, event = event
        else:
            machine = self._coordinator if isinstance(event, _ToCoordinator) else self._worker
        if machine is None:
            return []
        if isinstance(event, e.FromCoordinator) and isinstance(event.message, Tell):
            self._note_told(event.message)
        with self._lock:
            commands = machine.handle(event)
        return self._dispatch(commands, machine)

    def _dispatch(self, commands: list[Any], machine: Any = None) -> list[Any]:
        follow: list[Any] = []
        sent = [command.message for command in commands if isinstance(command, c.Send)]
        said = [command.message for command in commands if isinstance(command, c.Broadcast)]
        if said:  # first to the others: worker 0 must not act on what they may never hear
            self._channel.broadcast(said)
            follow += [e.FromCoordinator(message) for message in said]
        if sent and self._coordinator is None:
            self._channel.send(sent)
        elif sent:
            follow += [e.FromWorker(self.rank, message) for message in sent]
        for command in commands:
            self._carry_out(command, machine)
        return follow

    def _carry_out(self, command: Any, machine: Any) -> None:
        match command:
            case c.Perform(_, order):
                if order.in_background:
                    lane = self._releasing if isinstance(order, Load) else self._preparing
                    lane.do(lambda: self._perform(command))
                else:
                    self._gate.perform(command)
            case c.Pass():
                self._gate.let_go()
            case c.Continue(outcome):
                self._gate.let_go(outcome)
            case c.Settle(number, tell):
                self._told(number, tell)
            case c.Discard(id_):
                self._preparing.do(lambda: self.replica.discard(id_))
            case c.SetTimer(number, secs):
                self._loop.post_after(secs, (machine, e.TimerFired(number)))
            case c.Write(number, entry):
                self._write(number, entry)
            case c.CloseInbox(ticket, tell):
                self._releasing.do(lambda: self._parcels.release_ticket("outside " + ticket))
                self.on_inbox(ticket, tell)
            case c.Ended():
                self._releasing.do(lambda: self.on_ended(command))
            case c.EndJob(reason):
                raise JobFailed(reason)

    def _write(self, number: int, entry: Entry) -> None:
        if self._writer is not None:
            self._writer.write(
                entry, self._parcels, lambda outcome: self._loop.post(e.Written(number, outcome))
            )

    def _perform(self, command: c.Perform) -> None:
        """In a lane: an unexpected error refuses this one order."""
        try:
            value = command.order.perform(self.replica)
        except Refuse as error:
            value = error.refusal
        except JobFailed:
            raise
        except Exception as error:
            logger.warning("%s failed on this worker", type(command.order).__name__, exc_info=True)
            problem = f"A worker could not prepare it ({type(error).__name__}: {error})"
            value = refusal_of(UpdateRefused(problem), self.rank)
        self._loop.post(e.Performed(command.number, value))

    def _performed(self, number: int | tuple[str, int], order: Any, value: Any) -> None:
        """In the training thread: an order was carried out."""
        event = e.Performed(number, value)
        if isinstance(order, TakeSnapshot):  # what was proposed before belongs to the checkpoint
            self._outbox.do(lambda: self._loop.post(event))
        else:
            self._loop.post(event)

    def _note_long_wait(self, waits: bool) -> None:
        step = self.step if waits else None
        self._releasing.do(lambda: self.on_long_wait(step))

    def _told(self, number: str, tell: Tell) -> None:
        ticket = self._tickets.get(number)
        if ticket is None:
            return
        ticket.told(tell)
        if ticket.done():
            del self._tickets[number]
            self._releasing.do(lambda: self._parcels.release_ticket(number))

    def _note_told(self, tell: Tell) -> None:
        if tell.ended and isinstance(tell.outcome, Receipt):
            self.receipts.append(tell.outcome)
            if self.rank == 0:
                log_trial(tell.outcome)

    def _note_stage(self, id_: str, stage: str) -> None:
        for ticket in list(self._tickets.values()):
            if ticket.id == id_:
                ticket.reach(Stage(stage))

    def _wake_readers(self) -> None:
        """So that those of all other workers end at once, and not when their question to the service does."""
        with contextlib.suppress(JobFailed):
            if self._coordinator is None:
                self._channel.send([])
            else:
                self._channel.broadcast([])

    def _read(self) -> None:
        while not self.threads.stopping.is_set():
            for message in self._channel.receive():
                self._loop.post(e.FromCoordinator(message))

    def _read_from(self, rank: int) -> None:
        while not self.threads.stopping.is_set():
            for message in self._channel.receive_from(rank):
                self._loop.post(e.FromWorker(rank, message))

    def check(self) -> None:
        """Raises when a thread or another worker has died."""
        self._check_elsewhere()
        self.threads.check()
