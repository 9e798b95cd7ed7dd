"""The valid entries of the journal: read in one way by the coordinator, `status` and the next attempt.

Readers do the fencing. Each group of workers claims the run directory by creating the next claim file, and
only then counts the entries of the group before it; that count is part of its claim. All later entries of the
earlier group are void. A group checks for a later claim *after* each write and before it acts on it. So every
entry that it acknowledges existed when the next group counted:

    group 1   write entry 7 ── durable ── is there a claim 2? no ──► acknowledge
    group 2                                                           claim 2 ── count group 1: 7 entries

    group 1   write entry 7 ── durable ── is there a claim 2? yes ─► end: another group has taken over
    group 2                     claim 2 ── count group 1: 6 or 7 entries; the seventh was not acknowledged
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from replicast.core.entries import (
    Before,
    Committed,
    Decided,
    Entry,
    Payload,
    Receipt,
    Refused,
    Saved,
    Scheduled,
    Started,
    Withdrawn,
)
from replicast.core.proposal import Content, Pending


@dataclass(frozen=True, slots=True)
class Group:
    """The entries of one group of workers.

    Attributes:
        entries: In the order in which they were written.
        taken: How many of them the next group took over; None for the last group.
    """

    entries: Sequence[Entry]
    taken: int | None = None


def valid(groups: Iterable[Group]) -> list[Entry]:
    """The valid entries, in order: of each group those that the next one took over."""
    return [entry for group in groups for entry in group.entries[: group.taken]]


class History:
    """The valid entries, indexed. Grows by `add` as entries become durable.

    Attributes:
        committed: The committed updates, by sequence number.
        decided: How trials ended, by sequence number.
        receipts: The last receipt of each update, by sequence number.
        before: Where the values are that each update has overwritten, by sequence number.
        scheduled: The updates that are durable and wait for their step, by id.
        withdrawn: The ids of withdrawn updates.
        refused: The tickets of proposals whose refusal is in the journal.
        checkpoints: The checkpoints that a restart may use, by step.
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
        """Adds an entry."""
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

    @property
    def next_sequence(self) -> int:
        """The sequence number of the next update."""
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

    def last_checkpoint(self) -> Saved | None:
        """The checkpoint that a restart uses by default."""
        return self.checkpoints[max(self.checkpoints)] if self.checkpoints else None

    def after(self, holds: frozenset[int]) -> list[Committed]:
        """The updates that a state which holds these ones still has to apply, in order."""
        left = [record for sequence, record in self.committed.items() if sequence not in holds]
        return sorted(left, key=lambda record: (record.step, record.sequence))
