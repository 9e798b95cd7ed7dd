"""Virtual time, the launcher, and what happens from outside: one simulated story in one thread."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from replicast.core.coordinator import Coordinator
from replicast.core.messages import Propose, Request, Tell, Withdraw
from replicast.core.operation import Operation, Timeouts
from replicast.core.operations.save import Snapshot
from replicast.core.operations.sync import Digest
from replicast.core.order import Order
from replicast.core.proposal import Proposal
from replicast.core.worker import Worker
from replicast.testing.simulation.check import Checks
from replicast.testing.simulation.disk import Disk
from replicast.testing.simulation.group import SimulatedGroup
from replicast.testing.simulation.plan import Plan
from replicast.testing.simulation.process import Process
from replicast.testing.simulation.replica import StoryFailed
from replicast.testing.simulation.transcript import described

TIMEOUTS = Timeouts(
    prepare_secs=6, answer_secs=2, meet_secs=20, decide_secs=60, compute_secs=10, retry_secs=1
)
SILENT_SECS = 15.0
"""When the launcher ends a group because a worker is stopped."""
MOST_SECS = 5000.0
MOST_EVENTS = 50_000


class StrictCoordinator(Coordinator):
    """An unexpected exception is a failure of the story."""

    def _unexpected(self, operation: Operation, error: Exception) -> None:
        raise error


@dataclass(frozen=True, slots=True)
class Machines:
    """The state machines that a story runs on; the tests put broken ones here."""

    coordinator: type[Coordinator] = StrictCoordinator
    worker: type[Worker] = Worker


class World:
    """One story.

    Args:
        plan: What happens.
        machines: The state machines.
        recording: Whether to keep a transcript.
        most_events: After so many events, something waits for ever.

    Attributes:
        now: Virtual seconds.
        lines: The transcript.
        counts: What has happened, and how often.
        faults: Which faults have fired, and how often.
    """

    def __init__(
        self,
        plan: Plan,
        machines: Machines | None = None,
        *,
        recording: bool = False,
        most_events: int = MOST_EVENTS,
    ) -> None:
        self.plan = plan
        self.machines = machines or Machines()
        self.recording = recording
        self._most_events = most_events
        self.random = Random(plan.seed)
        self.timeouts = TIMEOUTS
        self.plans: dict[str, tuple[int, Order]] = {}
        if plan.audit_every:
            self.plans["audit"] = (plan.audit_every, Digest())
        if plan.save_every:
            self.plans["save"] = (plan.save_every, Snapshot())
        self.unhealed = False
        self.now = 0.0
        self.writes = 0
        self.lines: list[str] = []
        self.counts = Counter[str]()
        self.faults = Counter[str]()
        self.disk = Disk()
        self.places: dict[tuple[int, int], list[int]] = {}
        self.groups: list[SimulatedGroup] = []
        self.checks = Checks(self)
        self.check_apply = self.checks.applied
        self.proposed = self.checks.proposed
        self.settled = self.checks.settled
        self.over = False
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._pushed = 0

    def run(self) -> None:
        """Plays the story to its end.

        Raises:
            StoryFailed: A promise was broken.
        """
        for incident in self.plan.incidents:
            self.at(incident[0], self._happen, incident[1:])
        self._start_group()
        heap, events = self._heap, 0
        while heap and not self.over:
            self.now, _, act, arguments = heapq.heappop(heap)
            act(*arguments)
            events += 1
            if self.now > MOST_SECS or events > self._most_events:
                break
        if not self.over:
            raise StoryFailed("something waits for ever")
        self.checks.finish(self.groups[-1])

    def at(self, time: float, act: Callable[..., None], *arguments: Any) -> None:
        """Calls something at a time."""
        self._pushed += 1
        heapq.heappush(self._heap, (time, self._pushed, act, arguments))

    def after(self, secs: float, act: Callable[..., None], *arguments: Any) -> None:
        """Calls something after some time."""
        self._pushed += 1
        heapq.heappush(self._heap, (self.now + secs, self._pushed, act, arguments))

    # The launcher.

    def _start_group(self) -> None:
        if self.over:
            return
        group = SimulatedGroup(self)
        self.groups.append(group)
        self.count("attempts")
        self.after(0.05, group.start)  # between the claim and the count, an earlier group may still write

    def restart(self, group: SimulatedGroup) -> None:
        """The launcher has seen that a group has failed."""
        if group.alive:
            group.kill()
            self.say(f"the launcher ends attempt {group.number}")
            if group is self.groups[-1]:
                self.after(0.2, self._start_group)

    def group_ended(self, group: SimulatedGroup, *, left: bool) -> None:
        """All scripts of a group have ended; one that was told to end is started again later."""
        if group is not self.groups[-1]:
            return
        self.say(f"attempt {group.number} has {'left' if left else 'ended'}")
        if left:
            self.count("left")
            self.after(1.0, self._start_group)
        else:
            self.over = True

    # What happens from outside.

    def _happen(self, incident: tuple[Any, ...]) -> None:
        group = self.groups[-1]
        match incident:
            case ("thread", rank, proposal):
                if group.alive and group.processes and group.processes[rank].alive:
                    group.processes[rank].run(self._propose, group.processes[rank], proposal)
            case ("push", ticket, proposal):
                self.proposed(ticket, proposal, in_inbox=True)
                self._put_in_inbox(ticket, Propose(ticket, proposal))
            case ("withdraw", ticket, id_):
                self.checks.asked(ticket)
                self._put_in_inbox(ticket, Withdraw(ticket, id_))
            case ("request", rank, kind):
                if group.alive and group.processes and group.processes[rank].alive:
                    self.count("operations")
                    group.processes[rank].run(group.send, rank, Request(kind))
            case ("full", secs):
                self.disk.full_until = self.now + secs
            case ("zombie", secs):
                if group.alive and group.processes:
                    self.fired("restart beside a living group")
                    self.say(f"the launcher takes attempt {group.number} for dead, which lives on")
                    self._start_group()
                    self.after(secs, self._bury, group)
            case (kind, rank, *arguments):
                if group.alive and group.processes:
                    self._strike(group, kind, rank, arguments)

    def _propose(self, process: Process, proposal: Proposal) -> None:
        process.propose(proposal)

    def _strike(self, group: SimulatedGroup, kind: str, rank: int, arguments: list[float]) -> None:
        process = group.processes[rank]
        if not process.alive:
            return
        self.say(f"fault: {kind} worker {rank}")
        if kind not in ("slow", "hang", "no_room"):
            self.fired(kind)
        if kind == "kill":
            group.die(process)
        elif kind == "freeze":
            process.frozen_until = self.now + arguments[0]
            if arguments[0] > SILENT_SECS:
                self.after(SILENT_SECS, self.restart, group)
        elif kind == "slow":
            group.slow(rank, self.now + arguments[0])
        elif kind == "no_room":
            process.replica.no_room = True
        elif kind == "hang":
            process.hangs = True
        elif kind == "drift" and process.replica.step < self.plan.steps:
            process.replica.values["d"] = int(arguments[0])

    def _bury(self, group: SimulatedGroup) -> None:
        if group.alive:
            group.kill()

    def _put_in_inbox(self, ticket: str, message: Propose | Withdraw) -> None:
        self.disk.inbox[ticket] = message
        for group in self.groups:
            group.from_outside(message)

    def close_inbox(self, group: SimulatedGroup, ticket: str, tell: Tell) -> None:
        """A coordinator removes what has its outcome."""
        if self.disk.inbox.pop(ticket, None) is not None:
            self.settled(group, ticket, tell)

    # What is noted.

    def fired(self, fault: str) -> None:
        """A fault has happened."""
        self.faults[fault] += 1

    def count(self, what: str, number: int = 1) -> None:
        """Something is counted for the report."""
        self.counts[what] += number

    def say(self, line: str) -> None:
        """Adds a line to the transcript."""
        if self.recording:
            self.lines.append(f"{self.now:9.3f}  {line}")

    described = staticmethod(described)
