"""A simulated training thread: trains, reaches boundaries, and carries out the actions of its script."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from typing import Any, Protocol

from msgspec.structs import replace

from replicast.core import events as c
from replicast.core import events as e
from replicast.core.coordinator import Coordinator
from replicast.core.operations.save import TakeSnapshot
from replicast.core.records import Proposal, ReportId, Snapshot
from replicast.core.worker import Worker
from tests.simulator.replica import InMemory, SimulatedReplica, StoryFailed
from tests.simulator.story import Story
from tests.simulator.words import described

LONG_SECS = 55.0
"""Longer than every delay and every other timeout: a thread that waits this long was forgotten."""


class Group(Protocol):
    """The part of a group that a process uses: the channel, and the transfers of training."""

    number: int

    def send(self, rank: int, message: Any) -> None:
        """Sends a message from a worker to the coordinator."""

    def append(self, message: Any) -> None:
        """Sends a message from the coordinator to all workers."""

    def train(self, process: TrainingThread, steps: int) -> None:
        """Starts the next step."""

    def closing(self) -> None:
        """Called when a script has reached its end."""

    def ended(self, process: TrainingThread, *, left: bool = False) -> None:
        """Called when the script of a process has ended, or the process was told to exit."""

    def die(self, process: TrainingThread) -> None:
        """Called when a process has died."""

    def replicas(self) -> list[SimulatedReplica]:
        """The replicas of all processes."""


class TrainingThread(ABC):
    """The part of a process that trains.

    Attributes:
        alive: Whether its process runs; a dead process handles no more events.
        frozen_until: The time until which it is stopped by SIGSTOP.
        place: How many actions of the script behind the current boundary are done.
    """

    def __init__(
        self, story: Story, group: Group, rank: int, worker: Worker, replica: SimulatedReplica, place: int
    ) -> None:
        self.story = story
        self.clock = story.clock
        self.group = group
        self.rank = rank
        self.name = f"worker {rank}"
        self.worker = worker
        self.replica = replica
        replica.place = self._place_of_snapshot
        self.alive = True
        self.frozen_until = 0.0
        self.place = place
        self._is_done = False
        self._tickets = 0
        self._last_ticket = ""
        self._is_unfinished = False
        self._waits_since: float | None = None
        self._snapshots: deque[tuple[ReportId, Any]] = deque()

    @abstractmethod
    def feed(self, machine: Worker | Coordinator, event: Any) -> None:
        """Passes an event to a state machine and carries out its commands."""

    @abstractmethod
    def post(self, event: Any, secs: float = 0.0) -> None:
        """Posts an event to the worker after all that were posted before."""

    def _pass(self, machine: Worker, command: c.PassBoundary) -> None:
        if self.story.plan.planned_at == "behind":
            self._take_planned()
        self._play()

    def _place_of_snapshot(self) -> int:
        """The position from which a restart continues: the action in which the script waits is repeated."""
        return self.place - 1 if self._is_unfinished else self.place

    def _continue(self, machine: Worker, command: c.Continue) -> None:
        waits_since, self._waits_since, self._is_unfinished = self._waits_since, None, False
        if waits_since is not None and self.clock.now - waits_since > LONG_SECS:
            raise StoryFailed(f"{self.name} has waited for what cannot come before it trains")
        if self._is_done and self.replica.report_to_raise is None:
            self.group.ended(self)
        else:
            self._play()

    def propose(self, proposal: Proposal, *, in_training: bool = False) -> None:
        """Makes a proposal in this process."""
        self._tickets += 1
        ticket = f"{self.group.number}.{self.rank}.{self._tickets}"
        if in_training:
            self._last_ticket = ticket
        self.story.checks.proposed(ticket, proposal, in_training=in_training)
        if proposal.content is not None:
            edits: Any = proposal.content
            proposal = replace(proposal, content=InMemory(self.group.number, edits))
        self.post(e.Proposed(ticket, proposal))

    def arrive(self, steps: int) -> None:
        """Called when a step has ended."""
        if not self.alive:
            return
        if self.frozen_until > self.clock.now:
            self.clock.at(self.frozen_until, self.arrive, steps)
            return
        self.replica.train(steps)
        self.place = 0
        if self.story.plan.planned_at == "before":
            self._take_planned()
            self._report_planned(0)
        self.feed(self.worker, e.Arrived(self.replica.step))

    def _take_planned(self) -> None:
        """Takes the planned snapshot or audit of this step. An audit is reported immediately."""
        plan, step = self.story.plan, self.replica.step
        if plan.audit_every and step % plan.audit_every == 0:
            self._report(ReportId("audit", step), self.replica.glance())
        if plan.save_every and step % plan.save_every == 0:
            id_ = ReportId("save", step)
            self._snapshots.append((id_, TakeSnapshot(str(id_)).perform(self.replica)))

    def _report_planned(self, place: int) -> None:
        """Reports a planned snapshot, with the proposals before it: a restart continues at this position."""
        while self._snapshots:
            id_, snapshot = self._snapshots.popleft()
            if snapshot is not None:
                values, _ = snapshot.details
                snapshot = Snapshot(snapshot.step, snapshot.digest, snapshot.holds, (values, place))
            self._report(id_, snapshot)

    def _report(self, id_: ReportId, value: Any) -> None:
        """This worker's part of what all do by themselves, unless its script has left it out."""
        forgets = self.story.plan.forgets
        if forgets is not None and forgets[0] == self.rank and forgets[1] <= id_.step < forgets[2]:
            self.story.notes.fired("forgotten report")
            self.story.notes.say(
                self.group.number, self.name, f"leaves out its {id_.kind} of step {id_.step}"
            )
        else:
            self.post(e.Reported(id_, value))

    def _play(self) -> None:
        """Carries out the script's actions behind a boundary; some of them wait."""
        if self.replica.report_to_raise is not None:
            self._raise()
            return
        plan, actions = self.story.plan, self.story.plan.script.get(self.replica.step, ())
        while self.place < len(actions):
            action = actions[self.place]
            self.place += 1
            match action:
                case ("propose", rank, proposal):
                    if rank == self.rank:
                        self.propose(proposal, in_training=True)
                case ("function", source, id_, number, at_step, trial, by):
                    if by not in (None, self.rank):
                        continue
                    if source == self.rank:
                        self.replica.functions[id_] = number
                    self.propose(Proposal(id_, "", None, at_step, trial, source), in_training=True)
                case ("wait", rank, secs):
                    if rank == self.rank and self._last_ticket:
                        self._is_unfinished, self._waits_since = True, self.clock.now
                        self.post(e.Awaited(self._last_ticket, secs))
                        return
                case _:
                    self._report_planned(self.place - 1)
                    self._is_unfinished = True
                    self.post(e.Rested(action))
                    return
        if self.replica.step >= plan.steps:
            self._is_done = True
            self._report_planned(self.place)
            self.group.closing()
            self.post(e.Rested(("close",)))
        else:
            if plan.planned_at == "late":
                self._take_planned()
            self._report_planned(self.place)
            self.group.train(self, plan.stride)

    def rests_with_a_report_to_raise(self) -> bool:
        """Whether its training thread still rests although all others raised the report of an audit."""
        rests = (self._is_unfinished or self._is_done) and self._waits_since is None
        stopped = self.frozen_until > self.clock.now
        return self.alive and self.replica.report_to_raise is not None and rests and not stopped

    def _raise(self) -> None:
        """Ends the script, and its process, with the report of an audit."""
        self.story.notes.say(
            self.group.number, self.name, f"raises: {described(self.replica.report_to_raise)}"
        )
        self.story.checks.raised(self.group.replicas())
        self.group.die(self)
