"""The transport of one host: the bytes lie once in shared memory, and each worker maps them privately."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from replicast.errors import UpdateRefused
from replicast.transport.arriving import PROGRESS_BYTES, Arrival
from replicast.transport.base import Announce, Look, Parcel, Transport, damaged, no_room, not_arrived
from replicast.transport.directory import JobDirectory
from replicast.transport.layout import Bytes, arrays_in, checked_id, digest_of, lay_out, write_out
from replicast.transport.mapping import bring_in, map_private, map_shared

SPARE_BYTES = (1 << 20, 1 << 28)
"""The smallest and the largest parcel for whose successor a spare file is kept ready."""
ANNOUNCED_BYTES = 1 << 22
"""From here on it is worth a word to the others that a parcel is on its way."""
EXPECTED_AT_ONCE = 4
"""What was announced and never came is given up when so many others were announced since."""
_LOOK_SECS = 0.002
_NOTHING = np.empty(0, np.uint8)


class Draft:
    """A file that is being written.

    It gets its final name when it is complete, and never changes again: a variable may live in a worker's
    mapping of it. Behind the bytes it says how many of them are there, for who follows the writing.

    Args:
        directory: The directory of the job.
        name: Its name until it is complete.
        nbytes: The size of the parcel. All of it is reserved at once: a full file system says so here, and
            not later by a signal that ends the process.
    """

    def __init__(self, directory: JobDirectory, name: str, nbytes: int) -> None:
        self.nbytes = nbytes
        self._directory = directory
        self._name = name
        self.mapped: Bytes | None = None
        """For writing, when it is warm."""
        self._progress: npt.NDArray[np.int64] | None = None
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._descriptor = os.open(name, flags, 0o600, dir_fd=directory.descriptor)
        try:
            os.posix_fallocate(self._descriptor, 0, nbytes + PROGRESS_BYTES)
        except BaseException:
            self.discard()
            raise

    def warm_up(self) -> None:
        """Maps it and touches every page, so that writing it will be one copy and nothing else."""
        self.mapped = map_shared(self._descriptor, self.nbytes + PROGRESS_BYTES)
        self.mapped[::4096] = 0
        self._progress = self.mapped[self.nbytes :].view(np.int64)

    def write(self, offset: int, data: Bytes) -> None:
        """Writes bytes. Without a mapping that is warm already, the kernel's own copy is the quicker one."""
        if self.mapped is not None:
            self.mapped[offset : offset + len(data)] = data
            return
        view = data.data
        while view:
            written = os.pwrite(self._descriptor, view, offset)
            view, offset = view[written:], offset + written

    def write_in_order(self, offset: int, data: Bytes) -> None:
        """Writes bytes, all before them being written, and says how far it has come."""
        self.write(offset, data)
        if self._progress is not None:
            self._progress[0] = offset + len(data)
        else:
            self.write(self.nbytes, np.array([offset + len(data)], np.int64).view(np.uint8))

    def rename(self, name: str) -> None:
        """Gives it another name."""
        held = self._directory.descriptor
        os.rename(self._name, name, src_dir_fd=held, dst_dir_fd=held)
        self._name = name

    def complete(self, name: str) -> None:
        """Gives it its final name."""
        self.rename(name)
        os.close(self._descriptor)

    def discard(self) -> None:
        """Removes it."""
        os.close(self._descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._name, dir_fd=self._directory.descriptor)


class SharedMemoryTransport(Transport):
    """One worker's end.

    Publishing into a new file costs three times as much as the copy itself: the kernel has to find and clear
    the pages. So when a parcel is released, a thread of its own makes a spare file of the same size ready for
    the next one, which is often as large.

    Args:
        job: The name of the job, the same on all its workers and unlike that of any other.
        rank: Which worker this is.
        directory: Where shared memory is, such as /dev/shm.
    """

    def __init__(self, job: str, rank: int, *, directory: Path) -> None:
        self._rank = rank
        self._directory = JobDirectory(directory, job)
        self._published: dict[str, Draft] = {}
        self._digests: dict[str, str] = {}
        self._lent: dict[str, Bytes] = {}
        self._spare: Draft | None = None
        self._preparing: threading.Thread | None = None
        self._changing_spare = threading.Lock()
        self._expected: dict[str, Arrival] = {}
        self._closed = False

    def publish(  # noqa: D102
        self,
        parcel_id: str,
        arrays: Sequence[npt.NDArray[Any]],
        announce: Announce | None = None,
        *,
        to_read: bool = False,
    ) -> Parcel:
        checked_id(parcel_id)
        pieces, nbytes = lay_out(arrays)
        draft = self.reserve(nbytes)
        if to_read and draft.mapped is not None:
            self._lent[parcel_id] = draft.mapped[:nbytes]
        try:
            if announce is not None and nbytes >= ANNOUNCED_BYTES:
                draft.rename(_coming(parcel_id))
                announce(Parcel(parcel_id, self._rank, nbytes, "", pieces))
            digest = write_out(arrays, pieces, nbytes, draft.write_in_order)
            draft.write_in_order(nbytes, _NOTHING)
        except BaseException:
            self._lent.pop(parcel_id, None)
            draft.discard()
            raise
        self.complete(parcel_id, draft)
        self._digests[parcel_id] = digest
        return Parcel(parcel_id, self._rank, nbytes, digest, pieces)

    def expect(self, parcel: Parcel, look: Look = lambda *_: None) -> None:  # noqa: D102
        if self._closed or parcel.id in self._lent:
            return
        names = (_coming(parcel.id), _file_of(parcel.id))
        is_own = parcel.source == self._rank  # then it is only mapped
        self._expected[parcel.id] = Arrival(parcel, lambda: self._open(names), None if is_own else look)
        while len(self._expected) > EXPECTED_AT_ONCE:
            self._expected.pop(next(iter(self._expected))).give_up()

    def receive(self, parcel: Parcel, timeout_secs: float) -> list[npt.NDArray[Any]]:  # noqa: D102
        arrival = self._expected.pop(parcel.id, None)
        taken = None if arrival is None else arrival.result(timeout_secs)
        # The source knows what it has written; the others look at the same memory.
        own = self._digests.get(parcel.id)
        lent = self._lent.get(parcel.id)
        if lent is not None and own == parcel.digest:
            return arrays_in(lent, parcel)
        if taken is not None and parcel.digest in (own, taken[1]):
            return arrays_in(taken[0], parcel)
        data = self.mapped(parcel, timeout_secs)
        bring_in(data)
        found = own or digest_of(data)
        if found != parcel.digest:
            raise damaged(parcel, found, self._rank)
        return arrays_in(data, parcel)

    def mapped(self, parcel: Parcel, timeout_secs: float) -> Bytes:
        """The bytes of a parcel in a private mapping of their own, as they are: no digest is looked at."""
        descriptor = self._opened(parcel, timeout_secs)
        try:
            size = os.fstat(descriptor).st_size
            expected = parcel.nbytes + PROGRESS_BYTES
            if size != expected:  # reading behind its end would end this process
                raise damaged(parcel, f"of {size:,} bytes instead of {expected:,}", self._rank)
            return map_private(descriptor, parcel.nbytes)
        finally:
            os.close(descriptor)

    def release(self, parcel_id: str) -> None:  # noqa: D102
        arrival = self._expected.pop(parcel_id, None)
        if arrival is not None:
            arrival.give_up()
        self._digests.pop(parcel_id, None)
        self._lent.pop(parcel_id, None)
        draft = self._published.pop(parcel_id, None)
        if draft is None:
            return
        self._unlink(parcel_id)
        if SPARE_BYTES[0] <= draft.nbytes <= SPARE_BYTES[1] and not self._closed:
            self._prepare(draft.nbytes)

    def close(self) -> None:  # noqa: D102
        self._closed = True
        for parcel_id in list(self._published):
            self.release(parcel_id)
        while self._expected:
            self._expected.popitem()[1].give_up()
        spare = self._take_spare()
        if spare is not None:
            spare.discard()
        self._directory.close()

    def reserve(self, nbytes: int) -> Draft:
        """A file to write a parcel into, for `complete` or to be discarded.

        Raises:
            UpdateRefused: There is no room.
        """
        spare = self._take_spare()
        if spare is not None:
            if spare.nbytes == nbytes:
                return spare
            spare.discard()  # first, because its room may be needed
        try:
            return self._draft(nbytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            raise self._no_room(nbytes) from error

    def complete(self, parcel_id: str, draft: Draft) -> None:
        """Makes a written parcel visible to the workers of this host. This worker's release removes it."""
        draft.complete(_file_of(parcel_id))
        self._published[parcel_id] = draft

    def _draft(self, nbytes: int) -> Draft:
        return Draft(self._directory, f"draft-{self._rank}-{secrets.token_hex(8)}", nbytes)

    def _no_room(self, nbytes: int) -> UpdateRefused:
        held = os.fstatvfs(self._directory.descriptor)
        return no_room(
            nbytes,
            held.f_bavail * held.f_frsize,
            str(self._directory.path.parent),
            self._rank,
            "Make room there, or set REPLICAST_SHM_DIR to a directory that has it (in a container, give it "
            "a larger /dev/shm)",
        )

    def _opened(self, parcel: Parcel, timeout_secs: float) -> int:
        until = time.monotonic() + timeout_secs
        while True:
            try:
                return self._open([_file_of(parcel.id)])
            except FileNotFoundError:
                if time.monotonic() >= until:
                    raise not_arrived(parcel, timeout_secs, self._rank, parcel.source) from None
            time.sleep(_LOOK_SECS)

    def _open(self, names: Sequence[str]) -> int:
        """A descriptor of the first of these files that is there."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
        for name in names[:-1]:
            with contextlib.suppress(FileNotFoundError):
                return os.open(name, flags, dir_fd=self._directory.descriptor)
        return os.open(names[-1], flags, dir_fd=self._directory.descriptor)

    def _unlink(self, parcel_id: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(_file_of(parcel_id), dir_fd=self._directory.descriptor)

    def _prepare(self, nbytes: int) -> None:
        spare = self._take_spare()
        if spare is not None:
            spare.discard()
        thread = threading.Thread(
            target=self._make_spare, args=(nbytes,), name="replicast-spare", daemon=True
        )
        with self._changing_spare:
            self._preparing = thread
            thread.start()

    def _make_spare(self, nbytes: int) -> None:
        with contextlib.suppress(OSError):  # no room for a spare is no harm
            spare = self._draft(nbytes)
            try:
                spare.warm_up()
            except OSError:
                spare.discard()
                raise
            self._spare = spare

    def _take_spare(self) -> Draft | None:
        with self._changing_spare:
            if self._preparing is not None:
                self._preparing.join()
            spare, self._spare, self._preparing = self._spare, None, None
            return spare


def _file_of(parcel_id: str) -> str:
    return f"parcel-{parcel_id}"


def _coming(parcel_id: str) -> str:
    return f"coming-{parcel_id}"
