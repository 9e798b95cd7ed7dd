"""The entries of the journal. Each is written completely or not at all.

Each group of workers writes its own sequence of entries; `storage/claims.py` decides which of them count. A
commit is a single entry: `Committed` is the commit of an update. `Saved` tells of a complete checkpoint.

A log has every entry but `Saved` as it is here, one per line. The bytes of an update are no part of a line:
there `content` is unset, and `file`, `sha256`, `nbytes` name the file beside the log that has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Annotated, Any, TypeAlias, assert_never

import msgspec
from msgspec import UNSET, UnsetType

from replicast.codec import Record
from replicast.update.trial import Effect, Trial, TrialOutcome

_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]  # An integer in JSON may have any size.


class Stage(StrEnum):
    """The stages of an operation, in order. It never goes back."""

    PROPOSED = "proposed"  # the coordinator has it
    PREPARED = "prepared"  # every worker holds its bytes and has checked them; nothing has changed
    SCHEDULED = "scheduled"  # durable, and every worker will stop at its step; it can still be withdrawn
    COMMITTED = "committed"  # the record is durable: it will be applied, after a restart if necessary
    APPLIED = "applied"  # every worker has applied it; a trial is in progress
    VERIFIED = "verified"  # every worker reported the same digest
    REVERTED = "reverted"  # its trial failed: every replica is back at the state before it
    WITHDRAWN = "withdrawn"  # withdrawn before it was committed; nothing has changed
    REFUSED = "refused"  # not accepted; nothing has changed
    FAILED = "failed"  # committed, and the workers' digests differ

    @property
    def is_final(self) -> bool:
        return self in _FINAL


_FINAL = frozenset({Stage.VERIFIED, Stage.REVERTED, Stage.WITHDRAWN, Stage.REFUSED, Stage.FAILED})


Content: TypeAlias = Any  # where the bytes of an update are: hashable, and opaque to the core


class Proposal(Record):
    """An update, a function that will compute one, or the number of an update to revert."""

    id: str
    digest: str
    content: Content = None
    at_step: int | None = None
    trial: Trial | None = None
    source: int | None = None
    author: str = ""
    note: str = ""
    proposed_at: float = 0.0
    reverts: int | None = None
    forced: bool = False


class Pending(Record):
    """An uncommitted proposal in a checkpoint, made before its boundary."""

    proposal: Proposal
    tickets: tuple[str, ...]


class Started(Record):
    """A group starts to train from a checkpoint: later checkpoints of earlier groups become invalid."""

    attempt: int
    from_step: int | None


class Payload(Record):
    """The bytes of an update, before it has a sequence number."""

    id: str
    digest: str
    content: Content = UNSET
    author: str = ""
    note: str = ""
    file: str = ""
    sha256: str = ""
    nbytes: _Size = 0
    edits: msgspec.Raw = msgspec.Raw(b"[]")  # A summary of each. It may be long, and few readers need it.


class Scheduled(Record):
    """An update will be applied at the step that its author chose, unless it is withdrawn before."""

    id: str
    digest: str
    at_step: int
    trial: Trial | None = None


class Committed(Record):
    """An update has its sequence number: the commit."""

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


class Before(Record):
    """The values that an update has overwritten, for a revert. Each attempt that applies it writes one."""

    sequence: int
    id: str
    content: Content = UNSET
    file: str = ""
    sha256: str = ""
    nbytes: _Size = 0
    problem: str = ""


class Decided(Record):
    """How a trial ended. Written before any worker acts on it."""

    sequence: int
    kept: bool
    step: int
    last: int
    reason: str = ""
    during: float | None = None


class Receipt(Record):
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
        effects: What it has done to each variable, as worker 0 measured it.
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
    effects: tuple[Effect, ...] | UnsetType = UNSET  # an old log has none


class Withdrawn(Record):
    """An update was withdrawn before it was committed. Its id cannot be used again."""

    id: str


class Refused(Record):
    """A proposal was refused that the journal, a checkpoint or the inbox would otherwise bring back.

    Written before its author is told.
    """

    id: str
    tickets: tuple[str, ...]
    problem: str
    whole: bool = True


class Saved(Record):
    """A checkpoint is complete: the commit of a checkpoint."""

    step: int
    attempt: int
    holds: frozenset[int]
    pending: tuple[Pending, ...]
    state: Any


Logged: TypeAlias = (
    Started | Payload | Scheduled | Committed | Before | Decided | Receipt | Withdrawn | Refused
)
Entry: TypeAlias = Logged | Saved


class History:
    """The entries that count, indexed: read in one way by the coordinator, `status` and the next attempt.

    Grows by `add` as entries become durable: written, and no later group had claimed the run directory then.
    """

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.committed: dict[int, Committed] = {}
        self.by_id: dict[str, Committed] = {}
        self.decided: dict[int, Decided] = {}
        self.receipts: dict[int, Receipt] = {}
        self.before: dict[int, Before] = {}
        self._reverts: dict[int, list[int]] = {}
        self.scheduled: dict[str, Scheduled] = {}
        self.withdrawn: set[str] = set()
        self.refused: set[str] = set()
        self.checkpoints: dict[int, Saved] = {}
        self._contents: dict[tuple[str, str], Content] = {}
        for entry in entries:
            self.add(entry)

    def add(self, entry: Entry) -> None:
        match entry:
            case Payload():
                self._contents[entry.id, entry.digest] = entry.content
            case Committed():
                self.committed[entry.sequence] = self.by_id[entry.id] = entry
                self.scheduled.pop(entry.id, None)
                if entry.reverts is not None:
                    self._reverts.setdefault(entry.reverts, []).append(entry.sequence)
            case Before():
                self.before[entry.sequence] = entry
            case Receipt():
                self.receipts[entry.sequence] = entry
            case Scheduled():
                self.scheduled[entry.id] = entry
            case Withdrawn():
                self.withdrawn.add(entry.id)
                self.scheduled.pop(entry.id, None)
            case Refused():
                self.refused.update(entry.tickets)
                if entry.whole:
                    self.scheduled.pop(entry.id, None)
            case Decided():
                self.decided[entry.sequence] = entry
            case Saved():
                self.checkpoints[entry.step] = entry
            case Started(_, from_step):
                kept = -1 if from_step is None else from_step
                self.checkpoints = {step: one for step, one in self.checkpoints.items() if step <= kept}
            case _:
                assert_never(entry)

    @property
    def next_sequence(self) -> int:
        return len(self.committed) + 1

    def reverted_by(self, sequence: int) -> int | None:
        """The update that has reverted this one; None if none has, or if that was reverted in turn."""
        later = (one for one in self._reverts.get(sequence, ()) if self.reverted_by(one) is None)
        return next(later, None)

    def content(self, id_: str, digest: str) -> Content:
        """The bytes of an update that is committed or scheduled."""
        return self._contents[id_, digest]

    def has_ended(self, pending: Pending) -> bool:
        """Whether a proposal that a checkpoint holds has got its outcome since."""
        id_ = pending.proposal.id
        return id_ in self.by_id or id_ in self.withdrawn or not self.refused.isdisjoint(pending.tickets)

    def after(self, holds: frozenset[int]) -> list[Committed]:
        """The updates that a state which holds these ones still has to apply, in order."""
        left = [record for sequence, record in self.committed.items() if sequence not in holds]
        return sorted(left, key=lambda record: (record.step, record.sequence))
