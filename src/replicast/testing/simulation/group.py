"""One group of simulated workers: their processes, the channel between them, and the transfers of training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from replicast.core import events as e
from replicast.core.messages import OUTSIDE, Tell
from replicast.testing.simulation.process import Process
from replicast.testing.simulation.replica import START, SimulatedReplica

if TYPE_CHECKING:
    from replicast.testing.simulation.world import World


class SimulatedGroup:
    """One attempt.

    Attributes:
        number: Its place in the order of claims.
        alive: Whether its processes run.
        started_at: When its workers began.
        closing_at: When the first script came to its end.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.number = world.disk.claim()
        self.alive = True
        self.started_at = world.now
        self.closing_at = float("inf")
        self.log: list[Any] = []
        self.processes: list[Process] = []
        size = world.plan.size
        self._read = [0] * size
        self._polling = [False] * size
        self._last_sent = [0.0] * size
        self._slow_until = [0.0] * size
        self._in_step: dict[int, list[Process]] = {}

    def start(self) -> None:
        """All workers have claimed, restored, and are about to train."""
        if not self.alive:
            return
        world, plan = self.world, self.world.plan
        self.started_at = world.now
        world.disk.count(self.number)
        history = world.disk.history()
        start = history.last_checkpoint()
        if start is not None and plan.go_back:
            world.fired("damaged checkpoint")
            earlier = [step for step in history.checkpoints if step < start.step]
            start = history.checkpoints[max(earlier)] if earlier else None
        step, values, holds, places = 0, START, frozenset[int](), [0] * plan.size
        if start is not None:
            state: Any = start.state
            step, holds = start.step, start.holds
            values, places = dict(state[0]), world.places[start.attempt, state[1]]
        world.say(f"attempt {self.number} starts at step {step}")
        kinds = world.machines
        coordinator = kinds.coordinator(
            plan.size, history, attempt=self.number, start=start, timeouts=world.timeouts
        )
        for rank in range(plan.size):
            replica = SimulatedReplica(rank, step, values, holds, world.check_apply, self._note_place)
            worker = kinds.worker(rank, step, plans=world.plans, timeouts=world.timeouts)
            process = Process(self, rank, worker, replica, coordinator if rank == 0 else None, places[rank])
            if plan.crash is not None and plan.crash[:2] == (self.number, rank):
                process.commands_left = plan.crash[2]
            self.processes.append(process)
        for process in self.processes:
            process.start()
        for message in world.disk.inbox.values():
            self.from_outside(message)

    def _note_place(self, replica: SimulatedReplica, snapshot: int) -> None:
        """A script that starts again from a snapshot goes on where each training thread was."""
        places = self.world.places.setdefault((self.number, snapshot), [0] * self.world.plan.size)
        places[replica.rank] = self.processes[replica.rank].place_of_snapshot()

    def from_outside(self, message: Any) -> None:
        """The coordinator finds something in the run directory."""
        if self.alive and self.processes:
            self.world.after(0.05 * self.world.random.random(), self._deliver, OUTSIDE, message)

    def send(self, rank: int, message: Any) -> None:
        """From a worker to the coordinator: in order, after a while."""
        world = self.world
        if world.recording:
            world.say(f"worker {rank} → coordinator: {world.described(message)}")
        self._last_sent[rank] = max(self._arrival(rank), self._last_sent[rank])
        world.at(self._last_sent[rank], self._deliver, rank, message)

    def append(self, message: Any) -> None:
        """From the coordinator to all workers: one log."""
        world = self.world
        if world.recording:
            world.say(f"coordinator → all: {world.described(message)}")
        self.log.append(message)
        if isinstance(message, Tell):
            world.checks.announced(message)
        for rank, polling in enumerate(self._polling):
            if not polling:
                self._polling[rank] = True
                world.at(self._arrival(rank), self._poll, rank)

    def slow(self, rank: int, until: float) -> None:
        """What this worker says and hears is late."""
        self._slow_until[rank] = until

    def _arrival(self, rank: int) -> float:
        world = self.world
        late = self._slow_until[rank]
        if late > world.now:
            world.fired("late message")
            return late
        return world.now + 0.001 + world.random.random() * 0.01

    def _deliver(self, rank: int, message: Any) -> None:
        process = self.processes[0]
        if process.alive and process.coordinator is not None:
            process.feed(process.coordinator, e.FromWorker(rank, message))

    def _poll(self, rank: int) -> None:
        """A worker reads what is new in the log."""
        process, world = self.processes[rank], self.world
        if not process.alive:
            return
        if process.frozen_until > world.now:
            world.at(process.frozen_until, self._poll, rank)
            return
        self._polling[rank] = False
        start, end = self._read[rank], len(self.log)
        self._read[rank] = end
        for message in self.log[start:end]:
            process.feed(process.worker, e.FromCoordinator(message))

    # Training.

    def train(self, process: Process, steps: int) -> None:
        """A process starts its next step; in synchronous training it ends when all have started it."""
        world = self.world
        if not world.plan.together:
            world.after(0.1 + world.random.random() * 0.4, process.arrive, steps)
            return
        entered = self._in_step.setdefault(process.replica.step, [])
        entered.append(process)
        if len(entered) == world.plan.size:
            secs = 0.1 + world.random.random() * 0.4
            for one in entered:
                world.after(secs + world.random.random() * 0.05, one.arrive, steps)

    # The end.

    def ended(self, process: Process, *, left: bool = False) -> None:
        """The script of a process has ended, or the process was told to end."""
        process.alive = False
        if self.alive and not any(one.alive for one in self.processes):
            self.alive = False
            self.world.group_ended(self, left=left)

    def die(self, process: Process) -> None:
        """A process is gone; the launcher sees it soon."""
        process.alive = False
        if self.alive:
            self.world.after(0.2 + self.world.random.random(), self.world.restart, self)

    def kill(self) -> None:
        """The launcher ends what is left of it."""
        self.alive = False
        for process in self.processes:
            process.alive = False
