"""The messages between workers and the coordinator: twelve.

To the coordinator, from any worker; each worker's messages arrive in order:

    Propose, Withdraw, Request    a request of a worker, or of a user outside the job
    At                            where the training thread is stopped, or will stop
    Answer                        the result of one order
    Rest                          the training thread waits for all others: `sync`, `save`, `audit`, `close`

To all workers, from the coordinator; one log, which every worker reads in order:

    Stop, Meet, Release           where the training threads stop, and when they continue
    Do                            an order: in the background, or in the training thread while it is stopped
    Resume                        a rest is over
    Tell                          the stage of an operation
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from replicast.core.order import Order
from replicast.core.proposal import Proposal
from replicast.core.record import record
from replicast.core.reports import ReportId
from replicast.core.stage import Stage

OUTSIDE = -1
"""The rank of messages from outside the job: from the inbox, and from `replicast withdraw`."""


@dataclass(frozen=True, slots=True)
class Propose:
    """Proposes an update or a function.

    Attributes:
        ticket: Identifies the proposal: the same update may be proposed more than once.
    """

    ticket: str
    proposal: Proposal


@record
class Withdraw:
    """Withdraws an update that is not committed yet."""

    ticket: str
    id: str


@record
class Request:
    """Requests an operation of all workers at one of the next boundaries: "leave", "save", "audit", "pull".

    Attributes:
        asked_by: The ids of requests from outside the job, which are answered when the operation ends.
        arguments: What else the operation has to know.
    """

    kind: str
    asked_by: tuple[str, ...] = ()
    arguments: tuple[Any, ...] = ()


@record
class At:
    """The position of a training thread.

    Attributes:
        step: The first boundary that it has not passed.
        standing: Whether it is stopped there, until `Release`, or `Meet` with a later step.
    """

    meeting: int
    step: int
    standing: bool


@record
class Answer:
    """The result of an order.

    Attributes:
        number: The number of the `Do`; for a planned save or audit, the id of the report.
        value: What the order returned, or a `Refusal`.
    """

    number: int | ReportId
    value: Any


@record
class Rest:
    """A training thread waits at its boundary until all others wait there for the same reason.

    Attributes:
        token: How many times it has rested.
        intent: The kind of operation and its arguments; must be the same on all workers.
    """

    token: int
    step: int
    intent: tuple[Any, ...]


@record
class Stop:
    """Answer with the first boundary that you have not passed, and do not pass it.

    Attributes:
        at_step: Instead, answer with the first boundary at or after this step, and do not pass that.
    """

    meeting: int
    at_step: int | None = None


@record
class Meet:
    """Continue to this boundary, and wait there."""

    meeting: int
    step: int


@record
class Do:
    """Carry out an order, and answer.

    Attributes:
        of: The ranks that it is for; None for all.
    """

    number: int
    order: Order
    of: tuple[int, ...] | None = None


@record
class Release:
    """The meeting is over: pass the boundary once all orders are carried out."""

    meeting: int


@record
class Resume:
    """A rest is over.

    Attributes:
        tokens: The token of each worker's rest, by rank; 0 for a worker that does not rest.
        outcome: Its result, or a `Refusal`.
    """

    tokens: tuple[int, ...]
    outcome: Any


@dataclass(frozen=True, slots=True)
class Tell:
    """The stage of an operation.

    Attributes:
        tickets: The proposals of this operation.
        step: The step at which it is, or will be, applied.
        outcome: The receipt or the refusal.
        waits_for: Why it is not decided yet, as text.
        waits_until: The first step at which it can have an outcome; 0 if that is unknown.
        ended: Whether the operation is over, not only one proposal of it: it can be discarded.
    """

    id: str
    tickets: tuple[str, ...]
    stage: Stage
    step: int | None = None
    outcome: Any = None
    waits_for: str = ""
    waits_until: int = 0
    ended: bool = False


ToCoordinator: TypeAlias = Propose | Withdraw | Request | At | Answer | Rest
ToWorkers: TypeAlias = Stop | Meet | Do | Release | Resume | Tell
