"""What the state machines want done: commands out. The runtime carries them out in order."""

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
    """Coordinator: write an entry durably, then look for a later claim; `Written` says what came of it."""

    number: int
    entry: Entry


@dataclass(frozen=True, slots=True)
class CloseInbox:
    """Coordinator: a proposal from the inbox has its outcome: note it, and remove the file."""

    ticket: str
    tell: Tell


@dataclass(frozen=True, slots=True)
class Ended:
    """Coordinator: an operation without a ticket has ended.

    Attributes:
        number: Of what the workers report by themselves: which report of that kind it was; otherwise 0.
        outcome: An `Outcome`.
        id: The operation's id.
        step: The boundary at which it happened, if it got there.
        asked_by: The ids of the requests from outside that it answers.
    """

    kind: str
    number: int
    outcome: Any
    id: str = ""
    step: int | None = None
    asked_by: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Either: send `TimerFired` after this time. There is no need to cancel one: late ones are ignored."""

    number: int
    secs: float


@dataclass(frozen=True, slots=True)
class EndJob:
    """Either: the job cannot go on; the process ends, and with it the group."""

    reason: str


@dataclass(frozen=True, slots=True)
class Send:
    """Worker: send to the coordinator."""

    message: ToCoordinator


@dataclass(frozen=True, slots=True)
class Perform:
    """Worker: carry out an order, in the background or in the training thread; `Performed` is the result."""

    number: int | tuple[str, int]
    order: Order


@dataclass(frozen=True, slots=True)
class Pass:
    """Worker: the training thread may start the next step."""

    step: int


@dataclass(frozen=True, slots=True)
class Continue:
    """Worker: the training thread returns from what it waited in, with a result or a `Refusal`."""

    outcome: Any


@dataclass(frozen=True, slots=True)
class Settle:
    """Worker: one of its tickets has come this far."""

    ticket: str
    tell: Tell


@dataclass(frozen=True, slots=True)
class Discard:
    """Worker: what was prepared under this id is not needed any more."""

    id: str


CoordinatorCommand: TypeAlias = Broadcast | Write | CloseInbox | Ended | SetTimer | EndJob
WorkerCommand: TypeAlias = Send | Perform | Pass | Continue | Settle | Discard | SetTimer | EndJob
