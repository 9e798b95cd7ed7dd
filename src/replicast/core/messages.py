"""What workers and the coordinator say to each other: twelve messages.

To the coordinator, from any worker; each worker's messages arrive in order:

    Propose, Withdraw, Request    a worker, or a user outside the job, requests something
    At                            where the training thread stands or will stop
    Answer                        what came of one order
    Rest                          the training thread waits for all others: `sync`, `save`, `audit`, `close`

To all workers, from the coordinator; one log, which every worker reads in order:

    Stop, Meet, Release           where the training threads stop, and when they go on
    Do                            an order: in the background, or in the training thread while it stands
    Resume                        a rest is over
    Tell                          how far an operation has come
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

from replicast.core.order import Order
from replicast.core.proposal import Proposal
from replicast.core.stage import Stage

OUTSIDE = -1
"""The rank that messages from outside the job have: from the inbox, and from `replicast withdraw`."""


@dataclass(frozen=True, slots=True)
class Propose:
    """Proposes an update or a function.

    Attributes:
        ticket: Which proposal this is: the same update may be proposed more than once.
    """

    ticket: str
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Withdraws an update that is not committed yet."""

    ticket: str
    id: str


@dataclass(frozen=True, slots=True)
class Request:
    """Requests an operation of all workers at one of the next boundaries: "leave", "save", "audit", "pull".

    Attributes:
        asked_by: The ids of requests from outside the job, which are answered when the operation ends.
        arguments: What else the operation has to know.
    """

    kind: str
    asked_by: tuple[str, ...] = ()
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True, slots=True)
class At:
    """Where a training thread is.

    Attributes:
        step: The first boundary that it has not passed.
        standing: It waits there, and stays until `Release`, or `Meet` with a later step.
    """

    meeting: int
    step: int
    standing: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of an order.

    Attributes:
        number: That of the `Do`; for what all workers report by themselves, the kind and its count.
        value: What the order returned, or a `Refusal`.
    """

    number: int | tuple[str, int]
    value: Any


@dataclass(frozen=True, slots=True)
class Rest:
    """A training thread waits at its boundary until all others have come there for the same reason.

    Attributes:
        token: How often it has rested.
        intent: The kind of operation and its arguments; must be the same on all workers.
    """

    token: int
    step: int
    intent: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Stop:
    """Answer which boundary you have not passed, and do not pass it.

    Attributes:
        at_step: Do not pass the first boundary at or after this step instead.
    """

    meeting: int
    at_step: int | None = None


@dataclass(frozen=True, slots=True)
class Meet:
    """Go on to this boundary, and wait there."""

    meeting: int
    step: int


@dataclass(frozen=True, slots=True)
class Do:
    """Carry out an order, and answer.

    Attributes:
        of: The ranks that it is for; None for all.
    """

    number: int
    order: Order
    of: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """The meeting is over: pass the boundary when you have carried out all orders."""

    meeting: int


@dataclass(frozen=True, slots=True)
class Resume:
    """A rest is over.

    Attributes:
        tokens: That of each worker's rest, by rank; 0 for a worker that does not rest.
        outcome: What came of it, or a `Refusal`.
    """

    tokens: tuple[int, ...]
    outcome: Any


@dataclass(frozen=True, slots=True)
class Tell:
    """How far an operation has come.

    Attributes:
        tickets: The proposals that it is about.
        step: Where it is, or will be, applied.
        outcome: The receipt or the refusal.
        waits_for: Why it is not decided yet, in words.
        waits_until: It can have no outcome before this step; 0 when that is not known.
        ended: The operation is over, not only one proposal of it: what was prepared is not needed any more.
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
