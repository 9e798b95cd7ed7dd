"""One group of simulated workers: their processes, the channel between them, the transfers of training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from replicast.core import events as e
from replicast.core.entries import Payload
from replicast.core.messages import OUTSIDE, Propose, Tell
from replicast.core.records import Refuse
from tests.simulator.model import needs_before
from tests.simulator.plan import TOGETHER, Action
from tests.simulator.process import Process
from tests.simulator.replica import START, Edit, InMemory, SimulatedReplica, StoryFailed
from tests.simulator.story import Story
from tests.simulator.thread import TrainingThread


class SimulatedGroup:
    """One attempt.

    Args:
        story: Shared by all parts of the schedule.
        on_failure: Called when the launcher detects that a process has died.
        on_end: Called when all processes have ended, and whether they were told to.

    Attributes:
        number: Its position in the order of claims.
        alive: Whether its processes run.
        started_at: When its workers started.
        closing_at: When the first script reached its end.
    """

    def __init__(
        self,
        story: Story,
        on_failure: Callable[[SimulatedGroup], None],
        on_end: Callable[[SimulatedGroup, bool], None],
    ) -> None:
        self.story = story
        self._clock, self._notes, self._random = story.clock, story.notes, story.random.random
        self.number = story.disk.claim()
        self._on_failure = on_failure
        self._on_end = on_end
        self.alive = True
        self.started_at = story.clock.now
        self.closing_at = float("inf")
        self.log: list[Any] = []
        self._failed = False
        self.processes: list[Process] = []
        size = story.plan.size
        self._read = [0] * size
        self._polling = [False] * size
        self._last_sent = [0.0] * size
        self._slow_until = [0.0] * size
        self._in_step: dict[int, list[TrainingThread]] = {}

    def start(self) -> None:
        """Starts the workers: they have restored the state and are about to train."""
        if not self.alive:
            return
        story, plan = self.story, self.story.plan
        self.started_at = story.clock.now
        story.disk.count(self.number)
        history = story.disk.history()
        start = history.last_checkpoint()
        if start is not None and plan.go_back == self.number:
            story.notes.fired("damaged checkpoint")
            earlier = [step for step in history.checkpoints if step < start.step]
            start = history.checkpoints[max(earlier)] if earlier else None
        step, values, holds, places = 0, START, frozenset[int](), [0] * plan.size
        if start is not None:
            step, holds = start.step, start.holds
            values = dict(start.state[0][0])
            places = aligned([place for _, place in start.state], plan.script.get(step, []))
        story.notes.say(self.number, "launcher", f"attempt {self.number} starts at step {step}")
        kinds = story.machines
        coordinator = kinds.coordinator(
            plan.size,
            history,
            attempt=self.number,
            start=start,
            timeouts=story.timeouts,
            audit_policy=plan.audit_policy,
        )
        for rank in range(plan.size):
            replica = SimulatedReplica(
                self.number,
                rank,
                step,
                values,
                holds,
                read=self._read_payload,
                undo=self._undo,
                on_apply=story.checks.applied,
            )
            worker = kinds.worker(rank, step, timeouts=story.timeouts)
            process = Process(
                story, self, rank, worker, replica, coordinator if rank == 0 else None, places[rank]
            )
            if plan.crash is not None and plan.crash[:2] == (self.number, rank):
                process.commands_left = plan.crash[2]
            self.processes.append(process)
        for process in self.processes:
            process.start()
        for message in (*story.disk.inbox.values(), *story.disk.requests.values()):
            self.from_outside(message)

    def _read_payload(self, id_: str, digest: str) -> tuple[Edit, ...] | None:
        payload = self.story.disk.find(Payload, id_, digest)
        content: Any = None if payload is None else payload.content
        return None if content is None else content.edits

    def _undo(self, sequence: int) -> tuple[Edit, ...]:
        disk = self.story.disk
        edits, history = disk.undo(sequence), disk.history()
        record = history.committed.get(sequence)
        if edits is None:
            is_kept = record is not None and needs_before(history, record)
            if is_kept and not self._notes.faults["full disk"]:
                raise StoryFailed(f"update {sequence} is reverted before the values before it are written")
            raise Refuse(f"The values before update {sequence} are not kept")
        return edits

    def from_outside(self, message: Any) -> None:
        """Delivers a message from the run directory to the coordinator."""
        if self.alive and self.processes:
            if (
                isinstance(message, Propose) and message.proposal.content is not None
            ):  # its file is read, and made available to all workers
                edits: Any = message.proposal.content
                proposal = replace(message.proposal, content=InMemory(self.number, edits))
                message = replace(message, proposal=proposal)
            first = self.processes[0]
            event = e.FromWorker(OUTSIDE, message)
            self._clock.after(0.05 * self._random(), first.feed, first.coordinator, event)

    def send(self, rank: int, message: Any) -> None:
        """Sends a message from a worker to the coordinator: in order, with a delay."""
        if self._notes.recording:
            self._notes.say(self.number, f"worker {rank} →", message)
        self._last_sent[rank] = arrives = max(self._arrival(rank), self._last_sent[rank])
        first = self.processes[0]
        self._clock.at(arrives, first.feed, first.coordinator, e.FromWorker(rank, message))

    def append(self, message: Any) -> None:
        """Appends a message of the coordinator to the log that all workers read."""
        if self._notes.recording:
            self._notes.say(self.number, "     → all", message)
        self.log.append(message)
        if isinstance(message, Tell):
            self.story.checks.announced(self.number, message)
        for rank, polling in enumerate(self._polling):
            if not polling:
                self._polling[rank] = True
                process = self.processes[rank]
                self._clock.at(self._arrival(rank), process.run, self._read_log, process)

    def slow(self, rank: int, until: float) -> None:
        """Delays the messages from and to this worker."""
        self._slow_until[rank] = until

    def _arrival(self, rank: int) -> float:
        now, late = self._clock.now, self._slow_until[rank]
        if late > now:
            self._notes.fired("late message")
            return late
        return now + 0.001 + self._random() * 0.01

    def _read_log(self, process: Process) -> None:
        """A worker reads new messages of the log."""
        rank = process.rank
        self._polling[rank] = False
        start, end = self._read[rank], len(self.log)
        self._read[rank] = end
        for message in self.log[start:end]:
            process.feed(process.worker, e.FromCoordinator(message))

    # Training.

    def train(self, process: TrainingThread, steps: int) -> None:
        """Starts the next step of a process; in synchronous training it ends when all have started it."""
        plan, clock, random = self.story.plan, self._clock, self._random
        if not plan.together:
            clock.after(0.1 + random() * 0.4, process.arrive, steps)
            return
        entered = self._in_step.setdefault(process.replica.step, [])
        entered.append(process)
        if len(entered) == plan.size:
            secs = 0.1 + random() * 0.4
            for one in entered:
                clock.after(secs + random() * 0.05, one.arrive, steps)

    # The end.

    def closing(self) -> None:
        """Called when a script has reached its end."""
        self.closing_at = min(self.closing_at, self._clock.now)

    def replicas(self) -> list[SimulatedReplica]:
        """The replicas of all processes."""
        return [process.replica for process in self.processes]

    def ended(self, process: TrainingThread, *, left: bool = False) -> None:
        """Called when the script of a process has ended, or the process was told to exit."""
        process.alive = False
        if self.alive and not self._failed and not any(one.alive for one in self.processes):
            self.alive = False
            self._on_end(self, left)

    def die(self, process: TrainingThread) -> None:
        """Called when a process has died; the launcher detects it soon."""
        process.alive = False
        self._failed = True
        if self.alive:
            self._clock.after(0.2 + self._random(), self._on_failure, self)

    def kill(self) -> None:
        """The launcher kills the remaining processes."""
        self.alive = False
        for process in self.processes:
            process.alive = False


def aligned(places: list[int], actions: list[Action]) -> list[int]:
    """Where the scripts continue after a restart: a joint action is repeated by all workers or by none.

    Args:
        places: How many of the actions each worker had done when its state was saved.
        actions: The actions of the scripts at that step.
    """
    together = [place for place, action in enumerate(actions) if action[0] in TOGETHER]
    done = min(sum(one < place for one in together) for place in places)
    last = together[done] if done < len(together) else len(actions)
    return [min(place, last) for place in places]
