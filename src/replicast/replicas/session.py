"""One worker's part in a job: drives the state machines of the core with real threads, messages and files.

    training thread    reaches boundaries, rests, waits for tickets; executes orders there       (`Gate`)
    loop               the only thread that calls `WorkerMachine` and, on worker 0, `Coordinator`
    readers            pass messages of other workers to the loop                                (`Channel`)
    outbox             publishes this worker's proposals in order, then tells the loop
    prepare            loads, fetches, checks and discards the bytes of updates, in the order of the log
    release            frees the memory of what is applied or has its outcome; tells how operations ended
    files              worker 0: writes what nobody waits for: values before updates
    journal, saver     worker 0: write entries, write checkpoints
    telemetry          worker 0: tells TensorBoard and OpenTelemetry, whose disk or network may hang

**Who may call what.** Only the loop calls the state machines (`_handle`); any thread may post events to it.
Other threads read a machine under `_lock`; `step`, which only one thread writes, they read without it. Only
the training thread touches variables: at a boundary it stands in the gate and executes the loop's orders.
The loop only ever waits while it sends a message; everything else that may block runs in a lane.

**Order.** Proposals, reports and rests of one worker go through its outbox, in the order in which the script
made them: a checkpoint contains the proposals made before it. Orders about bytes, and `DropPrepared`, run in
the one lane "prepare": what is refused leaves no bytes behind. Worker 0's messages go to the other workers
before it acts on them itself: it must not act on what they may never receive.

**Who stops a thread, and what if it dies.** `stop` stops all; they are daemons and hold nothing but memory.
When one dies, all stop, and the training thread raises its error at the next boundary or from the wait in
which it is (`check`, at least once a second). An error about one order refuses that order only. `JobFailed`
and `FileDamaged` in a lane end the job: what was promised is lost.

**Waits.** In the gate: for the coordinator's decision, which has deadlines of its own (`Timeouts`) and names
who is missing. A ticket: its `timeout`. `wait_for_outcomes`: `answer_secs`, for the lane "release". `stop`:
5 s for the outbox, 5 s for the threads.
"""

from __future__ import annotations

import contextlib
import heapq
import importlib
import itertools
import logging
import queue
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from replicast import faults
from replicast.config import TOLD_TO_END
from replicast.coordination import DirectExchange
from replicast.core import messages as m
from replicast.core.coordinator import Coordinator
from replicast.core.entries import Committed, Decided, Entry, Payload, Receipt, Saved, Stage
from replicast.core.messages import Answer, Refusal, Refuse, ReportId, Request, Tell
from replicast.core.operation import Outcome, Timeouts
from replicast.core.operations.apply import Apply, BeginTrial, EndTrial, WriteBefore
from replicast.core.operations.attempt import Exit, TakeSnapshot
from replicast.core.worker import WorkerMachine
from replicast.errors import ClusterError, FileDamaged, JobFailed, ReplicastError, UpdateRefused
from replicast.processes import Deadline
from replicast.replicas.channel import Channel, Note
from replicast.replicas.proposals import Proposals, Ticket, log_trial, refusal_of
from replicast.replicas.replica import Parcels, StateReplica, WorkerHooks
from replicast.storage.journal import Journal, NotWritten, PerhapsWritten, Updates, UpdateView
from replicast.transport import Transport
from replicast.update.audit_report import Policy
from replicast.update.guard import Guard
from replicast.update.schema import Limits, State
from replicast.update.update import Update

logger = logging.getLogger("replicast")

LOOK_SECS = 0.5
IDLE_SECS = 1.0
STOP_SECS = 5.0
REMIND_SECS = 0.5
LONG_SECS = 10.0  # then the other workers are told that this one waits: they may wait for it in a transfer
RAISE_SECS = 30.0  # how long an error that all workers raise is held back until the coordinator lets go
_MUST_NOT_FAIL = (Apply, BeginTrial, EndTrial)
_MOST_CHANGES = 20  # so many variables of an update have a curve of their own


def wait_for(event: threading.Event, secs: float | None, check: Callable[[], None]) -> bool:
    """Blocks until the event is set, and returns True; False after `secs`.

    Meanwhile `check` is called twice a second. It raises when nobody is left who could set the event.
    """
    deadline = Deadline(secs)
    while not event.wait(deadline.left(LOOK_SECS)):
        check()
        if deadline.has_passed():
            return event.is_set()
    return True


class Lane:
    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.feeds: list[Lane] = []  # they end after this one, which queues tasks there until it ends

    def do(self, task: Callable[[], object]) -> None:
        """Queues a task and returns at once. Any thread or signal handler."""
        self._tasks.put(task)

    def flushed(self) -> threading.Event:
        """Is set when all tasks are done that were queued before."""
        done = threading.Event()
        self.do(done.set)
        return done

    def end(self) -> None:
        """Stops the lane after the tasks that are already queued."""
        self._tasks.put(None)

    def run(self) -> None:
        try:
            while (task := self._tasks.get()) is not None:
                task()
                del task  # what it holds, such as values of variables, is free while the lane waits
        finally:
            for lane in self.feeds:
                lane.end()


class WorkerThreads:
    def __init__(self, on_death: Callable[[], None] = lambda: None) -> None:
        self.stopping = threading.Event()
        self._on_death = on_death
        self._threads: list[threading.Thread] = []
        self._lanes: list[Lane] = []
        self._death: JobFailed | FileDamaged | None = None

    def start(self, name: str, target: Callable[[], None]) -> threading.Thread:
        """Starts a thread; `target` must return soon after `stopping` is set."""
        thread = threading.Thread(
            target=self._run, args=(name, target), name=f"replicast-{name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()
        return thread

    def lane(self, name: str, fed_by: Lane | None = None) -> Lane:
        lane = Lane()
        (self._lanes if fed_by is None else fed_by.feeds).append(lane)
        self.start(name, lane.run)
        return lane

    def check(self) -> None:
        if self._death is not None:
            raise self._death

    def stop(self, timeout_secs: float) -> None:
        """Stops all threads and waits at most `timeout_secs` in total. Must not be called by one of them."""
        self._stop_soon()
        deadline = Deadline(timeout_secs)
        for thread in self._threads:
            thread.join(deadline.left(timeout_secs))
            if thread.is_alive():
                logger.debug("thread %s did not exit within %.0f s", thread.name, timeout_secs)

    def have_ended(self) -> bool:
        return self.stopping.is_set() and not any(thread.is_alive() for thread in self._threads)

    def _stop_soon(self) -> None:
        self.stopping.set()
        for lane in self._lanes:
            lane.end()

    def _run(self, name: str, target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            if self.stopping.is_set():
                logger.debug("thread %s failed while stopping", name, exc_info=error)
                return
            if isinstance(error, JobFailed | FileDamaged):
                self._death = error  # the training thread reports it
            else:
                logger.error("the background thread %r died", name, exc_info=error)
                said = f"{type(error).__name__}: {error}"
                self._death = JobFailed(f"The background thread {name!r} of replicast died: {said}")
                self._death.__cause__ = error
            self._stop_soon()
            self._on_death()


class Gate:
    """The boundaries of one worker, where the training thread and the event loop meet.

    The training thread enters with an event (it arrived, it rests, it waits for a ticket) and stays until the
    loop lets it go. Meanwhile it executes the loop's orders. `perform` and `let_go` are for the loop.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._replica = session.replica
        self._items: queue.SimpleQueue[m.Perform | tuple[Any]] = queue.SimpleQueue()
        self._is_left_early = False
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def enter(self, announce: Callable[[], None]) -> Any:
        """Blocks the training thread, which executes orders, until the event loop lets it go."""
        self.check_may_enter()
        self.thread = threading.current_thread()
        self._replica.stopped_at = time.monotonic()
        self._is_left_early = True
        announce()
        while True:
            item = self._next()
            if not isinstance(item, m.Perform):
                self._is_left_early = False
                self._raise_error()
                self._session.check()
                return item[0]
            self._carry_out(item)
            if isinstance(item.order, Exit):  # the script ends by itself, and nothing more is decided
                self._is_left_early = False
                return None
            self._replica.stopped_at = time.monotonic()

    def perform(self, command: m.Perform) -> None:
        self._items.put(command)

    def let_go(self, value: Any = None) -> None:
        self._items.put((value,))

    def check_may_enter(self) -> None:
        """Raises inside a proposed function, or when this thread has left a wait by an exception."""
        if self._replica.in_function and threading.current_thread() is self.thread:
            raise UpdateRefused(
                "A proposed function cannot wait for other workers: they wait for it",
                expected="a function that returns the changes",
                received="a call of boundary, sync, save, audit or result inside the function",
                remedy="Make that call after the step instead; a function may call propose()",
            )
        if self._is_left_early:  # what it has missed there cannot be made up
            raise JobFailed(
                "This worker was interrupted while it waited for the others at a boundary, and cannot rejoin "
                "them. Let the script exit, and restart the job"
            )

    def _next(self) -> m.Perform | tuple[Any]:
        waited = 0.0
        while True:
            try:
                item = self._items.get(timeout=REMIND_SECS)
                if waited >= LONG_SECS:
                    self._replica.hooks.on_long_wait(None)
                return item
            except queue.Empty:
                waited += REMIND_SECS
                if waited == LONG_SECS:
                    # Not in a lane: what is known of this worker must not stay behind when it trains on.
                    self._replica.hooks.on_long_wait(self._session.step)
            if self.error is None:
                self._session.check()
            elif waited >= RAISE_SECS:  # the one that raised first may have ended the coordinator
                self._replica.hooks.on_long_wait(None)
                self._raise_error()

    def _raise_error(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error

    def _carry_out(self, command: m.Perform) -> None:
        order = command.order
        try:
            value: Any = order.perform(self._replica)
        except Refuse as error:
            value = error.refusal
        except Exception as error:
            if isinstance(order, _MUST_NOT_FAIL):
                raise
            if isinstance(error, UpdateRefused):
                value = refusal_of(error, self._replica.rank)
            elif isinstance(error, ReplicastError):
                raise
            else:
                logger.exception("%s failed on this worker", type(order).__name__)
                value = Refusal(f"{type(order).__name__} failed ({type(error).__name__}: {error})")
        except BaseException as error:  # sys.exit, Ctrl-C: this worker exits, and no one may wait for it
            ended = Refusal(f"It ended the worker ({type(error).__name__})")
            self._session.performed(command.number, order, ended)
            raise
        self._session.performed(command.number, order, value)
        if isinstance(order, Exit) and not self._session.script_ended:
            sys.exit(TOLD_TO_END)


@dataclass(eq=False, repr=False)
class Session:
    """One worker. Methods are for the training thread unless they say otherwise."""

    exchange: DirectExchange
    channel: Channel
    transport: Transport
    state: State
    journal: Journal | None = None  # on worker 0
    saved: Sequence[Saved] = ()
    attempt: int = 0
    timeouts: Timeouts = field(default_factory=Timeouts)
    limits: Limits = field(default_factory=Limits)
    guard: Guard | None = None
    may_differ: frozenset[str] = frozenset()
    audit_policy: Policy = "heal"

    def __post_init__(self) -> None:
        journal = self.journal
        self.rank, self.size = self.channel.rank, self.channel.size
        self.begun = False
        self.script_ended = False  # it need not be told to exit
        self.receipts: list[Receipt] = []
        self._closed = False
        self._plans = Counter[str]()
        self._reports: dict[str, ReportId] = {}
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, Any]] = []
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._worker = WorkerMachine(self.rank, timeouts=self.timeouts)
        self._coordinator: Coordinator | None = None
        if journal is not None:
            history = journal.history()
            for one in self.saved:
                history.add(one)
            self._coordinator = Coordinator(
                self.size,
                history,
                attempt=self.attempt,
                timeouts=self.timeouts,
                audit_policy=self.audit_policy,
            )
        self.threads = WorkerThreads(on_death=lambda: self._gate.let_go())
        self._outbox = self.threads.lane("outbox")
        self._preparing = self.threads.lane("prepare")
        self._releasing = self.threads.lane("release")
        self._files = self._releasing if journal is None else self.threads.lane("files")
        if journal is not None:
            self._entries = self.threads.lane("journal")
            self._saver = self.threads.lane("saver", fed_by=self._entries)
            self._telling = self.threads.lane("telemetry", fed_by=self._entries)
        self._telemetry = None if journal is None else Telemetry(journal, self.attempt)
        self._parcels = Parcels(self.transport, self.exchange.name, self.rank, self.state.schema)
        self.replica = StateReplica(
            self._worker,
            self.state,
            self._parcels,
            self._releasing.do,
            lambda id_, stage: self.proposals.reach(id_, stage),
            self.limits,
            receive_secs=self.timeouts.prepare_secs - 10.0,
            journal=journal,
            guard=self.guard,
            may_differ=self.may_differ,
        )
        self._gate = Gate(self)
        self.proposals = Proposals(
            self.replica,
            self._outbox.do,
            self.size,
            self.in_training_thread,
            self._events.put,
            self._wait_for,
        )

    def start(self, hooks: WorkerHooks) -> None:
        """Starts the loop and the readers. The calling thread becomes the training thread."""
        self.replica.hooks = hooks
        self._gate.thread = threading.current_thread()
        self.threads.start("loop", self._run_loop)
        if self._coordinator is None:
            self.threads.start("reader", self._read)
        else:
            for rank in range(1, self.size):
                self.threads.start(f"reader-{rank}", partial(self._read_from, rank))

    def stop(self) -> None:
        """Stops the threads and fails open tickets: the job is over."""
        self._closed = True
        if not self.threads.stopping.is_set():  # what is still in the outbox, somebody may wait for
            self._outbox.flushed().wait(STOP_SECS)
        self.threads.stopping.set()
        self._events.put(None)  # wakes the loop up
        self.threads.stop(STOP_SECS)
        self.proposals.end(self.step)
        self.channel.close()
        self.transport.close()

    def abandon(self) -> None:
        """Releases shared memory when the process exits, in whatever state it is."""
        self.threads.stopping.set()
        self.transport.close()

    # The training thread.

    @property
    def step(self) -> int:
        """The last boundary that the training thread has reached. Any thread."""
        return self._worker.step

    @property
    def is_wanted(self) -> bool:
        """Whether the others wait for this training thread to reach a boundary. Any thread."""
        with self._lock:
            return self._worker.is_wanted

    def in_training_thread(self) -> bool:
        return threading.current_thread() is self._gate.thread

    def arrive(self, step: int) -> None:
        """Returns when the next step may start. Costs one uncontended lock when nothing is going on."""
        self._gate.check_may_enter()
        with self._lock:
            passes = self._worker.passes(step)
        if passes:
            self._gate.thread = threading.current_thread()
            self.check()
        else:
            self._gate.enter(lambda: self._events.put(m.Arrived(step)))

    def rest(self, *intent: Any) -> Any:
        """Waits at this boundary until all workers rest here with the same intent.

        All earlier proposals, of any worker, are settled when it returns. Blocks as long as the others run.
        """
        outcome = self._gate.enter(lambda: self._outbox.do(lambda: self._events.put(m.Rested(intent))))
        if isinstance(outcome, Refusal):
            self.exchange.check_nobody_left()  # a worker that has left is the better explanation
            raise ClusterError(outcome.problem, remedy="Every worker must make the same calls to replicast")
        return outcome.result if isinstance(outcome, Outcome) else outcome

    def begin(self) -> None:
        """Resumes unfinished work of earlier attempts, before the first common operation of all workers."""
        if not self.begun:
            if self.journal is not None and self._coordinator is not None:
                self.journal.check_start(self._coordinator.start)
            self.rest("begin")
            self.begun = True

    def require_same_plan(self, kind: str, plan: str, *, problem: str, remedy: str) -> None:
        """All workers call it; blocks until they have, at most `join_secs`. Raises if their plans differ."""
        number = self._plans[kind] = self._plans[kind] + 1
        secs = self.timeouts.join_secs
        self.exchange.require_same(f"{kind}/{number}", plan, secs, problem=problem, remedy=remedy)
        self.exchange.forget_agreed(f"{kind}/{number - 1}")  # all who have come to this one have heard it

    def next_report(self, kind: str) -> ReportId:
        """The id of the next planned save or audit at this boundary; all workers ask for the same ones."""
        last = self._reports.get(kind)
        count = last.count + 1 if last is not None and last.step == self.step else 1
        self._reports[kind] = id_ = ReportId(kind, self.step, count)
        return id_

    def report(self, id_: ReportId, value: Callable[[], Any]) -> None:
        """Reports something that every worker does at this boundary without waiting. Returns at once."""
        self._outbox.do(lambda: self._events.put(Answer(id_, value())))

    def start_from(self, saved: Saved) -> None:
        """Starts from the state of a checkpoint. Called on all workers, before training begins."""
        with self._lock:
            self._worker.step = saved.step
            if self._coordinator is not None:
                self._coordinator.start = saved
        self.replica.holds = set(saved.holds)

    def open_board(self, log_dir: str) -> None:
        """Tells the TensorBoard of a directory of updates, from this step on. Worker 0; returns at once."""
        if (telemetry := self._telemetry) is not None:
            step = self.step
            self._telling.do(lambda: telemetry.open_board(log_dir, step))

    def set_audit_policy(self, policy: Policy) -> None:
        self.audit_policy = policy
        if self._coordinator is not None:
            self._coordinator.audit_policy = policy

    def raise_later(self, error: Exception) -> None:
        self._gate.error = error

    def wait_for_outcomes(self) -> None:
        """Blocks until the lane "release" has handled all outcomes that are known now: audit reports, saves.

        At most `answer_secs`: then reports come late, and nothing else is wrong.
        """
        wait_for(self._releasing.flushed(), self.timeouts.answer_secs, self.check)

    # Any thread.

    def send_note(self, text: str) -> None:
        """Sends this worker's note to worker 0, before whatever it sends next. Not for worker 0."""
        self._events.put(Note(text))

    def operations(self) -> list[dict[str, Any]]:
        """Worker 0: the current operations, in order."""
        coordinator = self._coordinator
        if coordinator is None:
            return []
        with self._lock:
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

    def remove_payloads(self, held: frozenset[int], pending: frozenset[tuple[str, str]] | None) -> None:
        """Worker 0: removes what no kept checkpoint needs (`Journal.remove_payloads`). Returns at once."""
        if (journal := self.journal) is not None:
            self._entries.do(lambda: journal.remove_payloads(held, pending))

    def check(self) -> None:
        self.replica.hooks.check()
        self.threads.check()

    def _wait_for(self, ticket: Ticket, timeout: float | None) -> bool:
        if ticket.done() or self._closed:
            return ticket.done()
        if self.in_training_thread():
            secs = self.timeouts.wait_secs if timeout is None and not self.begun else timeout
            awaited = m.Awaited(ticket.number, secs)
            self._gate.enter(lambda: self._outbox.do(lambda: self._events.put(awaited)))
            return ticket.done()
        return wait_for(ticket.settled, timeout, self.check)

    # The loop: one event at a time. Readers and all other threads only post events.

    def _run_loop(self) -> None:
        while not self.threads.stopping.is_set() or not self._events.empty():
            secs = IDLE_SECS
            if self._timers:
                secs = min(secs, max(0.0, self._timers[0][0] - time.monotonic()))
            with contextlib.suppress(queue.Empty):
                self._handle(self._events.get(timeout=secs))
            while self._timers and self._timers[0][0] <= time.monotonic():
                self._handle(heapq.heappop(self._timers)[2])
        # Lets the readers of all other workers stop now, before their request to the service times out.
        with contextlib.suppress(JobFailed):
            if self._coordinator is None:
                self.channel.send([])
            else:
                self.channel.broadcast([])

    def _read(self) -> None:
        while not self.threads.stopping.is_set():
            for message in self.channel.receive():
                self._events.put(message)

    def _read_from(self, rank: int) -> None:
        while not self.threads.stopping.is_set():
            for message in self.channel.receive_from(rank):
                if isinstance(message, Note):
                    self.replica.hooks.on_note(rank, message.text)
                else:
                    self._events.put(m.FromWorker(rank, message))

    def _handle(self, event: Any) -> None:
        pending = [] if event is None else [event]
        while pending:
            pending = [more for one in pending for more in self._handle_one(one)]

    def _handle_one(self, event: Any) -> list[Any]:
        """Passes an event to its machine, executes the commands, and returns the local events that follow."""
        if isinstance(event, Request):
            return self._dispatch([m.Send(event)], None)
        if isinstance(event, Note):
            self.channel.send([event])
            return []
        machine: WorkerMachine | Coordinator | None
        if isinstance(event, tuple):  # a timer of one of the machines
            machine, event = event
        else:
            is_for_coordinator = isinstance(event, m.FromWorker | m.Written)
            machine = self._coordinator if is_for_coordinator else self._worker
        if machine is None:
            return []
        if isinstance(event, Tell) and event.ended and isinstance(event.outcome, Receipt):
            self.receipts.append(event.outcome)
            if self.rank == 0:
                log_trial(event.outcome)
        with self._lock:
            commands: list[Any] = [*machine.handle(event)]
        return self._dispatch(commands, machine)

    def _dispatch(self, commands: list[Any], machine: WorkerMachine | Coordinator | None) -> list[Any]:
        follow: list[Any] = []
        sent = [command.message for command in commands if isinstance(command, m.Send)]
        said = [command.message for command in commands if isinstance(command, m.Broadcast)]
        if said:  # to the others first: worker 0 must not act on a message that they may never receive
            self.channel.broadcast(said)
            follow += said
        if sent and self._coordinator is None:
            self.channel.send(sent)
        elif sent:  # worker 0 and its coordinator are in one process
            follow += [m.FromWorker(self.rank, message) for message in sent]
        for command in commands:
            if isinstance(command, m.SetTimer):
                timer = machine, m.TimerFired(command.number)
                heapq.heappush(self._timers, (time.monotonic() + command.secs, next(self._numbers), timer))
            elif not isinstance(command, m.Send | m.Broadcast):
                self._carry_out(command)
        return follow

    def _carry_out(self, command: Any) -> None:
        match command:
            case m.Perform(_, order):
                if not order.in_background:
                    self._gate.perform(command)
                elif isinstance(order, WriteBefore):
                    self._files.do(lambda: self._perform(command))
                else:
                    self._preparing.do(lambda: self._perform(command))
            case m.PassBoundary():
                self._gate.let_go()
            case m.Continue(outcome):
                self._gate.let_go(outcome)
            case m.Settle(number, tell):
                self.proposals.told(number, tell)
            case m.DropPrepared(id_):
                self._parcels.discard_soon(id_)
                self._preparing.do(lambda: self.replica.discard(id_))
            case m.Write(number, entry):
                self._write(number, entry)
            case m.CloseInbox(ticket, tell):
                self.proposals.close_from_outside(ticket, tell.stage)
                self.replica.hooks.on_inbox(ticket, tell)
            case m.Ended():
                self._releasing.do(lambda: self.replica.hooks.on_ended(command))
            case m.EndJob(reason):
                raise JobFailed(reason)

    # Orders, in a lane or in the gate.

    def _perform(self, command: m.Perform) -> None:
        """Executes an order in a lane. An unexpected error refuses only this order."""
        try:
            value = command.order.perform(self.replica)
        except Refuse as error:
            value = error.refusal
        except UpdateRefused as error:
            value = refusal_of(error, self.rank)
        except (JobFailed, FileDamaged):  # what was promised is lost: that ends the job
            raise
        except Exception as error:
            logger.warning("%s failed on this worker", type(command.order).__name__, exc_info=True)
            problem = f"A worker could not prepare it ({type(error).__name__}: {error})"
            value = refusal_of(UpdateRefused(problem), self.rank)
        self._events.put(m.Performed(command.number, value))

    def performed(self, number: int, order: Any, value: Any) -> None:
        later = isinstance(order, TakeSnapshot) or callable(value)
        if later:
            # Training goes on meanwhile. In the outbox: earlier proposals belong to a checkpoint, and a
            # checkpoint that holds an update comes after the report that it is applied.
            self._outbox.do(lambda: self._events.put(Answer(number, value() if callable(value) else value)))
        self._events.put(m.Performed(number, None if later else value, answers=not later))

    # Worker 0's writes: entries in one lane, and checkpoints, which take longer, in another.

    def _write(self, number: int, entry: Entry) -> None:
        journal = self.journal
        if journal is None:
            return

        def then(outcome: m.WriteOutcome, problem: str) -> None:
            if (telemetry := self._telemetry) is not None and isinstance(entry, Receipt):
                self._telling.do(lambda: telemetry.tell(entry.sequence))
            self._events.put(m.Written(number, outcome, problem))

        def write_entry() -> None:
            outcome, problem = _written(journal, entry, update)
            then(outcome, problem)
            if outcome is m.WriteOutcome.DURABLE:
                journal.sync()  # of what nobody waits for

        if isinstance(entry, Saved):
            write, problem = self.replica.hooks.write_checkpoint(entry), "The checkpoint cannot be written"
            # Behind the entries: what it relies on is synced by then.
            self._entries.do(lambda: self._saver.do(lambda: then(write(), problem)))
            return
        update = self._parcels.prepared(entry.id, entry.digest) if isinstance(entry, Payload) else None
        self._entries.do(write_entry)


def _written(journal: Journal, entry: Entry, update: Update | None) -> tuple[m.WriteOutcome, str]:
    if isinstance(entry, Receipt):
        faults.point("verify")
    elif isinstance(entry, Decided):
        faults.point("decide")
    try:
        journal.write(entry, update)
    except NotWritten as error:
        logger.warning("%s", error)
        return m.WriteOutcome.FAILED, str(error)
    except (PerhapsWritten, FileDamaged) as error:
        logger.error("%s", error)
        return m.WriteOutcome.UNKNOWN, str(error)
    except JobFailed as error:
        logger.error("%s", error)
        return m.WriteOutcome.FENCED, str(error)
    if isinstance(entry, Committed):
        faults.point("commit")
    return m.WriteOutcome.DURABLE, ""


# Updates, trials and restarts for the tools that people have: TensorBoard and OpenTelemetry.


class Telemetry:
    """Worker 0 tells of an update once its receipt is durable. What fails here is logged once, no more.

    Call the methods in its lane: they may block as long as a disk or a collector does.
    """

    def __init__(self, journal: Journal, attempt: int) -> None:
        self._journal = journal
        self._attempt = attempt
        self._updates: Updates | None = None
        self._boards: dict[str, Any] = {}
        self._warned = False

    def open_board(self, log_dir: str, step: int) -> None:
        """Writes below a directory in which Keras' TensorBoard callback writes, from this step on."""
        with self._one_warning():
            if log_dir in self._boards:
                return
            import tensorflow as tf  # a user's test has workers without it

            place = tf.io.gfile.join(log_dir, "replicast")
            board = self._boards[log_dir] = tf.summary.create_file_writer(place)
            with board.as_default(step):
                tf.summary.scalar("replicast/attempt", self._attempt)
                if self._attempt:
                    text = f"Attempt {self._attempt} begins at step {step}"
                    tf.summary.text("replicast/restarts", text)
                board.flush()

    def tell(self, sequence: int) -> None:
        with self._one_warning():
            tracing: Any = None
            with contextlib.suppress(ImportError):
                tracing = importlib.import_module("opentelemetry.trace")
            if self._boards or tracing is not None:
                self._updates = self._updates or Updates(self._journal)
                self._updates.read_on()
                view = self._updates.committed(sequence)
                if self._boards:
                    self._write(view)
                if tracing is not None:
                    _trace(tracing, view)

    @contextlib.contextmanager
    def _one_warning(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            if not self._warned:
                self._warned = True
                logger.exception("TensorBoard or OpenTelemetry cannot be told of updates")

    def _write(self, view: UpdateView) -> None:
        import tensorflow as tf

        why = " · ".join(filter(None, (view.author, view.note)))
        changes = "".join(f"\n- {text}" for text in view.texts)
        replayed = ", again after a restart" if len(view.receipts) > 1 else ""
        text = f"**Update {view.sequence}: {view.stage}** at step {view.step}{replayed}\n\n{why}\n{changes}"
        for board in self._boards.values():
            with board.as_default(view.step):
                tf.summary.text("replicast/updates", text)
                for name, (begun, ended) in view.timings.items() if len(view.receipts) == 1 else ():
                    tf.summary.scalar(f"replicast/{name}_secs", ended - begun)
                for effect in view.effects[:_MOST_CHANGES]:
                    if effect.relative is not None:
                        tf.summary.scalar(f"replicast/relative_change/{effect.variable}", effect.relative)
                if (trial := view.outcome) is not None:
                    outcome = f"Update {view.sequence} is {trial.outcome}: {trial.reason}"
                    tf.summary.text("replicast/trials", outcome, trial.step)
                    for when, value in (("before", trial.before), ("during", trial.during)):
                        if value is not None:
                            tf.summary.scalar(f"replicast/trial_{trial.metric}_{when}", value, trial.step)
                board.flush()


def _trace(api: Any, view: UpdateView) -> None:
    """One span, from the proposal to the receipt, with one inside for each part of it."""
    receipt, outcome = view.receipt, view.outcome
    if receipt is None or len(view.receipts) > 1:  # an earlier attempt has told of it
        return
    tracer = api.get_tracer("replicast")
    begins, ends = zip(*view.timings.values(), strict=True)
    about = {
        "id": view.id,
        "sequence": view.sequence,
        "step": view.step,
        "attempt": view.attempt,
        "stage": str(view.stage),
        "author": view.author,
        "note": view.note,
        "changes": view.texts,
        "workers": view.workers,
        "digest": receipt.digests[0],
        "trial": None if outcome is None else outcome.reason,
    }
    attributes = {f"replicast.{name}": value for name, value in about.items() if value is not None}
    # Not within a span of whatever runs in this thread: an update is a trace of its own.
    root = api.set_span_in_context(api.INVALID_SPAN)
    span = tracer.start_span("replicast.update", root, attributes=attributes, start_time=_ns(min(begins)))
    inside = api.set_span_in_context(span)
    for name, (begun, ended) in view.timings.items():
        tracer.start_span(f"replicast.{name}", inside, start_time=_ns(begun)).end(_ns(ended))
    if view.stage is Stage.FAILED:
        span.set_status(api.StatusCode.ERROR, "the workers' digests differ")
    span.end(_ns(max(ends)))


def _ns(secs: float) -> int:
    return int(secs * 1e9)
