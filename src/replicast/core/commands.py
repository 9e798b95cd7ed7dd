"""Commands of the state machines. The runtime carries them out in order."""

from __future__ import annotations

from typing import Any, TypeAlias

from replicast.core.entries import Entry
from replicast.core.messages import Tell, ToCoordinator, ToWorkers
from replicast.core.order import Order
from replicast.core.record import record


@record
class Broadcast:
    """Coordinator: append to the log that every worker reads."""

    message: ToWorkers


@record
class Write:
    """Coordinator: write an entry durably, then check for a later claim; `Written` has the result."""

    number: int
    entry: Entry


@record
class CloseInbox:
    """Coordinator: a proposal from the inbox has its outcome: record it, and remove the file."""

    ticket: str
    tell: Tell


@record
class Ended:
    """Coordinator: an operation without a ticket has ended.

    Attributes:
        id: That of the operation; of a planned save or audit, the text of its `ReportId`.
        outcome: An `Outcome`.
        step: The boundary at which it happened, if it got there.
        asked_by: The ids of the requests from outside that it answers.
    """

    kind: str
    id: str
    outcome: Any
    step: int | None = None
    asked_by: tuple[str, ...] = ()


@record
class SetTimer:
    """Either: send `TimerFired` after this time. Timers are never cancelled: obsolete ones are ignored."""

    number: int
    secs: float


@record
class EndJob:
    """Either: the job cannot continue; the process exits, and with it the group."""

    reason: str


@record
class Send:
    """Worker: send to the coordinator."""

    message: ToCoordinator


@record
class Perform:
    """Worker: carry out an order, in the background or in the training thread; `Performed` is the result."""

    number: int
    order: Order


@record
class Pass:
    """Worker: the training thread may start the next step."""

    step: int


@record
class Continue:
    """Worker: the training thread returns from its wait, with a result or a `Refusal`."""

    outcome: Any


@record
class Settle:
    """Worker: one of its tickets has reached a new stage."""

    ticket: str
    tell: Tell


@record
class Discard:
    """Worker: the update prepared under this id is not needed any more."""

    id: str


CoordinatorCommand: TypeAlias = Broadcast | Write | CloseInbox | Ended | SetTimer | EndJob
WorkerCommand: TypeAlias = Send | Perform | Pass | Continue | Settle | Discard | SetTimer | EndJob
