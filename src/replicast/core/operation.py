"""An operation, and the requests that its script may yield.

A script is a generator: it yields a request, the coordinator carries it out, and the script is resumed with
the answer. A refused request raises `Refuse` at the `yield`. If the script does not catch it, the operation
is refused, and no replica has changed.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from typing import Any, ClassVar, Protocol, TypeAlias, TypeVar

from replicast.codec import Record
from replicast.core.entries import Committed, Entry, History, Pending, Proposal, Saved, Stage
from replicast.core.messages import Order, Refusal, ReportId


class Ask(Record):
    """Have workers carry out an order; resumed with their answers by rank."""

    order: Order
    of: tuple[int, ...] | None = None
    secs: float | None = None
    what: str = "answer"


class Go(Record):
    """The last order at a boundary: the workers carry it out and continue; resumed with their answers."""

    order: Order
    resume: bool = False


class Reserve(Record):
    """Have all workers agree to stop at a step; resumed when they have. Refused if the step has passed."""

    at_step: int


class Boundary(Record):
    """Have all workers stop at one boundary; resumed with its step when they have."""

    at_step: int | None = None


class Persist(Record):
    """Write an entry; resumed when it is durable. Refused if the disk is full.

    Two kinds of entry need not be on disk by then: a payload, which the commit syncs, and a receipt, which
    the next attempt writes again (`FileJournal.write`).
    """

    entry: Entry


class EarlierSettled(Record):
    """Resumed when every earlier proposal has its outcome, or waits for a later step."""


class EarlierStored(Record):
    """Resumed when what the next start needs of all operations so far is durable, or they have ended.

    That is the payload of each proposal, and the values that updates have overwritten.
    """


class BeforeWritten(Record):
    """Resumed when a committed update is applied and the values it has overwritten are durable or lost."""

    id: str


class Collect(Record):
    """Collect a planned report of every worker; resumed with the reports by rank. One missing refuses it."""

    id: ReportId


AnyRequest: TypeAlias = (
    Ask | Go | Reserve | Boundary | Persist | EarlierSettled | EarlierStored | BeforeWritten | Collect
)


class Outcome(Record):
    stage: Stage
    result: Any = None


Result = TypeVar("Result")
Part: TypeAlias = Generator[AnyRequest, Any, Result]  # of a script: `yield from` it
Script: TypeAlias = Part[Outcome]


class Timeouts(Record):
    """How many seconds the workers wait for each other.

    Attributes:
        prepare_secs: For every worker to fetch and check an update; then it is refused. Raise it for large
            updates on a slow network.
        answer_secs: For every worker's background thread, and the others' part of a checkpoint. Then the
            update is refused, or the checkpoint is skipped.
        meet_secs: For all training threads to reach a boundary, once the first waits there. Then the update,
            checkpoint or audit is refused; a committed update ends the job. Raise it if one worker evaluates
            for longer.
        decide_secs: For worker 0, by a worker at a boundary; then `JobFailed`. Keep it above `meet_secs` and
            `compute_secs` together.
        compute_secs: For work while all wait, such as a function or digests; then that is refused.
        retry_secs: Before a refusal that could not be written is written again.
        wait_secs: For the others to wait at the same boundary, by a training thread in `result()` without a
            timeout; then `UpdatePending`.
        join_secs: For all workers to create `Replicas`, or to reach the same `restore()` or `fit`; then the
            script raises.
    """

    prepare_secs: float = 130.0
    answer_secs: float = 30.0
    meet_secs: float = 900.0
    decide_secs: float = 1800.0
    compute_secs: float = 600.0
    retry_secs: float = 10.0
    wait_secs: float = 5.0
    join_secs: float = 600.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not (secs := getattr(self, name)) >= 0:
                raise ValueError(f"{name} must be a number of seconds, at least 0. Received: {secs}")


class AuditTrail:
    def __init__(self) -> None:
        self.count = 0
        self.last_equal: int | None = None
        self._last_equal_as_a_whole: int | None = None
        self._partly: frozenset[str] = frozenset()  # the tables that audits compare slice by slice
        self.found_at: int | None = None

    def differ(self, step: int) -> int:
        """Records that they differ; returns the step at which that was first found."""
        self.found_at = step if self.found_at is None else self.found_at
        return self.found_at

    def are_equal(self, step: int, partly: frozenset[str] = frozenset()) -> None:
        """Records that they are equal, or were made equal; some variables as far as they were compared."""
        self.found_at, self.last_equal = None, step
        if partly:
            self._partly = partly
        else:
            self._last_equal_as_a_whole = step

    def last_equal_in(self, variables: Iterable[str]) -> int | None:
        """The last step at which these variables were equal, as a whole."""
        known = self._partly.isdisjoint(variables)
        return self.last_equal if known else self._last_equal_as_a_whole


class JobView(Protocol):
    """The part of the coordinator that scripts use."""

    size: int
    attempt: int
    timeouts: Timeouts
    history: History
    start: Saved | None  # the checkpoint that the workers have restored
    trial: Operation | None  # the operation whose trial is in progress
    leaving: bool  # all workers have been told to exit: nothing more is decided
    audits: AuditTrail
    audit_policy: str  # what happens to replicas that differ: "heal", "raise" or "warn"

    def new_id(self, kind: str) -> str:
        """Generates an id for an operation or update without one."""

    def request_audit(self) -> None:
        """Requests an audit because replicas differ; one that still waits for its boundary is enough."""

    def promise(self, operation: Operation, at_step: int) -> None:
        """Sets the stop for the operation's next boundary, while all workers are stopped before it."""

    def replay(self, operation: Operation) -> None:
        """Schedules the operation's next boundary in the order of replays."""

    def take_up_journal(self) -> None:
        """Opens the operations that earlier attempts left, then new proposals. All workers rest."""

    def refuse_functions_without_source(self) -> None:
        """Called when all workers have made all of their proposals."""

    def pending(self) -> tuple[Pending, ...]:
        """The updates that are proposed and not committed."""

    def announce(self, outcome: Outcome) -> None:
        """Sends all workers the receipt of an update without a ticket."""

    def keep_before(self, record: Committed) -> None:
        """Has worker 0 write the values that an update has overwritten. Nobody waits for it."""

    def replayed_at(self, sequence: int) -> int | None:
        """The step at which an update of the journal is still to be applied again; None if it is applied."""

    def resting_for(self) -> str:
        """The kind of operation in which all training threads rest; empty if they do not."""

    def end_rest(self, operation: Operation, refusal: Refusal) -> None:
        """Lets workers that rest in another operation continue, even if not all workers rest."""


class Operation:
    kind: str
    # It needs no boundary, only a durable file: a checkpoint waits for it, and no training thread does.
    only_writes: ClassVar[bool] = False
    in_trial: bool = False  # may run while the trial of another operation is in progress

    def __init__(self, id_: str, proposal: Proposal | None = None) -> None:
        self.number = 0
        self.id = id_
        self.proposal = proposal
        self.stage = Stage.PROPOSED
        self.step: int | None = None
        self.waits_for = ""
        self.waits_until = 0
        self.tickets: list[str] = []
        self.tokens: tuple[int, ...] = ()  # of the workers that rest in it
        self.outcome: Outcome | None = None
        self.replays: tuple[float, float] | None = None  # its place among the replays of the journal
        self.promised = False
        self.must_run = False
        self.stored = False
        self.report: ReportId | None = None
        self.arguments: tuple[Any, ...] = ()  # of the request, or of the call in which all rest
        self.asked_by: tuple[str, ...] = ()
        # Written by the coordinator.
        self.running: Script | None = None
        self.meeting: Meeting | None = None
        self.applying = False  # its last order at a boundary is not answered by all
        self.withdrawing = False
        self.held: tuple[Any, ...] = ()  # what to resume it with if it cannot be withdrawn
        self.told: tuple[Stage, int] = Stage.PROPOSED, 0

    def script(self, job: JobView) -> Script:
        raise NotImplementedError

    def is_applying(self, id_: str) -> bool:
        """Whether this update is being applied, or the values that it has overwritten are being written."""
        return self.applying and self.id == id_

    def __repr__(self) -> str:
        return f"<{self.kind} {self.id} {self.stage}>"


class Gather:
    """One answer from each of some workers: the only place where the coordinator collects."""

    __slots__ = ("answers", "missing", "timer", "what")

    def __init__(self, what: str, ranks: Iterable[int]) -> None:
        self.what = what
        self.timer = 0  # the coordinator's, until the last answer has come
        self.missing = set(ranks)
        self.answers: dict[int, Any] = {}

    def add(self, rank: int, answer: Any) -> bool:
        """Adds an answer; returns whether it was the last one."""
        if rank not in self.missing:
            return False
        self.missing.discard(rank)
        self.answers[rank] = answer
        return not self.missing

    def refusal(self) -> Refusal | None:
        """The first refusal among the answers, if there is one."""
        for rank in sorted(self.answers):
            if isinstance(refusal := self.answers[rank], Refusal):
                return Refusal(refusal.problem, refusal.workers or (rank,), refusal.details)
        return None

    def timed_out(self, secs: float) -> Refusal:
        return self.refused_by(self.missing, f" within {secs:g} s")

    def refused_by(self, ranks: Iterable[int], why: str = "") -> Refusal:
        """A refusal that names workers that did not answer and will not."""
        missing = tuple(sorted(ranks))
        return Refusal(f"Worker {', '.join(map(str, missing))} did not {self.what}{why}", missing)


class Meeting:
    """How all training threads are stopped at one boundary, as far as the coordinator knows.

        Stop ──► every worker answers at once with the first boundary that it has not passed, and stops there
        Meet ──► the latest answer is the step: workers before it continue to it
        At   ◄── every worker is stopped there

    A worker that rests before the step (its script waits for the others) will never reach it: then the
    coordinator asks again.
    """

    __slots__ = ("at_step", "number", "round", "size", "standing", "steps", "target", "timed_round")

    def __init__(self, number: int, size: int, at_step: int | None) -> None:
        self.number = number
        self.size = size
        self.at_step = at_step
        self.steps: dict[int, int] = {}
        self.standing: set[int] = set()
        self.target = 0 if at_step is None else at_step
        self.round = 0
        self.timed_round = -1

    def note(self, rank: int, step: int, standing: bool) -> None:
        self.steps[rank] = step
        if standing:
            self.standing.add(rank)

    @property
    def answered(self) -> bool:
        return len(self.steps) == self.size

    @property
    def latest(self) -> int:
        """The latest boundary that a worker has not passed."""
        return max(self.steps.values())

    def aim(self, step: int) -> None:
        """Sets the target: workers that are stopped before it continue."""
        self.target = step
        self.round += 1
        self.standing = {rank for rank in self.standing if self.steps[rank] >= step}

    def missing(self) -> tuple[int, ...]:
        return tuple(rank for rank in range(self.size) if rank not in self.standing)

    def step(self) -> int | None:
        """The boundary at which all workers are stopped; None while they are not."""
        if len(self.standing) < self.size:
            return None
        step = min(self.steps.values())
        return step if step == self.latest and step >= (self.at_step or 0) else None
