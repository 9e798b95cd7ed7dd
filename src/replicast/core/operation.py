"""An operation, and what its script may ask for.

A script is a generator: it yields a request, the coordinator carries it out, and the script goes on with the
answer. A request that is refused raises `Refuse` at the `yield`. A script that does not catch it ends there,
the operation is refused, and no replica has changed.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeAlias

from replicast.core.entries import Committed, Entry, Saved
from replicast.core.history import History
from replicast.core.meeting import Meeting
from replicast.core.order import Order
from replicast.core.proposal import Pending, Proposal
from replicast.core.refusal import Refusal
from replicast.core.stage import Stage


@dataclass(frozen=True, slots=True)
class Ask:
    """Have workers carry out an order; resumed with their answers by rank.

    Attributes:
        of: Which workers; None for all.
        secs: How long to wait for them; None for as long as it takes.
        what: What is waited for, for the error that names who did not answer.
    """

    order: Order
    of: tuple[int, ...] | None = None
    secs: float | None = None
    what: str = "answer"


@dataclass(frozen=True, slots=True)
class Go:
    """The last order at a boundary: the workers carry it out and go on; resumed with their answers.

    Attributes:
        resume: Of an operation in which all workers rest: they need not wait for what comes of it.
    """

    order: Order
    resume: bool = False


@dataclass(frozen=True, slots=True)
class Reserve:
    """Have all workers agree to stop at a step; resumed when they have. Refused when it is past."""

    at_step: int


@dataclass(frozen=True, slots=True)
class Boundary:
    """Have all workers stand at one boundary; resumed with its step when they do.

    Attributes:
        at_step: The first one at or after this step; None for the next possible one.
    """

    at_step: int | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """Write an entry; resumed when it is durable. Refused when the disk is full."""

    entry: Entry


@dataclass(frozen=True, slots=True)
class EarlierSettled:
    """Resumed when everything that was proposed before has its outcome, or waits for a later step."""


@dataclass(frozen=True, slots=True)
class EarlierStored:
    """Resumed when what the next start needs of all operations so far is durable, or they have ended.

    That is the payload of each proposal, and the values that updates have overwritten.
    """


@dataclass(frozen=True, slots=True)
class Collect:
    """What every worker reports by itself, for the n-th time; resumed with the answers by rank."""

    kind: str
    number: int


AnyRequest: TypeAlias = Ask | Go | Reserve | Boundary | Record | EarlierSettled | EarlierStored | Collect


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an operation ended.

    Attributes:
        result: The receipt, report or refusal.
    """

    stage: Stage
    result: Any = None


Script: TypeAlias = Generator[AnyRequest, Any, Outcome]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long the coordinator and the workers wait, in seconds.

    Attributes:
        prepare_secs: For every worker to have fetched and checked an update's bytes.
        answer_secs: For every worker's event loop to answer `Stop`.
        meet_secs: For every training thread to stand at a boundary, once the first one does.
        decide_secs: For the coordinator, by a training thread that stands at a boundary.
        compute_secs: For an order that runs in a training thread at a boundary.
        retry_secs: Before a write that must succeed is tried again.
        wait_secs: For the other workers to wait at this boundary as well, by a training thread that waits for
            a ticket without a timeout.
        join_secs: For the other workers to make their `Replicas`, or to come to the same call.
    """

    prepare_secs: float = 130.0
    answer_secs: float = 30.0
    meet_secs: float = 900.0
    decide_secs: float = 1800.0
    compute_secs: float = 600.0
    retry_secs: float = 10.0
    wait_secs: float = 5.0
    join_secs: float = 600.0


class AuditTrail:
    """What the audits of one attempt have found, one after the other.

    Attributes:
        last_equal: The step of the last audit that found all replicas equal.
        found_at: The step at which it was first seen that they differ; None while they do not.
    """

    def __init__(self) -> None:
        self._count = 0
        self.last_equal: int | None = None
        self.found_at: int | None = None

    def next_number(self) -> int:
        """Of a report."""
        self._count += 1
        return self._count

    def differ(self, step: int) -> int:
        """They differ; gives the step at which that was first seen."""
        self.found_at = step if self.found_at is None else self.found_at
        return self.found_at

    def are_equal(self, step: int) -> None:
        """They are equal, or were made so."""
        self.found_at, self.last_equal = None, step


class Job(Protocol):
    """What a script may know about the job. The coordinator is one."""

    size: int
    attempt: int
    timeouts: Timeouts
    history: History
    start: Saved | None
    """The checkpoint that the workers have restored."""
    trial: Operation | None
    """The operation whose trial is under way."""
    leaving: bool
    """All workers are told to end: nothing more is decided."""
    audits: AuditTrail
    """What audits have found so far."""
    audit_policy: str
    """What happens to replicas that differ: "heal", "raise" or "warn"."""

    def new_id(self, kind: str) -> str:
        """Generates an id for an update without one."""

    def request_audit(self) -> None:
        """Replicas differ: the next audit looks into it, which may be one that waits for its boundary."""

    def promise(self, operation: Operation, at_step: int) -> None:
        """Puts up the stop for the operation's next boundary, while all workers stand before it."""

    def replay(self, operation: Operation) -> None:
        """Gives the operation its next place in the order of replays."""

    def take_up_journal(self) -> None:
        """Opens what earlier attempts have left, then what was proposed meanwhile. All workers rest."""

    def refuse_functions_without_source(self) -> None:
        """All workers have come to the end of what they propose."""

    def pending(self) -> tuple[Pending, ...]:
        """The updates that were proposed and are not committed."""

    def announce(self, outcome: Outcome) -> None:
        """Tells all workers the receipt of an update without a ticket."""

    def keep_before(self, record: Committed) -> None:
        """Has worker 0 write the values that an update has overwritten. Nobody waits for it."""

    def replayed_at(self, sequence: int) -> int | None:
        """The step at which an update of the journal is still to be applied again; None if it is applied."""

    def resting_for(self) -> str:
        """The kind of operation in which all training threads rest; empty when they do not."""

    def end_rest(self, operation: Operation, refusal: Refusal) -> None:
        """Lets workers that rest in another operation continue, even if not all workers rest."""


class Operation:
    """One entry of the coordinator's list.

    Attributes:
        number: Its place in the list.
        id: The update's id, or a name of its own.
        stage: How far it has come.
        step: Where it is, or will be, applied.
        waits_for: Why it is not decided yet, in words.
        waits_until: It can have no outcome before this step; 0 when that is not known.
        tickets: Who is told.
        tokens: Of an operation for which all training threads rest: the token of each rest.
        outcome: How it ended.
        replays: While it replays the journal: its place in the order of replays, (step, sequence).
        in_trial: Whether it may run while a trial is under way.
        promised: The stop for its next boundary is up, whatever else has to be done until then.
        must_run: It is committed, or has begun: when it cannot be carried out, the job ends.
        stored: Its payload is in the journal.
        report: Of what the workers report by themselves: which report of this kind it is; otherwise 0.
        arguments: Of a request: what else it said. One operation answers all equal requests.
        asked_by: The ids of the requests from outside the job that it answers.
    """

    kind: ClassVar[str]
    only_writes: ClassVar[bool] = False
    """It needs no boundary, only a durable file: a checkpoint waits for it, and no training thread does."""

    def __init__(self, id_: str, proposal: Proposal | None = None) -> None:
        self.number = 0
        self.id = id_
        self.proposal = proposal
        self.stage = Stage.PROPOSED
        self.step: int | None = None
        self.waits_for = ""
        self.waits_until = 0
        self.tickets: list[str] = []
        self.tokens: tuple[int, ...] = ()
        self.outcome: Outcome | None = None
        self.replays: tuple[float, float] | None = None
        self.in_trial = False
        self.promised = False
        self.must_run = False
        self.stored = False
        self.report = 0
        self.arguments: tuple[Any, ...] = ()
        self.asked_by: tuple[str, ...] = ()
        # Written by the coordinator.
        self.running: Script | None = None
        self.meeting: Meeting | None = None
        self.withdrawing = False
        self.held: tuple[Any, ...] = ()
        self.told: tuple[Stage, int] = Stage.PROPOSED, 0

    def script(self, job: Job) -> Script:
        """The coordinator's side of the story."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"<{self.kind} {self.id} {self.stage}>"
