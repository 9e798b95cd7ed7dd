"""Runs one simulated schedule in one thread: the launcher, and events from outside."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator
from typing import Any

from replicast.core.entries import Proposal
from replicast.core.messages import Propose, Request, Withdraw
from tests.simulator.check import GroupOutcome
from tests.simulator.group import Process, SimulatedGroup
from tests.simulator.plan import Plan, random_plan
from tests.simulator.replica import StoryFailed
from tests.simulator.story import Machines, Story

SILENT_SECS = 15.0
"""How long a worker may be stopped before the launcher ends its group."""
DISTURBING = {"crash", "kill", "late message", "unknown write", "stale write"}
"""Faults after which a worker may not have received messages that the others have."""
MOST_SECS = 5000.0
MOST_EVENTS = 50_000


class World:
    """Runs one schedule."""

    def __init__(
        self,
        plan: Plan,
        machines: Machines | None = None,
        *,
        recording: bool = False,
        most_events: int = MOST_EVENTS,
    ) -> None:
        self.story = Story(plan, machines or Machines(), recording=recording)
        self.notes = self.story.notes
        self.clock = self.story.clock
        self.groups: list[SimulatedGroup] = []
        self._most_events = most_events

    def run(self) -> None:
        """Runs the schedule to its end."""
        for incident in self.story.plan.incidents:
            self.clock.at(incident[0], self._happen, incident[1:])
        self._start_group()
        self.clock.run(MOST_SECS, self._most_events)
        if not self.clock.stopped:
            raise StoryFailed("something waits forever")
        self.story.checks.finish(
            [GroupOutcome(one.replicas(), one.started_at, one.closing_at) for one in self.groups]
        )

    # The launcher.

    def _start_group(self) -> None:
        if self.story.clock.stopped:
            return
        group = SimulatedGroup(self.story, self._restart, self._ended)
        self.groups.append(group)
        self.notes.count("attempts")
        self.clock.after(
            0.05, group.start
        )  # between the claim and the count, an earlier group may still write

    def _restart(self, group: SimulatedGroup) -> None:
        """The launcher restarts a group that has failed."""
        if group.alive:
            forgotten = [one.name for one in group.processes if one.rests_with_a_report_to_raise()]
            if forgotten and not self.notes.faults.keys() & DISTURBING:
                raise StoryFailed(f"{forgotten} still rest with a report to raise")
            group.kill()
            self.notes.say(group.number, "launcher", f"ends attempt {group.number}")
            if group is self.groups[-1]:
                self.clock.after(0.2, self._start_group)

    def _ended(self, group: SimulatedGroup, left: bool) -> None:
        """All scripts of a group have ended; a group that was told to exit is started again later."""
        if group is not self.groups[-1]:
            return
        self.notes.say(group.number, "launcher", f"attempt {group.number} has {'left' if left else 'ended'}")
        if left:
            self.notes.count("left")
            self.clock.after(1.0, self._start_group)
        else:
            self.story.clock.stopped = True

    # What happens from outside.

    def _happen(self, incident: tuple[Any, ...]) -> None:
        group = self.groups[-1]
        match incident:
            case ("thread", rank, proposal):
                if group.alive and group.processes and group.processes[rank].alive:
                    group.processes[rank].run(self._propose, group.processes[rank], proposal)
            case ("push", ticket, proposal):
                self.story.checks.proposed(ticket, proposal, in_inbox=True)
                self._put_in_inbox(ticket, Propose(ticket, proposal))
            case ("withdraw", ticket, id_):
                self.story.checks.asked(ticket)
                self._put_in_inbox(ticket, Withdraw(ticket, id_))
            case ("request", rank, kind):
                if group.alive and group.processes and group.processes[rank].alive:
                    self.notes.count("operations")
                    group.processes[rank].run(group.send, rank, Request(kind))
            case ("ask", id_, kind, arguments):
                self.notes.count("operations")
                self.story.checks.asked(id_)
                self.story.disk.requests[id_] = request = Request(kind, (id_,), arguments)
                self.notes.say(None, "author", f"asks for: {kind} {' '.join(map(str, arguments))}".rstrip())
                for group in self.groups:
                    group.from_outside(request)
            case ("full", secs):
                self.story.disk.full_until = self.clock.now + secs
            case ("zombie", secs):
                if group.alive and group.processes:
                    self.notes.fired("restart beside a living group")
                    self.notes.say(
                        group.number, "launcher", f"takes attempt {group.number} for dead, which lives on"
                    )
                    self._start_group()
                    self.clock.after(secs, self._bury, group)
            case (kind, rank, *arguments):
                if group.alive and group.processes:
                    self._strike(group, kind, rank, arguments)

    def _propose(self, process: Process, proposal: Proposal) -> None:
        process.propose(proposal)

    def _strike(self, group: SimulatedGroup, kind: str, rank: int, arguments: list[float]) -> None:
        process = group.processes[rank]
        if not process.alive:
            return
        self.notes.say(
            group.number, "fault", f"{kind} worker {rank} {arguments[0] if arguments else ''}".rstrip()
        )
        if kind not in ("slow", "hang", "no_room"):
            self.notes.fired(kind)
        if kind == "kill":
            group.die(process)
        elif kind == "freeze":
            process.frozen_until = max(process.frozen_until, self.clock.now + arguments[0])
            if arguments[0] > SILENT_SECS:
                self.clock.after(SILENT_SECS, self._restart, group)
        elif kind == "slow":
            group.slow(rank, self.clock.now + arguments[0])
        elif kind == "no_room":
            process.replica.no_room = True
        elif kind == "hang":
            process.hangs = True
        elif kind == "drift" and process.replica.step < self.story.plan.steps:
            self.story.checks.drifted(group.number)
            process.replica.values["d"] = int(arguments[0])

    def _bury(self, group: SimulatedGroup) -> None:
        if group.alive:
            group.kill()

    def _put_in_inbox(self, ticket: str, message: Propose | Withdraw) -> None:
        self.story.disk.inbox[ticket] = message
        for group in self.groups:
            group.from_outside(message)


# Many schedules, one after the other, and the memory that they need.

SCHEDULES_PER_COLLECTION = 3


def worlds(seeds: Iterable[int]) -> Iterator[World]:
    """Yields the world of each seed, to be run before the next one is made.

    A schedule leaves thousands of small objects in reference cycles. They are collected while they are still
    in the processor's cache, and nothing else of the process is scanned: this saves a quarter of the time.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        for number, seed in enumerate(seeds, 1):
            yield World(random_plan(seed))
            if number % SCHEDULES_PER_COLLECTION == 0:
                gc.collect()
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()
