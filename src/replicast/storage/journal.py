"""The journal: the durable order of all events. Checkpoint + journal = any later state.

It is the concatenation of the logs of all groups of workers, up to the entries that count (`groups.py`). Only
the process of worker 0 writes; any process may read.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import threading
import time
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping
from typing import Any

from replicast import faults
from replicast.core.entries import Before, Committed, Entry, Payload, Saved
from replicast.core.history import History
from replicast.core.proposal import Content
from replicast.errors import FileDamaged, PayloadRemoved, ReplicastError, UpdateRefused
from replicast.files import TEMPORARY, RunDir, RunPath, below, sync_directory, write_durably
from replicast.mapping import copied
from replicast.storage.counted import counted_entries
from replicast.storage.entry_files import (
    EntryFile,
    Stored,
    StoredBefore,
    StoredPayload,
    bytes_path,
    fields_of,
    kind_of,
    read_before,
    read_entry,
    read_payload,
    summary,
)
from replicast.storage.fence import Fence
from replicast.storage.index import write_index
from replicast.storage.retention import remove_void, unneeded_payloads
from replicast.storage.starting import check_records, check_start, stopped
from replicast.update.inverse import NOT_KEPT
from replicast.update.update import Update

INDEX_EVERY = 1000
"""A group writes an index every this many entries."""
KEPT_BYTES = 1 << 26
"""The most bytes of update values that a journal in memory keeps."""

_BEFORE = " before"
_NO_ENTRY = "A checkpoint is not a journal entry: the checkpoint store writes it"


class NotWritten(ReplicastError):  # noqa: N818 - reads as a sentence: raise NotWritten
    """An entry is certainly not in the journal."""


class PerhapsWritten(ReplicastError):  # noqa: N818 - reads as a sentence: raise PerhapsWritten
    """An entry may be in the journal: only a new attempt can tell."""


class Journal(ABC):
    """The interface of a journal, with or without files. Only one thread writes."""

    @abstractmethod
    def write(self, entry: Entry, update: Update | None = None) -> None:
        """Writes an entry. It is durable when this returns.

        Args:
            entry: The entry; not `Saved`, which is a checkpoint.
            update: The update whose bytes go with a `Payload`.

        Raises:
            NotWritten: The entry does not exist, and nothing is left behind.
            PerhapsWritten: It is not known whether the entry exists.
            JobFailed: Another group has taken over the run. The entry may or may not count, and must not be
                acted on.
        """

    @abstractmethod
    def load(self, id_: str, digest: str) -> Update:
        """Loads the update of a payload. Any thread may call it.

        Raises:
            PayloadRemoved: It is not kept any more.
            FileDamaged: It is missing or damaged.
        """

    @abstractmethod
    def edits(self, id_: str, digest: str) -> tuple[Mapping[str, Any], ...]:
        """A summary of each edit of a payload, also when its values are not kept; empty if it is not known.

        Any thread may call it.
        """

    @abstractmethod
    def check_start(self, saved: Saved | None) -> None:
        """Checks that all is known and stored that a start has to apply. Call it before anything is decided.

        Args:
            saved: The checkpoint that is restored; None if the job starts from scratch.

        Raises:
            PayloadRemoved: The values of an update are not kept any more.
            FileDamaged: Something that this start needs is missing or damaged. The message says what to do.
        """

    @abstractmethod
    def stage_before(self, before: Update) -> Content:
        """Makes the values before an update durable; they count once a `Before` refers to them. Any thread.

        Returns:
            The content of that entry.

        Raises:
            OSError: They cannot be written, and nothing is left behind.
        """

    @abstractmethod
    def load_before(self, sequence: int) -> Update | None:
        """Loads the values before an update, as the update that assigns them. Any thread may call it.

        Returns:
            None if the journal says nothing about them: it may need none.

        Raises:
            UpdateRefused: They were not kept, or not for so long.
            FileDamaged: They are damaged.
        """

    @abstractmethod
    def history(self) -> History:
        """The entries that count. The content of a payload is the tuple of its id and digest."""

    @abstractmethod
    def remove_payloads(self, held: Container[int], pending: Container[tuple[str, str]] | None) -> int:
        """Removes the bytes of updates that no attempt will need again; the entries stay.

        These are the updates that every kept checkpoint contains, those that were refused or withdrawn, and
        those that an earlier attempt stored and neither scheduled nor committed, unless a kept checkpoint
        proposes them again. Files that cannot be removed are left alone. Only for the thread that writes.

        Args:
            held: The sequence numbers of the updates that every kept checkpoint contains.
            pending: The ids and digests of the updates that kept checkpoints propose again, one of this
                attempt among them: what this attempt has taken over from an earlier one is in it. None if
                this is not known.

        Returns:
            The number of removed payloads.
        """


class FileJournal(Journal):
    """The journal in a run directory, for the group that writes it.

    Args:
        run_dir: The run directory.
        fence: The claim of the group.

    Raises:
        FileDamaged: The record of a committed update may be missing or damaged.
        OSError: Leftovers of an earlier group cannot be removed.
    """

    def __init__(self, run_dir: RunDir, fence: Fence) -> None:
        self._run_dir, self._fence = below(run_dir), fence
        remove_void(self._run_dir, fence.number)
        files, self._indexed, self._damaged = counted_entries(self._run_dir)
        self._files = [file.without_edits() for file in files]
        check_records(self._run_dir, self._files, self._damaged)
        self._payloads = {key: file for file in self._files if (key := file.payload_key) is not None}
        self._before = {
            file.stored.sequence: file for file in self._files if isinstance(file.stored, StoredBefore)
        }
        self._staged = itertools.count(1)
        self._committed = sum(isinstance(file.stored, Committed) for file in self._files)
        self._removed: set[tuple[int, int]] = set()
        if self._indexed < len(self._files):
            self._write_index()

    def write(self, entry: Entry, update: Update | None = None) -> None:
        """As in `Journal`."""
        if isinstance(entry, Committed) and entry.sequence != self._committed + 1:
            raise ValueError(f"The next update is {self._committed + 1}. Received: {entry.sequence}")
        number = self._fence.entries + 1
        kind = "before" if isinstance(entry, Before) else "payload"
        payload = bytes_path(self._fence.directory, number, kind)
        written_at = time.time()
        try:
            stored = _stored(entry, update, payload)
            self._fence.append(kind_of(stored), fields_of(stored) | {"written_at": written_at})
        except OSError as error:
            if self._fence.entries >= number:  # The payload was written before, so `stored` exists.
                self._take_in(EntryFile(self._fence.number, number, written_at, stored))
                raise PerhapsWritten(_perhaps_written(payload, error)) from error
            with contextlib.suppress(OSError):
                payload.unlink(missing_ok=True)
            self._fence.check_not_taken_over()  # A later group removes unfinished files of earlier ones.
            raise NotWritten(_not_written(self._run_dir, error)) from error
        self._take_in(EntryFile(self._fence.number, number, written_at, stored))

    def load(self, id_: str, digest: str) -> Update:
        """As in `Journal`."""
        file = self._payloads.get((id_, digest))
        if file is None or not isinstance(file.stored, StoredPayload):
            raise FileDamaged(self._run_dir / "groups", f"it has no payload for update {id_} ({digest})")
        try:
            return read_payload(file.payload_path(self._run_dir), file.stored)
        except FileDamaged as error:
            raise stopped(self._run_dir, error, f"it has the values of update {id_}") from error

    def edits(self, id_: str, digest: str) -> tuple[Mapping[str, Any], ...]:
        """As in `Journal`. They are read from the entry's file."""
        file = self._payloads.get((id_, digest))
        if file is None:
            return ()
        try:
            stored = read_entry(self._run_dir, file.group, file.number, file.kind).stored
        except FileDamaged:
            return ()
        return (stored.edits or ()) if isinstance(stored, StoredPayload) else ()

    def check_start(self, saved: Saved | None) -> None:
        """As in `Journal`."""
        check_start(self._run_dir, self._files, self._damaged, self._payloads, saved)

    def stage_before(self, before: Update) -> Content:
        """As in `Journal`."""
        # A name that readers ignore: the entry's number is not known yet.
        path = self._fence.directory / f"{TEMPORARY}before-{next(self._staged)}"
        sha256, nbytes = _write_update(path, before)
        return path.name, sha256, nbytes

    def load_before(self, sequence: int) -> Update | None:
        """As in `Journal`."""
        file = self._before.get(sequence)
        if file is None or not isinstance(file.stored, StoredBefore):
            return None
        return read_before(file.payload_path(self._run_dir), file.stored)

    def history(self) -> History:
        """As in `Journal`."""
        return History(file.entry() for file in self._files)

    def remove_payloads(self, held: Container[int], pending: Container[tuple[str, str]] | None) -> int:
        """As in `Journal`. Removes nothing if an entry is damaged, or a later group has taken over."""
        if self._damaged or self._fence.is_taken_over():
            return 0
        unneeded = unneeded_payloads(self._files, held, self._fence.number, pending)
        removed = 0
        for file in [file for file in unneeded if file.place not in self._removed]:
            try:
                file.payload_path(self._run_dir).unlink()
                removed += 1
            except FileNotFoundError:
                pass  # An earlier attempt has removed it.
            except OSError:
                continue  # It is retried next time.
            self._removed.add(file.place)
        return removed

    def _take_in(self, file: EntryFile) -> None:
        file = file.without_edits()
        self._files.append(file)
        if file.payload_key is not None:
            self._payloads[file.payload_key] = file
        if isinstance(file.stored, StoredBefore):
            self._before[file.stored.sequence] = file
        self._committed += isinstance(file.stored, Committed)
        if len(self._files) - self._indexed >= INDEX_EVERY:
            self._write_index()

    def _write_index(self) -> None:
        """An index has no holes: while an entry is damaged, an earlier index stays."""
        if self._damaged:
            return
        self._indexed = len(self._files)
        with contextlib.suppress(OSError):  # The index is derived: the entries have the same content.
            write_index(self._run_dir, self._fence.number, self._files)


class MemoryJournal(Journal):
    """A journal without files: for jobs without durability, and for tests.

    It keeps only the latest updates, up to `KEPT_BYTES` in total.
    """

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._updates: OrderedDict[tuple[str, str], Update] = OrderedDict()
        self._kept_bytes = 0
        self._staged = itertools.count(1)
        self._lock = threading.Lock()

    def write(self, entry: Entry, update: Update | None = None) -> None:
        """As in `Journal`."""
        if isinstance(entry, Saved):
            raise ValueError(_NO_ENTRY)
        if isinstance(entry, Payload):
            update = _checked(entry, update)
            if update.nbytes <= KEPT_BYTES:  # a copy: what was received is in memory that is used again
                arrays = [copied(array) for array in update.arrays()]
                self._keep((entry.id, entry.digest), Update.from_parts(update.describe(), arrays))
            entry = Payload(entry.id, entry.digest, (entry.id, entry.digest), entry.author, entry.note)
        self._entries.append(entry)

    def load(self, id_: str, digest: str) -> Update:
        """As in `Journal`."""
        update = self._updates.get((id_, digest))
        if update is None:
            raise PayloadRemoved(id_, "the journal is in memory", remedy="Propose the update again")
        return update

    def edits(self, id_: str, digest: str) -> tuple[Mapping[str, Any], ...]:
        """As in `Journal`."""
        update = self._updates.get((id_, digest))
        return () if update is None else tuple(summary(edit) for edit in update.edits)

    def check_start(self, saved: Saved | None) -> None:
        """As in `Journal`. What is not in memory is refused when it is loaded."""

    def stage_before(self, before: Update) -> Content:
        """As in `Journal`."""
        number = next(self._staged)
        self._keep((_BEFORE, str(number)), before)
        return number

    def load_before(self, sequence: int) -> Update | None:
        """As in `Journal`."""
        entries = (one for one in reversed(self._entries) if isinstance(one, Before))
        entry = next((one for one in entries if one.sequence == sequence), None)
        if entry is None:
            return None
        before = self._updates.get((_BEFORE, str(entry.content)))
        if before is None:
            gone = f"The values before update {sequence} are not kept any more: the journal is in memory"
            raise UpdateRefused(entry.problem or gone, remedy=NOT_KEPT)
        return before

    def history(self) -> History:
        """As in `Journal`."""
        return History(self._entries)

    def remove_payloads(self, held: Container[int], pending: Container[tuple[str, str]] | None) -> int:
        """As in `Journal`. Removes nothing, since the size is bounded."""
        return 0

    def _keep(self, key: tuple[str, str], update: Update) -> None:
        with self._lock:
            self._forget(key)
            self._updates[key] = update
            self._kept_bytes += update.nbytes
            while self._kept_bytes > KEPT_BYTES:
                self._forget(next(iter(self._updates)))

    def _forget(self, key: tuple[str, str]) -> None:
        update = self._updates.pop(key, None)
        self._kept_bytes -= 0 if update is None else update.nbytes


def _stored(entry: Entry, update: Update | None, path: RunPath) -> Stored:
    """The content of an entry's file. For a payload, first writes its bytes durably."""
    if isinstance(entry, Saved):
        raise ValueError(_NO_ENTRY)
    if isinstance(entry, Before):
        return _stored_before(entry, path)
    if not isinstance(entry, Payload):
        return entry
    update = _checked(entry, update)
    sha256, nbytes = _write_update(path, update)
    faults.point("journal")
    edits = tuple(summary(edit) for edit in update.edits)
    return StoredPayload(entry.id, entry.digest, entry.author, entry.note, sha256, nbytes, edits)


def _stored_before(entry: Before, path: RunPath) -> StoredBefore:
    """Gives values that were staged their final name."""
    if not isinstance(entry.content, tuple):
        return StoredBefore(entry.sequence, entry.id, problem=entry.problem)
    staged, sha256, nbytes = entry.content
    path.with_name(staged).rename(path)
    sync_directory(path.parent)
    return StoredBefore(entry.sequence, entry.id, sha256, nbytes)


def _write_update(path: RunPath, update: Update) -> tuple[str, int]:
    """Writes an update's file durably; gives its sha256 and its size."""
    hasher, nbytes = hashlib.sha256(), 0

    def counted() -> Iterator[bytes | memoryview]:
        nonlocal nbytes
        for chunk in update.file_chunks():
            hasher.update(chunk)
            nbytes += len(chunk)
            yield chunk

    write_durably(path, counted())
    return hasher.hexdigest(), nbytes


def _checked(payload: Payload, update: Update | None) -> Update:
    if update is None or update.id != payload.id:
        received = None if update is None else update.id
        raise ValueError(f"A payload must be written with its update, {payload.id}. Received: {received}")
    return update


def _not_written(run_dir: RunDir, error: OSError) -> str:
    return (
        f"The journal cannot be written ({error.strerror}). "
        f"Free space on the disk of {run_dir}, or repair it, and propose the update again."
    )


def _perhaps_written(path: RunPath, error: OSError) -> str:
    return (
        f"{path.name.partition('.')[0]} of {path.parent} was renamed, and then its directory could not be "
        f"synced ({error.strerror}). Only the next attempt of the job can tell whether it was written."
    )
