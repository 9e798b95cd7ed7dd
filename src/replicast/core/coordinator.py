"""The coordinator: one ordered list of operations, and the scripts that carry them out.

    Propose, Request, Rest ──► an operation at the end of the list; its script runs until it asks for something
    Ask       ──► Do to the workers; their answers resume the script                      (`Gather`)
    Record    ──► Write; when the entry is durable, the script goes on
    Boundary  ──► Stop to the workers; when all stand at one boundary, it has the turn     (`Boundaries`)
    Go        ──► Do to the workers; the turn is over, and the next operation has it, or `Release`
    return    ──► Tell to those who hold a ticket

Preparing goes on side by side. While a trial is under way, most operations wait for its end.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from replicast.core.boundaries import Boundaries
from replicast.core.commands import Broadcast, CloseInbox, CoordinatorCommand, EndJob, SetTimer, Write
from replicast.core.entries import Committed, Entry, Refused, Saved, Withdrawn
from replicast.core.events import CoordinatorEvent, FromWorker, TimerFired, WriteOutcome, Written
from replicast.core.gather import Gather
from replicast.core.history import History
from replicast.core.messages import (
    OUTSIDE,
    Answer,
    At,
    Do,
    Propose,
    Request,
    Rest,
    Resume,
    Tell,
    ToCoordinator,
    ToWorkers,
    Withdraw,
)
from replicast.core.operation import (
    AnyRequest,
    Ask,
    Boundary,
    Collect,
    EarlierSettled,
    Go,
    Operation,
    Outcome,
    Record,
    Reserve,
    Timeouts,
)
from replicast.core.operations.catalog import collective, planned, proposed, replayed, requested
from replicast.core.operations.function import Function
from replicast.core.proposal import Proposal
from replicast.core.refusal import JobEnds, Refusal, Refuse
from replicast.core.stage import Stage

AHEAD = 4
"""How many updates of the journal are prepared before their step comes."""
_UNDECIDED = (Stage.PROPOSED, Stage.PREPARED, Stage.SCHEDULED)


class Coordinator:
    """The state machine that decides. It lives in worker 0.

    Args:
        size: The number of workers.
        history: What the journal says, read after this group has claimed the run directory.
        attempt: The number of this group.
        start: The checkpoint that the workers have restored; None when they start from scratch.
        timeouts: How long it waits.

    Attributes:
        operations: What is under way, in order: `status` reads it, and so do tickets, through `Tell`.
        history: What the journal says, kept up to date.
        trial: The operation whose trial is under way.
        leaving: All workers are told to end: nothing more is decided.
    """

    def __init__(
        self,
        size: int,
        history: History,
        *,
        attempt: int = 0,
        start: Saved | None = None,
        timeouts: Timeouts | None = None,
    ) -> None:
        self.size = size
        self.history = history
        self.attempt = attempt
        self.start = start
        self.timeouts = timeouts or Timeouts()
        self.operations: dict[int, Operation] = {}
        self.trial: Operation | None = None
        self.leaving = False
        self._numbers = itertools.count(1)
        self._known: dict[str, Operation] = {}
        self._early: list[tuple[int, Propose]] | None = []
        self._inbox: set[str] = set()
        self._in_checkpoints = set(history.pending)
        self._gathers: dict[int | tuple[str, int], tuple[Gather, Operation]] = {}
        self._writes: dict[int, tuple[Entry, Callable[[Refusal | None], None]]] = {}
        self._timers: dict[int, Callable[[], None]] = {}
        self._settling: list[tuple[Operation, int]] = []
        self._replays: deque[Operation] = deque()
        self._over = False
        self._commands: list[CoordinatorCommand] = []
        self.boundaries = Boundaries(
            size,
            self.timeouts,
            self._numbers,
            say=self._say,
            set_timer=self._set_timer,
            resume=self._run,
            deferred=self._deferred,
            end_job=self._end_job,
        )

    def handle(self, event: CoordinatorEvent) -> list[CoordinatorCommand]:
        """What is to be done, in this order."""
        self._commands = commands = list[CoordinatorCommand]()
        if self._over:
            return commands
        match event:
            case FromWorker(rank, message):
                self._on_message(rank, message)
            case Written(number, outcome):
                self._written(number, outcome)
            case TimerFired(number):
                self._timers.pop(number, lambda: None)()
        while not self._over and (self.boundaries.schedule() or self._settle_next()):
            pass
        return commands

    # What comes in.

    def _on_message(self, rank: int, message: ToCoordinator) -> None:
        match message:
            case Answer(number, value):
                self._answered(rank, number, value)
            case At(meeting, step, standing):
                self.boundaries.at(rank, meeting, step, standing)
            case Propose():
                self._propose(rank, message)
            case Rest():
                self._rest(rank, message)
            case Withdraw(ticket, id_):
                if rank == OUTSIDE:
                    self._inbox.add(ticket)
                self._withdraw(ticket, id_)
            case Request(kind):
                if not any(one.kind == kind and one.stage in _UNDECIDED for one in self.operations.values()):
                    self.open(requested(kind, self.new_id(kind)))

    def _propose(self, rank: int, message: Propose) -> None:
        """The same id with the same content is one update; with other content it is refused."""
        proposal, ticket = message.proposal, message.ticket
        if self._early is not None:
            self._early.append((rank, message))
            return
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
        elif proposal.source is None and proposal.digest != _digest_of(known, record):
            problem = f"An update with the id {proposal.id} and other content was proposed before"
            self._refuse(Tell(proposal.id, (ticket,), Stage.REFUSED, outcome=Refusal(problem)))
        elif known is not None and known.outcome is None:
            known.tickets.append(ticket)
            self._note_proposer(known, rank)
        else:
            tell = self._outcome_of(proposal.id, ticket, known, record)
            (self._refuse if tell.stage is Stage.REFUSED else self._tell)(tell)

    def _outcome_of(self, id_: str, ticket: str, known: Operation | None, record: Committed | None) -> Tell:
        """What is known of an operation that has ended, in this attempt or before."""
        if known is not None and known.outcome is not None:
            return Tell(id_, (ticket,), known.outcome.stage, known.step, known.outcome.result)
        sequence = 0 if record is None else record.sequence
        receipt, decided = self.history.receipts.get(sequence), self.history.decided.get(sequence)
        stage = receipt.stage if receipt is not None else Stage.VERIFIED
        if decided is not None and not decided.kept:
            stage = Stage.REVERTED
        return Tell(id_, (ticket,), stage, None if record is None else record.step, receipt)

    def _note_proposer(self, operation: Operation, rank: int) -> None:
        """A function runs on its source, which must be among those that propose it."""
        if isinstance(operation, Function) and rank == operation.function.source and not operation.has_source:
            operation.has_source = True
            self._start(operation)

    def _withdraw(self, ticket: str, id_: str) -> None:
        """Whatever is not committed can be taken back."""
        operation = self._known.get(id_)
        has_turn = operation is not None and operation is self.boundaries.speaker
        if operation is None or has_turn or operation.withdrawing or operation.stage not in _UNDECIDED:
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
        """All training threads wait for each other: that is an operation, if it is for the same reason."""
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
        self.open(operation)

    # The list.

    def open(self, operation: Operation, promised_at: int | None = None) -> None:
        """Adds an operation to the list and starts its script.

        Args:
            operation: What to do.
            promised_at: The step at which an earlier attempt has promised it; all workers rest now.
        """
        operation.number = next(self._numbers)
        self.operations[operation.number] = operation
        if operation.proposal is not None:
            self._known[operation.id] = operation
        if promised_at is not None:
            self.boundaries.replay(operation)
            self.boundaries.promise(operation, promised_at)
        self._start(operation)

    def promise(self, operation: Operation, at_step: int) -> None:
        """Puts up the stop for the operation's next boundary, while all workers stand before it."""
        self.boundaries.promise(operation, at_step)

    def replay(self, operation: Operation) -> None:
        """Gives the operation its next place in the order of replays."""
        self.boundaries.replay(operation)

    def new_id(self, kind: str) -> str:
        """An id for an operation that nobody has given one."""
        return f"{kind}-{self.attempt}-{next(self._numbers)}"

    def take_up_journal(self) -> None:
        """Opens what earlier attempts have left, then what was proposed meanwhile. All workers rest."""
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
        for proposal in () if start is None else start.pending:
            if proposal.id in history.pending and proposal.id not in self._known:
                self.open(proposed(proposal))
        early, self._early = self._early or [], None
        for rank, message in early:
            self._propose(rank, message)

    def _open_replays(self) -> None:
        """A few at a time: each holds the bytes of its update. All workers stand before or at its step."""
        while self._replays and self.boundaries.count_replays() < AHEAD:
            replay = self._replays.popleft()
            self.open(replay, promised_at=replay.step)

    def pending(self) -> tuple[Proposal, ...]:
        """The updates that were proposed and are not committed."""
        return tuple(
            one.proposal
            for one in self.operations.values()
            if one.proposal is not None and one.proposal.content is not None and one.stage in _UNDECIDED
        )

    def refuse_functions_without_source(self) -> None:
        """All workers have come to the end of what they propose."""
        for one in list(self.operations.values()):
            if isinstance(one, Function) and not one.has_source:
                source = one.function.source or 0
                problem = f"Worker {source}, on which the function was to run, has not proposed it"
                self._finish(one, Outcome(Stage.REFUSED, Refusal(problem, (source,))))

    def _deferred(self, operation: Operation) -> tuple[str, int] | None:
        """Why an operation may not run now, and until which step."""
        if operation.withdrawing or self.leaving:
            return "the workers to end", 0
        trial = self.trial
        if trial is not None and trial is not operation and not operation.in_trial:
            until = trial.meeting.at_step or 0 if trial.meeting is not None else 0
            return f"the trial of {trial.id}, until step {until}", until
        begins = operation.proposal is not None and operation.proposal.trial is not None and operation is not trial
        if begins and operation.replays is None and self.boundaries.count_replays():
            last = self._replays[-1].step or 0 if self._replays else self.boundaries.last_replay()
            return f"the updates of the journal, until step {last}", last
        return None

    # Scripts.

    def _start(self, operation: Operation) -> None:
        if isinstance(operation, Function) and not operation.has_source:
            operation.waits_for = f"worker {operation.function.source} to propose the function"
            return
        operation.waits_for = ""
        operation.running = operation.script(self)
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
                request = operation.running.throw(Refuse(value.problem, value.workers))
            else:
                request = operation.running.send(value)
        except StopIteration as end:
            self._finish(operation, end.value)
        except Refuse as error:
            self._finish(operation, Outcome(Stage.REFUSED, error.refusal))
        except JobEnds as error:
            self._end_job(str(error))
        except Exception as error:
            self._unexpected(operation, error)
        else:
            self._serve(operation, request)
            if operation.stage is Stage.SCHEDULED and operation.told is not Stage.SCHEDULED:
                operation.told = operation.stage
                self._tell(Tell(operation.id, tuple(operation.tickets), operation.stage, operation.step))

    def _unexpected(self, operation: Operation, error: Exception) -> None:
        """One bad input refuses itself and does not end the job, unless replicas may have changed."""
        problem = f"Unexpected {type(error).__name__} in {operation.kind} {operation.id}: {error}"
        if operation.stage in _UNDECIDED:
            self._finish(operation, Outcome(Stage.REFUSED, Refusal(problem)))
        else:
            self._end_job(problem)

    def _serve(self, operation: Operation, request: AnyRequest) -> None:
        match request:
            case Ask(order, of, secs, what):
                number = self._gather(operation, Gather(what, range(self.size) if of is None else of), secs)
                self._say(Do(number, order, of))
            case Go(order, resume):
                number = self._gather(operation, Gather("apply", range(self.size)), None)
                self._say(Do(number, order))
                self.boundaries.leave(operation)
                self._open_replays()
                if resume and operation.tokens:
                    tokens, operation.tokens = operation.tokens, ()
                    self._resume(tokens, None)
            case Record(entry):
                self._write(entry, lambda refusal: self._run(operation, refusal))
            case Boundary(at_step):
                self.boundaries.want(operation, at_step)
            case Reserve(at_step):
                self.boundaries.reserve(operation, at_step)
            case EarlierSettled():
                self._settling.append((operation, next(self._numbers)))
            case Collect(kind, step):
                self._gathers[kind, step] = Gather(f"report its {kind}", range(self.size)), operation

    def _finish(self, operation: Operation, outcome: Outcome) -> None:
        """An operation has ended: those who hold a ticket are told."""
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
        if operation.tokens:
            self._resume(operation.tokens, outcome)

    def _settle_next(self) -> bool:
        """Goes on with a script that waits for all earlier operations, if they are settled."""
        for place, (operation, limit) in enumerate(() if self._writes else self._settling):
            earlier = (
                one for number, one in self.operations.items() if number < limit and one is not operation
            )
            if all(self._waits_for_later(one) for one in earlier):
                del self._settling[place]
                self._run(operation, None)
                return True
        return False

    def _waits_for_later(self, operation: Operation) -> bool:
        """Whether it can have no outcome before the training goes on."""
        step = self.boundaries.resting_step() or 0
        if isinstance(operation, Function) and not operation.has_source:
            return True
        later = operation.meeting is not None and (operation.meeting.at_step or 0) > step
        if not self.boundaries.is_waiting(operation):
            return later and operation.must_run  # it is still being prepared, and its stop is up
        return later or self._deferred(operation) is not None

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

    def _answered(self, rank: int, number: int | tuple[str, int], value: Any) -> None:
        if number not in self._gathers and isinstance(number, tuple):
            self.open(planned(*number))
        gather, operation = self._gathers.get(number, (None, None))
        if gather is None or operation is None or not gather.add(rank, value):
            return
        del self._gathers[number]
        self._run(operation, gather.refusal() or gather.answers)

    # What goes out.

    def _write(self, entry: Entry, then: Callable[[Refusal | None], None]) -> None:
        number = next(self._numbers)
        self._writes[number] = entry, then
        if isinstance(entry, Saved):
            self._in_checkpoints.update(proposal.id for proposal in entry.pending)
        self._commands.append(Write(number, entry))

    def _written(self, number: int, outcome: WriteOutcome) -> None:
        entry, then = self._writes.pop(number)
        match outcome:
            case WriteOutcome.DURABLE:
                self.history.add(entry)
                then(None)
            case WriteOutcome.FAILED:
                then(Refusal("The journal cannot be written: make room on the disk of the run directory"))
            case WriteOutcome.UNKNOWN:
                self._end_job("It is unknown whether the journal was written: only a new start can tell")
            case WriteOutcome.FENCED:
                self._end_job("Another group of workers has taken over the run directory")

    def _refuse(self, tell: Tell, operation: Operation | None = None) -> None:
        """Tells a refusal. If the journal, a checkpoint or the inbox would bring it back, it is written first."""
        kept = tell.id in self.history.scheduled or tell.id in self._in_checkpoints
        whole = operation is not None and kept
        to_write = tuple(one for one in tell.tickets if whole or one in self._inbox)
        if not whole:
            self._tell(replace(tell, tickets=tuple(one for one in tell.tickets if one not in to_write)))
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
        """What was refused may be proposed again. A function's refusal is kept for those who propose it too."""
        if operation is not None and not isinstance(operation, Function):
            self._known.pop(operation.id, None)

    def _tell(self, tell: Tell) -> None:
        self._say(tell)
        if tell.stage.is_final:
            for ticket in self._inbox.intersection(tell.tickets):
                self._inbox.discard(ticket)
                self._commands.append(CloseInbox(ticket, tell))

    def _resume(self, tokens: tuple[int, ...], outcome: Any) -> None:
        self.boundaries.rests_end()
        self._say(Resume(tokens, outcome))

    def _say(self, message: ToWorkers) -> None:
        self._commands.append(Broadcast(message))

    def _set_timer(self, secs: float, then: Callable[[], None]) -> None:
        number = next(self._numbers)
        self._timers[number] = then
        self._commands.append(SetTimer(number, secs))

    def _end_job(self, reason: str) -> None:
        self._over = True
        self._commands.append(EndJob(reason))


def _digest_of(known: Operation | None, record: Committed | None) -> str:
    if record is not None:
        return record.digest
    return known.proposal.digest if known is not None and known.proposal is not None else ""
