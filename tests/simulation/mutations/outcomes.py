"""Breaks of what is accepted and refused, and of what authors are told."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from replicast.core import coordinator as coordinator_module
from replicast.core.coordinator import Coordinator
from replicast.core.entries import Scheduled
from replicast.core.events import CloseInbox, Write
from replicast.core.messages import Tell
from replicast.core.operation import Gather, Outcome, Persist
from replicast.core.operations.trial import BeginTrial
from replicast.core.operations.update import Apply, Discard, Prepare
from replicast.core.records import Stage
from tests.simulation.mutations.registry import ORIGINAL, broken, mutation


@mutation
def acknowledge_before_the_journal_is_durable() -> Any:
    def write(self: Coordinator, entry: Any, then: Callable[[Any], None]) -> None:
        number = next(self._numbers)
        self._writes[number] = entry, lambda refusal: None
        self._commands.append(Write(number, entry))
        self.history.add(entry)
        then(None)

    return broken(Coordinator, "_write", write)


@mutation
def commit_after_a_refusal() -> Any:
    return broken(Gather, "refusal", lambda self: None)


@mutation
def forget_the_id_check() -> Any:
    def propose(self: Coordinator, rank: int, message: Any) -> None:
        self._known.pop(message.proposal.id, None)
        self.history.by_id.pop(message.proposal.id, None)
        ORIGINAL[Coordinator, "_propose"](self, rank, message)

    return broken(Coordinator, "_propose", propose)


@mutation
def keep_what_was_prepared_by_id_alone() -> Any:
    def prepare(self: Prepare, replica: Any) -> None:
        replica.prepare(self.id, "", self.content)

    def apply(self: Apply, replica: Any) -> Any:
        return replica.apply(self.id, "", self.sequence, keep=True)

    stack = contextlib.ExitStack()
    stack.enter_context(broken(Prepare, "perform", prepare))
    stack.enter_context(broken(Apply, "perform", apply))
    stack.enter_context(
        broken(BeginTrial, "perform", lambda self, replica: (replica.keep_copy(), apply(self, replica))[1])
    )
    return stack


@mutation
def refuse_what_is_committed() -> Any:
    def refused(self: Coordinator, operation: Any, refusal: Any) -> None:
        self._finish(operation, Outcome(Stage.REFUSED, refusal))

    return broken(Coordinator, "_refused", refused)


@mutation
def accept_other_content_under_the_same_id() -> Any:
    return broken(coordinator_module, "has_other_content", lambda proposal, known, record: False)


@mutation
def lose_a_withdrawal() -> Any:
    def withdraw(self: Coordinator, ticket: str, id_: str) -> None:
        self._tell(Tell(id_, (ticket,), Stage.WITHDRAWN))

    return broken(Coordinator, "_withdraw", withdraw)


@mutation
def tell_a_withdrawal_before_it_is_written() -> Any:
    def withdraw(self: Coordinator, ticket: str, id_: str) -> None:
        if id_ in self._known:
            self._tell(Tell(id_, (ticket,), Stage.WITHDRAWN))
        ORIGINAL[Coordinator, "_withdraw"](self, ticket, id_)

    return broken(Coordinator, "_withdraw", withdraw)


@mutation
def promise_a_step_without_writing_it_down() -> Any:
    def serve(self: Coordinator, operation: Any, request: Any) -> None:
        if isinstance(request, Persist) and isinstance(request.entry, Scheduled):
            self._run(operation, None)
        else:
            ORIGINAL[Coordinator, "_serve"](self, operation, request)

    return broken(Coordinator, "_serve", serve)


@mutation
def remove_from_the_inbox_when_it_is_read() -> Any:
    def propose(self: Coordinator, rank: int, message: Any) -> None:
        ORIGINAL[Coordinator, "_propose"](self, rank, message)
        if message.ticket in self._inbox:
            self._inbox.discard(message.ticket)
            self._commands.append(CloseInbox(message.ticket, Tell(message.proposal.id, (), Stage.PROPOSED)))

    return broken(Coordinator, "_propose", propose)


@mutation
def tell_a_refusal_that_a_restart_would_undo() -> Any:
    def write_refusal(self: Coordinator, tell: Tell, operation: Any, whole: bool) -> None:
        self._forget(operation)
        self._tell(tell)

    return broken(Coordinator, "_write_refusal", write_refusal)


@mutation
def keep_the_bytes_of_what_was_refused() -> Any:
    return broken(Discard, "perform", lambda self, replica: None)
