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

The chain between hosts uses the same parcels: arrays in one buffer, with a digest of each block.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import ml_dtypes  # noqa: F401 - makes bfloat16 and the 8-bit floats known to numpy by name
import numpy as np

from replicast.codec import Record
from replicast.errors import ClusterError, UpdateRefused, logger
from replicast.mapped_memory import ALIGNMENT, Bytes, aligned, map_private, map_shared, map_to_read
from replicast.processes import Deadline
from replicast.update.digest import DIGITS, blocks_of, digest_block, digest_of_blocks, name_of
from replicast.update.edits import Array

KEPT_BYTES = (1 << 20, 1 << 31)  # The smallest and the largest file that is kept for the next parcel.
# All files that the workers of a host keep take at most one part in this many of the file system.
KEPT_PART = 8
_POLL_SECS = 0.002
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# Called with the index of an array in the parcel, and a flat chunk of that array.
Inspect = Callable[[int, Array], None]
_PARCEL_ID = re.compile(r"[A-Za-z0-9._-]{1,100}")


class Piece(Record):
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class Parcel(Record):
    """The description of a parcel, which the source sends to the others so that they can fetch the bytes."""

    id: str
    source: int
    nbytes: int
    arrays: tuple[Piece, ...]
    blocks: str
    memory: str = ""  # the first parcel in this memory of the source, if it may be used again
    to_read: bool = False

    @property
    def digest(self) -> str:
        """One digest of the bytes of all arrays; independent of their offsets."""
        return digest_of_blocks(self.blocks)


def damaged(parcel: Parcel, expected: str, received: str, worker: int) -> UpdateRefused:
    return UpdateRefused(
        f"The bytes of parcel {parcel.id!r} from worker {parcel.source} arrived damaged at worker {worker}",
        expected=expected,
        received=received,
        worker=worker,
        remedy="Propose it again; if it happens again, check that worker's memory and network",
    )


def damaged_block(parcel: Parcel, block: int, found: str, worker: int) -> UpdateRefused | None:
    """The refusal of a block whose bytes have another digest than those that the source published."""
    expected = parcel.blocks[DIGITS * block : DIGITS * (block + 1)]
    if found == expected:
        return None
    return damaged(parcel, f"digest {expected} of block {block}", f"digest {found}", worker)


def not_arrived(parcel: Parcel, timeout_secs: float, worker: int, waited_for: int) -> UpdateRefused:
    return UpdateRefused(
        f"Worker {worker} waited {timeout_secs:g} s for parcel {parcel.id!r} from worker {waited_for}",
        expected=f"{parcel.nbytes:,} bytes from worker {waited_for}",
        received="nothing",
        worker=worker,
        remedy=f"See worker {waited_for}'s log for the reason, then propose it again",
    )


# The layout of arrays in one buffer, and its verification: pure functions between arrays and bytes.


def path_part(name: str) -> str:
    """The id of a parcel or a job, if it can be part of a file name."""
    if not _PARCEL_ID.fullmatch(name):
        raise ValueError(
            "The id of a parcel or a job consists of at most 100 letters, digits, dots, hyphens and "
            f"underscores. Received: {name!r}"
        )
    return name


def lay_out(arrays: Sequence[Array]) -> tuple[tuple[Piece, ...], int]:
    """The position of each array, and the size of the buffer: a multiple of 64 bytes, and at least 64."""
    pieces = []
    end = 0
    for array in arrays:
        if array.dtype.hasobject or array.dtype.kind in "SUMm" or name_of(array.dtype).startswith("void"):
            raise TypeError(f"Only arrays of numbers can be sent. Received: dtype {array.dtype}")
        pieces.append(Piece(name_of(array.dtype), tuple(array.shape), end))
        end += aligned(array.nbytes)
    return tuple(pieces), max(end, ALIGNMENT)


def write_out(arrays: Sequence[Array], pieces: Sequence[Piece], buffer: Bytes) -> str:
    """Copies the arrays into a buffer; returns the digests of the copies' blocks."""
    digests = []
    for place, start, content in blocks_of(arrays):
        target = buffer[pieces[place].offset + start :]

        def copy(at: int, chunk: Bytes, target: Bytes = target) -> Bytes:
            written = target[at : at + len(chunk)]
            written[:] = chunk
            return written

        digests.append(digest_block(content, copy))
    return "".join(digests)


def arrays_in(buffer: Bytes, pieces: Sequence[Piece]) -> list[Array]:
    """The arrays in a buffer, as views that keep it alive."""
    return [
        buffer[piece.offset : piece.offset + piece.nbytes].view(piece.dtype).reshape(piece.shape)
        for piece in pieces
    ]


def check_share(
    parcel: Parcel, arrays: Sequence[Array], rank: int, local_ranks: Sequence[int], inspect: Inspect
) -> None:
    """Verifies this worker's share of the blocks of a parcel, and inspects their values in the same pass."""
    for number, (place, _, content) in enumerate(blocks_of(arrays)):
        if local_ranks[number % len(local_ranks)] != rank:
            continue

        def inspected(_: int, chunk: Bytes, place: int = place) -> Bytes:
            inspect(place, chunk.view(arrays[place].dtype))
            return chunk

        refusal = damaged_block(parcel, number, digest_block(content, inspected), rank)
        if refusal is not None:
            raise refusal


# Files in shared memory.


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
            # Not those that cannot be opened (a link, another user's, already gone) or locked (its owner is
            # alive), and no directory.
            with contextlib.suppress(OSError), opened(path, os.O_RDONLY | os.O_NONBLOCK) as descriptor:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(path)
                logger.info("removed %s, which a process that has died left behind", path)
    return removed


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
            problem = f"{directory} cannot be used for shared memory"
            remedy = "Set REPLICAST_SHM_DIR to a directory in a tmpfs, such as /dev/shm"
            raise ClusterError(problem, received=str(error), remedy=remedy) from error
        remove_leftovers(directory)  # of dead processes of this user

    def publish(self, parcel_id: str, arrays: Sequence[Array], *, to_read: bool = False) -> Parcel:
        """Makes copies of the arrays available to all workers. Only on the source."""
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
            with self._lock:
                name, content = self._mapped.get(parcel.source, ("", None))
            if content is None or name != parcel.memory:
                with self._waited_for(parcel, timeout_secs) as descriptor:
                    if parcel.memory:
                        content = map_to_read(descriptor, os.fstat(descriptor).st_size)
                    else:
                        content = map_private(descriptor, parcel.nbytes)
                # Otherwise the source frees the memory, and a mapping would hold it.
                if parcel.memory and self._is_worth_keeping(len(content)):
                    with self._lock:
                        self._mapped[parcel.source] = parcel.memory, content
            arrays = arrays_in(content, parcel.arrays)
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
        with self._lock:
            file = self._kept.pop(memory or "", None)
        if file is not None and (memory is None or nbytes > file.nbytes):
            file.remove()  # first, because its space may be needed
            file = None
        if file is None:
            status = os.statvfs(self._directory)
            try:
                file = SharedFile(self._directory, nbytes)
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                raise UpdateRefused(
                    f"Worker {self._rank} has no room for the update in {self._directory}",
                    expected=f"{nbytes:,} bytes free",
                    received=f"{status.f_bavail * status.f_frsize:,} bytes free",
                    worker=self._rank,
                    remedy="Free some space there, or set REPLICAST_SHM_DIR to a directory with more (in a "
                    "container, increase the size of /dev/shm)",
                ) from error
        try:
            yield file
            if not file.name:
                file.complete(self._path(parcel_id))
                file.name, file.mirrors = ("", "") if memory is None else (parcel_id, memory)
        except BaseException:
            file.remove()
            raise
        self._files[parcel_id] = file

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
