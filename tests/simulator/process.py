"""A simulated worker process: runs a `Worker`, and on rank 0 a `Coordinator`.

The runtime does the same with real threads and files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from replicast.core import events as c
from replicast.core import events as e
from replicast.core.coordinator import Coordinator
from replicast.core.entries import Saved
from replicast.core.operations.attempt import Exit
from replicast.core.operations.save import TakeSnapshot
from replicast.core.operations.trial import BeginTrial
from replicast.core.operations.update import Apply, Load, Prepare
from replicast.core.records import Refusal, Refuse
from replicast.core.worker import Worker
from tests.simulator.replica import SimulatedReplica
from tests.simulator.story import Story
from tests.simulator.thread import Group, TrainingThread
from tests.simulator.words import described

DIGEST_SECS = 0.01


class Process(TrainingThread):
    """One process.

    Attributes:
        hangs: Whether its next fetch never ends.
        commands_left: The number of commands after which it dies; None if it does not.
    """

    def __init__(
        self,
        story: Story,
        group: Group,
        rank: int,
        worker: Worker,
        replica: SimulatedReplica,
        coordinator: Coordinator | None,
        place: int,
    ) -> None:
        super().__init__(story, group, rank, worker, replica, place)
        self.coordinator = coordinator
        self.hangs = False
        self.commands_left: int | None = None
        self._events: deque[tuple[Any, Any]] = deque()
        self._driving = False
        self._outbox: deque[tuple[float, Any]] = deque()
        self._write_ends = 0.0

    # Events in, commands out.

    def feed(self, machine: Worker | Coordinator, event: Any) -> None:
        """Passes an event to a state machine and carries out its commands, unless the process crashes."""
        if not self.alive:
            return
        if self.frozen_until > self.clock.now:
            self.clock.at(self.frozen_until, self.feed, machine, event)
            return
        self._events.append((machine, event))
        if self._driving:  # events that a command causes are handled after the other commands
            return
        self._driving = True
        while self._events and self.alive:
            machine, event = self._events.popleft()
            for command in machine.handle(event):
                if self.commands_left is not None:
                    self._count_down(command)
                if not self.alive:
                    break
                _CARRIED_OUT_BY[type(command)](self, machine, command)
        self._driving = False

    def _count_down(self, command: Any) -> None:
        """Kills the process before one of its commands, if the plan says so."""
        if self.commands_left == 0:
            self.story.notes.fired("crash")
            self.story.notes.say(self.group.number, self.name, f"dies, before {type(command).__name__}")
            self.group.die(self)
        self.commands_left = (self.commands_left or 0) - 1

    def run(self, act: Callable[..., None], *arguments: Any) -> None:
        """Calls a function in this process; later if the process is stopped, never if it is dead."""
        if not self.alive:
            return
        if self.frozen_until > self.clock.now:
            self.clock.at(self.frozen_until, self.run, act, *arguments)
        else:
            act(*arguments)

    def post(self, event: Any, secs: float = 0.0) -> None:
        """Posts an event to the worker after all that were posted before, as the outbox does.

        Args:
            event: What to post.
            secs: How long it takes to make it.
        """
        self._outbox.append((self.clock.now + secs, event))
        if secs:
            self.clock.after(secs, self.run, self._send_outbox)
        self._send_outbox()

    def _send_outbox(self) -> None:
        while self._outbox and self._outbox[0][0] <= self.clock.now:
            self.feed(self.worker, self._outbox.popleft()[1])

    def start(self) -> None:
        """Starts the process, which has joined the others and restored its state."""
        self.feed(self.worker, e.Rested(("begin",)))

    # Commands of both machines.

    def _set_timer(self, machine: Worker | Coordinator, command: c.SetTimer) -> None:
        self.clock.after(command.secs, self.feed, machine, e.TimerFired(command.number))

    def _end_job(self, machine: Worker | Coordinator, command: c.EndJob) -> None:
        self.story.notes.say(self.group.number, self.name, f"ends the job: {command.reason}")
        self.story.notes.count("jobs ended by the core")
        self.group.die(self)

    # Commands of the coordinator.

    def _broadcast(self, machine: Coordinator, command: c.Broadcast) -> None:
        self.group.append(command.message)

    def _write(self, machine: Coordinator, command: c.Write) -> None:
        """Queues a write: writes are carried out one at a time, as by one thread."""
        took = 0.002 + self.story.random.random() * 0.02
        self._write_ends = max(self.clock.now, self._write_ends) + took
        self.clock.at(self._write_ends, self._make_write, command)

    def _make_write(self, command: c.Write) -> None:
        """Starts a write. A process that is stopped here may continue after another group has a claim."""
        self.run(self._write_entry, command)

    def _write_entry(self, command: c.Write) -> None:
        story, disk, number = self.story, self.story.disk, self.group.number
        story.writes += 1
        outcome = e.WriteOutcome.DURABLE
        if story.writes == story.plan.unknown:
            story.notes.fired("unknown write")
            if story.random.random() < 0.5:
                disk.append(number, command.entry)
            outcome = e.WriteOutcome.UNKNOWN
        elif disk.full_until > self.clock.now:
            story.notes.fired("full disk")
            outcome = e.WriteOutcome.FAILED
        else:
            disk.append(number, command.entry)
            if disk.is_fenced(number):
                story.notes.fired("stale write")
                outcome = e.WriteOutcome.FENCED
            elif isinstance(command.entry, Saved):
                story.checks.saved(command.entry)
        if story.notes.recording:
            failed = "" if outcome is e.WriteOutcome.DURABLE else f"{outcome.value.upper()}: "
            story.notes.say(number, "  journal", f"{failed}{described(command.entry)}")
        if self.coordinator is not None:
            self.feed(self.coordinator, e.Written(command.number, outcome))

    def _close_inbox(self, machine: Coordinator, command: c.CloseInbox) -> None:
        if self.story.disk.inbox.pop(command.ticket, None) is not None:
            self.story.checks.settled(self.group.replicas(), command.ticket, command.tell)

    def _ended(self, machine: Coordinator, command: c.Ended) -> None:
        if isinstance(command.outcome.result, Refusal) and self.story.notes.recording:
            said = f"{command.id} is {described(command.outcome)}"
            self.story.notes.say(self.group.number, self.name, f"  {said}")
        replicas = self.group.replicas()
        self.story.checks.ended(self.group.number, replicas, command)
        self._answer(command.asked_by)

    def _answer(self, requests: tuple[str, ...]) -> None:
        """What somebody outside has asked for has ended; a group that was taken for dead answers as well."""
        for id_ in requests:
            if self.story.disk.requests.pop(id_, None) is not None:
                self.story.notes.say(self.group.number, "  answer", f"to {id_}")

    # Commands of the worker.

    def _send(self, machine: Worker, command: c.Send) -> None:
        self.group.send(self.rank, command.message)

    def _perform(self, machine: Worker, command: c.Perform) -> None:
        delay = self.story.random.random()
        if command.order.in_background:
            if self.hangs and isinstance(command.order, Load | Prepare):
                self.hangs = False
                self.story.notes.fired("hung transfer")
                return
            slow = delay >= 0.9 and not self.story.plan.quick
            secs = delay if slow else 0.005 + delay * 0.1
            if isinstance(command.order, Prepare):
                self.replica.fetching[command.number] = command.order.id
            self.clock.after(secs, self._carry_out, command)
        elif delay < 0.3:
            self.clock.after(delay * 0.1, self._carry_out, command)
        else:
            self._carry_out(command)

    def _carry_out(self, command: c.Perform) -> None:
        if not self.alive:
            return
        if self.frozen_until > self.clock.now:
            self.clock.at(self.frozen_until, self._carry_out, command)
            return
        try:
            value = None if self._is_discarded(command) else command.order.perform(self.replica)
        except Refuse as error:
            value = error.refusal
            self.story.notes.fired("refused by a worker")
        if self.story.notes.recording:
            self.story.notes.say(
                self.group.number, self.name, f"  {described(command.order)}: {described(value)}"
            )
        later = isinstance(
            command.order, TakeSnapshot | Apply | BeginTrial
        )  # digested while training goes on
        if later:
            self.post(e.Reported(command.number, value), DIGEST_SECS)
        self.feed(self.worker, e.Performed(command.number, value, answers=not later))
        if isinstance(command.order, Exit):
            if self.rank == 0:
                self._answer(command.order.asked_by)
            self.group.ended(self, left=True)

    def _is_discarded(self, command: c.Perform) -> bool:
        """Whether it was fetching an update that has been discarded meanwhile."""
        fetches = isinstance(command.order, Prepare)
        return fetches and self.replica.fetching.pop(command.number, None) is None

    def _settle(self, machine: Worker, command: c.Settle) -> None:
        self.story.checks.settled(self.group.replicas(), command.ticket, command.tell)

    def _discard(self, machine: Worker, command: c.DropPrepared) -> None:
        self.replica.discard(command.id)


_CARRIED_OUT_BY: dict[type[Any], Callable[[Process, Any, Any], None]] = {
    c.Send: Process._send,
    c.Perform: Process._perform,
    c.PassBoundary: Process._pass,
    c.Continue: Process._continue,
    c.Settle: Process._settle,
    c.DropPrepared: Process._discard,
    c.SetTimer: Process._set_timer,
    c.EndJob: Process._end_job,
    c.Broadcast: Process._broadcast,
    c.Write: Process._write,
    c.CloseInbox: Process._close_inbox,
    c.Ended: Process._ended,
}
