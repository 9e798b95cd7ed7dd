"""Runs the scripts of operations and carries out their requests. `Coordinator` is a subclass.

    Ask       ──► Do to the workers; their answers resume the script                      (`Gather`)
    Record    ──► Write; when the entry is durable, the script goes on
    Boundary  ──► Stop to the workers; when all stand at one boundary, it has the turn     (`Boundaries`)
    Go        ──► Do to the workers; the turn is over, and the next operation has it, or `Release`
    Collect   ──► what the workers report by themselves resumes the script                (`PlannedReports`)
    return    ──► the operation is finished

Scripts run concurrently; at a boundary, only one of them has its turn.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from math import inf
from typing import Any

from replicast.core.boundaries import Boundaries
from replicast.core.commands import Broadcast, CoordinatorCommand, EndJob, SetTimer, Write
from replicast.core.entries import Entry
from replicast.core.events import CoordinatorEvent, FromWorker, WriteOutcome, Written
from replicast.core.gather import Gather
from replicast.core.history import History
from replicast.core.messages import Do, Resume, ToCoordinator, ToWorkers
from replicast.core.operation import (
    AnyRequest,
    Ask,
    BeforeWritten,
    Boundary,
    Collect,
    EarlierSettled,
    EarlierStored,
    Go,
    Operation,
    Outcome,
    Record,
    Reserve,
    Script,
    Timeouts,
)
from replicast.core.planned import PlannedReports
from replicast.core.refusal import JobEnds, Refusal, Refuse
from replicast.core.reports import ReportId
from replicast.core.stage import Stage

UNDECIDED = (Stage.PROPOSED, Stage.PREPARED, Stage.SCHEDULED)
"""The stages in which no replica has changed, and it is not yet certain that one will."""


class Engine(ABC):
    """Runs scripts.

    Args:
        size: The number of workers.
        history: The valid entries of the journal.
        timeouts: The timeouts of the job.

    Attributes:
        operations: The current operations, by number, in order.
        history: The valid entries of the journal, kept up to date.
        boundaries: Which operation has its turn at a boundary.
    """

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
            Record: self._record,
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

    def _record(self, operation: Operation, record: Record) -> None:
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
