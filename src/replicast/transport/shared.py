"""The transport within one host: one copy of the bytes in shared memory, which each worker maps.

**One file, one owner.** A file is created without a name, locked by its creator, and only then linked to its
name. The kernel releases the lock when the process dies, even by kill -9. So a named file whose lock can be
taken has no owner any more, and the next process that starts removes it.

**Memory is used again.** Allocating, clearing and mapping new memory takes longer than to copy and verify
the bytes. So parcels that workers only read (`to_read`) use the same memory, one after the other: the source
keeps a file once no worker uses it any more, and the others keep their mapping of it. Other parcels are
mapped privately. A source that publishes a parcel in memory of an earlier one (`Parcel.memory`) knows that no
worker of the job uses the earlier one any more. So another host that has the earlier one may write over it
too (`chain.Mirrors`), and nothing else has to be said.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from replicast.deadline import Deadline
from replicast.errors import ClusterError
from replicast.mapped_memory import Bytes, map_private, map_shared, map_to_read
from replicast.tensorfiles import Array
from replicast.transport.base import (
    Inspect,
    Parcel,
    Transport,
    arrays_in,
    check_share,
    damaged,
    lay_out,
    no_inspection,
    no_room,
    not_arrived,
    path_part,
    write_out,
)

logger = logging.getLogger("replicast")

KEPT_BYTES = (1 << 20, 1 << 31)  # The smallest and the largest file that is kept for the next parcel.
# All files that the workers of a host keep take at most one part in this many of the file system.
KEPT_PART = 8
_POLL_SECS = 0.002
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class SharedFile:
    """A file of this process that others can map once it is complete."""

    def __init__(self, directory: Path, nbytes: int) -> None:
        self.name = ""  # of the first parcel in it, if it may be used again
        self._path: Path | None = None
        self._descriptor = _unnamed_file(directory)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(self._descriptor, 0, nbytes)
            self.buffer: Bytes = map_shared(self._descriptor, nbytes)
        except BaseException:
            os.close(self._descriptor)
            raise

    @property
    def nbytes(self) -> int:
        return len(self.buffer)

    def descriptor(self) -> int:
        """Another descriptor of the file, which the caller closes."""
        return os.dup(self._descriptor)

    def complete(self, path: Path) -> None:
        """Links the written file to its name, so that others can map it."""
        # Python follows the link in /proc only if it is given a directory descriptor, which is not used.
        os.link(f"/proc/self/fd/{self._descriptor}", path, src_dir_fd=self._descriptor)
        self._path = path

    def hide(self) -> None:
        """Removes the name: nobody else can map the file, and it ends with the last process that has."""
        if self._path is not None:
            with contextlib.suppress(OSError):  # the directory may be gone
                self._path.unlink()
            self._path = None

    def remove(self) -> None:
        """Removes the file; mappings of it stay valid. Never raises. Call it once."""
        self.hide()
        os.close(self._descriptor)


@contextlib.contextmanager
def opened(path: Path, access: int = os.O_RDONLY) -> Iterator[int]:
    """A complete file of this user, open for reading or with another access."""
    descriptor = os.open(path, access | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_uid != os.getuid():
            raise FileNotFoundError(errno.ENOENT, "The file belongs to another user", str(path))
        yield descriptor
    finally:
        os.close(descriptor)


def name_prefix() -> str:
    return f"replicast-memory-{os.getuid()}-"


def remove_leftovers(directory: Path) -> list[Path]:
    """Removes the files of this user whose owner is dead; returns their paths."""
    removed = []
    with contextlib.suppress(OSError):
        for path in sorted(directory.glob(f"{name_prefix()}*")):
            if _remove_if_left(path):
                removed.append(path)
                logger.info("removed %s, which a process that has died left behind", path)
    return removed


def _remove_if_left(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # a link, another user's, or already gone
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink()
    except OSError:  # its owner is alive, or it is a directory
        return False
    finally:
        os.close(descriptor)
    return True


def _unnamed_file(directory: Path) -> int:
    return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)


# --- Within one host -------------------------------------------------------------------------------------


class SharedMemoryTransport(Transport):
    """One worker's end. Opening it removes the files that dead processes of this user left behind."""

    def __init__(
        self, job: str, rank: int, *, directory: Path, local_ranks: Sequence[int] | None = None
    ) -> None:
        self._rank = rank
        self._local_ranks = (rank,) if local_ranks is None else tuple(local_ranks)
        self._directory = directory
        self._job = path_part(job)
        self._published: dict[str, SharedFile] = {}
        self._to_read: dict[str, list[Array]] = {}
        self._kept: SharedFile | None = None
        self._mapped: dict[int, tuple[str, Bytes]] = {}  # by source: its memory that was read last
        self._closed = False
        self._lock = threading.Lock()
        try:
            os.close(_unnamed_file(directory))
        except OSError as error:
            raise ClusterError(
                f"{directory} cannot be used for shared memory",
                received=str(error),
                remedy="Set REPLICAST_SHM_DIR to a directory in a tmpfs, such as /dev/shm",
            ) from error
        remove_leftovers(directory)

    def publish(self, parcel_id: str, arrays: Sequence[Array], *, to_read: bool = False) -> Parcel:
        path_part(parcel_id)
        pieces, nbytes = lay_out(arrays)
        file = self.reserve(nbytes, to_read=to_read)
        try:
            blocks = write_out(arrays, pieces, file.buffer)
            if not file.name:
                file.complete(self.path(parcel_id))
                file.name = parcel_id if to_read else ""
        except BaseException:
            file.remove()
            raise
        self._published[parcel_id] = file
        if to_read:
            self._to_read[parcel_id] = arrays_in(file.buffer, pieces)
        return Parcel(parcel_id, self._rank, nbytes, pieces, blocks, file.name, to_read)

    def receive(self, parcel: Parcel, timeout_secs: float, inspect: Inspect = no_inspection) -> list[Array]:
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
        if reuse and file.name and self.is_worth_keeping(file.nbytes):
            with self._lock:
                if not self._closed:
                    file, self._kept = self._kept, file
        if file is not None:
            file.remove()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            kept, self._kept = self._kept, None
            self._mapped.clear()
        if kept is not None:
            kept.remove()
        for parcel_id in list(self._published):
            self.release(parcel_id)

    def mapped(self, parcel: Parcel, timeout_secs: float) -> Bytes:
        """Waits for the bytes of a parcel and maps them; does not verify them."""
        with self._lock:
            name, known = self._mapped.get(parcel.source, ("", None))
        if known is not None and name == parcel.memory:
            return known
        with self.waited_for(parcel, timeout_secs) as descriptor:
            if not parcel.memory:
                return map_private(descriptor, parcel.nbytes)
            found = map_to_read(descriptor, os.fstat(descriptor).st_size)
        if self.is_worth_keeping(len(found)):  # else the source frees it, and a mapping would hold it
            with self._lock:
                self._mapped[parcel.source] = parcel.memory, found
        return found

    @contextlib.contextmanager
    def waited_for(self, parcel: Parcel, timeout_secs: float) -> Iterator[int]:
        """The file of a parcel, once its source has completed it."""
        path = self.path(parcel.memory or parcel.id)
        deadline = Deadline(timeout_secs)
        with contextlib.ExitStack() as stack:
            while True:
                try:
                    descriptor = stack.enter_context(opened(path))
                    break
                except FileNotFoundError:
                    if deadline.has_passed():
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
            kept.remove()  # first, because its space may be needed
        status = os.statvfs(self._directory)
        try:
            return SharedFile(self._directory, nbytes)
        except OSError as error:
            if error.errno not in _NO_ROOM:
                raise
            free = status.f_bavail * status.f_frsize
            remedy = (
                "Free some space there, or set REPLICAST_SHM_DIR to a directory with more (in a container, "
                "increase the size of /dev/shm)"
            )
            raise no_room(nbytes, free, str(self._directory), self._rank, remedy) from error

    def is_worth_keeping(self, nbytes: int) -> bool:
        """Whether files of this size together may be kept by one worker of this host."""
        try:
            status = os.statvfs(self._directory)
        except OSError:  # the directory may be gone
            return False
        shared = status.f_blocks * status.f_frsize // (KEPT_PART * len(self._local_ranks))
        return KEPT_BYTES[0] <= nbytes <= min(KEPT_BYTES[1], shared)

    def path(self, parcel_id: str) -> Path:
        return self._directory / f"{name_prefix()}{self._job}-{parcel_id}"
