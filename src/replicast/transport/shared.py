"""The transport of one host: the bytes lie once in shared memory, and each worker maps them privately."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from replicast.errors import UpdateRefused
from replicast.mapping import Bytes, map_private, map_shared, touch, write_at
from replicast.storing import MAX_PART, Store, drop_spare, offer, prepare, withdraw
from replicast.transport.arriving import PROGRESS_BYTES, Arrival
from replicast.transport.base import Announce, Look, Parcel, Piece, Transport, damaged, no_room, not_arrived
from replicast.transport.checking import Share, check_share
from replicast.transport.directory import JobDirectory
from replicast.transport.layout import arrays_in, checked_id, lay_out, write_out

SPARE_BYTES = (1 << 20, 1 << 28)
"""The smallest and the largest parcel for whose successor a spare file is kept ready."""
ANNOUNCED_BYTES = 1 << 22
"""From here on it is worth a word to the others that a parcel is on its way."""
EXPECTED_AT_ONCE = 4
"""What was announced and never came is given up when so many others were announced since."""
_LOOK_SECS = 0.002
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
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
        """Writes bytes."""
        if self.mapped is not None:
            self.mapped[offset : offset + len(data)] = data
        else:
            write_at(self._descriptor, offset, data)

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
        self.mapped = self._progress = None
        os.close(self._descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._name, dir_fd=self._directory.descriptor)


class SharedMemoryTransport(Transport):
    """One worker's end.

    Publishing into a new file costs three times as much as the copy itself: the kernel has to find and clear
    the pages. So when a parcel is released, a thread of its own makes a spare file of the same size ready for
    the next one, which is often as large. What lies in a store needs no copy at all: the store's file becomes
    the parcel's, and the spare is a store then.

    Args:
        job: The name of the job, the same on all its workers and unlike that of any other.
        rank: Which worker this is.
        directory: Where shared memory is, such as /dev/shm.
        mates: All workers that share it, this one included. Default: it checks by itself what it receives.
    """

    def __init__(self, job: str, rank: int, *, directory: Path, mates: Sequence[int] | None = None) -> None:
        self._rank = rank
        self._mates = (rank,) if mates is None else tuple(mates)
        self._directory = JobDirectory(directory, job)
        self._published: dict[str, Draft | Store] = {}
        self._lent: dict[str, list[npt.NDArray[Any]]] = {}
        self._spare: Draft | None = None
        self._preparing: threading.Thread | None = None
        self._changing_spare = threading.Lock()
        self._expected: dict[str, Arrival] = {}
        self._closed = False
        offer(self._directory.path.parent)

    def publish(  # noqa: D102
        self,
        parcel_id: str,
        arrays: Sequence[npt.NDArray[Any]],
        announce: Announce | None = None,
        *,
        store: Store | None = None,
        to_read: bool = False,
    ) -> Parcel:
        checked_id(parcel_id)
        handed_over = None if store is None else self._hand_over(parcel_id, arrays, store, to_read=to_read)
        if handed_over is not None:
            return handed_over
        pieces, nbytes = lay_out(arrays)
        announced = Parcel(parcel_id, self._rank, nbytes, pieces)
        draft = self.reserve(nbytes)
        if to_read and draft.mapped is not None:
            self._lent[parcel_id] = arrays_in(draft.mapped, announced)
        try:
            if announce is not None and nbytes >= ANNOUNCED_BYTES:
                draft.rename(_coming(parcel_id))
                announce(announced)
            blocks = write_out(arrays, pieces, draft.write_in_order)
            draft.write_in_order(nbytes, _NOTHING)
        except BaseException:
            self._lent.pop(parcel_id, None)
            draft.discard()
            raise
        self.complete(parcel_id, draft)
        return replace(announced, blocks=blocks)

    def _hand_over(
        self, parcel_id: str, arrays: Sequence[npt.NDArray[Any]], store: Store, *, to_read: bool
    ) -> Parcel | None:
        """Makes a store's file the parcel's, if it can be; it is there for as long as the store is."""
        try:
            placed = store.place(arrays)
            if placed is None:
                return None
            file = store.name_in(self._directory.path, self._directory.descriptor)
        except OSError:
            return None
        self._published[parcel_id] = store  # whoever made the update may let it go now
        if to_read:
            self._lent[parcel_id] = [one.array for one in placed]
        pieces = [Piece(one.array.dtype.name, tuple(one.array.shape), one.offset) for one in placed]
        blocks = "".join(one.blocks for one in placed)
        return Parcel(
            parcel_id,
            self._rank,
            max(one.end for one in placed),  # what others append meanwhile, and may take back, is not its own
            tuple(pieces),
            blocks,
            file=file,
            is_finite=all(one.is_finite for one in placed),
        )

    def expect(self, parcel: Parcel, look: Look = lambda *_: None) -> None:  # noqa: D102
        if self._closed or parcel.id in self._lent:
            return
        names = (_coming(parcel.id), _file_of(parcel.id))
        share = Share(parcel, self._rank, self._mates)
        self._expected[parcel.id] = Arrival(parcel, lambda: self._open(names), share, look)
        while len(self._expected) > EXPECTED_AT_ONCE:
            self._expected.pop(next(iter(self._expected))).give_up()

    def receive(  # noqa: D102
        self, parcel: Parcel, timeout_secs: float, look: Look = lambda *_: None
    ) -> list[npt.NDArray[Any]]:
        arrival = self._expected.pop(parcel.id, None)
        taken = None if arrival is None else arrival.result(timeout_secs)
        if taken is not None and all(parcel.digest_of(block) == found for block, found in taken[1].items()):
            return arrays_in(taken[0], parcel)
        arrays = self._lent.get(parcel.id)
        if arrays is None:
            data = self.mapped(parcel, timeout_secs)
            touch(data)
            arrays = arrays_in(data, parcel)
        check_share(parcel, arrays, self._rank, self._mates, look)
        return arrays

    def mapped(self, parcel: Parcel, timeout_secs: float) -> Bytes:
        """The bytes of a parcel in a private mapping of their own, as they are: no digest is looked at."""
        descriptor = self._opened(parcel, timeout_secs)
        try:
            size = os.fstat(descriptor).st_size
            expected = parcel.nbytes + (0 if self._is_handed_over(parcel) else PROGRESS_BYTES)
            if size < expected:  # reading behind its end would end this process
                raise damaged(parcel, f"{expected:,} bytes", f"{size:,} bytes", self._rank)
            return map_private(descriptor, parcel.nbytes)
        finally:
            os.close(descriptor)

    def release(self, parcel_id: str) -> None:  # noqa: D102
        arrival = self._expected.pop(parcel_id, None)
        if arrival is not None:
            arrival.give_up()
        self._lent.pop(parcel_id, None)
        published = self._published.pop(parcel_id, None)
        if isinstance(published, Draft):
            self._unlink(parcel_id)
        if published is None or self._closed:
            return
        if isinstance(published, Draft):
            self._prepare(self._make_spare, published.nbytes)
        else:
            self._prepare(self._make_spare_store, published.nbytes)

    def close(self) -> None:  # noqa: D102
        if not self._closed:
            withdraw(self._directory.path.parent)
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
            del spare
        while True:
            held = os.fstatvfs(self._directory.descriptor)
            try:
                return self._draft(nbytes)
            except OSError as error:
                if error.errno not in _NO_ROOM:
                    raise
                if not drop_spare():
                    raise self._no_room(nbytes, held.f_bavail * held.f_frsize) from error

    def complete(self, parcel_id: str, draft: Draft) -> None:
        """Makes a written parcel visible to the workers of this host. This worker's release removes it."""
        draft.complete(_file_of(parcel_id))
        self._published[parcel_id] = draft

    def _draft(self, nbytes: int) -> Draft:
        return Draft(self._directory, f"draft-{self._rank}-{secrets.token_hex(8)}", nbytes)

    def _no_room(self, nbytes: int, free: int) -> UpdateRefused:
        return no_room(
            nbytes,
            free,
            str(self._directory.path.parent),
            self._rank,
            "Make room there, or set REPLICAST_SHM_DIR to a directory that has it (in a container, give it "
            "a larger /dev/shm)",
        )

    def _opened(self, parcel: Parcel, timeout_secs: float) -> int:
        until = time.monotonic() + timeout_secs
        while True:
            try:
                return self._open([parcel.file if self._is_handed_over(parcel) else _file_of(parcel.id)])
            except FileNotFoundError:
                if time.monotonic() >= until:
                    raise not_arrived(parcel, timeout_secs, self._rank, parcel.source) from None
            time.sleep(_LOOK_SECS)

    def _is_handed_over(self, parcel: Parcel) -> bool:
        """Whether it is in a store here. To another host it was sent, and written there."""
        return parcel.handed_over and parcel.source in self._mates

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

    def _prepare(self, make: Callable[[int], None], nbytes: int) -> None:
        held = os.fstatvfs(self._directory.descriptor)
        most = min(SPARE_BYTES[1], held.f_blocks * held.f_frsize // MAX_PART)
        if not SPARE_BYTES[0] <= nbytes <= most:
            return
        thread = threading.Thread(target=make, args=(nbytes,), name="replicast-spare", daemon=True)
        with self._changing_spare:  # in one go: of two that are made ready, one would stay until the end
            spare = self._prepared()
            if spare is not None:
                spare.discard()
            if not self._closed:
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

    def _make_spare_store(self, nbytes: int) -> None:
        with contextlib.suppress(OSError):
            prepare(self._directory.path.parent, nbytes)

    def _take_spare(self) -> Draft | None:
        with self._changing_spare:
            return self._prepared()

    def _prepared(self) -> Draft | None:
        """Takes the spare, if there is one. To be called by whoever changes it."""
        if self._preparing is not None:
            self._preparing.join()
        spare, self._spare, self._preparing = self._spare, None, None
        return spare


def _file_of(parcel_id: str) -> str:
    return f"parcel-{parcel_id}"


def _coming(parcel_id: str) -> str:
    return f"coming-{parcel_id}"
