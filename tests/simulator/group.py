"""One group of simulated workers: their processes, the channel between them, the transfers of training.

A process runs a `Worker`, and on rank 0 a `Coordinator`, as the runtime does with real threads and files.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from replicast.core import messages as m
from replicast.core.coordinator import Coordinator
from replicast.core.entries import Payload, Proposal, Saved
from replicast.core.messages import OUTSIDE, Answer, Propose, Refusal, Refuse, ReportId, Snapshot, Tell
from replicast.core.operations.apply import Apply, BeginTrial, Load, Prepare
from replicast.core.operations.attempt import Exit, TakeSnapshot
from replicast.core.worker import WorkerMachine
from tests.simulator.model import needs_before
from tests.simulator.plan import TOGETHER, Action
from tests.simulator.replica import START, Edit, InMemory, SimulatedReplica, StoryFailed
from tests.simulator.story import Story
from tests.simulator.words import described

LONG_SECS = 55.0  # longer than every delay and every other timeout: who waits this long was forgotten
DIGEST_SECS = 0.01


class Process:
    """One process."""

    def __init__(
        self,
        story: Story,
        group: SimulatedGroup,
        rank: int,
        worker: WorkerMachine,
        replica: SimulatedReplica,
        coordinator: Coordinator | None,
        place: int,
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
        self.frozen_until = 0.0  # stopped by SIGSTOP until then
        self.place = place  # how many actions of the script behind the current boundary are done
        self._is_done = False
        self._tickets = 0
        self._last_ticket = ""
        self._is_unfinished = False
        self._waits_since: float | None = None
        self._snapshots: deque[tuple[ReportId, Any]] = deque()
        self.coordinator = coordinator
        self.hangs = False  # its next fetch never ends
        self.commands_left: int | None = None  # after which it dies
        self._events: deque[tuple[Any, Any]] = deque()
        self._driving = False
        self._outbox: deque[tuple[float, Any]] = deque()
        self._write_ends = 0.0

    # Events in, commands out.

    def feed(self, machine: WorkerMachine | Coordinator, event: Any) -> None:
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
        """Posts an event to the worker after all that were posted before, as the outbox does."""
        self._outbox.append((self.clock.now + secs, event))
        if secs:
            self.clock.after(secs, self.run, self._send_outbox)
        self._send_outbox()

    def _send_outbox(self) -> None:
        while self._outbox and self._outbox[0][0] <= self.clock.now:
            self.feed(self.worker, self._outbox.popleft()[1])

    def start(self) -> None:
        """Starts the process, which has joined the others and restored its state."""
        self.feed(self.worker, m.Rested(("begin",)))

    # Commands of both machines.

    def _set_timer(self, machine: WorkerMachine | Coordinator, command: m.SetTimer) -> None:
        self.clock.after(command.secs, self.feed, machine, m.TimerFired(command.number))

    def _end_job(self, machine: WorkerMachine | Coordinator, command: m.EndJob) -> None:
        self.story.notes.say(self.group.number, self.name, f"ends the job: {command.reason}")
        self.story.notes.count("jobs ended by the core")
        self.group.die(self)

    # Commands of the coordinator.

    def _broadcast(self, machine: Coordinator, command: m.Broadcast) -> None:
        self.group.append(command.message)

    def _write(self, machine: Coordinator, command: m.Write) -> None:
        """Queues a write: writes are carried out one at a time, as by one thread."""
        took = 0.002 + self.story.random.random() * 0.02
        self._write_ends = max(self.clock.now, self._write_ends) + took
        self.clock.at(self._write_ends, self._make_write, command)

    def _make_write(self, command: m.Write) -> None:
        """Starts a write. A process that is stopped here may continue after another group has a claim."""
        self.run(self._write_entry, command)

    def _write_entry(self, command: m.Write) -> None:
        story, disk, number = self.story, self.story.disk, self.group.number
        story.writes += 1
        outcome = m.WriteOutcome.DURABLE
        if story.writes == story.plan.unknown:
            story.notes.fired("unknown write")
            if story.random.random() < 0.5:
                disk.append(number, command.entry)
            outcome = m.WriteOutcome.UNKNOWN
        elif disk.full_until > self.clock.now:
            story.notes.fired("full disk")
            outcome = m.WriteOutcome.FAILED
        else:
            disk.append(number, command.entry)
            if disk.is_fenced(number):
                story.notes.fired("stale write")
                outcome = m.WriteOutcome.FENCED
            elif isinstance(command.entry, Saved):
                story.checks.saved(command.entry)
        if story.notes.recording:
            failed = "" if outcome is m.WriteOutcome.DURABLE else f"{outcome.value.upper()}: "
            story.notes.say(number, "  journal", f"{failed}{described(command.entry)}")
        if self.coordinator is not None:
            self.feed(self.coordinator, m.Written(command.number, outcome))

    def _close_inbox(self, machine: Coordinator, command: m.CloseInbox) -> None:
        if self.story.disk.inbox.pop(command.ticket, None) is not None:
            self.story.checks.settled(self.group.replicas(), command.ticket, command.tell)

    def _ended(self, machine: Coordinator, command: m.Ended) -> None:
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

    def _send(self, machine: WorkerMachine, command: m.Send) -> None:
        self.group.send(self.rank, command.message)

    def _perform(self, machine: WorkerMachine, command: m.Perform) -> None:
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

    def _carry_out(self, command: m.Perform) -> None:
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
            self.post(Answer(command.number, value), DIGEST_SECS)
        self.feed(self.worker, m.Performed(command.number, value, answers=not later))
        if isinstance(command.order, Exit):
            if self.rank == 0:
                self._answer(command.order.asked_by)
            self.group.ended(self, left=True)

    def _is_discarded(self, command: m.Perform) -> bool:
        """Whether it was fetching an update that has been discarded meanwhile."""
        fetches = isinstance(command.order, Prepare)
        return fetches and self.replica.fetching.pop(command.number, None) is None

    def _settle(self, machine: WorkerMachine, command: m.Settle) -> None:
        self.story.checks.settled(self.group.replicas(), command.ticket, command.tell)

    def _discard(self, machine: WorkerMachine, command: m.DropPrepared) -> None:
        self.replica.discard(command.id)

    # The training thread: trains, reaches boundaries, and carries out the actions of its script.

    def _pass(self, machine: WorkerMachine, command: m.PassBoundary) -> None:
        if self.story.plan.planned_at == "behind":
            self._take_planned()
        self._play()

    def _place_of_snapshot(self) -> int:
        """The position from which a restart continues: the action in which the script waits is repeated."""
        return self.place - 1 if self._is_unfinished else self.place

    def _continue(self, machine: WorkerMachine, command: m.Continue) -> None:
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
        self.post(Propose(ticket, proposal))

    def arrive(self, steps: int) -> None:
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
        self.feed(self.worker, m.Arrived(self.replica.step))

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
            self.post(Answer(id_, value))

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
                        self.post(m.Awaited(self._last_ticket, secs))
                        return
                case _:
                    self._report_planned(self.place - 1)
                    self._is_unfinished = True
                    self.post(m.Rested(action))
                    return
        if self.replica.step >= plan.steps:
            self._is_done = True
            self._report_planned(self.place)
            self.group.closing()
            self.post(m.Rested(("close",)))
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


_CARRIED_OUT_BY: dict[type[Any], Callable[[Process, Any, Any], None]] = {
    m.Send: Process._send,
    m.Perform: Process._perform,
    m.PassBoundary: Process._pass,
    m.Continue: Process._continue,
    m.Settle: Process._settle,
    m.DropPrepared: Process._discard,
    m.SetTimer: Process._set_timer,
    m.EndJob: Process._end_job,
    m.Broadcast: Process._broadcast,
    m.Write: Process._write,
    m.CloseInbox: Process._close_inbox,
    m.Ended: Process._ended,
}


class SimulatedGroup:
    """One attempt."""

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
        self._in_step: dict[int, list[Process]] = {}

    def start(self) -> None:
        """Starts the workers: they have restored the state and are about to train."""
        if not self.alive:
            return
        story, plan = self.story, self.story.plan
        self.started_at = story.clock.now
        story.disk.count(self.number)
        history = story.disk.history()
        start = history.checkpoints[max(history.checkpoints)] if history.checkpoints else None
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
            event = m.FromWorker(OUTSIDE, message)
            self._clock.after(0.05 * self._random(), first.feed, first.coordinator, event)

    def send(self, rank: int, message: Any) -> None:
        """Sends a message from a worker to the coordinator: in order, with a delay."""
        if self._notes.recording:
            self._notes.say(self.number, f"worker {rank} →", message)
        self._last_sent[rank] = arrives = max(self._arrival(rank), self._last_sent[rank])
        first = self.processes[0]
        self._clock.at(arrives, first.feed, first.coordinator, m.FromWorker(rank, message))

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
            process.feed(process.worker, message)

    # Training.

    def train(self, process: Process, steps: int) -> None:
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
        self.closing_at = min(self.closing_at, self._clock.now)

    def replicas(self) -> list[SimulatedReplica]:
        """The replicas of all processes."""
        return [process.replica for process in self.processes]

    def ended(self, process: Process, *, left: bool = False) -> None:
        process.alive = False
        if self.alive and not self._failed and not any(one.alive for one in self.processes):
            self.alive = False
            self._on_end(self, left)

    def die(self, process: Process) -> None:
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
    """Where the scripts continue after a restart: a joint action is repeated by all workers or by none."""
    together = [place for place, action in enumerate(actions) if action[0] in TOGETHER]
    done = min(sum(one < place for one in together) for place in places)
    last = together[done] if done < len(together) else len(actions)
    return [min(place, last) for place in places]
