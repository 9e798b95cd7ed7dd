"""The journal: the durable order of committed updates. Checkpoint + journal = any later state.

It is the log of each group of workers, as far as that counts (`groups.py`), one after the other:

    groups/000003/.pending-<id>.safetensors   staged: durable, and nothing to anybody
    groups/000003/000017.safetensors          its payload, once its place is decided
    groups/000003/000017.record.json          the rename of this file is the commit
    groups/000003/000018.receipt.json         how an update ended
    groups/000003/000019.moved.json           a pause has brought an update forward: to which step
    groups/000003/000020.trial.json           how a trial ended, before anybody acts on it
    groups/000003/000021.withdrawn.json       an update is never applied, before it is called off

One process writes, the coordinator's; any may read. Of several entries about one update, the last one counts.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from replicast.anyjournal import AnyJournal, MemoryJournal
from replicast.errors import FileDamaged, UpdateRefused
from replicast.fence import Fence
from replicast.files import read_bytes, read_sealed, remove_leftovers, write_durably
from replicast.groups import entry_kinds, entry_path, group_directory, group_numbers, last_claim
from replicast.records import Receipt, Record, StagedPayload, summarized
from replicast.trial import TrialOutcome
from replicast.update import Update

__all__ = ["AnyJournal", "Journal", "MemoryJournal", "Receipt", "Record", "StagedPayload", "summarized"]

_PENDING, _PAYLOAD = ".pending-", ".safetensors"
_RECORD, _RECEIPT, _MOVED, _TRIAL, _WITHDRAWN = "record", "receipt", "moved", "trial", "withdrawn"
_Described = TypeVar("_Described", Record, Receipt, TrialOutcome)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an entry lies."""

    directory: Path
    group: int
    number: int
    kind: str

    @property
    def path(self) -> Path:
        return entry_path(self.directory, self.number, self.kind)

    @property
    def payload(self) -> Path:
        return self.directory / f"{self.number:06d}{_PAYLOAD}"


class Journal(AnyJournal):
    """The journal in a run directory.

    Args:
        run_dir: The run directory.
        fence: The claim of the group that writes. Without one, the journal can only be read.
    """

    def __init__(self, run_dir: Path, fence: Fence | None = None) -> None:
        self._run_dir = Path(run_dir)
        self._fence = fence
        self._read: dict[_Place, dict[str, Any]] = {}
        self._committed: int | None = None  # How many records there are; this process alone adds to them.

    def stage(self, update: Update) -> StagedPayload:
        """As in `AnyJournal`."""
        path = self._writer.directory / f"{_PENDING}{update.id}{_PAYLOAD}"
        hasher, nbytes = hashlib.sha256(), 0

        def counted() -> Iterator[bytes | memoryview]:
            nonlocal nbytes
            for chunk in update.file_chunks():
                hasher.update(chunk)
                nbytes += len(chunk)
                yield chunk

        try:
            write_durably(path, counted())
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise _not_written(update.id, error) from error
        return StagedPayload(update.id, path, hasher.hexdigest(), nbytes)

    def commit(self, staged: StagedPayload, record: Record) -> None:
        """As in `AnyJournal`."""
        if staged.path is None or (staged.id, staged.sha256) != (record.id, record.sha256):
            raise ValueError(f"The record belongs to another payload. Received: {record.id} for {staged.id}")
        if self._committed is None:
            self._committed = len(self._places(_RECORD))
        if record.sequence != self._committed + 1:
            raise ValueError(f"The next place is {self._committed + 1}. Received: {record.sequence}")
        before = self._writer.entries
        try:
            self._writer.append(_RECORD, record.to_json(), staged.path)
        except OSError as error:
            if self._writer.entries > before:
                place = _Place(self._writer.directory, self._writer.number, before + 1, _RECORD)
                problem = f"it was renamed, and then its directory could not be synced ({error.strerror})"
                raise FileDamaged(place.path, problem) from error
            raise _not_written(record.id, error) from error
        self._committed += 1

    def discard(self, staged: StagedPayload) -> None:
        """As in `AnyJournal`."""
        if staged.path is not None:
            staged.path.unlink(missing_ok=True)

    def write_receipt(self, receipt: Receipt) -> None:
        """As in `AnyJournal`."""
        self._writer.append(_RECEIPT, receipt.to_json())

    def move(self, sequence: int, step: int) -> None:
        """As in `AnyJournal`."""
        self._writer.append(_MOVED, {"sequence": sequence, "step": step})

    def moves(self) -> dict[int, int]:
        """As in `AnyJournal`."""
        found = {}
        for place in self._places(_MOVED):
            fields = self._fields(place)
            sequence, step = fields.get("sequence"), fields.get("step")
            if type(sequence) is not int or type(step) is not int:
                raise FileDamaged(place.path, "it has no step")
            found[sequence] = step
        return found

    def withdraw(self, sequence: int) -> None:
        """As in `AnyJournal`."""
        self._writer.append(_WITHDRAWN, {"sequence": sequence})

    def withdrawn(self) -> frozenset[int]:
        """As in `AnyJournal`."""
        found = set()
        for place in self._places(_WITHDRAWN):
            sequence = self._fields(place).get("sequence")
            if type(sequence) is not int:
                raise FileDamaged(place.path, "it names no update")
            found.add(sequence)
        return frozenset(found)

    def write_outcome(self, outcome: TrialOutcome) -> None:
        """As in `AnyJournal`."""
        self._writer.append(_TRIAL, outcome.to_json())

    def outcomes(self) -> dict[int, TrialOutcome]:
        """As in `AnyJournal`."""
        found = (self._described(TrialOutcome, place) for place in self._places(_TRIAL))
        return {outcome.sequence: outcome for outcome in found}

    def records(self) -> list[Record]:
        """As in `AnyJournal`."""
        return [self._record(sequence, place) for sequence, place in self._records()]

    def load(self, sequence: int) -> Update:
        """As in `AnyJournal`."""
        place = dict(self._records()).get(sequence)
        if place is None:
            raise FileDamaged(f"update {sequence}", "it is not in the journal")
        record = self._record(sequence, place)
        try:
            content = read_bytes(place.payload, max_bytes=record.nbytes)
            if hashlib.sha256(content).hexdigest() != record.sha256:
                raise FileDamaged(place.payload, f"its sha256 is not the record's. Expected: {record.sha256}")
            return Update.parse(content, place.payload.name)[0]
        except UpdateRefused as error:
            raise FileDamaged(place.payload, str(error)) from error

    def receipts(self) -> dict[int, Receipt]:
        """As in `AnyJournal`."""
        found = (self._described(Receipt, place) for place in self._places(_RECEIPT))
        return {receipt.sequence: receipt for receipt in found}

    def clean(self) -> None:
        """As in `AnyJournal`. Also what does not count: it takes room, and would puzzle whoever looks."""
        claim = last_claim(self._run_dir)
        if claim is None or claim.group != self._writer.number:
            return
        counted = dict(claim.counted)
        for group in group_numbers(self._run_dir):
            if group < claim.group:
                _remove_void(group_directory(self._run_dir, group), counted.get(group, 0))

    @property
    def _writer(self) -> Fence:
        if self._fence is None:
            raise ValueError("Only the group that has claimed the run directory writes into its journal")
        return self._fence

    def _records(self) -> list[tuple[int, _Place]]:
        return list(enumerate(self._places(_RECORD), start=1))

    def _places(self, kind: str) -> list[_Place]:
        """The entries of one kind that count, in their order.

        Raises:
            FileDamaged: An entry of whatever kind is missing among those that count.
        """
        claim = last_claim(self._run_dir)
        if claim is None:
            return []
        places = []
        for group, counted in (*claim.counted, (claim.group, None)):
            directory = group_directory(self._run_dir, group)
            kinds = entry_kinds(directory)
            last = max(kinds, default=0) if counted is None else counted
            for number in range(1, last + 1):
                if number not in kinds:
                    raise FileDamaged(directory / f"{number:06d}", "an entry of the journal is missing here")
                if kinds[number] == kind:
                    places.append(_Place(directory, group, number, kind))
        return places

    def _record(self, sequence: int, place: _Place) -> Record:
        record = self._described(Record, place)
        if record.sequence != sequence:
            problem = f"it must be the record of update {sequence}. Received: {record.sequence}"
            raise FileDamaged(place.path, problem)
        try:
            size = place.payload.stat().st_size
        except OSError as error:
            raise FileDamaged(
                place.payload, f"it cannot be read ({error.strerror}), and its record is there"
            ) from error
        if size != record.nbytes:
            raise FileDamaged(place.payload, f"its record says {record.nbytes} bytes. Received: {size}")
        return record

    def _described(self, kind: type[_Described], place: _Place) -> _Described:
        try:
            return kind.from_json(self._fields(place))
        except ValueError as error:
            raise FileDamaged(place.path, str(error)) from error

    def _fields(self, place: _Place) -> Mapping[str, Any]:
        """What an entry says. Read once: an entry never changes."""
        if place not in self._read:
            fields = read_sealed(place.path)
            if (fields.get("group"), fields.get("entry")) != (place.group, place.number):
                raise FileDamaged(place.path, "it is another entry than its name says")
            self._read[place] = fields
        return self._read[place]


def _remove_void(directory: Path, counted: int) -> None:
    """Removes what does not count in the directory of an earlier group."""
    remove_leftovers(directory, older_than_secs=0.0)
    kinds = entry_kinds(directory)
    void = [entry_path(directory, number, kind) for number, kind in kinds.items() if number > counted]
    records = {number for number, kind in kinds.items() if kind == _RECORD and number <= counted}
    for path in directory.glob(f"*{_PAYLOAD}"):
        name = path.name.removesuffix(_PAYLOAD)
        if not name.isdigit() or int(name) not in records:
            void.append(path)
    for path in void:
        path.unlink(missing_ok=True)


def _not_written(update_id: str, error: OSError) -> UpdateRefused:
    return UpdateRefused(
        f"The journal cannot be written ({error.strerror})",
        received=f"update {update_id}",
        remedy="Make room or repair the disk of the run directory, and propose the update again",
    )
