"""What passes between the machines, twelve messages; and the events and commands of each with its runtime.

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

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, ClassVar, Protocol, TypeAlias

import msgspec

from replicast.codec import Record
from replicast.core.entries import Content, Entry, Proposal, Stage
from replicast.update.audit_report import ComparedRows
from replicast.update.trial import Effect, Trial

# Why an operation was refused: a record that is sent between processes, and the exception for it.


class Refusal(Record):
    problem: str
    workers: tuple[int, ...] = ()
    details: Mapping[str, Any] | None = None


class Refuse(Exception):  # noqa: N818 - read as a sentence: raise Refuse("...")
    """Raised by a script or an order to refuse the operation. Nothing has changed."""

    def __init__(
        self, problem: str, workers: tuple[int, ...] = (), details: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(problem)
        self.refusal = Refusal(problem, workers, details)


class JobEnds(Exception):  # noqa: N818 - read as a sentence: raise JobEnds("...")
    """Raised by a script that can be neither carried out nor refused: every worker must exit."""


# What a worker answers to an order, or reports by itself.


class Published(Record):
    """An update that a worker has created at a boundary, and that all workers can fetch."""

    digest: str
    content: Content
    note: str = ""


class ReportId(Record, order=True):
    """Which planned save or audit a report belongs to: the same on all workers."""

    kind: str
    step: int
    count: int = 1

    def __str__(self) -> str:
        return f"{self.kind}-step-{self.step}" + (f"-{self.count}" if self.count > 1 else "")


class Applied(Record):
    digest: str
    applied_at: float = 0.0
    stall_secs: float = 0.0
    trained: int = 0
    keeps: bool = False
    effects: tuple[Effect, ...] = ()


class SeenDigests(Record):
    step: int
    digests: Mapping[str, str]
    free: Mapping[str, str] = msgspec.field(default_factory=dict)
    secs: float = 0.0
    trained: int = 0
    time: float = 0.0
    partly: tuple[ComparedRows, ...] = ()
    devices: tuple[str, ...] = ()  # of its replicas, if it has several


class Snapshot(Record):
    step: int
    digest: str
    holds: frozenset[int]
    details: Any


# An order: a worker's part of an operation, as data that is sent to it and a method that runs there.


class Replica(Protocol):
    """One worker's copy of the state, as operations use it. Implemented by the runtime and the simulation.

    Methods marked "background" run while training continues; all others run in the training thread, at a
    boundary.
    """

    rank: int

    @property
    def on_trial(self) -> bool:
        """Whether there is a copy to revert to."""

    def load(self, id_: str, digest: str) -> Content:
        """Background, on worker 0. Makes the bytes of a payload in the journal available to all workers."""

    def prepare(self, id_: str, digest: str, content: Content) -> None:
        """Background. Fetches and checks the bytes; raises `Refuse` if they cannot be applied.

        Prepared updates are kept by id and digest, because a slow worker may still hold one with the same id
        and other content that was refused.
        """

    def apply(self, id_: str, digest: str, sequence: int, keep: bool) -> Applied | Callable[[], Applied]:
        """Applies a prepared update. Must not fail."""

    def write_before(self, sequence: int) -> tuple[Content, str]:
        """Background, on worker 0. Makes the values that `apply` has kept durable, beside the journal."""

    def drop_before(self, sequence: int) -> None:
        """Forgets what `apply` has kept. No-op if it has kept nothing."""

    def invert(self, id_: str, sequence: int, forced: bool) -> Published:
        """Background, on worker 0. An update that undoes an update of the journal."""

    def pull(self, id_: str, name: str, rows: tuple[tuple[int, int], ...]) -> str:
        """The digest of a variable, or of these ranges of its rows; worker 0 also keeps a copy of them."""

    def discard(self, id_: str) -> None:
        """Background. Discards all that is prepared, or being prepared, under an id; no-op if nothing is."""

    def compute(self, id_: str) -> Published:
        """Runs a function that this worker has proposed."""

    def digest(self) -> str:
        """The digest of all variables that must be equal on all workers."""

    def digests(self, names: tuple[str, ...] = ()) -> dict[str, str]:
        """The digest of each of these variables; without names, of all variables."""

    def examine(self) -> SeenDigests:
        """The digests that an audit compares."""

    def expected(self, names: tuple[str, ...]) -> dict[str, str]:
        """The digests according to checkpoint and journal, of the variables that training does not change."""

    def publish(self, id_: str, names: tuple[str, ...], devices: tuple[str, ...] = ()) -> Published:
        """An update that assigns this worker's values of these variables; those on a device, if given."""

    def deviations(self, id_: str, digest: str, names: tuple[str, ...]) -> Mapping[str, Any]:
        """How far this replica's values of these variables are from those of a prepared update."""

    def snapshot(self, id_: str, *, due: bool, again: bool) -> Snapshot | Callable[[], Snapshot]:
        """Copies the state on worker 0, and digests it on all."""

    def keep_copy(self) -> None:
        """Copies the state, so that it can be reverted."""

    def go_back(self) -> None:
        """Reverts the state to that of `keep_copy`."""

    def drop_copy(self) -> None:
        """Deletes the copy."""

    def report(self, report: Any, raises: bool) -> None:
        """Passes an audit's report to the training thread, which raises it if `raises` is true."""

    def leave(self, problem: str, asked_by: tuple[str, ...]) -> None:
        """Ends the process, together with all others."""

    def measure(self, trial: Trial) -> tuple[float | None, int]:
        """The mean of the trial's metric since `keep_copy`; without a copy, over the steps before now."""


class Order(Record):
    """An order to a worker. Most are one method of `Replica`, and their fields are its arguments."""

    method: ClassVar[str] = ""
    # While training continues; otherwise in the stopped training thread.
    in_background: ClassVar[bool] = False

    def perform(self, replica: Replica) -> Any:
        """Carries it out; the result is sent to the coordinator. `Refuse` becomes a `Refusal`."""
        return getattr(replica, self.method)(*(getattr(self, name) for name in self.__struct_fields__))


OUTSIDE = -1  # The rank of messages from outside the job: from the inbox, and from `replicast withdraw`.


class Propose(Record):
    ticket: str
    proposal: Proposal


class Withdraw(Record):
    ticket: str
    id: str


class Request(Record):
    """Requests an operation of all workers at a next boundary: "leave", "save", "audit", "pull"."""

    kind: str
    asked_by: tuple[str, ...] = ()
    arguments: tuple[Any, ...] = ()


class At(Record):
    meeting: int
    step: int
    standing: bool


class Answer(Record):
    number: int | ReportId
    value: Any


class Rest(Record):
    """A training thread waits at its boundary until all others wait there for the same reason."""

    token: int
    step: int
    intent: tuple[Any, ...]


class Stop(Record):
    """Answer with the first boundary that you have not passed, and do not pass it."""

    meeting: int
    at_step: int | None = None


class Meet(Record):
    """Continue to this boundary, and wait there."""

    meeting: int
    step: int


class Do(Record):
    number: int
    order: Any  # an `Order`: msgspec would decode its base class only
    of: tuple[int, ...] | None = None


class Release(Record):
    """The meeting is over: pass the boundary once all orders are carried out."""

    meeting: int


class Resume(Record):
    tokens: tuple[int, ...]
    outcome: Any


class Tell(Record):
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


# Events that the runtime passes to the state machines.


class WriteOutcome(Enum):
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
