"""What is written down: the entries of the journal. Each is written whole, or is not there.

A group of workers writes its own sequence of entries (`History` says which of them count). The entry that
makes something true is the only one: `Committed` is the commit of an update, `Saved` that of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from replicast.core.proposal import Content, Pending
from replicast.core.stage import Stage
from replicast.update.trial import Trial, TrialOutcome


@dataclass(frozen=True, slots=True)
class Started:
    """A group begins to train from a checkpoint: later checkpoints of earlier groups are given up.

    Attributes:
        attempt: The number of the group.
        from_step: The step of the checkpoint; None when it starts from scratch.
    """

    attempt: int
    from_step: int | None


@dataclass(frozen=True, slots=True)
class Payload:
    """The bytes of an update, before it has a place in the order.

    Attributes:
        author: Who proposed it.
        note: Why.
    """

    id: str
    digest: str
    content: Content
    author: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """An update will be applied at a step that its author chose, unless it is withdrawn before."""

    id: str
    digest: str
    at_step: int
    trial: Trial | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """An update has its place in the order: the commit.

    Attributes:
        sequence: Its number, from 1. Updates are applied in the order of (step, sequence).
        step: The boundary at which every worker applies it.
        before: For a trial: what its metric was before.
        heals: Whether an audit made it, to make replicas equal again.
        workers: How many workers the job had.
        reverts: The number of the update that it undoes, if any.
    """

    sequence: int
    id: str
    digest: str
    step: int
    attempt: int
    trial: Trial | None = None
    before: float | None = None
    heals: bool = False
    workers: int = 0
    reverts: int | None = None


@dataclass(frozen=True, slots=True)
class Before:
    """The values that an update has overwritten, for a revert. Each attempt that applies it writes one.

    Attributes:
        sequence: The update's number.
        content: Where the bytes are; None if they are not kept.
        problem: Why they are not kept; empty if they are.
    """

    sequence: int
    id: str
    content: Content
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Decided:
    """How a trial ended, before anybody acts on it.

    Attributes:
        sequence: The update's number.
        step: The boundary at which it was decided.
        last: The last committed update then: those behind it come after the decision.
        during: What the metric was in the trial.
    """

    sequence: int
    kept: bool
    step: int
    last: int
    reason: str = ""
    during: float | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """How an update ended, in one attempt: a replay leaves a receipt of its own.

    Attributes:
        sequence: Its place in the order.
        id: The update's id.
        step: The boundary at which it was applied.
        digests: What each worker reported of the touched variables, by rank.
        propose_to_applied_secs: From the proposal until the last worker had applied it; 0 in a replay.
        stall_secs: The longest that a training thread was held up.
        verified_at: When the last worker had applied it, in seconds since 1970.
        stage: Verified, reverted or failed.
        trial: How its trial ended, if it had one.
        attempt: The start of the job that applied it.
        trained: How far each worker had trained, by rank, if they report it; they must agree.
    """

    sequence: int
    id: str
    step: int
    digests: Mapping[int, str]
    propose_to_applied_secs: float
    stall_secs: float
    verified_at: float
    stage: Stage
    trial: TrialOutcome | None = None
    attempt: int = 0
    trained: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """An update was taken back before it was committed. Its id is used up."""

    id: str


@dataclass(frozen=True, slots=True)
class Refused:
    """What journal, checkpoint or inbox would bring back was refused. Written before it is told.

    Attributes:
        tickets: Which proposals: the same update may be proposed again later.
        whole: The update itself has ended, and not only these proposals of it.
    """

    id: str
    tickets: tuple[str, ...]
    problem: str
    whole: bool = True


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint is complete: the commit of a checkpoint.

    Attributes:
        holds: The sequence numbers of the updates that its state contains.
        pending: What was proposed before its boundary and not committed: a restarted script does not come to
            those lines again.
        state: Where its bytes are; the core never looks inside.
    """

    step: int
    attempt: int
    holds: frozenset[int]
    pending: tuple[Pending, ...]
    state: Any


Entry: TypeAlias = (
    Started | Payload | Scheduled | Committed | Before | Decided | Receipt | Withdrawn | Refused | Saved
)
