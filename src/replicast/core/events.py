"""Events that the runtime passes to the state machines."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeAlias

from replicast.core.entries import Entry
from replicast.core.messages import Order, Tell, ToCoordinator, ToWorkers
from replicast.core.records import Proposal, ReportId, record


class WriteOutcome(Enum):
    """The result of a write."""

    DURABLE = "durable"  # and no later group had claimed the run directory afterwards
    FAILED = "failed"  # certainly not written: the disk is full
    UNKNOWN = "unknown"  # it may have been written: only a restart can tell
    FENCED = "fenced"  # a later group has claimed the run directory


@record
class FromWorker:
    """To the coordinator: a message has arrived; `rank` is OUTSIDE for those from the run directory."""

    rank: int
    message: ToCoordinator


@record
class Written:
    """To the coordinator: a write has finished."""

    number: int
    outcome: WriteOutcome
    problem: str = ""


@record
class TimerFired:
    """To either: the time that `SetTimer` asked for has passed."""

    number: int


@record
class FromCoordinator:
    """To a worker: the next message of the log."""

    message: ToWorkers


@record
class Arrived:
    """To a worker: the training thread has finished `step` steps and waits for `Pass`."""

    step: int


@record
class Rested:
    """To a worker: the training thread waits until all others rest for the same reason."""

    intent: tuple[Any, ...]


@record
class Awaited:
    """To a worker: the training thread waits for one of its tickets."""

    ticket: str
    secs: float | None


@record
class Performed:
    """To a worker: an order was carried out; `value` is its result, or a `Refusal`."""

    number: int
    value: Any
    answers: bool = True


@record
class Reported:
    """To a worker: the training thread carried out a planned save or audit, as all do at this boundary."""

    id: ReportId | int
    value: Any


@record
class Proposed:
    """To a worker: its process proposes something."""

    ticket: str
    proposal: Proposal


CoordinatorEvent: TypeAlias = FromWorker | Written | TimerFired
WorkerEvent: TypeAlias = (
    FromCoordinator | Arrived | Rested | Awaited | Performed | Reported | Proposed | TimerFired
)


# Commands of the state machines. The runtime carries them out in order.


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
    """Coordinator: an operation without a ticket has ended."""

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
