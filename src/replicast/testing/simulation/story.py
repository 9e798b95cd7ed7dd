"""All that the parts of one simulated story share."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from replicast.core.coordinator import Coordinator
from replicast.core.operation import Operation, Timeouts
from replicast.core.worker import Worker
from replicast.testing.simulation.check import Checks
from replicast.testing.simulation.clock import Clock
from replicast.testing.simulation.disk import Disk
from replicast.testing.simulation.notes import Notes
from replicast.testing.simulation.plan import Plan
from replicast.testing.simulation.replica import StoryFailed

TIMEOUTS = Timeouts(
    prepare_secs=6, answer_secs=2, meet_secs=20, decide_secs=60, compute_secs=10, retry_secs=1
)


class StrictCoordinator(Coordinator):
    """An unexpected exception is a failure of the story."""

    def _unexpected(self, operation: Operation, error: Exception) -> None:
        raise StoryFailed(f"unexpected in {operation}: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Machines:
    """The state machines that a story runs on."""

    coordinator: type[Coordinator] = StrictCoordinator
    worker: type[Worker] = Worker


class Story:
    """One story: its plan, its time, its disk, and who watches.

    Attributes:
        random: What is left to chance: how long things take.
        writes: How many writes there were.
    """

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
