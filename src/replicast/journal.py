"""The journal: the durable order of committed updates. Checkpoint + journal = any later state.

    updates/.pending-<id>.safetensors     staged: durable, and nothing to anybody
    updates/000042.safetensors            its payload, once the sequence number is decided
    updates/000042.json                   its record: the rename of this file is the commit
    updates/000042.receipt.json           how it ended
    updates/000042.moved.json             if a pause of the training has brought it forward: to which step
    updates/000042.trial.json             if it was on trial: how that ended, before anybody acts on it

One process writes, the coordinator's; any may read.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from replicast import faults
from replicast.anyjournal import AnyJournal, MemoryJournal
from replicast.errors import FileDamaged, UpdateRefused
from replicast.files import (
    json_bytes,
    make_durably,
    read_bytes,
    read_json,
    remove_leftovers,
    sync_directory,
    write_durably,
)
from replicast.records import Receipt, Record, StagedPayload, summarized
from replicast.trial import TrialOutcome
from replicast.update import Update

__all__ = ["AnyJournal", "Journal", "MemoryJournal", "Receipt", "Record", "StagedPayload", "summarized"]

_PENDING = ".pending-"
_PAYLOAD, _RECORD, _RECEIPT, _MOVED = ".safetensors", ".json", ".receipt.json", ".moved.json"
_TRIAL = ".trial.json"


class Journal(AnyJournal):
    """The journal in a run directory.

    Args:
        run_dir: The run directory; `updates` is made in it by the first write.
        check: Raises when this process must not write any more. Called before each write.
    """

    def __init__(self, run_dir: Path, check: Callable[[], None] = lambda: None) -> None:
        self._directory = Path(run_dir) / "updates"
        self._check = check

    def stage(self, update: Update) -> StagedPayload:
        """As in `AnyJournal`."""
        self._check()
        path = self._directory / f"{_PENDING}{update.id}{_PAYLOAD}"
        hasher, nbytes = hashlib.sha256(), 0

        def counted() -> Iterator[bytes | memoryview]:
            nonlocal nbytes
            for chunk in update.file_chunks():
                hasher.update(chunk)
                nbytes += len(chunk)
                yield chunk

        try:
            make_durably(self._directory)
            write_durably(path, counted())
        except OSError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise _not_written(update.id, error) from error
        return StagedPayload(update.id, path, hasher.hexdigest(), nbytes)

    def commit(self, staged: StagedPayload, record: Record) -> None:
        """As in `AnyJournal`."""
        self._check()
        if staged.path is None or (staged.id, staged.sha256) != (record.id, record.sha256):
            raise ValueError(f"The record belongs to another payload. Received: {record.id} for {staged.id}")
        record_path = self._path(record.sequence, _RECORD)
        if record_path.exists():
            raise FileDamaged(record_path, "another update has this place in the order already")
        if record.sequence > 1 and not self._path(record.sequence - 1, _RECORD).exists():
            raise ValueError(f"The order has no place before this one. Received: {record.sequence}")
        payload_path, content = self._path(record.sequence, _PAYLOAD), json_bytes(record.to_json())
        try:
            staged.path.rename(payload_path)
            sync_directory(self._directory)
            faults.point("journal")
            write_durably(record_path, [content])
        except OSError as error:
            if record_path.exists():
                problem = f"it was renamed, and then its directory could not be synced ({error.strerror})"
                raise FileDamaged(record_path, problem) from error
            for path in (staged.path, payload_path):
                with contextlib.suppress(OSError):
                    path.unlink()
            raise _not_written(record.id, error) from error

    def discard(self, staged: StagedPayload) -> None:
        """As in `AnyJournal`."""
        self._check()  # A later group may have staged the same again, under the same name.
        if staged.path is not None:
            staged.path.unlink(missing_ok=True)

    def write_receipt(self, receipt: Receipt) -> None:
        """As in `AnyJournal`."""
        self._check()
        write_durably(self._path(receipt.sequence, _RECEIPT), [json_bytes(receipt.to_json())])

    def move(self, sequence: int, step: int) -> None:
        """As in `AnyJournal`."""
        self._check()
        write_durably(self._path(sequence, _MOVED), [json_bytes({"sequence": sequence, "step": step})])

    def moves(self) -> dict[int, int]:
        """As in `AnyJournal`."""
        found = {}
        for sequence in self._sequences(_MOVED):
            path = self._path(sequence, _MOVED)
            step = read_json(path).get("step")
            if not isinstance(step, int) or isinstance(step, bool):
                raise FileDamaged(path, "it has no step")
            found[sequence] = step
        return found

    def write_outcome(self, outcome: TrialOutcome) -> None:
        """As in `AnyJournal`."""
        self._check()
        write_durably(self._path(outcome.sequence, _TRIAL), [json_bytes(outcome.to_json())])

    def outcomes(self) -> dict[int, TrialOutcome]:
        """As in `AnyJournal`."""
        found = {}
        for sequence in sorted(self._sequences(_TRIAL)):
            path = self._path(sequence, _TRIAL)
            try:
                found[sequence] = TrialOutcome.from_json(read_json(path))
            except ValueError as error:
                raise FileDamaged(path, str(error)) from error
        return found

    def records(self) -> list[Record]:
        """As in `AnyJournal`."""
        last = max(self._sequences(_RECORD), default=0)
        # By number and not by what the listing has: an update may be committed while it is made.
        return [self._record(sequence) for sequence in range(1, last + 1)]

    def load(self, sequence: int) -> Update:
        """As in `AnyJournal`."""
        record = self._record(sequence)
        path = self._path(sequence, _PAYLOAD)
        try:
            content = read_bytes(path, max_bytes=record.nbytes)
            if hashlib.sha256(content).hexdigest() != record.sha256:
                raise FileDamaged(path, f"its sha256 is not the record's. Expected: {record.sha256}")
            return Update.parse(content, path.name)[0]
        except UpdateRefused as error:
            raise FileDamaged(path, str(error)) from error

    def receipts(self) -> dict[int, Receipt]:
        """As in `AnyJournal`."""
        made = {}
        for sequence in sorted(self._sequences(_RECEIPT)):
            path = self._path(sequence, _RECEIPT)
            try:
                made[sequence] = Receipt.from_json(read_json(path))
            except ValueError as error:
                raise FileDamaged(path, str(error)) from error
        return made

    def clean(self) -> None:
        """As in `AnyJournal`."""
        self._check()
        remove_leftovers(self._directory, older_than_secs=0.0)
        for path in self._directory.glob(f"{_PENDING}*"):
            path.unlink(missing_ok=True)

    def _record(self, sequence: int) -> Record:
        path = self._path(sequence, _RECORD)
        try:
            record = Record.from_json(read_json(path))
        except ValueError as error:
            raise FileDamaged(path, str(error)) from error
        if record.sequence != sequence:
            raise FileDamaged(path, f"it is the record of another place. Received: {record.sequence}")
        payload = self._path(sequence, _PAYLOAD)
        try:
            size = payload.stat().st_size
        except OSError as error:
            raise FileDamaged(
                payload, f"it cannot be read ({error.strerror}), and its record is there"
            ) from error
        if size != record.nbytes:
            raise FileDamaged(payload, f"its record says {record.nbytes} bytes. Received: {size}")
        return record

    def _path(self, sequence: int, ending: str) -> Path:
        return self._directory / f"{sequence:06d}{ending}"

    def _sequences(self, ending: str) -> list[int]:
        if not self._directory.is_dir():
            return []
        names = (
            path.name.removesuffix(ending) for path in self._directory.iterdir() if path.name.endswith(ending)
        )
        return [
            int(name) for name in names if name.isascii() and name.isdigit() and f"{int(name):06d}" == name
        ]


def _not_written(update_id: str, error: OSError) -> UpdateRefused:
    return UpdateRefused(
        f"The journal cannot be written ({error.strerror})",
        received=f"update {update_id}",
        remedy="Make room or repair the disk of the run directory, and propose the update again",
    )
