"""Moves parcels of arrays between workers; within one host by one copy in shared memory, which each maps.

**One file, one owner.** A file is created without a name, locked by its creator, and only then linked to its
name. The kernel releases the lock when the process dies, even by kill -9. So a named file whose lock can be
taken has no owner any more, and the next process that starts removes it.

**Memory is used again.** Allocating, clearing and mapping new memory takes longer than to copy and verify
the bytes. So parcels that workers only read (`to_read`) use the same memory, one after the other: the source
keeps a file once no worker uses it any more, and the others keep their mapping of it. Other parcels are
mapped privately. A source that publishes a parcel in memory of an earlier one (`Parcel.memory`) knows that no
worker of the job uses the earlier one any more. So another host may then write over the file in which it has
received the earlier one (`SharedFile.mirrors`), and nothing else has to be said.
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
from replicast.transport.parcel import (
    Inspect,
    Parcel,
    arrays_in,
    check_share,
    damaged,
    lay_out,
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
        self.mirrors = ""  # the memory of a worker of another host whose bytes it has received
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


class Transport:
    """Carries parcels from one worker to all workers of its host. To those of other hosts: `ChainTransport`.

    ```
    source:  publish ──► describe to all ──► receive ──► all have it ──► release
    others:              description ──────► receive ──► confirm     ──► release
    ```
    All methods may be called from any thread, including `receive` for several parcels at once, in any order.
    """

    def __init__(
        self, job: str, rank: int, *, directory: Path, local_ranks: Sequence[int] | None = None
    ) -> None:
        self._rank = rank
        self._local_ranks = (rank,) if local_ranks is None else tuple(local_ranks)
        self._directory = directory
        self._job = path_part(job)
        self._files: dict[str, SharedFile] = {}  # what this worker has published or received for its host
        self._to_read: dict[str, list[Array]] = {}
        # To be used again: "" for what this worker publishes, otherwise the memory of another host's worker.
        self._kept: dict[str, SharedFile] = {}
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
        remove_leftovers(directory)  # of dead processes of this user

    def publish(self, parcel_id: str, arrays: Sequence[Array], *, to_read: bool = False) -> Parcel:
        """Makes the arrays available to all workers. Only on the source.

        The arrays are copied before this returns and may be changed afterwards.
        """
        path_part(parcel_id)
        pieces, nbytes = lay_out(arrays)
        with self._filled(parcel_id, nbytes, "" if to_read else None) as file:
            blocks = write_out(arrays, pieces, file.buffer)
        if to_read:
            self._to_read[parcel_id] = arrays_in(file.buffer, pieces)
        return Parcel(parcel_id, self._rank, nbytes, pieces, blocks, file.name, to_read)

    def receive(
        self, parcel: Parcel, timeout_secs: float, inspect: Inspect = lambda index, chunk: None
    ) -> list[Array]:
        """Receives the arrays. On every worker, the source included.

        Blocks until the bytes have arrived, at most `timeout_secs`. Unless the parcel was published
        `to_read`, the arrays are private to this worker: they are writable, no other worker sees the writes,
        and they stay valid after any release or close.

        Workers that share memory also share the verification: each verifies some of the blocks, and damage
        found by one counts for all. So a parcel is intact once all workers have received it.
        """
        arrays = self._to_read.get(parcel.id)
        if arrays is None:
            arrays = arrays_in(self._bytes_of(parcel, timeout_secs), parcel.arrays)
        check_share(parcel, arrays, self._rank, self._local_ranks, inspect)
        return arrays

    def release(self, parcel_id: str, *, reuse: bool = False) -> None:
        """Releases the parcel on this worker. Never raises; a second call does nothing.

        Call it when every worker has received the parcel or given up. The memory is freed when the source
        releases the parcel; on other hosts, when the worker that received the bytes for that host does. With
        `reuse`, no worker reads it any more: the source may use its memory for the next one.
        """
        self._to_read.pop(parcel_id, None)
        file = self._files.pop(parcel_id, None)
        if file is None:
            return
        given_back = [file]
        if (reuse or file.mirrors) and file.name and self._is_worth_keeping(file.nbytes):
            with self._lock:
                if not self._closed:
                    # One of its own, and one of another host's worker.
                    same = [memory for memory in self._kept if bool(memory) is bool(file.mirrors)]
                    given_back = [self._kept.pop(memory) for memory in same]
                    self._kept[file.mirrors] = file
        for one in given_back:
            one.remove()

    def close(self) -> None:
        """Releases everything but the received arrays. A second call does nothing."""
        with self._lock:
            self._closed = True
            kept = list(self._kept.values())
            self._kept.clear()
            self._mapped.clear()
        for file in kept:
            file.remove()
        for parcel_id in list(self._files):
            self.release(parcel_id)

    @contextlib.contextmanager
    def _filled(self, parcel_id: str, nbytes: int, memory: str | None) -> Iterator[SharedFile]:
        """A file for a parcel, which the caller fills; others can map it afterwards.

        It is used again for what comes into the same memory, if there is one (`_kept`).
        """
        file = self._reserved(nbytes, memory)
        try:
            yield file
            if not file.name:
                file.complete(self._path(parcel_id))
                file.name, file.mirrors = ("", "") if memory is None else (parcel_id, memory)
        except BaseException:
            file.remove()
            raise
        self._files[parcel_id] = file

    def _reserved(self, nbytes: int, memory: str | None) -> SharedFile:
        with self._lock:
            kept = self._kept.pop(memory or "", None)
        if kept is not None:
            if memory is not None and nbytes <= kept.nbytes:
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

    def _bytes_of(self, parcel: Parcel, timeout_secs: float) -> Bytes:
        """Waits for the bytes of a parcel and maps them; does not verify them."""
        with self._lock:
            name, known = self._mapped.get(parcel.source, ("", None))
        if known is not None and name == parcel.memory:
            return known
        with self._waited_for(parcel, timeout_secs) as descriptor:
            if not parcel.memory:
                return map_private(descriptor, parcel.nbytes)
            found = map_to_read(descriptor, os.fstat(descriptor).st_size)
        if self._is_worth_keeping(len(found)):  # else the source frees it, and a mapping would hold it
            with self._lock:
                self._mapped[parcel.source] = parcel.memory, found
        return found

    @contextlib.contextmanager
    def _waited_for(self, parcel: Parcel, timeout_secs: float) -> Iterator[int]:
        """The file of a parcel, once its source has completed it."""
        path = self._path(parcel.memory or parcel.id)
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

    def _is_worth_keeping(self, nbytes: int) -> bool:
        """Whether files of this size together may be kept by one worker of this host."""
        try:
            status = os.statvfs(self._directory)
        except OSError:  # the directory may be gone
            return False
        shared = status.f_blocks * status.f_frsize // (KEPT_PART * len(self._local_ranks))
        return KEPT_BYTES[0] <= nbytes <= min(KEPT_BYTES[1], shared)

    def _path(self, parcel_id: str) -> Path:
        return self._directory / f"{name_prefix()}{self._job}-{parcel_id}"
