"""The coordinator: the state machine in worker 0 that orders all operations and decides.

    Propose, Request, Rest, a planned report ──► an operation at the end of the list; its script runs
    the script yields a request              ──► messages, writes, timers; the answer resumes the script
    the script returns                       ──► Tell to the holders of its tickets, Resume to workers at rest

What can go wrong. Any process may die or freeze between two lines. Messages and writes may be late; a
write may fail, or nobody knows whether it happened. Another group of workers may claim the run directory
at any time. A training thread may never reach the boundary, or the call, in which the others wait for it.

What is always true:

1. Nothing that can fail comes after the commit. Until the record of an update is durable, no replica has
   changed and the update can be refused. Afterwards it is applied, after a restart if necessary: an
   operation that can neither go on nor be refused ends the job (`EndJob`).
2. Stop first, then choose the step. `Stop` asks every worker for the first boundary that it has not
   passed; the latest answer is the step. No worker can be past it, so no assumption about the training is
   needed.
3. At a boundary one operation at a time has its turn, in the order of the list. Replays of the journal
   come first, in the order of (step, sequence): every attempt applies the same updates in the same order.
4. An author is told an outcome only when no restart can change it: the entry is durable and this group
   was not fenced (`WriteOutcome`). A refusal that journal, checkpoint or inbox would undo is written
   first.
5. Every wait for a worker has a deadline and names who is missing, except for orders after a commit: they
   must be carried out, and a worker that does not ends the job itself (`Timeouts.decide_secs`).
6. An error that one proposal causes refuses this proposal and not the job, unless replicas may have
   changed.

Who may call what. The runtime calls `handle`, from one thread at a time, and carries out the commands in
order. Scripts call the public methods. Everything else is private. Commands and numbers follow from the
events alone, so a simulation replays any schedule from its seed, and a transcript does not change from
one run to the next.

This file, from top to bottom: what comes in; proposals and their tickets; scripts and what they request;
reports that all workers make by themselves; whose turn it is at a boundary; meetings; the start of an
attempt.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import deque
from collections.abc import Callable
from math import inf
from typing import Any

from msgspec.structs import replace

from replicast.core import messages as m
from replicast.core.entries import (
    Committed,
    Entry,
    History,
    Pending,
    Proposal,
    Receipt,
    Refused,
    Saved,
    Stage,
    Withdrawn,
)
from replicast.core.messages import JobEnds, Refusal, Refuse, ReportId
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
    Timeouts,
)
from replicast.core.operations.apply import Function, Keep, Revert, UpdateOperation
from replicast.core.operations.attempt import Barrier, Begin, Close, Leave, Save
from replicast.core.operations.audit import Audit, Pull, Sync

AHEAD = 4  # replayed updates that are prepared in advance: each holds its bytes
MOST_SHARED = 16  # operations at one boundary; after that, training continues before the next one
NO_TOKEN = 0  # the token of a worker that does not rest: those of rests start at 1
UNDECIDED = (Stage.PROPOSED, Stage.PREPARED, Stage.SCHEDULED)  # no replica has changed or certainly will

# Which operation is made for what comes in.


def proposed(proposal: Proposal, *, scheduled: bool = False, stored: bool = False) -> Operation:
    """For a proposal, including one that was scheduled or made in an earlier attempt."""
    if proposal.reverts is not None:
        return Revert(proposal, stored=stored)
    if proposal.content is None:
        return Function(proposal.id, proposal)
    return UpdateOperation(proposal, scheduled=scheduled, stored=stored)


# What all training threads rest in, what is asked for from outside, and what all workers do by themselves.
OPERATIONS: dict[str, Callable[..., Operation]] = {
    one.kind: one for one in (Begin, Close, Leave, Sync, Barrier, Audit, Save, Pull)
}


def has_other_content(proposal: Proposal, known: Operation | None, record: Committed | None) -> bool:
    """Whether a proposal is not what is known under its id. What is made later has no digest yet."""
    first = record if record is not None else None if known is None else known.proposal
    if first is None:
        return False
    is_made = proposal.content is not None
    return proposal.reverts != first.reverts or (is_made and proposal.digest != first.digest)


class Coordinator:
    """To scripts it is a `JobView`, which describes its public methods."""

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
        self.size = size
        self.history = history
        self.attempt = attempt
        self.start = start  # the checkpoint that the workers have restored
        self.timeouts = timeouts or Timeouts()
        self.audit_policy = audit_policy  # what happens to replicas that differ: "heal", "raise" or "warn"
        self.audits = AuditTrail()
        self.operations: dict[int, Operation] = {}  # the list, by number
        self.trial: Operation | None = None  # whose trial is in progress: most operations wait for its end
        self.leaving = False  # all workers have been told to exit: nothing more is decided
        self._numbers = itertools.count(1)  # of operations, orders, writes, timers and meetings
        self._commands: list[m.CoordinatorCommand] = []
        self._over = False
        # Messages that wait until the work of earlier attempts is known.
        self._early: list[tuple[int, m.ToCoordinator]] | None = []
        # Proposals.
        self._known: dict[str, Operation] = {}  # by id: undecided ones, and refused functions
        self._inbox: set[str] = set()  # tickets from outside: their files stay until their outcome is durable
        self._in_checkpoints = {
            one.proposal.id for saved in history.checkpoints.values() for one in saved.pending
        }
        # What scripts wait for.
        self._gathers: dict[int, tuple[Gather, Operation]] = {}
        self._writes: dict[int, tuple[Entry, Callable[[Refusal | None], None]]] = {}
        self._timers: dict[int, Callable[[], None]] = {}
        self._settling: list[tuple[Operation, float, Callable[[Operation], bool]]] = []
        self._planned: dict[ReportId, tuple[Gather, Operation]] = {}
        self._latest_report: dict[tuple[str, int], ReportId] = {}  # by kind and rank
        # Workers that are stopped.
        self._rests: dict[int, m.Rest] = {}
        self._resuming: m.Resume | None = None
        self._speaker: Operation | None = None  # has its turn
        self._waiting: list[Operation] = []  # for a turn, in the order of the list
        self._turn: list[Operation] = []  # have theirs next, where all are stopped
        self._here: tuple[Meeting | None, int] | None = None  # where that is
        self._shared = 0
        self._meetings: dict[int, Meeting] = {}
        self._reserving: dict[int, Operation] = {}
        self._next: Meeting | None = None  # for all who want the next possible boundary
        # Replays: those not opened yet, and the places of those that are opened and not applied.
        self._unopened: deque[Operation] = deque()
        self._replays: list[tuple[tuple[float, float], int]] = []
        self._on_request: dict[type[AnyRequest], Callable[[Operation, Any], None]] = {
            Ask: self._ask,
            Go: self._go,
            Persist: lambda one, wanted: self._write(wanted.entry, lambda refusal: self._run(one, refusal)),
            Boundary: lambda one, wanted: self._want(one, wanted.at_step),
            Reserve: lambda one, wanted: self._reserve(one, wanted.at_step),
            EarlierSettled: lambda one, _: self._settle(one, self._waits_for_later),
            EarlierStored: lambda one, _: self._settle(one, self._is_stored),
            BeforeWritten: lambda one, wanted: self._settle(
                one, lambda other: not other.is_applying(wanted.id), also_later=True
            ),
            Collect: lambda one, wanted: self._collect(one, wanted.id),
        }

    # What comes in.

    def handle(self, event: m.CoordinatorEvent) -> list[m.CoordinatorCommand]:
        """Handles an event; returns the commands to carry out, in order."""
        self._commands = []
        if self._over:
            return []
        if isinstance(event, m.FromWorker):
            self._on_message(event.rank, event.message)
        elif isinstance(event, m.Written):
            self._written(event)
        else:
            self._timers.pop(event.number, lambda: None)()
        while not self._over and (
            (self._resuming is not None and self._resume_rests())
            or self._schedule()
            or (self._settling and self._settle_next())
        ):
            pass
        return self._commands

    def _on_message(self, rank: int, message: m.ToCoordinator) -> None:
        if isinstance(message, m.Answer):
            self._answered(rank, message.number, message.value)
        elif isinstance(message, m.At):
            self._at(rank, message.meeting, message.step, message.standing)
        elif isinstance(message, m.Rest):
            self._rest(rank, message)
        elif self._early is not None:
            self._early.append((rank, message))  # the work of earlier attempts comes first
        elif isinstance(message, m.Propose):
            self._propose(rank, message)
        elif isinstance(message, m.Withdraw):
            if rank == m.OUTSIDE:
                self._inbox.add(message.ticket)
            self._withdraw(message.ticket, message.id)
        else:
            self._request(message)

    def _rest(self, rank: int, rest: m.Rest) -> None:
        """Opens an operation once all training threads rest, if all rest for the same reason."""
        rests = self._rests
        rests[rank] = rest
        if len(rests) < self.size:
            return
        tokens = tuple(rests[rank].token for rank in range(self.size))
        if len({(one.step, one.intent) for one in rests.values()}) > 1:
            places = (f"worker {r} at step {one.step}: {one.intent[0]}" for r, one in sorted(rests.items()))
            problem = f"The workers wait for each other at different places: {'; '.join(places)}"
            self._resuming = m.Resume(tokens, Refusal(problem))
            return
        kind, *arguments = rest.intent
        operation = OPERATIONS[kind](self.new_id(kind))
        operation.arguments, operation.tokens = tuple(arguments), tokens
        for id_ in [one for one in self._planned if isinstance(operation, Close) or one.step < rest.step]:
            # What one of them has not reported by now, it never will.
            gather, waiting = self._planned.pop(id_)
            self._run(waiting, gather.refused_by(gather.missing))
        self._open(operation)

    def _request(self, request: m.Request) -> None:
        """Opens an operation for a request; further equal requests before its boundary share it."""
        kind, arguments = request.kind, request.arguments
        for one in self._waiting:
            if one.kind == kind and (one.tokens or one.arguments == arguments) and one.report is None:
                one.asked_by += request.asked_by
                return
        operation = OPERATIONS[kind](self.new_id(kind))
        operation.arguments, operation.asked_by = arguments, request.asked_by
        self._open(operation)

    def _open(self, operation: Operation, promised_at: int | None = None) -> None:
        operation.number = next(self._numbers)
        self.operations[operation.number] = operation
        if operation.proposal is not None:
            self._known[operation.id] = operation
        if promised_at is not None:
            self.replay(operation)
            self.promise(operation, promised_at)
        self._start(operation)

    def new_id(self, kind: str) -> str:
        return f"{kind}-{self.attempt}-{next(self._numbers)}"

    # Proposals and their tickets.
    #
    #     a ticket ──► a proposal of an update: several authors may propose the same update, also repeatedly
    #     inbox    ──► the tickets from outside: their files are removed when their outcome is durable

    def _propose(self, rank: int, message: m.Propose) -> None:
        """The same id with the same content is one update; with other content it is refused."""
        proposal, ticket = message.proposal, message.ticket
        if rank == m.OUTSIDE:
            self._inbox.add(ticket)
        known, record = self._known.get(proposal.id), self.history.by_id.get(proposal.id)
        if ticket in self.history.refused:
            self._tell(m.Tell(proposal.id, (ticket,), Stage.REFUSED))
        elif proposal.id in self.history.withdrawn:
            self._tell(m.Tell(proposal.id, (ticket,), Stage.WITHDRAWN))
        elif known is None and record is None:
            operation = proposed(proposal)
            operation.tickets.append(ticket)
            self._open(operation)
            self._note_proposer(operation, rank)
        elif has_other_content(proposal, known, record):
            problem = f"An update with the id {proposal.id} and other content was already proposed"
            refusal = Refusal(f"{problem}. Give this one an id of its own")
            self._refuse(m.Tell(proposal.id, (ticket,), Stage.REFUSED, outcome=refusal))
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
        if isinstance(operation, Function) and rank == operation.proposal.source and not operation.has_source:
            operation.has_source = True
            self._start(operation)

    def refuse_functions_without_source(self) -> None:
        for one in list(self.operations.values()):
            if isinstance(one, Function) and not one.has_source:
                source = one.proposal.source or 0
                problem = f"Worker {source}, on which the function was to run, did not propose it"
                self._finish(one, Outcome(Stage.REFUSED, Refusal(problem, (source,))))

    def _withdraw(self, ticket: str, id_: str) -> None:
        """Withdraws an update, which is possible until it is committed."""
        operation = self._known.get(id_)
        if operation is not None and operation.withdrawing:
            operation.tickets.append(ticket)
            return
        if operation is None or operation is self._speaker or operation.stage not in UNDECIDED:
            stage = Stage.WITHDRAWN if id_ in self.history.withdrawn else Stage.REFUSED
            refusal = Refusal(f"{id_} is unknown, or committed already")
            self._tell(m.Tell(id_, (ticket,), stage, outcome=refusal))
            return
        operation.withdrawing = True

        def then(refusal: Refusal | None, withdrawn: Operation = operation) -> None:
            withdrawn.withdrawing = False
            if refusal is None:
                withdrawn.tickets.append(ticket)
                self._finish(withdrawn, Outcome(Stage.WITHDRAWN))
                return
            self._tell(m.Tell(id_, (ticket,), Stage.REFUSED, outcome=refusal))
            if withdrawn.held:
                (value,), withdrawn.held = withdrawn.held, ()
                self._run(withdrawn, value)

        self._write(Withdrawn(id_), then)

    def pending(self) -> tuple[Pending, ...]:
        return tuple(
            Pending(one.proposal, tuple(one.tickets))
            for one in self.operations.values()
            if one.proposal is not None and one.stored and one.stage in UNDECIDED
        )

    def _outcome_of(self, id_: str, ticket: str, known: Operation | None, record: Committed | None) -> m.Tell:
        if known is not None and known.outcome is not None:
            return m.Tell(id_, (ticket,), known.outcome.stage, known.step, known.outcome.result)
        sequence = 0 if record is None else record.sequence
        receipt, decided = self.history.receipts.get(sequence), self.history.decided.get(sequence)
        stage = receipt.stage if receipt is not None else Stage.VERIFIED
        if decided is not None and not decided.kept:
            stage = Stage.REVERTED
        step = None if record is None else record.step
        if receipt is None and step is not None:  # it was never written: the state that was restored has it
            receipt = Receipt(sequence, id_, step, {}, 0.0, 0.0, 0.0, stage)
        return m.Tell(id_, (ticket,), stage, step, receipt)

    def _finish(self, operation: Operation, outcome: Outcome) -> None:
        """An operation has ended: the holders of its tickets are told, and workers at rest in it continue."""
        if operation.running is not None:
            operation.running.close()
        operation.outcome, operation.stage = outcome, outcome.stage
        del self.operations[operation.number]
        self._end_turn(operation)
        for several in (self._waiting, self._turn):
            if operation in several:
                several.remove(operation)
        if operation.meeting is not None:
            self._reserving.pop(operation.meeting.number, None)
            self._release(operation.meeting)
            operation.meeting = None
        step = operation.step
        if operation.proposal is None:
            self._commands.append(m.Ended(operation.kind, operation.id, outcome, step, operation.asked_by))
        else:
            tickets = tuple(operation.tickets)
            told = m.Tell(operation.id, tickets, outcome.stage, step, outcome.result, ended=True)
            if outcome.stage is Stage.REFUSED:
                self._refuse(told, operation)
            else:
                self._tell(told)
                self._known.pop(operation.id, None)  # the journal knows it
        if operation.tokens:
            self._resuming = m.Resume(operation.tokens, outcome)

    def _refuse(self, tell: m.Tell, operation: Operation | None = None) -> None:
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

    def _write_refusal(self, tell: m.Tell, operation: Operation | None, whole: bool) -> None:
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

    def _tell(self, tell: m.Tell) -> None:
        self._say(tell)
        if tell.stage.is_final:
            for ticket in [one for one in dict.fromkeys(tell.tickets) if one in self._inbox]:
                self._inbox.discard(ticket)
                self._commands.append(m.CloseInbox(ticket, tell))

    def _tell_progress(self, operation: Operation, tickets: tuple[str, ...]) -> None:
        """Tells waiting workers why it is not decided yet, and whether training must continue first."""
        operation.told = stage, until = operation.stage, operation.waits_until
        if tickets:
            why = operation.waits_for
            self._say(m.Tell(operation.id, tickets, stage, operation.step, waits_for=why, waits_until=until))

    def announce(self, outcome: Outcome) -> None:
        receipt: Receipt = outcome.result
        self._say(m.Tell(receipt.id, (), receipt.stage, receipt.step, receipt, ended=True))

    # Scripts, and what they request.
    #
    #     Ask       ──► Do to the workers; their answers resume the script
    #     Persist   ──► Write; when the entry is written (see `Persist`), the script continues
    #     Boundary  ──► Stop to the workers; when all stand at one boundary, it has its turn
    #     Go        ──► Do to the workers; the turn is over, and the next operation has it, or `Release`
    #     Collect   ──► what the workers report by themselves resumes the script
    #     return    ──► the operation is finished
    #
    # Scripts run concurrently; at a boundary, only one of them has its turn.

    def _start(self, operation: Operation) -> None:
        if self._is_ready(operation):
            operation.waits_for = ""
            operation.running = operation.script(self)
            self._run(operation, None)

    def _is_ready(self, operation: Operation) -> bool:
        """A function waits until its source is among those that propose it."""
        return not isinstance(operation, Function) or operation.has_source

    def _run(self, operation: Operation, value: Any) -> None:
        """Resumes a script until it has to wait; tells its authors how far it has come."""
        self._advance(operation, value)
        told = operation.told == (operation.stage, operation.waits_until)
        if operation.waits_until and operation.outcome is None and not told:
            self._tell_progress(operation, tuple(operation.tickets))

    def _advance(self, operation: Operation, value: Any) -> None:
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
        number = next(self._numbers)
        gather = Gather(ask.what, range(self.size) if ask.of is None else ask.of)
        self._gathers[number] = gather, operation
        if ask.secs is not None:
            secs = ask.secs

            def late() -> None:
                if self._gathers.pop(number, None) is not None:
                    self._run(operation, gather.timed_out(secs))

            gather.timer = self._set_timer(secs, late)
        self._say(m.Do(number, ask.order, ask.of))

    def _go(self, operation: Operation, go: Go) -> None:
        self._ask(operation, Ask(go.order, what="apply"))
        operation.applying = True
        self._end_turn(operation)
        self._open_replays()
        if go.resume and operation.tokens:
            self._resuming, operation.tokens = m.Resume(operation.tokens, None), ()

    def _answered(self, rank: int, number: int | ReportId, value: Any) -> None:
        if isinstance(number, ReportId):
            self._reported(rank, number, value)
            return
        gather, operation = self._gathers.get(number, (None, None))
        if gather is None or operation is None or not gather.add(rank, value):
            return
        del self._gathers[number]
        self._timers.pop(gather.timer, None)  # It would keep all answers in memory until its time is up.
        operation.applying = False
        self._run(operation, gather.refusal() or gather.answers)

    def _settle(
        self, operation: Operation, is_enough: Callable[[Operation], bool], *, also_later: bool = False
    ) -> None:
        """Resumes the script once all operations that are now in the list satisfy a condition.

        With `also_later`, those that are added meanwhile must satisfy it too.
        """
        limit = inf if also_later else next(self._numbers)
        self._settling.append((operation, limit, is_enough))

    def _settle_next(self) -> bool:
        for place, (operation, limit, is_enough) in enumerate(self._settling):
            if self._writes and is_enough == self._waits_for_later:
                continue  # what is being written may be told when it is durable
            others = (one for one in self.operations.values() if one.number < limit and one is not operation)
            if all(is_enough(one) for one in others):
                del self._settling[place]
                self._run(operation, None)
                return True
        return False

    def _waits_for_later(self, operation: Operation) -> bool:
        """Whether nobody need wait for it: it only writes, or it cannot end before training continues."""
        if operation.only_writes:
            return True
        if operation.running is None:
            return not self._is_ready(operation)
        if any(one is operation for _, one in self._planned.values()):
            return True
        step = self._resting_step() or 0
        later = operation.meeting is not None and (operation.meeting.at_step or 0) > step
        if operation not in self._waiting:
            return later and operation.promised  # it is still being prepared
        return later or self._deferred(operation) is not None

    def _is_stored(self, operation: Operation) -> bool:
        """Whether a restart from the journal could bring it back."""
        if operation.only_writes:
            return False
        proposal = operation.proposal
        is_update = proposal is not None and (proposal.content is not None or proposal.reverts is not None)
        return operation.stored or not is_update or operation.stage not in UNDECIDED

    def keep_before(self, record: Committed) -> None:
        self._open(Keep(self.new_id("keep"), record))

    def request_audit(self) -> None:
        """Replicas differ; an audit that still waits for its boundary is enough."""
        if not any(isinstance(one, Audit) for one in self._waiting):
            self._open(Audit(self.new_id("audit")))

    def _write(self, entry: Entry, then: Callable[[Refusal | None], None]) -> None:
        if isinstance(entry, Saved):
            self._in_checkpoints.update(one.proposal.id for one in entry.pending)
        number = next(self._numbers)
        self._writes[number] = entry, then
        self._commands.append(m.Write(number, entry))

    def _written(self, written: m.Written) -> None:
        entry, then = self._writes.pop(written.number)
        match written.outcome:
            case m.WriteOutcome.DURABLE:
                # A checkpoint's state is on disk now; kept here, it would be in memory until the job ends.
                self.history.add(replace(entry, state=None) if isinstance(entry, Saved) else entry)
                then(None)
            case m.WriteOutcome.FAILED:
                then(Refusal(written.problem or "The journal cannot be written: free some space on its disk"))
            case m.WriteOutcome.UNKNOWN:
                self._end_job("It is unknown whether the journal was written: only a restart can tell")
            case m.WriteOutcome.FENCED:
                self._end_job("Another group of workers has taken over the run directory")

    def _say(self, message: m.ToWorkers) -> None:
        self._commands.append(m.Broadcast(message))

    def _set_timer(self, secs: float, then: Callable[[], None]) -> int:
        number = next(self._numbers)
        self._timers[number] = then
        self._commands.append(m.SetTimer(number, secs))
        return number

    def _end_job(self, reason: str) -> None:
        self._over = True
        self._commands.append(m.EndJob(reason))

    # Planned reports: each worker makes its part of a save or an audit by itself, at the same boundary.
    #
    #     every worker    makes its part at the boundary, reports it, and trains on; its reports come in order
    #     coordinator     the first report opens the operation; when all are there, its script continues
    #
    # A worker may never report its part: its callback was skipped, or the script caught an error. Then the
    # operation is refused, and the refusal names the worker, as soon as it is certain or too late:
    #
    #     the worker has reported a later one of this kind      it makes its reports in order
    #     all workers rest at a later boundary, or in close     they have reported what they made before
    #     `meet_secs` after the first report                    whatever the reason is

    def _collect(self, operation: Operation, id_: ReportId) -> None:
        gather = Gather(f"report its {id_.kind} of step {id_.step}", range(self.size))
        self._planned[id_] = gather, operation
        secs = self.timeouts.meet_secs

        def late() -> None:
            if gather.missing:
                gather.answers.clear()
                self._run(operation, gather.timed_out(secs))

        gather.timer = self._set_timer(secs, late)

    def _reported(self, rank: int, id_: ReportId, value: Any) -> None:
        if id_ not in self._planned:
            planned = OPERATIONS[id_.kind](str(id_))
            planned.report = id_
            self._open(planned)
        self._latest_report[id_.kind, rank] = id_
        gather, operation = self._planned[id_]
        if gather.add(rank, value):
            del self._planned[id_]
            self._timers.pop(gather.timer, None)
            self._run(operation, gather.refusal() or gather.answers)
        for other in [one for one in self._planned if one.kind == id_.kind]:
            gather, operation = self._planned[other]
            latest = {rank: self._latest_report.get((id_.kind, rank), other) for rank in gather.missing}
            passed = [rank for rank in gather.missing if other < latest[rank]]
            if passed:
                gather.answers.clear()
                # Kept until every worker has made its report or passed it: a late one opens nothing.
                if len(passed) == len(gather.missing):
                    del self._planned[other]
                self._run(operation, gather.refused_by(passed))

    # Whose turn it is at a boundary.
    #
    # Operations that need a boundary wait in the order of the list. Once all workers are stopped where an
    # operation can run (in a meeting, or all of them rest at one boundary), it has its turn until it yields
    # `Go`, ends, or asks for another boundary. Operations that are ready by then share the stop; then the
    # workers are released. While a trial is in progress, most operations wait for its end.

    def _want(self, operation: Operation, at_step: int | None) -> None:
        """The operation waits until all workers are stopped at a boundary."""
        self._end_turn(operation)
        if at_step is not None and operation.meeting is None:
            operation.meeting = self._open_meeting(at_step)
        self._wait(operation)

    def _wait(self, operation: Operation) -> None:
        insort(self._waiting, operation, key=lambda one: one.number)

    def _reserve(self, operation: Operation, at_step: int) -> None:
        """All workers agree to stop at a step; then the script continues."""
        operation.meeting = meeting = self._open_meeting(at_step)
        self._reserving[meeting.number] = operation
        self._time_answers(meeting)

    def promise(self, operation: Operation, at_step: int) -> None:
        operation.meeting = self._open_meeting(at_step)
        operation.promised = True

    def replay(self, operation: Operation) -> None:
        if operation.replays is not None:
            insort(self._replays, (operation.replays, operation.number))

    def _end_turn(self, operation: Operation) -> None:
        if self._speaker is operation:
            self._speaker = None
            if operation.replays is not None:
                self._replays.remove((operation.replays, operation.number))
                operation.replays = None

    def _schedule(self) -> bool:
        """Gives the turn to the next operation; returns whether there was one."""
        if self._speaker is not None:
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
            self._speaker, operation.meeting = operation, None
            operation.waits_for, operation.waits_until = "", 0
            self._run(operation, step)
            return True
        return False

    def _share(self, step: int) -> bool:
        """Also runs operations here that have become ready meanwhile, up to a limit."""
        ready = [
            one
            for one in self._waiting
            if one.meeting is None and self._deferred(one) is None and self._is_next(one, step)
        ]
        if not ready or self._shared >= MOST_SHARED:
            return False
        self._take_turns(ready, self._shared)
        return True

    def _take_turns(self, operations: list[Operation], shared: int = 0) -> None:
        self._turn, self._shared = operations, shared + len(operations)
        for one in operations:
            self._waiting.remove(one)

    def _end_here(self) -> None:
        """No operation needs the workers to be stopped here any more."""
        used = None if self._here is None else self._here[0]
        self._here = None
        if used is not None:
            self._release(used)

    def _find_turn(self) -> bool:
        """Gives the turn to the first operation that can run where all workers are stopped."""
        resting, wanted = self._resting_step(), False
        for operation in self._waiting:
            deferred = self._deferred(operation)
            if deferred is not None:
                self._put_off(operation, *deferred)
                continue
            wanted = wanted or operation.meeting is None
            meeting = operation.meeting or self._next
            step = None if meeting is None else meeting.step()
            if step is None and resting is not None:
                earliest = 0 if operation.meeting is None else operation.meeting.at_step or 0
                step = resting if resting >= earliest else None
            if step is None or not self._is_next(operation, step):
                continue
            meeting, turns = operation.meeting, [operation]
            if meeting is None:
                meeting = self._next if resting is None else None
                turns = [one for one in self._waiting if one.meeting is None and self._deferred(one) is None]
            self._take_turns(turns)
            self._here = meeting, step
            return True
        if wanted and self._next is None and resting is None:
            self._open_next()
        elif not wanted and self._next is not None:
            self._release(self._next)
        return False

    def _is_next(self, operation: Operation, step: int) -> bool:
        """Whether no replay comes before it."""
        if not self._replays:
            return True
        first = self._replays[0][0]
        return operation.replays == first if operation.replays is not None else first[0] > step

    def _put_off(self, operation: Operation, reason: str, until: int) -> None:
        meeting = operation.meeting
        if operation.waits_for != reason:
            own = 0 if meeting is None else meeting.at_step or 0
            operation.waits_for, operation.waits_until = reason, max(until, own)
            self._tell_progress(operation, tuple(operation.tickets))
        if meeting is not None and meeting.standing and until > meeting.target:
            meeting.aim(until)
            self._say(m.Meet(meeting.number, until))

    def _deferred(self, operation: Operation) -> tuple[str, int] | None:
        """Why an operation must not run now, and until which step."""
        if operation.withdrawing or self.leaving:
            return "", 0
        trial, proposal = self.trial, operation.proposal
        if trial is not None and trial is not operation and not operation.in_trial:
            until = trial.meeting.at_step or 0 if trial.meeting is not None else 0
            return f"the trial of {trial.id}, until step {until}", until
        begins_trial = proposal is not None and proposal.trial is not None and operation is not trial
        if begins_trial and operation.replays is None and self._replays:
            last = self._unopened[-1].step or 0 if self._unopened else int(self._replays[-1][0][0])
            return f"the updates of the journal, until step {last}", last
        return None

    # Workers at rest.

    def _resting_step(self) -> int | None:
        """The boundary at which all workers rest; None if they do not."""
        if len(self._rests) < self.size:
            return None
        steps = {rest.step for rest in self._rests.values()}
        return steps.pop() if len(steps) == 1 else None

    def resting_for(self) -> str:
        return "" if self._resting_step() is None else str(self._rests[0].intent[0])

    def end_rest(self, operation: Operation, refusal: Refusal) -> None:
        for one in list(self.operations.values()):
            if one.tokens and one is not operation:
                self._finish(one, Outcome(Stage.REFUSED, refusal))
        rests = self._rests
        if rests and len(rests) < self.size:
            tokens = tuple(rests[rank].token if rank in rests else NO_TOKEN for rank in range(self.size))
            self._resuming = m.Resume(tokens, Outcome(Stage.REFUSED, refusal))

    def _resume_rests(self) -> bool:
        """Lets resting workers continue as soon as no operation needs them at rest."""
        if self._resuming is None or self._speaker is not None:
            return False
        resume, self._resuming = self._resuming, None
        self._end_rests()
        self._say(resume)
        return True

    def _end_rests(self) -> None:
        """Operations that needed the workers at rest wait again."""
        self._rests = {}
        for operation in self._turn:
            self._wait(operation)
        self._turn = []
        self._end_here()

    # Meetings: how all training threads are stopped at one boundary (`Meeting`).

    def _open_meeting(self, at_step: int | None) -> Meeting:
        meeting = Meeting(next(self._numbers), self.size, at_step)
        self._meetings[meeting.number] = meeting
        self._say(m.Stop(meeting.number, at_step))
        return meeting

    def _open_next(self) -> None:
        self._next = self._open_meeting(None)
        self._time_answers(self._next)

    def _release(self, meeting: Meeting) -> None:
        if self._meetings.pop(meeting.number, None) is not None:
            self._say(m.Release(meeting.number))
        if meeting is self._next:
            self._next = None

    def _at(self, rank: int, number: int, step: int, standing: bool) -> None:
        meeting = self._meetings.get(number)
        if meeting is None:
            return
        had_answered = meeting.answered
        meeting.note(rank, step, standing)
        if standing:
            self._time_standing(meeting)
        if number in self._reserving and meeting.answered:
            problem = f"Step {meeting.at_step} is past: the next boundary is that of step {meeting.latest}"
            refusal = Refusal(problem) if meeting.latest > meeting.target else None
            self._run(self._reserving.pop(number), refusal)
        elif meeting.at_step is not None:
            return
        elif not had_answered and meeting.answered:
            # Chooses the step: the latest boundary that a worker has not passed.
            meeting.target = latest = meeting.latest
            if len(set(meeting.steps.values())) > 1:
                meeting.aim(latest)
                self._say(m.Meet(number, latest))
                self._time_standing(meeting)  # with the workers that are already there
        elif had_answered and standing and step < meeting.target:
            self._next = None
            self._open_next()  # it rests, and will never reach the target: ask again
            self._release(meeting)

    def _time_answers(self, meeting: Meeting) -> None:
        """Sets the timeout for answers to `Stop`: event loops answer it whatever the training threads do."""
        secs = self.timeouts.answer_secs

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
        secs, round_ = self.timeouts.meet_secs, meeting.round

        def late() -> None:
            open_ = meeting.number in self._meetings and meeting.round == round_
            if open_ and meeting.missing() and self._resting_step() is None:
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
            self._run(operation, refusal)

    # The start of an attempt: what earlier attempts left comes before what is proposed now.

    def take_up_journal(self) -> None:
        history, start = self.history, self.start
        for record in history.after(frozenset() if start is None else start.holds):
            content = history.content(record.id, record.digest)
            proposal = Proposal(record.id, record.digest, content, record.step, record.trial)
            replay = UpdateOperation(proposal, record, history.decided.get(record.sequence))
            self._known[record.id] = replay
            self._unopened.append(replay)
        self._open_replays()
        for one in list(history.scheduled.values()):
            content = history.content(one.id, one.digest)
            proposal = Proposal(one.id, one.digest, content, one.at_step, one.trial)
            self._open(proposed(proposal, scheduled=True), promised_at=one.at_step)
        for pending in () if start is None else start.pending:
            if not history.has_ended(pending) and pending.proposal.id not in self._known:
                operation = proposed(pending.proposal, stored=True)
                operation.tickets.extend(pending.tickets)
                self._open(operation)
        early, self._early = self._early or [], None
        for rank, message in early:
            self._on_message(rank, message)

    def _open_replays(self) -> None:
        """Opens a few replays at a time. All workers are stopped at or before their step."""
        while self._unopened and len(self._replays) < AHEAD:
            replay = self._unopened.popleft()
            self._open(replay, promised_at=replay.step)

    def replayed_at(self, sequence: int) -> int | None:
        waiting = (one for one in (*self.operations.values(), *self._unopened) if one.replays is not None)
        records = (one.record for one in waiting if isinstance(one, UpdateOperation))
        return next((one.step for one in records if one is not None and one.sequence == sequence), None)
