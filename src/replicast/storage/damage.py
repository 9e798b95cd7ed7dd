"""Entries of the journal that count and cannot be read: what each of them said, and whether a start needs it.

One bad entry hides no other. Readers leave it out and name its file. A start goes on without an entry that
cannot change which updates are applied, and stops otherwise:

    started, receipt       never needed
    before                 never needed: an update that is not reverted needs no values before it
    payload                needed if it belongs to an update that this start has to apply (`starting.py`)
    committed              needed
    scheduled              needed, unless every update stored before it is committed, scheduled or ended
    decided                needed, unless the state contains every trial without a decision
    withdrawn, refused     needed if an update that it may concern is scheduled, in the checkpoint or inbox
    a missing file         may be any of these; the records before and behind it may show that it is no record
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from replicast.core.entries import Committed, Refused, Saved, Scheduled, Withdrawn
from replicast.core.history import History
from replicast.errors import FileDamaged
from replicast.storage.entry_files import EntryFile, StoredPayload
from replicast.update.trial import Trial

_SAID = {
    "started": "which checkpoint an attempt started from",
    "payload": "what an update contains",
    "scheduled": "that an update is scheduled for a step",
    "committed": "that an update was committed, and at which step",
    "before": "which values an update has overwritten",
    "decided": "how a trial ended",
    "receipt": "how an update ended in one attempt",
    "withdrawn": "that an update was withdrawn",
    "refused": "that an update was refused",
}


@dataclass(frozen=True, slots=True)
class DamagedEntry:
    """An entry that counts and cannot be read.

    Attributes:
        group: The group of workers that wrote it.
        number: Which of its entries it is; of several missing ones, the first.
        kind: Its kind according to its name; None if it is missing.
        error: Which file, and what is wrong with it.
    """

    group: int
    number: int
    kind: str | None
    error: FileDamaged

    @property
    def place(self) -> tuple[int, int]:
        """Its group and number."""
        return self.group, self.number

    def may_be(self, kind: str) -> bool:
        """Whether it may be an entry of this kind. What another version wrote may be anything."""
        return self.kind not in _SAID or self.kind == kind

    def __str__(self) -> str:
        """Which file is damaged, and what it said, in words."""
        said = _SAID.get(self.kind or "", "something that is not known")
        return f"{str(self.error).removesuffix('.')}. The entry said {said}."


@dataclass(frozen=True, slots=True)
class Start:
    """What a start of the job goes on from.

    Attributes:
        history: The readable entries.
        damaged: The others.
        saved: The checkpoint; None without one.
        waiting: When each update in the inbox was submitted, by id.
    """

    history: History
    damaged: Sequence[DamagedEntry]
    saved: Saved | None
    waiting: Mapping[str, float]

    @property
    def holds(self) -> frozenset[int]:
        """The sequence numbers of the updates that the state contains."""
        return frozenset() if self.saved is None else self.saved.holds

    @property
    def pending(self) -> dict[str, str]:
        """The digests of the updates that the checkpoint proposes again, by id."""
        proposals = () if self.saved is None else self.saved.pending
        left = [one.proposal for one in proposals if not self.history.has_ended(one)]
        return {one.id: one.digest for one in left}


def why_a_record(damaged: DamagedEntry, files: Sequence[EntryFile]) -> str:
    """Why a damaged entry may be the record of a committed update; empty if it cannot be."""
    if not damaged.may_be("committed"):
        return ""
    if damaged.kind is not None and damaged.kind not in _SAID:
        return "this version of replicast does not know entries of its kind"
    before, behind = 0, None
    for file in files:
        if isinstance(file.stored, Committed):
            if file.place > damaged.place:
                behind = file.stored.sequence
                break
            before = file.stored.sequence
    if behind == before + 1 and damaged.kind != "committed":
        return ""
    return f"it may be the record of update {before + 1}, which must be applied again"


def why_needed(damaged: DamagedEntry, files: Sequence[EntryFile], start: Start) -> str:
    """Why a start needs to know what a damaged entry said; empty if it can go on without it."""
    for kind, why in _WHY.items():
        reason = why(damaged, files, start) if damaged.may_be(kind) else ""
        if reason:
            return reason
    return ""


def _why_decided(damaged: DamagedEntry, files: Sequence[EntryFile], start: Start) -> str:
    known = start.history.decided.keys() | start.holds
    for file in files:
        match file.stored:
            case Committed(sequence, trial=Trial()) if file.place < damaged.place and sequence not in known:
                return f"the trial of update {sequence} might be decided differently"
    return ""


def _why_scheduled(damaged: DamagedEntry, files: Sequence[EntryFile], start: Start) -> str:
    """An update is stored before it is scheduled."""
    stored: set[str] = set()
    for file in files:
        match file.stored:
            case StoredPayload(id_):
                if file.place < damaged.place:
                    stored.add(id_)
            case Scheduled(id_) | Committed(_, id_) | Withdrawn(id_) | Refused(id_, whole=True):
                stored.discard(id_)
    unknown = any(one.may_be("payload") and one.place < damaged.place for one in start.damaged)
    return f"update {min(stored, default='?')} may be scheduled" if stored or unknown else ""


def _why_ended(damaged: DamagedEntry, files: Sequence[EntryFile], start: Start) -> str:
    """An update that was withdrawn or refused must not come back."""
    behind = min((file.written_at for file in files if file.place > damaged.place), default=inf)
    places = {file.stored.id: file.place for file in files if isinstance(file.stored, Scheduled)}
    scheduled = [id_ for id_ in start.history.scheduled if places[id_] < damaged.place]
    waiting = [id_ for id_, submitted_at in start.waiting.items() if submitted_at <= behind]
    for ids, where in (
        (scheduled, "scheduled"),
        (sorted(start.pending), "pending in the checkpoint"),
        (waiting, "in the inbox"),
    ):
        if ids:
            return f"update {ids[0]}, which is {where}, may have been withdrawn or refused"
    return ""


_WHY: Mapping[str, Callable[[DamagedEntry, Sequence[EntryFile], Start], str]] = {
    "committed": lambda damaged, files, start: why_a_record(damaged, files),
    "decided": _why_decided,
    "scheduled": _why_scheduled,
    "withdrawn": _why_ended,
    "refused": _why_ended,
}
