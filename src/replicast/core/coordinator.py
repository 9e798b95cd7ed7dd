"""The coordinator: one ordered list of operations, and what is added to it.

    Propose, Request, Rest, a planned step ──► an operation at the end of the list; its script runs (`Engine`)
    it ends ──► Tell to the holders of its tickets (`Tickets`), Resume to the workers that rest in it

While a trial is in progress, most operations wait for its end.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from math import inf
from typing import Any

from msgspec.structs import replace

from replicast.core.entries import Committed, Entry, History, Receipt, Refused, Saved, Withdrawn
from replicast.core.events import (
    Broadcast,
    CloseInbox,
    CoordinatorCommand,
    CoordinatorEvent,
    Ended,
    EndJob,
    FromWorker,
    SetTimer,
    Write,
    WriteOutcome,
    Written,
)
from replicast.core.messages import (
    OUTSIDE,
    Answer,
    At,
    Do,
    Meet,
    Propose,
    Release,
    Request,
    Rest,
    Resume,
    Stop,
    Tell,
    ToCoordinator,
    ToWorkers,
    Withdraw,
)
from replicast.core.operation import (
    AnyRequest,
    Ask,
    AuditTrail,
    BeforeWritten,
    Boundary,
    Collect,
    EarlierSettled,
    EarlierStored,
    Gather,
    Go,
    Meeting,
    Operation,
    Outcome,
    Persist,
    Reserve,
    Script,
    Timeouts,
)
from replicast.core.operations.audit import Audit
from replicast.core.operations.catalog import collective, planned, proposed, replayed, requested
from replicast.core.operations.function import Function
from replicast.core.operations.leave import Close
from replicast.core.operations.revert import Keep
from replicast.core.operations.update import Update
from replicast.core.records import JobEnds, Pending, Proposal, Refusal, Refuse, ReportId, Stage

# What all workers report by themselves: each its part of a save or an audit, made at the same boundary.
#
#     every worker    makes its part at the boundary, reports it, and trains on; its reports come in order
#     coordinator     the first report opens the operation; when all are there, its script goes on
#
# A worker may never report its part: its callback was skipped, or the script caught an error. Then the
# operation is refused, and the refusal names the worker, as soon as it is certain or too late:
#
#     the worker has reported a later one of this kind      it makes its reports in order
#     all workers rest at a later boundary, or in close     they have reported what they made before
#     `meet_secs` after the first report                    whatever the reason is


class PlannedReports:
    """The reports of all workers that are not complete. A part of the coordinator."""

    def __init__(
        self,
        size: int,
        secs: float,
        *,
        open_: Callable[[ReportId], None],
        set_timer: Callable[[float, Callable[[], None]], None],
        resume: Callable[[Operation, Any], None],
    ) -> None:
        self._size = size
        self._secs = secs
        self._open = open_
        self._set_timer = set_timer
        self._resume = resume
        self._gathers: dict[ReportId, tuple[Gather, Operation]] = {}
        self._latest: dict[tuple[str, int], ReportId] = {}  # by kind and rank

    def collect(self, operation: Operation, id_: ReportId) -> None:
        """The script of the operation goes on when all workers have reported, or one will not."""
        gather = Gather(f"report its {id_.kind} of step {id_.step}", range(self._size))
        self._gathers[id_] = gather, operation

        def late() -> None:
            if gather.missing:
                gather.answers.clear()
                self._resume(operation, gather.timed_out(self._secs))

        self._set_timer(self._secs, late)

    def is_collecting(self, operation: Operation) -> bool:
        """Whether the operation waits for reports."""
        return any(one is operation for _, one in self._gathers.values())

    def add(self, rank: int, id_: ReportId, value: Any) -> None:
        """A worker has reported its part."""
        if id_ not in self._gathers:
            self._open(id_)
        self._latest[id_.kind, rank] = id_
        gather, operation = self._gathers[id_]
        if gather.add(rank, value):
            del self._gathers[id_]
            self._resume(operation, gather.refusal() or gather.answers)
        for other in [one for one in self._gathers if one.kind == id_.kind]:
            self._give_up_passed(other)

    def give_up(self, before: int | None) -> None:
        """All workers rest: what one of them has not reported by now, it never will."""
        for id_ in [one for one in self._gathers if before is None or one.step < before]:
            gather, operation = self._gathers.pop(id_)
            self._resume(operation, gather.refused_by(gather.missing))

    def _give_up_passed(self, id_: ReportId) -> None:
        """Refuses what a worker will not report, because it has reported a later one.

        The reports are kept until every worker has made its own or passed it: a late one opens nothing.
        """
        gather, operation = self._gathers[id_]
        passed = [rank for rank in gather.missing if id_ < self._latest.get((id_.kind, rank), id_)]
        if passed:
            gather.answers.clear()
            if len(passed) == len(gather.missing):
                del self._gathers[id_]
            self._resume(operation, gather.refused_by(passed))


# Which operation has its turn at a boundary: one at a time, while all training threads are stopped there.
#
# Operations that need a boundary wait in the order of the list. Once all workers are stopped where an
# operation can run (`Meeting`, or all of them rest at one boundary), it has its turn until it yields `Go`,
# ends, or asks for another boundary. Operations that are ready by then share the meeting; then the workers
# are released.
#
# Replayed updates of the journal come before all others at their boundary, in the order of (step,
# sequence), so every attempt applies all updates in the same order.

MOST_SHARED = 16
"""The maximum number of operations at one boundary; after that, training continues before the next one."""


class Boundaries:
    """The stops of all workers. A part of the coordinator."""

    def __init__(
        self,
        size: int,
        timeouts: Timeouts,
        numbers: Iterator[int],
        *,
        say: Callable[[ToWorkers], None],
        set_timer: Callable[[float, Callable[[], None]], None],
        resume: Callable[[Operation, Any], None],
        deferred: Callable[[Operation], tuple[str, int] | None],
        note_deferred: Callable[[Operation], None],
        end_job: Callable[[str], None],
    ) -> None:
        self.size = size
        self.speaker: Operation | None = None
        self.rests: dict[int, Rest] = {}
        self._timeouts = timeouts
        self._numbers = numbers
        self._say = say
        self._set_timer = set_timer
        self._resume = resume
        self._deferred = deferred
        self._note_deferred = note_deferred
        self._end_job = end_job
        self._meetings: dict[int, Meeting] = {}
        self._reserving: dict[int, Operation] = {}
        self._next: Meeting | None = None  # for all who want the next possible boundary
        self._waiting: list[Operation] = []
        self._replays: list[tuple[tuple[float, float], int]] = []
        self._here: tuple[Meeting | None, int] | None = None
        self._turn: list[Operation] = []
        self._shared = 0

    # What operations want.

    def want(self, operation: Operation, at_step: int | None) -> None:
        """Adds an operation that waits until all workers are stopped at a boundary."""
        self.leave(operation)
        if at_step is not None and operation.meeting is None:
            operation.meeting = self._open(at_step)
        self._wait(operation)

    def reserve(self, operation: Operation, at_step: int) -> None:
        """Makes all workers agree to stop at a step; then resumes the script."""
        operation.meeting = meeting = self._open(at_step)
        self._reserving[meeting.number] = operation
        self._time_answers(meeting)

    def promise(self, operation: Operation, at_step: int) -> None:
        """The same while all workers are stopped before that step: there is nothing to wait for."""
        operation.meeting = self._open(at_step)
        operation.promised = True

    def replay(self, operation: Operation) -> None:
        """Schedules a replay: before all other operations, in the order of replays."""
        if operation.replays is not None:
            insort(self._replays, (operation.replays, operation.number))

    def last_replay(self) -> int:
        """The step of the last replay that is opened; 0 for none."""
        return int(self._replays[-1][0][0]) if self._replays else 0

    def count_replays(self) -> int:
        """How many replays are opened and not applied yet."""
        return len(self._replays)

    def leave(self, operation: Operation) -> None:
        """Ends the turn of an operation."""
        if self.speaker is operation:
            self.speaker = None
            if operation.replays is not None:
                self._replays.remove((operation.replays, operation.number))
                operation.replays = None

    def forget(self, operation: Operation) -> None:
        """Removes an operation that has ended."""
        self.leave(operation)
        if operation in self._waiting:
            self._waiting.remove(operation)
        if operation in self._turn:
            self._turn.remove(operation)
        if operation.meeting is not None:
            self._reserving.pop(operation.meeting.number, None)
            self._release(operation.meeting)
            operation.meeting = None

    def rests_end(self) -> None:
        """Called when resting workers continue: operations that needed them at rest wait again."""
        self.rests = {}
        for operation in self._turn:
            self._wait(operation)
        self._turn = []
        self._end_here()

    def is_waiting(self, operation: Operation) -> bool:
        """Whether an operation waits for its turn."""
        return operation in self._waiting

    def resting_step(self) -> int | None:
        """The boundary at which all workers rest; None if they do not."""
        if len(self.rests) < self.size:
            return None
        steps = {rest.step for rest in self.rests.values()}
        return steps.pop() if len(steps) == 1 else None

    # What workers say.

    def at(self, rank: int, number: int, step: int, standing: bool) -> None:
        """Handles a worker's message about its position."""
        meeting = self._meetings.get(number)
        if meeting is None:
            return
        had_answered = meeting.answered
        meeting.note(rank, step, standing)
        if standing:
            self._time_standing(meeting)
        if number in self._reserving and meeting.answered:
            self._agreed(meeting)
        elif meeting.at_step is not None:
            return
        elif not had_answered and meeting.answered:
            self._aim(meeting)
        elif had_answered and standing and step < meeting.target:
            self._next = None
            self._open_next()  # it rests, and will never reach the target: ask again
            self._release(meeting)

    def _aim(self, meeting: Meeting) -> None:
        """Chooses the step: the latest boundary that a worker has not passed."""
        meeting.target = latest = meeting.latest
        if len(set(meeting.steps.values())) > 1:
            meeting.aim(latest)
            self._say(Meet(meeting.number, latest))
            self._time_standing(meeting)  # with the workers that are already there

    def _agreed(self, meeting: Meeting) -> None:
        operation = self._reserving.pop(meeting.number)
        refusal = None
        if meeting.latest > meeting.target:
            refusal = Refusal(
                f"Step {meeting.at_step} is past: the next boundary is that of step {meeting.latest}"
            )
        self._resume(operation, refusal)

    # Whose turn it is.

    def schedule(self) -> bool:
        """Gives the turn to the next operation; returns whether there was one."""
        if self.speaker is not None:
            return False
        if self._here is not None:
            if self._next_turn(self._here[1]) or self._share(self._here[1]):
                return True
            self._end_here()
        return (bool(self._waiting) or self._next is not None) and self._find_turn()

    def _next_turn(self, step: int) -> bool:
        while self._turn:
            operation = self._turn.pop(0)
            if self._deferred(operation) is not None:  # a trial has begun just now
                self._wait(operation)
                continue
            self.speaker, operation.meeting = operation, None
            operation.waits_for, operation.waits_until = "", 0
            self._resume(operation, step)
            return True
        return False

    def _end_here(self) -> None:
        """Called when no operation needs the workers to be stopped here any more."""
        used = None if self._here is None else self._here[0]
        self._here = None
        if used is not None:
            self._release(used)

    def _share(self, step: int) -> bool:
        """Also runs operations here that have become ready meanwhile, up to a limit."""
        ready = [one for one in self._waiting if one.meeting is None and self._can_run(one, step)]
        if not ready or self._shared >= MOST_SHARED:
            return False
        self._shared += len(ready)
        self._turn = ready
        for one in ready:
            self._waiting.remove(one)
        return True

    def _can_run(self, operation: Operation, step: int) -> bool:
        return self._deferred(operation) is None and self._is_next(operation, step)

    def _find_turn(self) -> bool:
        resting, wanted = self.resting_step(), False
        for operation in self._waiting:
            deferred = self._deferred(operation)
            if deferred is not None:
                self._put_off(operation, *deferred)
                continue
            wanted = wanted or operation.meeting is None
            step = self._where(operation, resting)
            if step is not None and self._is_next(operation, step):
                self._give_turns(operation, step, resting)
                return True
        if wanted and self._next is None and resting is None:
            self._open_next()
        elif not wanted and self._next is not None:
            self._release(self._next)
        return False

    def _where(self, operation: Operation, resting: int | None) -> int | None:
        """The boundary at which all workers are stopped, if the operation can run there."""
        meeting = operation.meeting or self._next
        step = None if meeting is None else meeting.step()
        if step is None and resting is not None:
            earliest = 0 if operation.meeting is None else operation.meeting.at_step or 0
            step = resting if resting >= earliest else None
        return step

    def _is_next(self, operation: Operation, step: int) -> bool:
        if not self._replays:
            return True
        first = self._replays[0][0]
        return operation.replays == first if operation.replays is not None else first[0] > step

    def _give_turns(self, operation: Operation, step: int, resting: int | None) -> None:
        meeting = operation.meeting
        self._turn = [operation]
        if meeting is None:
            meeting = self._next if resting is None else None
            self._turn = [one for one in self._waiting if one.meeting is None and self._deferred(one) is None]
        for one in self._turn:
            self._waiting.remove(one)
        self._here = meeting, step
        self._shared = len(self._turn)

    def _put_off(self, operation: Operation, reason: str, until: int) -> None:
        meeting = operation.meeting
        if operation.waits_for != reason:
            own = 0 if meeting is None else meeting.at_step or 0
            operation.waits_for, operation.waits_until = reason, max(until, own)
            self._note_deferred(operation)
        if meeting is not None and meeting.standing and until > meeting.target:
            meeting.aim(until)
            self._say(Meet(meeting.number, until))

    # Meetings.

    def _wait(self, operation: Operation) -> None:
        insort(self._waiting, operation, key=lambda one: one.number)

    def _open(self, at_step: int | None) -> Meeting:
        meeting = Meeting(next(self._numbers), self.size, at_step)
        self._meetings[meeting.number] = meeting
        self._say(Stop(meeting.number, at_step))
        return meeting

    def _open_next(self) -> None:
        self._next = self._open(None)
        self._time_answers(self._next)

    def _release(self, meeting: Meeting) -> None:
        if self._meetings.pop(meeting.number, None) is not None:
            self._say(Release(meeting.number))
        if meeting is self._next:
            self._next = None

    def _time_answers(self, meeting: Meeting) -> None:
        """Sets the timeout for answers to `Stop`: event loops answer it whatever the training threads do."""
        secs = self._timeouts.answer_secs

        def late() -> None:
            if meeting.number in self._meetings and not meeting.answered:
                silent = (rank for rank in range(self.size) if rank not in meeting.steps)
                self._call_off(meeting, Gather("answer", silent).timed_out(secs))

        self._set_timer(secs, late)

    def _time_standing(self, meeting: Meeting) -> None:
        """Sets the timeout for all training threads to arrive, once the first one has."""
        if not meeting.standing or meeting.timed_round == meeting.round:
            return
        meeting.timed_round = meeting.round
        secs, round_ = self._timeouts.meet_secs, meeting.round

        def late() -> None:
            open_ = meeting.number in self._meetings and meeting.round == round_
            if open_ and meeting.missing() and self.resting_step() is None:
                self._call_off(meeting, Gather("reach the boundary", meeting.missing()).timed_out(secs))

        self._set_timer(secs, late)

    def _call_off(self, meeting: Meeting, refusal: Refusal) -> None:
        """Refuses the operations of a meeting that not all workers reach."""
        waiting = [one for one in self._waiting if (one.meeting or self._next) is meeting]
        if meeting.number in self._reserving:
            waiting.append(self._reserving.pop(meeting.number))
        self._release(meeting)
        for operation in waiting:
            if operation.must_run:
                self._end_job(f"{operation.kind} {operation.id} cannot be carried out: {refusal.problem}")
                return
            if operation in self._waiting:
                self._waiting.remove(operation)
            operation.meeting = None
            self._resume(operation, refusal)


# Runs the scripts of operations and carries out their requests. `Coordinator` is a subclass.
#
#     Ask       ──► Do to the workers; their answers resume the script                      (`Gather`)
#     Persist    ──► Write; when the entry is durable, the script goes on
#     Boundary  ──► Stop to the workers; when all stand at one boundary, it has the turn     (`Boundaries`)
#     Go        ──► Do to the workers; the turn is over, and the next operation has it, or `Release`
#     Collect   ──► what the workers report by themselves resumes the script                (`PlannedReports`)
#     return    ──► the operation is finished
#
# Scripts run concurrently; at a boundary, only one of them has its turn.

UNDECIDED = (Stage.PROPOSED, Stage.PREPARED, Stage.SCHEDULED)
"""The stages in which no replica has changed, and it is not yet certain that one will."""


class Engine(ABC):
    """Runs scripts."""

    def __init__(self, size: int, history: History, timeouts: Timeouts) -> None:
        self.size = size
        self.history = history
        self.timeouts = timeouts
        self.operations: dict[int, Operation] = {}
        self._numbers = itertools.count(1)
        self._gathers: dict[int, tuple[Gather, Operation]] = {}
        self._writes: dict[int, tuple[Entry, Callable[[Refusal | None], None]]] = {}
        self._timers: dict[int, Callable[[], None]] = {}
        self._settling: list[tuple[Operation, float, Callable[[Operation], bool]]] = []
        self._resuming: Resume | None = None
        self._over = False
        self._commands: list[CoordinatorCommand] = []
        self._on_request: dict[type[AnyRequest], Callable[[Operation, Any], None]] = {
            Ask: self._ask,
            Go: self._go,
            Persist: self._record,
            Boundary: lambda operation, wanted: self.boundaries.want(operation, wanted.at_step),
            Reserve: lambda operation, wanted: self.boundaries.reserve(operation, wanted.at_step),
            EarlierSettled: lambda operation, _: self._settle(operation, self._waits_for_later),
            EarlierStored: lambda operation, _: self._settle(operation, self._is_stored),
            BeforeWritten: lambda operation, wanted: self._settle(
                operation, lambda one: not one.is_applying(wanted.id), also_later=True
            ),
            Collect: lambda operation, wanted: self._reports.collect(operation, wanted.id),
        }
        self._reports = PlannedReports(
            size,
            timeouts.meet_secs,
            open_=self._open_planned,
            set_timer=self._set_timer,
            resume=self._run,
        )
        self.boundaries = Boundaries(
            size,
            timeouts,
            self._numbers,
            say=self._say,
            set_timer=self._set_timer,
            resume=self._run,
            deferred=self._deferred,
            note_deferred=self._note_deferred,
            end_job=self._end_job,
        )

    def handle(self, event: CoordinatorEvent) -> list[CoordinatorCommand]:
        """Handles an event; returns the commands to carry out, in order."""
        commands: list[CoordinatorCommand] = []
        self._commands = commands
        if self._over:
            return commands
        if isinstance(event, FromWorker):
            self._on_message(event.rank, event.message)
        elif isinstance(event, Written):
            self._written(event)
        else:
            self._timers.pop(event.number, lambda: None)()
        while not self._over and (
            (self._resuming is not None and self._resume_rests())
            or self.boundaries.schedule()
            or (self._settling and self._settle_next())
        ):
            pass
        return commands

    @abstractmethod
    def _on_message(self, rank: int, message: ToCoordinator) -> None:
        """Handles a message from a worker, or from outside the job."""

    @abstractmethod
    def _script(self, operation: Operation) -> Script:
        """Creates the script of an operation."""

    @abstractmethod
    def _finish(self, operation: Operation, outcome: Outcome) -> None:
        """Called when an operation has ended."""

    @abstractmethod
    def _deferred(self, operation: Operation) -> tuple[str, int] | None:
        """Why an operation must not run now at any boundary, and until which step."""

    @abstractmethod
    def _note_deferred(self, operation: Operation) -> None:
        """Called when the reason why an operation waits becomes known."""

    @abstractmethod
    def _open_planned(self, report: ReportId) -> None:
        """The first worker reports what all do by themselves."""

    @abstractmethod
    def _has_left_turn(self, operation: Operation) -> None:
        """Called when the last order of an operation's turn has been sent."""

    @abstractmethod
    def _is_ready(self, operation: Operation) -> bool:
        """Whether everything that its script needs is available."""

    # Scripts.

    def _start(self, operation: Operation) -> None:
        if self._is_ready(operation):
            operation.waits_for = ""
            operation.running = self._script(operation)
            self._run(operation, None)

    def _run(self, operation: Operation, value: Any) -> None:
        """Resumes a script, until it has to wait."""
        if operation.running is None or operation.outcome is not None or self._over:
            return
        if operation.withdrawing:
            operation.held = (value,)
            return
        try:
            if isinstance(value, Refusal):
                request = operation.running.throw(Refuse(value.problem, value.workers, value.details))
            else:
                request = operation.running.send(value)
        except StopIteration as end:
            self._finish(operation, end.value)
        except Refuse as error:
            self._refused(operation, error.refusal)
        except JobEnds as error:
            self._end_job(str(error))
        except Exception as error:
            self._unexpected(operation, error)
        else:
            self._serve(operation, request)

    def _refused(self, operation: Operation, refusal: Refusal) -> None:
        """Handles a refusal: before the commit nothing has changed; after it, a proposal must be applied."""
        if operation.proposal is None or operation.stage in UNDECIDED:
            self._finish(operation, Outcome(Stage.REFUSED, refusal))
        else:
            self._end_job(f"{operation.kind} {operation.id} is {operation.stage}: {refusal.problem}")

    def _unexpected(self, operation: Operation, error: Exception) -> None:
        """One bad input refuses itself and does not end the job, unless replicas may have changed."""
        problem = f"Unexpected {type(error).__name__} in {operation.kind} {operation.id}: {error}"
        if operation.stage in UNDECIDED:
            self._finish(operation, Outcome(Stage.REFUSED, Refusal(problem)))
        else:
            self._end_job(problem)

    def _serve(self, operation: Operation, request: AnyRequest) -> None:
        self._on_request[type(request)](operation, request)

    def _ask(self, operation: Operation, ask: Ask) -> None:
        ranks = range(self.size) if ask.of is None else ask.of
        number = self._gather(operation, Gather(ask.what, ranks), ask.secs)
        self._say(Do(number, ask.order, ask.of))

    def _go(self, operation: Operation, go: Go) -> None:
        number = self._gather(operation, Gather("apply", range(self.size)), None)
        operation.applying = True
        self._say(Do(number, go.order))
        self.boundaries.leave(operation)
        self._has_left_turn(operation)
        if go.resume and operation.tokens:
            tokens, operation.tokens = operation.tokens, ()
            self._resume(tokens, None)

    def _record(self, operation: Operation, record: Persist) -> None:
        self._write(record.entry, lambda refusal: self._run(operation, refusal))

    def _settle(
        self, operation: Operation, is_enough: Callable[[Operation], bool], *, also_later: bool = False
    ) -> None:
        """Resumes the script once all operations that are now in the list satisfy a condition.

        With `also_later`, those that are added meanwhile must satisfy it too.
        """
        limit = inf if also_later else next(self._numbers)
        self._settling.append((operation, limit, is_enough))

    def _settle_next(self) -> bool:
        """Resumes a script that waits for all earlier operations, if they satisfy its condition."""
        for place, (operation, limit, is_enough) in enumerate(self._settling):
            if self._writes and is_enough == self._waits_for_later:
                continue  # what is being written may be told when it is durable
            if all(
                is_enough(one)
                for number, one in self.operations.items()
                if number < limit and one is not operation
            ):
                del self._settling[place]
                self._run(operation, None)
                return True
        return False

    def _waits_for_later(self, operation: Operation) -> bool:
        """Whether it can have no outcome before training continues, or if nobody waits for its outcome."""
        if operation.only_writes:
            return True
        if operation.running is None:
            return not self._is_ready(operation)
        if self._reports.is_collecting(operation):
            return True
        step = self.boundaries.resting_step() or 0
        later = operation.meeting is not None and (operation.meeting.at_step or 0) > step
        if not self.boundaries.is_waiting(operation):
            return later and operation.promised  # it is still being prepared
        return later or self._deferred(operation) is not None

    def _is_stored(self, operation: Operation) -> bool:
        """Whether a restart from the journal could bring it back."""
        if operation.only_writes:
            return False
        proposal = operation.proposal
        is_update = proposal is not None and (proposal.content is not None or proposal.reverts is not None)
        return operation.stored or not is_update or operation.stage not in UNDECIDED

    # Answers.

    def _gather(self, operation: Operation, gather: Gather, secs: float | None) -> int:
        number = next(self._numbers)
        self._gathers[number] = gather, operation
        if secs is not None:
            limit = secs

            def late() -> None:
                if self._gathers.pop(number, None) is not None:
                    self._run(operation, gather.timed_out(limit))

            self._set_timer(limit, late)
        return number

    def _answered(self, rank: int, number: int | ReportId, value: Any) -> None:
        if isinstance(number, ReportId):
            self._reports.add(rank, number, value)
            return
        gather, operation = self._gathers.get(number, (None, None))
        if gather is None or operation is None or not gather.add(rank, value):
            return
        del self._gathers[number]
        operation.applying = False
        self._run(operation, gather.refusal() or gather.answers)

    # What goes out.

    def _write(self, entry: Entry, then: Callable[[Refusal | None], None]) -> None:
        number = next(self._numbers)
        self._writes[number] = entry, then
        self._commands.append(Write(number, entry))

    def _written(self, written: Written) -> None:
        entry, then = self._writes.pop(written.number)
        match written.outcome:
            case WriteOutcome.DURABLE:
                self.history.add(entry)
                then(None)
            case WriteOutcome.FAILED:
                then(Refusal(written.problem or "The journal cannot be written: free some space on its disk"))
            case WriteOutcome.UNKNOWN:
                self._end_job("It is unknown whether the journal was written: only a restart can tell")
            case WriteOutcome.FENCED:
                self._end_job("Another group of workers has taken over the run directory")

    def _resume(self, tokens: tuple[int, ...], outcome: Any) -> None:
        self._resuming = Resume(tokens, outcome)

    def _resume_rests(self) -> bool:
        """Lets resting workers continue as soon as no operation needs them at rest."""
        if self._resuming is None or self.boundaries.speaker is not None:
            return False
        resume, self._resuming = self._resuming, None
        self.boundaries.rests_end()
        self._say(resume)
        return True

    def _say(self, message: ToWorkers) -> None:
        self._commands.append(Broadcast(message))

    def _set_timer(self, secs: float, then: Callable[[], None]) -> None:
        number = next(self._numbers)
        self._timers[number] = then
        self._commands.append(SetTimer(number, secs))

    def _end_job(self, reason: str) -> None:
        self._over = True
        self._commands.append(EndJob(reason))


# Notifies authors of the stage of their proposals, and writes first what must be durable by then.
#
#     a ticket ──► a proposal of an update: the same update may be proposed more than once, by several authors
#     inbox    ──► the tickets from outside: their files are removed when their outcome is durable
#
# A proposal that the journal, a checkpoint or the inbox would bring back after a restart is refused in the
# journal before its author is told.


class Tickets(Engine):
    """The part of the coordinator that keeps track of proposals and their authors."""

    def __init__(self, size: int, history: History, timeouts: Timeouts) -> None:
        super().__init__(size, history, timeouts)
        self._known: dict[str, Operation] = {}
        self._inbox: set[str] = set()
        self._in_checkpoints = {
            one.proposal.id for saved in history.checkpoints.values() for one in saved.pending
        }

    # How far it has come.

    def _run(self, operation: Operation, value: object) -> None:
        super()._run(operation, value)
        if (
            operation.waits_until
            and operation.outcome is None
            and operation.told != (operation.stage, operation.waits_until)
        ):
            self._tell_progress(operation, tuple(operation.tickets))

    def _note_deferred(self, operation: Operation) -> None:
        self._tell_progress(operation, tuple(operation.tickets))

    def _tell_progress(self, operation: Operation, tickets: tuple[str, ...]) -> None:
        """Tells waiting workers why it is not decided yet, and whether training must continue first."""
        operation.told = operation.stage, operation.waits_until
        if tickets:
            why, until = operation.waits_for, operation.waits_until
            self._say(
                Tell(operation.id, tickets, operation.stage, operation.step, waits_for=why, waits_until=until)
            )

    def _outcome_of(self, id_: str, ticket: str, known: Operation | None, record: Committed | None) -> Tell:
        """What is known of an operation that has ended, in this attempt or before."""
        if known is not None and known.outcome is not None:
            return Tell(id_, (ticket,), known.outcome.stage, known.step, known.outcome.result)
        sequence = 0 if record is None else record.sequence
        receipt, decided = self.history.receipts.get(sequence), self.history.decided.get(sequence)
        stage = receipt.stage if receipt is not None else Stage.VERIFIED
        if decided is not None and not decided.kept:
            stage = Stage.REVERTED
        step = None if record is None else record.step
        if receipt is None and step is not None:  # it was never written: the state that was restored has it
            receipt = Receipt(sequence, id_, step, {}, 0.0, 0.0, 0.0, stage)
        return Tell(id_, (ticket,), stage, step, receipt)

    # How it ended.

    def _finish(self, operation: Operation, outcome: Outcome) -> None:
        """Notifies the holders of tickets that an operation has ended."""
        if operation.running is not None:
            operation.running.close()
        operation.outcome, operation.stage = outcome, outcome.stage
        del self.operations[operation.number]
        self.boundaries.forget(operation)
        if operation.proposal is not None:
            told = Tell(
                operation.id,
                tuple(operation.tickets),
                outcome.stage,
                operation.step,
                outcome.result,
                ended=True,
            )
            if outcome.stage is Stage.REFUSED:
                self._refuse(told, operation)
            else:
                self._tell(told)
                self._known.pop(operation.id, None)  # the journal knows it
        else:
            step, asked_by = operation.step, operation.asked_by
            self._commands.append(Ended(operation.kind, operation.id, outcome, step, asked_by))
        if operation.tokens:
            self._resume(operation.tokens, outcome)

    def _refuse(self, tell: Tell, operation: Operation | None = None) -> None:
        """Announces a refusal. One that journal, checkpoint or inbox would undo is written first."""
        kept = tell.id in self.history.scheduled or tell.id in self._in_checkpoints
        whole = operation is not None and kept
        to_write = tuple(one for one in tell.tickets if whole or one in self._inbox)
        others = tuple(one for one in tell.tickets if one not in to_write)
        if others or not (whole or to_write):
            self._tell(replace(tell, tickets=others))
        if whole or to_write:
            self._write_refusal(replace(tell, tickets=to_write), operation, whole)
        else:
            self._forget(operation)

    def _write_refusal(self, tell: Tell, operation: Operation | None, whole: bool) -> None:
        def then(failed: Refusal | None) -> None:
            if failed is not None:
                again = self.timeouts.retry_secs
                self._set_timer(again, lambda: self._write_refusal(tell, operation, whole))
                return
            self._forget(operation)
            self._tell(tell)

        self._write(Refused(tell.id, tell.tickets, tell.outcome.problem, whole), then)

    def _forget(self, operation: Operation | None) -> None:
        """Lets a refused id be proposed again. A function's refusal is kept for its other authors."""
        if operation is not None and not isinstance(operation, Function):
            self._known.pop(operation.id, None)

    def _tell(self, tell: Tell) -> None:
        self._say(tell)
        if tell.stage.is_final:
            for ticket in [one for one in dict.fromkeys(tell.tickets) if one in self._inbox]:
                self._inbox.discard(ticket)
                self._commands.append(CloseInbox(ticket, tell))

    def _write(self, entry: Entry, then: Callable[[Refusal | None], None]) -> None:
        if isinstance(entry, Saved):
            self._in_checkpoints.update(one.proposal.id for one in entry.pending)
        super()._write(entry, then)


def has_other_content(proposal: Proposal, known: Operation | None, record: Committed | None) -> bool:
    """Whether a proposal is not what is known under its id. What is made later has no digest yet."""
    first = record if record is not None else None if known is None else known.proposal
    if first is None:
        return False
    is_made = proposal.content is not None
    return proposal.reverts != first.reverts or (is_made and proposal.digest != first.digest)


AHEAD = 4
"""How many replayed updates are prepared in advance."""
NO_TOKEN = 0
"""The token of a worker that does not rest: the tokens of rests start at 1."""


class Coordinator(Tickets):
    """The state machine that decides. It runs in worker 0."""

    def __init__(
        self,
        size: int,
        history: History,
        *,
        attempt: int = 0,
        start: Saved | None = None,
        timeouts: Timeouts | None = None,
        audit_policy: str = "heal",
    ) -> None:
        super().__init__(size, history, timeouts or Timeouts())
        self.audits = AuditTrail()
        self.audit_policy = audit_policy
        self.attempt = attempt
        self.start = start
        self.trial: Operation | None = None
        self.leaving = False
        self._early: list[tuple[int, ToCoordinator]] | None = []
        self._replays: deque[Operation] = deque()

    # What comes in.

    def _on_message(self, rank: int, message: ToCoordinator) -> None:
        if isinstance(message, Answer):
            self._answered(rank, message.number, message.value)
        elif isinstance(message, At):
            self.boundaries.at(rank, message.meeting, message.step, message.standing)
        elif isinstance(message, Rest):
            self._rest(rank, message)
        elif self._early is not None:
            self._early.append((rank, message))  # the work of earlier attempts comes first
        elif isinstance(message, Propose):
            self._propose(rank, message)
        elif isinstance(message, Withdraw):
            if rank == OUTSIDE:
                self._inbox.add(message.ticket)
            self._withdraw(message.ticket, message.id)
        else:
            self._request(message)

    def _propose(self, rank: int, message: Propose) -> None:
        """The same id with the same content is one update; with other content it is refused."""
        proposal, ticket = message.proposal, message.ticket
        if rank == OUTSIDE:
            self._inbox.add(ticket)
        known, record = self._known.get(proposal.id), self.history.by_id.get(proposal.id)
        if ticket in self.history.refused:
            self._tell(Tell(proposal.id, (ticket,), Stage.REFUSED))
        elif proposal.id in self.history.withdrawn:
            self._tell(Tell(proposal.id, (ticket,), Stage.WITHDRAWN))
        elif known is None and record is None:
            operation = proposed(proposal)
            operation.tickets.append(ticket)
            self.open(operation)
            self._note_proposer(operation, rank)
        elif has_other_content(proposal, known, record):
            problem = (
                f"An update with the id {proposal.id} and other content was already proposed. Give this one "
                "an id of its own"
            )
            self._refuse(Tell(proposal.id, (ticket,), Stage.REFUSED, outcome=Refusal(problem)))
        elif known is not None and known.outcome is None:
            known.tickets.append(ticket)
            self._note_proposer(known, rank)
            if known.waits_until:
                self._tell_progress(known, (ticket,))
        else:
            tell = self._outcome_of(proposal.id, ticket, known, record)
            (self._refuse if tell.stage is Stage.REFUSED else self._tell)(tell)

    def _note_proposer(self, operation: Operation, rank: int) -> None:
        """A function runs on its source, which must be among those that propose it."""
        if isinstance(operation, Function) and rank == operation.function.source and not operation.has_source:
            operation.has_source = True
            self._start(operation)

    def _withdraw(self, ticket: str, id_: str) -> None:
        """Withdraws an update, which is possible until it is committed."""
        operation = self._known.get(id_)
        has_turn = operation is not None and operation is self.boundaries.speaker
        if operation is not None and operation.withdrawing:
            operation.tickets.append(ticket)
            return
        if operation is None or has_turn or operation.stage not in UNDECIDED:
            stage = Stage.WITHDRAWN if id_ in self.history.withdrawn else Stage.REFUSED
            self._tell(
                Tell(id_, (ticket,), stage, outcome=Refusal(f"{id_} is unknown, or committed already"))
            )
            return
        withdrawn = operation
        withdrawn.withdrawing = True

        def then(refusal: Refusal | None) -> None:
            withdrawn.withdrawing = False
            if refusal is None:
                withdrawn.tickets.append(ticket)
                self._finish(withdrawn, Outcome(Stage.WITHDRAWN))
                return
            self._tell(Tell(id_, (ticket,), Stage.REFUSED, outcome=refusal))
            if withdrawn.held:
                (value,), withdrawn.held = withdrawn.held, ()
                self._run(withdrawn, value)

        self._write(Withdrawn(id_), then)

    def _rest(self, rank: int, rest: Rest) -> None:
        """Opens an operation once all training threads rest, if all rest for the same reason."""
        rests = self.boundaries.rests
        rests[rank] = rest
        if len(rests) < self.size:
            return
        tokens = tuple(rests[rank].token for rank in range(self.size))
        if len({(one.step, one.intent) for one in rests.values()}) > 1:
            said = "; ".join(
                f"worker {r} at step {one.step}: {one.intent[0]}" for r, one in sorted(rests.items())
            )
            self._resume(tokens, Refusal(f"The workers wait for each other at different places: {said}"))
            return
        operation = collective(rest.intent, self.new_id(rest.intent[0]))
        operation.tokens = tokens
        self._reports.give_up(None if isinstance(operation, Close) else rest.step)
        self.open(operation)

    def _request(self, request: Request) -> None:
        """Opens an operation for a request; further equal requests before its boundary share it."""
        kind, arguments = request.kind, request.arguments
        for one in self.operations.values():
            same = one.kind == kind and one.arguments == arguments and one.report is None
            if same and self.boundaries.is_waiting(one):
                one.asked_by += request.asked_by
                return
        operation = requested(kind, self.new_id(kind), arguments)
        operation.asked_by = request.asked_by
        self.open(operation)

    # The list.

    def open(self, operation: Operation, promised_at: int | None = None) -> None:
        """Adds an operation to the list and starts its script."""
        operation.number = next(self._numbers)
        self.operations[operation.number] = operation
        if operation.proposal is not None:
            self._known[operation.id] = operation
        if promised_at is not None:
            self.boundaries.replay(operation)
            self.boundaries.promise(operation, promised_at)
        self._start(operation)

    def promise(self, operation: Operation, at_step: int) -> None:
        """Sets the stop for the operation's next boundary, while all workers are stopped before it."""
        self.boundaries.promise(operation, at_step)

    def replay(self, operation: Operation) -> None:
        """Schedules the operation's next boundary in the order of replays."""
        self.boundaries.replay(operation)

    def new_id(self, kind: str) -> str:
        """Generates an id for an operation without one."""
        return f"{kind}-{self.attempt}-{next(self._numbers)}"

    def take_up_journal(self) -> None:
        """Opens the operations that earlier attempts left, then new proposals. All workers rest."""
        history, start = self.history, self.start
        for record in history.after(frozenset() if start is None else start.holds):
            content = history.content(record.id, record.digest)
            proposal = Proposal(record.id, record.digest, content, record.step, record.trial)
            self._known[record.id] = replay = replayed(proposal, record, history.decided.get(record.sequence))
            self._replays.append(replay)
        self._open_replays()
        for one in list(history.scheduled.values()):
            content = history.content(one.id, one.digest)
            proposal = Proposal(one.id, one.digest, content, one.at_step, one.trial)
            self.open(proposed(proposal, scheduled=True), promised_at=one.at_step)
        for pending in () if start is None else start.pending:
            if not history.has_ended(pending) and pending.proposal.id not in self._known:
                operation = proposed(pending.proposal, stored=True)
                operation.tickets.extend(pending.tickets)
                self.open(operation)
        early, self._early = self._early or [], None
        for rank, message in early:
            self._on_message(rank, message)

    def _open_replays(self) -> None:
        """Opens a few replays at a time, because each holds the bytes of its update.

        All workers are stopped at or before their step.
        """
        while self._replays and self.boundaries.count_replays() < AHEAD:
            replay = self._replays.popleft()
            self.open(replay, promised_at=replay.step)

    def pending(self) -> tuple[Pending, ...]:
        """The updates that are proposed and not committed."""
        return tuple(
            Pending(one.proposal, tuple(one.tickets))
            for one in self.operations.values()
            if one.proposal is not None and one.stored and one.stage in UNDECIDED
        )

    def announce(self, outcome: Outcome) -> None:
        """Sends all workers the receipt of an update without a ticket."""
        receipt: Receipt = outcome.result
        self._say(Tell(receipt.id, (), receipt.stage, receipt.step, receipt, ended=True))

    def keep_before(self, record: Committed) -> None:
        """Has worker 0 write the values that an update has overwritten. Nobody waits for it."""
        self.open(Keep(self.new_id("keep"), record))

    def replayed_at(self, sequence: int) -> int | None:
        """The step at which an update of the journal is still to be applied again; None if it is applied."""
        waiting = (one for one in (*self.operations.values(), *self._replays) if one.replays is not None)
        records = (one.record for one in waiting if isinstance(one, Update))
        return next((one.step for one in records if one is not None and one.sequence == sequence), None)

    def resting_for(self) -> str:
        """The kind of operation in which all training threads rest; empty if they do not."""
        if self.boundaries.resting_step() is None:
            return ""
        return str(self.boundaries.rests[0].intent[0])

    def end_rest(self, operation: Operation, refusal: Refusal) -> None:
        """Lets workers that rest in another operation continue, even if not all workers rest."""
        for one in list(self.operations.values()):
            if one.tokens and one is not operation:
                self._finish(one, Outcome(Stage.REFUSED, refusal))
        rests = self.boundaries.rests
        if rests and len(rests) < self.size:
            tokens = tuple(rests[rank].token if rank in rests else NO_TOKEN for rank in range(self.size))
            self._resume(tokens, Outcome(Stage.REFUSED, refusal))

    def request_audit(self) -> None:
        """Requests an audit because replicas differ; one that still waits for its boundary is enough."""
        audits = (one for one in self.operations.values() if isinstance(one, Audit))
        if not any(self.boundaries.is_waiting(one) for one in audits):
            self.open(requested("audit", self.new_id("audit")))

    def refuse_functions_without_source(self) -> None:
        """Called when all workers have made all of their proposals."""
        for one in list(self.operations.values()):
            if isinstance(one, Function) and not one.has_source:
                source = one.function.source or 0
                problem = f"Worker {source}, on which the function was to run, did not propose it"
                self._finish(one, Outcome(Stage.REFUSED, Refusal(problem, (source,))))

    def _deferred(self, operation: Operation) -> tuple[str, int] | None:
        """Why an operation must not run now, and until which step."""
        if operation.withdrawing or self.leaving:
            return "", 0
        trial = self.trial
        if trial is not None and trial is not operation and not operation.in_trial:
            until = trial.meeting.at_step or 0 if trial.meeting is not None else 0
            return f"the trial of {trial.id}, until step {until}", until
        begins = (
            operation.proposal is not None and operation.proposal.trial is not None and operation is not trial
        )
        if begins and operation.replays is None and self.boundaries.count_replays():
            last = self._replays[-1].step or 0 if self._replays else self.boundaries.last_replay()
            return f"the updates of the journal, until step {last}", last
        return None

    def _script(self, operation: Operation) -> Script:
        return operation.script(self)

    def _is_ready(self, operation: Operation) -> bool:
        """A function waits until its source is among those that propose it."""
        return not isinstance(operation, Function) or operation.has_source

    def _open_planned(self, report: ReportId) -> None:
        self.open(planned(report))

    def _has_left_turn(self, operation: Operation) -> None:
        self._open_replays()
