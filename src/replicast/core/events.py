"""Events that the runtime passes to the state machines."""

from __future__ import annotations

from enum import Enum
from typing import Any, TypeAlias

from replicast.core.messages import ToCoordinator, ToWorkers
from replicast.core.proposal import Proposal
from replicast.core.record import record
from replicast.core.reports import ReportId


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
    """To the coordinator: a write has finished.

    Attributes:
        problem: Why it failed, and what to do.
    """

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
    """To a worker: the training thread waits for one of its tickets.

    Attributes:
        secs: The timeout. None: wait until it is certain that this thread has to train first, at most
            `decide_secs`.
    """

    ticket: str
    secs: float | None


@record
class Performed:
    """To a worker: an order was carried out; `value` is its result, or a `Refusal`.

    Attributes:
        answers: False if the result comes later, as `Reported`; the training thread need not wait for it.
    """

    number: int
    value: Any
    answers: bool = True


@record
class Reported:
    """To a worker: the training thread carried out a planned save or audit, as all do at this boundary.

    Attributes:
        id: The save or audit that it belongs to. The reports of one kind are made in order. Or the number of
            an order whose result comes after its `Performed`.
        value: The result.
    """

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
