"""The coordinator: one ordered list of operations, and what is added to it.

    Propose, Request, Rest, a planned step ──► an operation at the end of the list; its script runs (`Engine`)
    it ends ──► Tell to the holders of its tickets (`Tickets`), Resume to the workers that rest in it

While a trial is in progress, most operations wait for its end.
"""

from __future__ import annotations

from collections import deque

from replicast.core.engine import UNDECIDED
from replicast.core.entries import Committed, Receipt, Saved, Withdrawn
from replicast.core.history import History
from replicast.core.messages import OUTSIDE, Answer, At, Propose, Request, Rest, Tell, ToCoordinator, Withdraw
from replicast.core.operation import AuditTrail, Operation, Outcome, Script, Timeouts
from replicast.core.operations.audit import Audit
from replicast.core.operations.catalog import collective, planned, proposed, replayed, requested
from replicast.core.operations.close import Close
from replicast.core.operations.function import Function
from replicast.core.operations.keep import Keep
from replicast.core.operations.update import Update
from replicast.core.proposal import Pending, Proposal
from replicast.core.refusal import Refusal
from replicast.core.reports import ReportId
from replicast.core.stage import Stage
from replicast.core.tickets import Tickets, has_other_content

AHEAD = 4
"""How many replayed updates are prepared in advance."""
NO_TOKEN = 0
"""The token of a worker that does not rest: the tokens of rests start at 1."""


class Coordinator(Tickets):
    """The state machine that decides. It runs in worker 0.

    Args:
        size: The number of workers.
        history: The valid entries of the journal, read after this group has claimed the run directory.
        attempt: The number of this attempt.
        start: The checkpoint that the workers have restored; None if they start from scratch.
        timeouts: The timeouts of the job.
        audit_policy: What happens to replicas that differ: "heal", "raise" or "warn".

    Attributes:
        operations: The current operations, in order: `status` reads it, and so do tickets, through `Tell`.
        trial: The operation whose trial is in progress.
        leaving: Whether all workers have been told to exit: nothing more is decided.
    """

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
        """Adds an operation to the list and starts its script.

        Args:
            operation: What to do.
            promised_at: The step for which an earlier attempt has accepted it; all workers rest now.
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
