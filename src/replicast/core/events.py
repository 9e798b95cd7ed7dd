"""Events that the runtime passes to the state machines."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeAlias

from replicast.codec import Record
from replicast.core.entries import Entry
from replicast.core.messages import Answer, Order, Propose, Tell, ToCoordinator, ToWorkers


class WriteOutcome(Enum):
    """The result of a write."""

    DURABLE = "durable"  # and no later group had claimed the run directory afterwards
    FAILED = "failed"  # certainly not written: the disk is full
    UNKNOWN = "unknown"  # it may have been written: only a restart can tell
    FENCED = "fenced"  # a later group has claimed the run directory


class FromWorker(Record):
    """To the coordinator: a message has arrived; `rank` is OUTSIDE for those from the run directory."""

    rank: int
    message: ToCoordinator


class Written(Record):
    """To the coordinator: a write has finished."""

    number: int
    outcome: WriteOutcome
    problem: str = ""


class TimerFired(Record):
    """To either: the time that `SetTimer` asked for has passed."""

    number: int


class Arrived(Record):
    """To a worker: the training thread has finished `step` steps and waits for `PassBoundary`."""

    step: int


class Rested(Record):
    """To a worker: the training thread waits until all others rest for the same reason."""

    intent: tuple[Any, ...]


class Awaited(Record):
    """To a worker: the training thread waits for one of its tickets."""

    ticket: str
    secs: float | None


class Performed(Record):
    """To a worker: an order was carried out; `value` is its result, or a `Refusal`."""

    number: int
    value: Any
    answers: bool = True


CoordinatorEvent: TypeAlias = FromWorker | Written | TimerFired
# Messages too: the log of the coordinator; a proposal of this process; an answer that comes later than
# `Performed`, or a planned save or audit that the training thread made, as all do at this boundary.
WorkerEvent: TypeAlias = ToWorkers | Propose | Answer | Arrived | Rested | Awaited | Performed | TimerFired


# Commands of the state machines. The runtime carries them out in order.


class Broadcast(Record):
    """Coordinator: append to the log that every worker reads."""

    message: ToWorkers


class Write(Record):
    """Coordinator: write an entry durably, then check for a later claim; `Written` has the result."""

    number: int
    entry: Entry


class CloseInbox(Record):
    """Coordinator: a proposal from the inbox has its outcome: record it, and remove the file."""

    ticket: str
    tell: Tell


class Ended(Record):
    """Coordinator: an operation without a ticket has ended."""

    kind: str
    id: str
    outcome: Any
    step: int | None = None
    asked_by: tuple[str, ...] = ()


class SetTimer(Record):
    """Either: send `TimerFired` after this time. Timers are never cancelled: obsolete ones are ignored."""

    number: int
    secs: float


class EndJob(Record):
    """Either: the job cannot continue; the process exits, and with it the group."""

    reason: str


class Send(Record):
    """Worker: send to the coordinator."""

    message: ToCoordinator


class Perform(Record):
    """Worker: carry out an order, in the background or in the training thread; `Performed` is the result."""

    number: int
    order: Order


class PassBoundary(Record):
    """Worker: the training thread may start the next step."""

    step: int


class Continue(Record):
    """Worker: the training thread returns from its wait, with a result or a `Refusal`."""

    outcome: Any


class Settle(Record):
    """Worker: one of its tickets has reached a new stage."""

    ticket: str
    tell: Tell


class DropPrepared(Record):
    """Worker: the update prepared under this id is not needed any more."""

    id: str


CoordinatorCommand: TypeAlias = Broadcast | Write | CloseInbox | Ended | SetTimer | EndJob
WorkerCommand: TypeAlias = (
    Send | Perform | PassBoundary | Continue | Settle | DropPrepared | SetTimer | EndJob
)
