"""Commands of the state machines. The runtime carries them out in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from replicast.core.entries import Entry
from replicast.core.messages import Tell, ToCoordinator, ToWorkers
from replicast.core.order import Order


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Coordinator: append to the log that every worker reads."""

    message: ToWorkers


@dataclass(frozen=True, slots=True)
class Write:
    """Coordinator: write an entry durably, then check for a later claim; `Written` has the result."""

    number: int
    entry: Entry


@dataclass(frozen=True, slots=True)
class CloseInbox:
    """Coordinator: a proposal from the inbox has its outcome: record it, and remove the file."""

    ticket: str
    tell: Tell


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Either: send `TimerFired` after this time. Timers are never cancelled: obsolete ones are ignored."""

    number: int
    secs: float


@dataclass(frozen=True, slots=True)
class EndJob:
    """Either: the job cannot continue; the process exits, and with it the group."""

    reason: str


@dataclass(frozen=True, slots=True)
class Send:
    """Worker: send to the coordinator."""

    message: ToCoordinator


@dataclass(frozen=True, slots=True)
class Perform:
    """Worker: carry out an order, in the background or in the training thread; `Performed` is the result."""

    number: int
    order: Order


@dataclass(frozen=True, slots=True)
class Pass:
    """Worker: the training thread may start the next step."""

    step: int


@dataclass(frozen=True, slots=True)
class Continue:
    """Worker: the training thread returns from its wait, with a result or a `Refusal`."""

    outcome: Any


@dataclass(frozen=True, slots=True)
class Settle:
    """Worker: one of its tickets has reached a new stage."""

    ticket: str
    tell: Tell


@dataclass(frozen=True, slots=True)
class Discard:
    """Worker: the update prepared under this id is not needed any more."""

    id: str


CoordinatorCommand: TypeAlias = Broadcast | Write | CloseInbox | Ended | SetTimer | EndJob
WorkerCommand: TypeAlias = Send | Perform | Pass | Continue | Settle | Discard | SetTimer | EndJob
