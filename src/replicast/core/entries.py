"""The entries of the journal. Each is written completely or not at all.

Each group of workers writes its own sequence of entries (`History` decides which of them are valid). A commit
is a single entry: `Committed` is the commit of an update, `Saved` that of a checkpoint.
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
    """A group starts to train from a checkpoint: later checkpoints of earlier groups become invalid.

    Attributes:
        attempt: The number of the attempt.
        from_step: The step of the checkpoint; None if it starts from scratch.
    """

    attempt: int
    from_step: int | None


@dataclass(frozen=True, slots=True)
class Payload:
    """The bytes of an update, before it has a sequence number.

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
    """An update will be applied at the step that its author chose, unless it is withdrawn before."""

    id: str
    digest: str
    at_step: int
    trial: Trial | None = None


@dataclass(frozen=True, slots=True)
class Committed:
    """An update has its sequence number: the commit.

    Attributes:
        sequence: Its number, from 1. Updates are applied in the order of (step, sequence).
        step: The boundary at which every worker applies it.
        before: For a trial: the value of its metric before.
        heals: Whether an audit created it, to make replicas equal again.
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
    """How a trial ended. Written before any worker acts on it.

    Attributes:
        sequence: The sequence number of the update.
        step: The boundary at which it was decided.
        last: The last committed update at that time: later ones come after the decision.
        during: The value of the metric during the trial.
    """

    sequence: int
    kept: bool
    step: int
    last: int
    reason: str = ""
    during: float | None = None


@dataclass(frozen=True, slots=True)
class Receipt:
    """How an update ended in one attempt: a replay writes its own receipt.

    Attributes:
        sequence: Its sequence number.
        id: The update's id.
        step: The boundary at which it was applied.
        digests: The digest of the touched variables that each worker reported, by rank.
        propose_to_applied_secs: From the proposal until the last worker had applied it; 0 in a replay.
        stall_secs: The longest time that a training thread was stopped.
        verified_at: When the last worker had applied it, in seconds since 1970.
        stage: Verified, reverted or failed.
        trial: How its trial ended, if it had one.
        attempt: The attempt that applied it.
        trained: How far each worker had trained, by rank, if they report it; they must agree.
        checkpoint: The name of the checkpoint that it was applied to while no job ran; empty if the workers
            applied it. Its digest then stands under 0.
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
    checkpoint: str = ""


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """An update was withdrawn before it was committed. Its id cannot be used again."""

    id: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A proposal was refused that the journal, a checkpoint or the inbox would otherwise bring back.

    Written before its author is told.

    Attributes:
        tickets: The refused proposals: the same update may be proposed again later.
        whole: Whether the update itself has ended, not only these proposals of it.
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
        pending: Uncommitted proposals that were made before its boundary: a restarted script does not run
            those lines again.
        state: Where its bytes are; opaque to the core.
    """

    step: int
    attempt: int
    holds: frozenset[int]
    pending: tuple[Pending, ...]
    state: Any


Entry: TypeAlias = (
    Started | Payload | Scheduled | Committed | Before | Decided | Receipt | Withdrawn | Refused | Saved
)
