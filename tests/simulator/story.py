"""The objects that all parts of one simulated schedule share."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from replicast.core.coordinator import Coordinator
from replicast.core.operation import Operation, Timeouts
from replicast.core.worker import WorkerMachine
from tests.simulator.check import Checks
from tests.simulator.disk import Disk
from tests.simulator.notes import Clock, Notes
from tests.simulator.plan import Plan
from tests.simulator.replica import StoryFailed

TIMEOUTS = Timeouts(
    prepare_secs=6, answer_secs=2, meet_secs=20, decide_secs=60, compute_secs=10, retry_secs=1
)


class StrictCoordinator(Coordinator):
    """A coordinator in which an unexpected exception fails the schedule."""

    def _unexpected(self, operation: Operation, error: Exception) -> None:
        raise StoryFailed(f"unexpected in {operation}: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Machines:
    """The classes of the state machines that a schedule runs."""

    coordinator: type[Coordinator] = StrictCoordinator
    worker: type[WorkerMachine] = WorkerMachine


class Story:
    """One schedule: its plan, clock, disk and checks."""

    def __init__(self, plan: Plan, machines: Machines, *, recording: bool) -> None:
        self.plan = plan
        self.machines = machines
        self.timeouts = TIMEOUTS
        self.random = Random(plan.seed)
        self.clock = Clock()
        self.notes = Notes(self.clock, recording=recording)
        self.disk = Disk()
        self.checks = Checks(plan, self.disk, self.clock, self.notes)
        self.writes = 0
