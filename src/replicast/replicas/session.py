"""One worker's part in a job: drives the state machines of the core with real threads, messages and files.

    training thread    reaches boundaries, rests, waits for tickets; executes orders there       (`Gate`)
    loop               the only thread that calls `Worker` and, on worker 0, `Coordinator`       (`Loop`)
    readers            pass messages of other workers to the loop                                (`Channel`)
    outbox             publishes this worker's proposals in order, then tells the loop
    prepare            loads, fetches, checks and discards the bytes of updates, in the order of the log
    release            frees the memory of what is applied or has its outcome
    files              worker 0: writes what nobody waits for: values before updates, answers to pulls
    journal, saver     worker 0: write entries, write checkpoints

The loop only ever waits for the coordination service; everything else that may block runs in a lane.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from replicast.core import events as c
from replicast.core import events as e
from replicast.core.coordinator import Coordinator
from replicast.core.entries import Entry, Receipt, Saved
from replicast.core.messages import Order, Request, Tell
from replicast.core.operation import Outcome, Timeouts
from replicast.core.operations.revert import WriteBefore
from replicast.core.operations.save import TakeSnapshot
from replicast.core.records import Refusal, Refuse, ReportId, Stage
from replicast.core.worker import Worker
from replicast.errors import ClusterError, FileDamaged, JobFailed, UpdateRefused
from replicast.replicas.channel import Channel, Note
from replicast.replicas.exchange import Exchange
from replicast.replicas.gate import Gate
from replicast.replicas.parcels import Function, Parcels
from replicast.replicas.proposals import Proposals
from replicast.replicas.replica import StateReplica, Writer
from replicast.replicas.threads import Lane, Threads
from replicast.replicas.ticket import Ticket, log_trial, refusal_of
from replicast.transport import Transport
from replicast.update.guard import Guard
from replicast.update.schema import Limits
from replicast.update.state import State
from replicast.update.trial import Trial
from replicast.update.update import Update

# The event loop of one worker: the only thread that calls its state machines.
#
# Any thread may post events; the loop handles them one at a time and fires timers.

IDLE_SECS = 1.0
_NOTHING = object()


class Loop:
    """Calls `handle` with one event at a time. `run` is for the loop's thread."""

    def __init__(self, handle: Callable[[Any], None], stopped: Callable[[], bool]) -> None:
        self._handle = handle
        self._stopped = stopped
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, Any]] = []
        self._numbers = itertools.count()

    def post(self, event: Any) -> None:
        """Posts an event and returns at once. Any thread or signal handler."""
        self._events.put(event)

    def post_after(self, secs: float, event: Any) -> None:
        """Posts an event after a delay. Only from within `handle`."""
        heapq.heappush(self._timers, (time.monotonic() + secs, next(self._numbers), event))

    def run(self) -> None:
        """Handles events until the loop is stopped."""
        while not self._stopped() or not self._events.empty():
            event = self._next()
            if event is not _NOTHING:
                self._handle(event)
            while self._timers and self._timers[0][0] <= time.monotonic():
                self._handle(heapq.heappop(self._timers)[2])

    def _next(self) -> Any:
        """The next event, or `_NOTHING` if a timer is due first."""
        secs = IDLE_SECS
        if self._timers:
            secs = min(secs, max(0.0, self._timers[0][0] - time.monotonic()))
        try:
            return self._events.get(timeout=secs)
        except queue.Empty:
            return _NOTHING


# The state machines of one worker, driven by its event loop: events in, messages out.
#
# Messages between worker 0 and its own coordinator are handled directly, in the same process. All other
# messages go through the channel; readers post incoming ones. Notes go through the channel too, past the
# state machines.

_ToCoordinator = e.FromWorker | e.Written


class Machines:
    """`Worker` and, on worker 0, `Coordinator`, both called by one thread."""

    def __init__(
        self,
        worker: Worker,
        coordinator: Coordinator | None,
        channel: Channel,
        threads: Threads,
        carry_out: Callable[[Any], None],
        on_tell: Callable[[Tell], None],
        on_note: Callable[[int, str], None],
    ) -> None:
        self.worker = worker
        self.coordinator = coordinator
        self.lock = threading.Lock()
        self._channel = channel
        self._threads = threads
        self._carry_out = carry_out
        self._on_tell = on_tell
        self._on_note = on_note
        self._loop = Loop(self._handle, threads.stopping.is_set)

    def start(self) -> None:
        """Starts the loop and the readers."""
        self._threads.start("loop", self._run)
        if self.coordinator is None:
            self._threads.start("reader", self._read)
            return
        for rank in range(1, self._channel.size):
            self._threads.start(f"reader-{rank}", partial(self._read_from, rank))

    def post(self, event: Any) -> None:
        """Posts an event and returns at once. Any thread or signal handler. None only wakes the loop up."""
        self._loop.post(event)

    def _run(self) -> None:
        self._loop.run()
        # Lets the readers of all other workers stop now, before their request to the service times out.
        with contextlib.suppress(JobFailed):
            if self.coordinator is None:
                self._channel.send([])
            else:
                self._channel.broadcast([])

    def _handle(self, event: Any) -> None:
        pending = [] if event is None else [event]
        while pending:
            pending = [more for one in pending for more in self._handle_one(one)]

    def _handle_one(self, event: Any) -> list[Any]:
        """Passes an event to its machine, executes the commands, and returns the local events that follow."""
        if isinstance(event, Request):
            return self._dispatch([c.Send(event)])
        if isinstance(event, Note):
            self._channel.send([event])
            return []
        machine: Worker | Coordinator | None
        if isinstance(event, tuple):  # a timer of one of the machines
            machine, event = event
        else:
            machine = self.coordinator if isinstance(event, _ToCoordinator) else self.worker
        if machine is None:
            return []
        if isinstance(event, e.FromCoordinator) and isinstance(event.message, Tell):
            self._on_tell(event.message)
        with self.lock:
            commands: list[Any] = [*machine.handle(event)]
        return self._dispatch(commands, machine)

    def _dispatch(self, commands: list[Any], machine: Worker | Coordinator | None = None) -> list[Any]:
        follow: list[Any] = []
        sent = [command.message for command in commands if isinstance(command, c.Send)]
        said = [command.message for command in commands if isinstance(command, c.Broadcast)]
        if said:  # to the others first: worker 0 must not act on a message that they may never receive
            self._channel.broadcast(said)
            follow += [e.FromCoordinator(message) for message in said]
        if sent and self.coordinator is None:
            self._channel.send(sent)
        elif sent:
            follow += [e.FromWorker(self._channel.rank, message) for message in sent]
        for command in commands:
            if isinstance(command, c.SetTimer):
                self._loop.post_after(command.secs, (machine, e.TimerFired(command.number)))
            elif not isinstance(command, c.Send | c.Broadcast):
                self._carry_out(command)
        return follow

    def _read(self) -> None:
        while not self._threads.stopping.is_set():
            for message in self._channel.receive():
                self._loop.post(e.FromCoordinator(message))

    def _read_from(self, rank: int) -> None:
        while not self._threads.stopping.is_set():
            for message in self._channel.receive_from(rank):
                if isinstance(message, Note):
                    self._on_note(rank, message.text)
                else:
                    self._loop.post(e.FromWorker(rank, message))


logger = logging.getLogger("replicast")


class Session:
    """One worker. Methods are for the training thread unless they say otherwise."""

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
        self._transport = transport
        self._check_elsewhere = check
        self.threads = Threads(on_death=lambda: self._gate.let_go())
        self._gate = Gate(self.check, self._note_long_wait, self._performed)
        self._outbox = self.threads.lane("outbox")
        self._preparing = self.threads.lane("prepare")
        self._releasing = self.threads.lane("release")
        self.files = self.threads.lane("files") if writer is not None else self._releasing
        self._parcels = Parcels(transport, exchange.name, self.rank, state.schema)
        self._writer = writer
        self.replica = self._gate.replica = self._new_replica(state, guard)
        self._machines = Machines(
            Worker(self.rank, timeouts=self.timeouts),
            self._new_coordinator(attempt, audit_policy),
            channel,
            self.threads,
            self._carry_out,
            self._note_told,
            lambda rank, text: self.on_note(rank, text),
        )
        self.proposals = Proposals(
            self.replica,
            self._parcels,
            self.limits,
            self._outbox,
            self._releasing,
            self._machines.post,
            self._wait_for,
        )
        self._closed = False
        self._reports: dict[str, ReportId] = {}
        self.begun = False
        self.receipts: list[Receipt] = []
        self.on_ended: Callable[[c.Ended], None] = lambda ended: None
        self.on_inbox: Callable[[str, Tell], None] = lambda ticket, tell: None
        self.on_note: Callable[[int, str], None] = lambda rank, text: None
        self.on_long_wait: Callable[[int | None], None] = lambda step: None

    def _new_replica(self, state: State, guard: Guard | None) -> StateReplica:
        replica = StateReplica(
            self.rank,
            state,
            self._parcels,
            self._gate,
            self._releasing,
            self.limits,
            self.timeouts.prepare_secs - 10.0,
        )
        replica.step = lambda: self.step
        replica.guard = guard
        if self._writer is not None:
            replica.journal = self._writer.journal
        return replica

    def _new_coordinator(self, attempt: int, audit_policy: str) -> Coordinator | None:
        """On worker 0."""
        if self._writer is None:
            return None
        history = self._writer.history()
        return Coordinator(
            self.size, history, attempt=attempt, timeouts=self.timeouts, audit_policy=audit_policy
        )

    def start(self) -> None:
        """Starts the threads. The calling thread becomes the training thread."""
        self._gate.thread = threading.current_thread()
        if self._writer is not None:
            self._writer.start(self.threads)
        self._machines.start()

    def stop(self, timeout_secs: float = 5.0) -> None:
        """Stops the threads and fails open tickets: the job is over."""
        self._closed = True
        if not self.threads.stopping.is_set():  # what is still in the outbox, somebody may wait for
            is_sent = threading.Event()
            self._outbox.do(is_sent.set)
            is_sent.wait(timeout_secs)
        self.threads.stopping.set()
        self._machines.post(None)
        self.threads.stop(timeout_secs)
        self.proposals.end(self.step)
        self._transport.close()

    def abandon(self) -> None:
        """Releases shared memory when the process exits, in whatever state it is."""
        self.threads.stopping.set()
        self._transport.close()

    # The training thread.

    @property
    def step(self) -> int:
        """The last boundary that the training thread has reached. Any thread."""
        return self._machines.worker.step

    @property
    def is_wanted(self) -> bool:
        """Whether the others wait for this training thread to reach a boundary. Any thread."""
        with self._machines.lock:
            return self._machines.worker.is_wanted

    def in_training_thread(self) -> bool:
        """Whether the caller is the training thread. Any thread."""
        return threading.current_thread() is self._gate.thread

    def arrive(self, step: int) -> None:
        """The training thread has finished `step` steps. Returns when it may start the next one.

        Costs one uncontended lock when nothing is going on.
        """
        self._gate.check_not_in_function()
        self._gate.check_not_left_early()
        with self._machines.lock:
            passes = self._machines.worker.passes(step)
        if passes:
            self._gate.thread = threading.current_thread()
            self.check()
        else:
            self._gate.enter(lambda: self._machines.post(e.Arrived(step)))

    def rest(self, *intent: Any) -> Any:
        """Waits at this boundary until all workers rest here with the same intent.

        All earlier proposals, of any worker, are settled when it returns. Blocks as long as the others run.
        """
        outcome = self._gate.enter(lambda: self._outbox.do(lambda: self._machines.post(e.Rested(intent))))
        if isinstance(outcome, Refusal):
            self.exchange.check_nobody_left()  # a worker that has left is the better explanation
            raise ClusterError(outcome.problem, remedy="Every worker must make the same calls to replicast")
        return outcome.result if isinstance(outcome, Outcome) else outcome

    def begin(self) -> None:
        """Resumes unfinished work of earlier attempts, before the first common operation of all workers."""
        if not self.begun:
            if self._writer is not None and self._machines.coordinator is not None:
                self._writer.journal.check_start(self._machines.coordinator.start)
            self.rest("begin")
            self.begun = True

    def next_report(self, kind: str) -> ReportId:
        """The id of the next planned save or audit at this boundary; all workers ask for the same ones."""
        last = self._reports.get(kind)
        count = last.count + 1 if last is not None and last.step == self.step else 1
        self._reports[kind] = id_ = ReportId(kind, self.step, count)
        return id_

    def report(self, id_: ReportId, value: Callable[[], Any]) -> None:
        """Reports something that every worker does at this boundary without waiting. Returns at once."""
        self._outbox.do(lambda: self._machines.post(e.Reported(id_, value())))

    def start_from(self, saved: Saved) -> None:
        """Starts from the state of a checkpoint. Called on all workers, before training begins."""
        with self._machines.lock:
            self._machines.worker.step = saved.step
            if self._machines.coordinator is not None:
                self._machines.coordinator.start = saved
        self.replica.holds = set(saved.holds)

    def set_audit_policy(self, policy: str) -> None:
        """Sets what happens to replicas that differ, from now on."""
        if self._machines.coordinator is not None:
            self._machines.coordinator.audit_policy = policy

    def raise_later(self, error: Exception) -> None:
        """Makes the training thread raise this error when it continues."""
        self._gate.error = error

    def script_ends(self) -> None:
        """Marks that the script has reached its end and need not be told to exit."""
        self._gate.ends = True

    # Any thread.

    def propose(self, update: Update, at_step: int | None = None, trial: Trial | None = None) -> Ticket:
        """Proposes an update. Returns at once."""
        return self.proposals.propose(update, at_step, trial)

    def propose_function(
        self, id_: str, function: Function, source: int, at_step: int | None, trial: Trial | None = None
    ) -> Ticket:
        """Proposes a function to be run on worker `source`, which must propose it too."""
        return self.proposals.propose_function(id_, function, source, at_step, trial)

    def propose_revert(self, id_: str, sequence: int, note: str = "", *, forced: bool = False) -> Ticket:
        """Proposes to undo a committed update. Returns at once."""
        return self.proposals.propose_revert(id_, sequence, note, forced=forced)

    def request(self, kind: str, asked_by: tuple[str, ...] = (), arguments: tuple[Any, ...] = ()) -> None:
        """Requests an operation of all workers at one of the next boundaries. Signal handlers may call it."""
        self._outbox.do(lambda: self._machines.post(Request(kind, asked_by, arguments)))

    def send_note(self, text: str) -> None:
        """Sends this worker's note to worker 0, before whatever it sends next. Returns at once.

        Not for worker 0.
        """
        self._machines.post(Note(text))

    def operations(self) -> list[dict[str, Any]]:
        """Worker 0: the current operations, in order. Any thread."""
        coordinator = self._machines.coordinator
        if coordinator is None:
            return []
        with self._machines.lock:
            return [
                {
                    "id": one.id,
                    "kind": one.kind,
                    "stage": str(one.stage),
                    "step": one.step,
                    "waits_for": one.waits_for,
                    "trial_until": one.waits_until
                    if one is coordinator.trial and one.stage is Stage.APPLIED
                    else None,
                    "author": "" if one.proposal is None else one.proposal.author,
                    "note": "" if one.proposal is None else one.proposal.note,
                }
                for one in coordinator.operations.values()
            ]

    def wait_for_outcomes(self) -> None:
        """Blocks until the lane "release" has handled all outcomes that are known now: audit reports, saves.

        At most `answer_secs`: then reports come late, and nothing else is wrong.
        """
        handled = threading.Event()
        self._releasing.do(handled.set)
        ends = time.monotonic() + self.timeouts.answer_secs
        while not handled.wait(0.2) and time.monotonic() < ends:
            self.check()

    def check(self) -> None:
        """Raises if a thread or another worker has died."""
        self._check_elsewhere()
        self.threads.check()

    def _wait_for(self, ticket: Ticket, timeout: float | None) -> bool:
        if ticket.done() or self._closed:
            return ticket.done()
        if self.in_training_thread():
            secs = self.timeouts.wait_secs if timeout is None and not self.begun else timeout
            awaited = e.Awaited(ticket.number, secs)
            self._gate.enter(lambda: self._outbox.do(lambda: self._machines.post(awaited)))
            return ticket.done()
        ends = None if timeout is None else time.monotonic() + timeout
        while not ticket.wait(0.5 if ends is None else max(0.0, min(0.5, ends - time.monotonic()))):
            self.check()
            if ends is not None and time.monotonic() >= ends:
                return False
        return True

    # Commands of the state machines.

    def _carry_out(self, command: Any) -> None:
        match command:
            case c.Perform(_, order):
                if order.in_background:
                    self._lane_of(order).do(lambda: self._perform(command))
                else:
                    self._gate.perform(command)
            case c.Pass():
                self._gate.let_go()
            case c.Continue(outcome):
                self._gate.let_go(outcome)
            case c.Settle(number, tell):
                self.proposals.told(number, tell)
            case c.DropPrepared(id_):
                self._parcels.discard_soon(id_)
                self._preparing.do(lambda: self.replica.discard(id_))
            case c.Write(number, entry):
                self._write(number, entry)
            case c.CloseInbox(ticket, tell):
                self.proposals.close_from_outside(ticket, tell.stage)
                self.on_inbox(ticket, tell)
            case c.Ended():
                self._releasing.do(lambda: self.on_ended(command))
            case c.EndJob(reason):
                raise JobFailed(reason)

    def _lane_of(self, order: Order) -> Lane:
        # All others in one lane with `DropPrepared`: what is refused leaves no bytes behind.
        return self.files if isinstance(order, WriteBefore) else self._preparing

    def _write(self, number: int, entry: Entry) -> None:
        if self._writer is not None:
            self._writer.write(
                entry,
                self._parcels,
                lambda outcome, problem: self._machines.post(e.Written(number, outcome, problem)),
            )

    def _perform(self, command: c.Perform) -> None:
        """Executes an order in a lane. An unexpected error refuses only this order."""
        try:
            value = command.order.perform(self.replica)
        except Refuse as error:
            value = error.refusal
        except (JobFailed, FileDamaged):  # what was promised is lost: that ends the job
            raise
        except Exception as error:
            logger.warning("%s failed on this worker", type(command.order).__name__, exc_info=True)
            problem = f"A worker could not prepare it ({type(error).__name__}: {error})"
            value = refusal_of(UpdateRefused(problem), self.rank)
        self._machines.post(e.Performed(command.number, value))

    def _performed(self, number: int, order: Any, value: Any) -> None:
        """Called in the training thread after each order."""
        later = isinstance(order, TakeSnapshot) or callable(value)
        if later:
            # Training goes on meanwhile. In the outbox: earlier proposals belong to a checkpoint, and a
            # checkpoint that holds an update comes after the report that it is applied.
            self._outbox.do(
                lambda: self._machines.post(e.Reported(number, value() if callable(value) else value))
            )
        self._machines.post(e.Performed(number, None if later else value, answers=not later))

    def _note_long_wait(self, waits: bool) -> None:
        # Not in a lane: what is known of this worker must not stay behind when it trains on.
        self.on_long_wait(self.step if waits else None)

    def _note_told(self, tell: Tell) -> None:
        if tell.ended and isinstance(tell.outcome, Receipt):
            self.receipts.append(tell.outcome)
            if self.rank == 0:
                log_trial(tell.outcome)
