"""Notifies authors of the stage of their proposals, and writes first what must be durable by then.

    a ticket ──► a proposal of an update: the same update may be proposed more than once, by several authors
    inbox    ──► the tickets from outside: their files are removed when their outcome is durable

A proposal that the journal, a checkpoint or the inbox would bring back after a restart is refused in the
journal before its author is told.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from replicast.core.commands import CloseInbox, Ended
from replicast.core.engine import Engine
from replicast.core.entries import Committed, Entry, Receipt, Refused, Saved
from replicast.core.history import History
from replicast.core.messages import Tell
from replicast.core.operation import Operation, Outcome, Timeouts
from replicast.core.operations.function import Function
from replicast.core.proposal import Proposal
from replicast.core.refusal import Refusal
from replicast.core.stage import Stage


class Tickets(Engine):
    """The part of the coordinator that keeps track of proposals and their authors.

    Args:
        size: The number of workers.
        history: The valid entries of the journal.
        timeouts: The timeouts of the job.
    """

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
