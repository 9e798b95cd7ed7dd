"""The transport within one host: one copy of the bytes in shared memory, which each worker maps.

Allocating, clearing and mapping new memory takes longer than to copy and verify the bytes. So parcels that
workers only read (`to_read`) use the same memory, one after the other: the source keeps a file once no worker
uses it any more, and the others keep their mapping of it. Other parcels are mapped privately.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy.typing as npt

from replicast.errors import UpdateRefused
from replicast.mapped_memory import Bytes, map_private, map_to_read
from replicast.transport.base import Inspect, Parcel, Transport, damaged, no_room, not_arrived
from replicast.transport.parcel_layout import arrays_in, check_share, checked_id, lay_out, write_out
from replicast.transport.shared_file import SharedFile, check_directory, name_prefix, opened, remove_leftovers

KEPT_BYTES = (1 << 20, 1 << 31)  # The smallest and the largest file that is kept for the next parcel.
# All files that the workers of a host keep take at most one part in this many of the file system.
KEPT_PART = 8
_POLL_SECS = 0.002
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SharedMemoryTransport(Transport):
    """One worker's end. Opening it removes the files that dead processes of this user left behind."""

    def __init__(
        self, job: str, rank: int, *, directory: Path, local_ranks: Sequence[int] | None = None
    ) -> None:
        self._rank = rank
        self._local_ranks = (rank,) if local_ranks is None else tuple(local_ranks)
        self._directory = directory
        self._job = checked_id(job)
        self._published: dict[str, SharedFile] = {}
        self._to_read: dict[str, list[npt.NDArray[Any]]] = {}
        self._names: dict[SharedFile, str] = {}  # of the files that may be used again
        self._kept: SharedFile | None = None
        self._mapped: dict[int, tuple[str, Bytes]] = {}  # by source: its memory that was read last
        self._closed = False
        self._lock = threading.Lock()
        check_directory(directory)
        remove_leftovers(directory)

    def publish(self, parcel_id: str, arrays: Sequence[npt.NDArray[Any]], *, to_read: bool = False) -> Parcel:
        checked_id(parcel_id)
        pieces, nbytes = lay_out(arrays)
        file = self.reserve(nbytes, to_read=to_read)
        try:
            blocks = write_out(arrays, pieces, file.buffer)
            name = self._names.setdefault(file, parcel_id) if to_read else ""
            if name in ("", parcel_id):
                file.complete(self.path(parcel_id))
        except BaseException:
            self._remove(file)
            raise
        self._published[parcel_id] = file
        if to_read:
            self._to_read[parcel_id] = arrays_in(file.buffer, pieces)
        return Parcel(parcel_id, self._rank, nbytes, pieces, blocks, name, to_read)

    def receive(
        self, parcel: Parcel, timeout_secs: float, inspect: Inspect = lambda *_: None
    ) -> list[npt.NDArray[Any]]:
        arrays = self._to_read.get(parcel.id)
        if arrays is None:
            arrays = arrays_in(self.mapped(parcel, timeout_secs), parcel.arrays)
        check_share(parcel, arrays, self._rank, self._local_ranks, inspect)
        return arrays

    def release(self, parcel_id: str, *, reuse: bool = False) -> None:
        self._to_read.pop(parcel_id, None)
        file = self._published.pop(parcel_id, None)
        if file is None:
            return
        if reuse and file in self._names and self.is_worth_keeping(file.nbytes):
            with self._lock:
                if not self._closed:
                    file, self._kept = self._kept, file
        if file is not None:
            self._remove(file)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            kept, self._kept = self._kept, None
            self._mapped.clear()
        if kept is not None:
            self._remove(kept)
        for parcel_id in list(self._published):
            self.release(parcel_id)

    def mapped(self, parcel: Parcel, timeout_secs: float) -> Bytes:
        """Waits for the bytes of a parcel and maps them; does not verify them."""
        with self._lock:
            name, known = self._mapped.get(parcel.source, ("", None))
        if known is not None and name == parcel.memory:
            return known
        with self._opened(parcel, timeout_secs) as descriptor:
            if not parcel.memory:
                return map_private(descriptor, parcel.nbytes)
            found = map_to_read(descriptor, os.fstat(descriptor).st_size)
        if self.is_worth_keeping(len(found)):  # else the source frees it, and a mapping would hold it
            with self._lock:
                self._mapped[parcel.source] = parcel.memory, found
        return found

    def descriptor(self, parcel: Parcel, timeout_secs: float) -> int:
        """Waits for the bytes of a parcel; a descriptor of their file, which the caller closes."""
        with self._opened(parcel, timeout_secs) as descriptor:
            return os.dup(descriptor)

    @contextlib.contextmanager
    def _opened(self, parcel: Parcel, timeout_secs: float) -> Iterator[int]:
        path = self.path(parcel.memory or parcel.id)
        until = time.monotonic() + timeout_secs
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    descriptor = stack.enter_context(opened(path))
                    break
                except FileNotFoundError:
                    if time.monotonic() >= until:
                        raise not_arrived(parcel, timeout_secs, self._rank, parcel.source) from None
                time.sleep(_POLL_SECS)
            size = os.fstat(descriptor).st_size
            if size < parcel.nbytes:  # reading past the end would kill this process
                raise damaged(parcel, f"{parcel.nbytes:,} bytes", f"{size:,} bytes", self._rank)
            yield descriptor

    def reserve(self, nbytes: int, *, to_read: bool = False) -> SharedFile:
        """A file for a parcel, which the caller completes or removes."""
        with self._lock:
            kept, self._kept = self._kept, None
        if kept is not None:
            if to_read and nbytes <= kept.nbytes:
                return kept
            self._remove(kept)  # first, because its space may be needed
        status = os.statvfs(self._directory)
        try:
            return SharedFile(self._directory, nbytes)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            raise self._no_room(nbytes, status.f_bavail * status.f_frsize) from error

    def complete(self, parcel_id: str, file: SharedFile) -> None:
        """Makes a written parcel visible to the workers of this host, until this worker releases it."""
        file.complete(self.path(parcel_id))
        self._published[parcel_id] = file

    def is_worth_keeping(self, nbytes: int) -> bool:
        """Whether files of this size together may be kept by one worker of this host."""
        try:
            status = os.statvfs(self._directory)
        except OSError:  # the directory may be gone
            return False
        shared = status.f_blocks * status.f_frsize // (KEPT_PART * len(self._local_ranks))
        return KEPT_BYTES[0] <= nbytes <= min(KEPT_BYTES[1], shared)

    def _remove(self, file: SharedFile) -> None:
        self._names.pop(file, None)
        file.remove()

    def path(self, parcel_id: str) -> Path:
        return self._directory / f"{name_prefix()}{self._job}-{parcel_id}"

    def _no_room(self, nbytes: int, free: int) -> UpdateRefused:
        return no_room(
            nbytes,
            free,
            str(self._directory),
            self._rank,
            "Free some space there, or set REPLICAST_SHM_DIR to a directory with more (in a container, "
            "increase the size of /dev/shm)",
        )
