"""Memory that a large update is made in, so that proposing it needs no copy: the other workers map the same.

An update copies its values anyway. While this process is a worker whose transport shares memory, large ones
are copied into a file there that has no name, and goes with whoever holds it, kill -9 included. To propose
the update, the file gets a name; see `transport.shared`. Where that cannot be (little room, many updates that
are kept, a forked process), values are copied into ordinary memory, and once more when they are proposed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from replicast.blocks import CHUNK_BYTES, bytes_of, digest_blocks
from replicast.edits import Array
from replicast.finite import is_finite
from replicast.mapping import Bytes, aligned, bring_in, map_shared, write_at

LARGE_BYTES = 1 << 20
"""From here on a value goes into a store."""
MAX_STORES = 16
"""Each holds a file open; the updates that somebody keeps are not to use up what a process may open."""
MAX_PART = 8
"""All stores of a process together take at most this part of a file system, and half of what is free."""
_SEGMENT_BYTES = 1 << 26
_PAGE = 4096
_LOCK_SECS = 1.0


@dataclass(frozen=True, slots=True)
class Placed:
    """An array in a store.

    Attributes:
        offset: Where it begins.
        blocks: The digests of its blocks.
        is_finite: Whether none of its numbers is NaN or infinite.
        array: The array itself, in the memory that others will map. Not to be written to.
    """

    offset: int
    blocks: str
    is_finite: bool
    array: Array

    @property
    def end(self) -> int:
        """Where the next one may begin."""
        return self.offset + aligned(self.array.nbytes)


class Store:
    """A file that grows at its end; what is in it never changes. For all threads of the process that made it.

    Args:
        place: A directory of the file system that it is to be part of.
        warm_bytes: So much of it is made ready at once: filling it is then one copy and nothing else.
    """

    def __init__(self, place: Path, warm_bytes: int = 0) -> None:
        self._descriptor = os.open(place, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._owner = os.getpid()
        self._names: list[Path] = []
        self._end = weakref.finalize(self, _end, self._descriptor, self._names, self._owner)
        self._changing = threading.Lock()
        self._placed: dict[int, Placed] = {}
        self._segment: tuple[int, Bytes] | None = None
        self._warm_bytes = 0
        self.nbytes = 0
        """All that is in it, a multiple of 64."""
        if warm_bytes:
            os.posix_fallocate(self._descriptor, 0, warm_bytes)
            self._mapped(0, warm_bytes)[::_PAGE] = 0
            self._warm_bytes = warm_bytes

    @property
    def room_bytes(self) -> int:
        """What it takes up."""
        return max(self.nbytes, self._warm_bytes)

    @property
    def is_warm(self) -> bool:
        """Whether there is some of it that was made ready and is not filled."""
        return self.nbytes < self._warm_bytes

    def append(self, array: Array, after: int) -> Placed | None:
        """Copies an array to the end, if the end is there still and nobody else is busy here.

        Raises:
            OSError: There is no room. Nothing of it is left.
        """
        # Does not wait: a signal handler may have interrupted the thread that is busy.
        if self._owner != os.getpid() or not self._changing.acquire(blocking=False):
            return None
        try:
            return self._append(array) if self.nbytes == after else None
        finally:
            self._changing.release()

    def place(self, arrays: Sequence[Array]) -> list[Placed] | None:
        """Where these arrays are; the few bytes that are not here yet are copied to the end.

        Returns:
            None if they are not few, or if much is here that is not theirs: others map all of it.

        Raises:
            OSError: There is no room. Nothing of it is left.
        """
        if self._owner != os.getpid():
            return None
        with self._changing:
            found = [self._find(array) for array in arrays]
            here = sum(one.array.nbytes for one in found if one is not None)
            missing = sum(array.nbytes for array in arrays) - here
            if 4 * missing > here or 2 * here < self.nbytes:
                return None
            before = self.nbytes
            try:
                return [one or self._append(array) for one, array in zip(found, arrays, strict=True)]
            except BaseException:
                self._cut(before)
                raise

    def name_in(self, directory: Path, descriptor: int) -> str:
        """A name of the file in an open directory, for others to map it; it has it for as long as it lives.

        What was made ready and is not filled is given back.

        Raises:
            OSError: It cannot have one there, as in another file system.
        """
        with self._changing:
            if self.is_warm:
                os.ftruncate(self._descriptor, self.nbytes)
            self._warm_bytes = 0
            for path in self._names:
                if path.parent == directory and path.exists():
                    return path.name
            name = f"store-{secrets.token_hex(8)}"
            os.link(f"/proc/self/fd/{self._descriptor}", name, dst_dir_fd=descriptor)
            self._names.append(directory / name)
            return name

    def has_room_for(self, nbytes: int) -> bool:
        """Whether so much more leaves enough for others."""
        if self.nbytes + nbytes <= self._warm_bytes:
            return True
        held = os.fstatvfs(self._descriptor)
        taken = sum(store.room_bytes for store in {*_stores, *_spares, self})
        most = held.f_blocks * held.f_frsize // MAX_PART
        return taken + nbytes <= most and 2 * nbytes <= held.f_bavail * held.f_frsize

    def _find(self, array: Array) -> Placed | None:
        placed = self._placed.get(array.ctypes.data)
        return placed if placed is not None and _is_same(placed.array, array) else None

    def _append(self, array: Array) -> Placed:
        content = bytes_of(array)
        dtype = array.dtype.newbyteorder("=")
        start, end = self.nbytes, self.nbytes + aligned(len(content))
        warm = self._mapped(start, end) if end <= self._warm_bytes else None
        scratch = np.empty(CHUNK_BYTES if warm is None else 0, np.uint8)
        finite = True

        def keep(at: int, chunk: Bytes) -> Bytes:
            nonlocal finite
            # The caller's array may change meanwhile: what is looked at and digested is the copy.
            copy = scratch[: len(chunk)] if warm is None else warm[at : at + len(chunk)]
            copy[:] = chunk
            finite = finite and is_finite(copy.view(dtype))
            if warm is None:  # so the kernel need not clear the pages, and says so when there are none
                write_at(self._descriptor, start + at, copy)
            return copy

        try:
            blocks = digest_blocks(content, keep)
            if warm is None:
                write_at(
                    self._descriptor, start + len(content), np.zeros(end - start - len(content), np.uint8)
                )
                warm = self._mapped(start, end)
                bring_in(self._mapped(start // _PAGE * _PAGE, end))
        except BaseException:
            self._cut(start)
            raise
        placed = Placed(start, blocks, finite, warm[: len(content)].view(dtype).reshape(array.shape))
        if len(content):
            self._placed[placed.array.ctypes.data] = placed
        self.nbytes = end
        return placed

    def _cut(self, nbytes: int) -> None:
        """Takes back what lies behind, of which nobody was told."""
        self._placed = {at: one for at, one in self._placed.items() if one.offset < nbytes}
        self.nbytes = nbytes
        os.ftruncate(self._descriptor, max(nbytes, self._warm_bytes))

    def _mapped(self, start: int, end: int) -> Bytes:
        """This range of the file, in one mapping with what came before as long as it is large enough."""
        if self._segment is None or end > self._segment[0] + len(self._segment[1]):
            begin = start // _PAGE * _PAGE
            size = max(_SEGMENT_BYTES, -(-(end - begin) // _PAGE) * _PAGE)
            self._segment = begin, map_shared(self._descriptor, size, begin)
        begin, segment = self._segment
        return segment[start - begin : end - begin]


def copied(array: Array) -> Array:
    """A copy in ordinary memory, row-major."""
    return np.array(array, order="C")


class Kept(NamedTuple):
    """Up to where a store holds the values of an update."""

    store: Store
    end: int


class Copies:
    """Where the values of one more edit of an update go.

    Args:
        kept: Where those of the edits before went, as far as they are in a store.

    Attributes:
        kept: The same, with those of this edit.
    """

    def __init__(self, kept: Kept | None) -> None:
        self.kept = kept

    def copy(self, array: Array) -> Array:
        """A copy that is ours alone, row-major."""
        placed = None
        if array.nbytes >= LARGE_BYTES:
            with contextlib.suppress(OSError):
                placed = self._place(array)
        return copied(array) if placed is None else placed.array.view()

    def _place(self, array: Array) -> Placed | None:
        store, end = self.kept or (_opened(), 0)
        with _held(_opening):
            has_room = store is not None and store.has_room_for(array.nbytes)
        if store is None or not has_room:
            return None
        placed = store.append(array, end)
        if placed is not None:
            self.kept = Kept(store, placed.end)
        return placed


_places: list[Path] = []
_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_spares: list[Store] = []
"""At most one."""
_opening = threading.Lock()
"""Held for a moment, by whoever looks at or changes the three."""
_warming = threading.Lock()
"""Held while a spare is made ready."""


def offer(place: Path) -> None:
    """From now on large values of updates go into stores that can have a name in this file system."""
    with _opening:
        _places.append(place)


def withdraw(place: Path) -> None:
    """No longer so; stores that are there stay. A second time does nothing."""
    with _opening, contextlib.suppress(ValueError):
        _places.remove(place)
        _spares.clear()


def prepare(place: Path, nbytes: int) -> None:
    """Makes a store ready for the next update, which is often as large as the last. Takes a while.

    Raises:
        OSError: There is no room.
    """
    with _warming:
        with _opening:
            _spares.clear()  # first, because its room may be needed
            has_room = Store(place).has_room_for(nbytes)
        spare = Store(place, nbytes) if has_room else None
        with _opening:
            if spare is not None and place in _places:
                _spares.append(spare)


def drop_spare() -> bool:
    """Gives back the room of what was made ready; whether there was any."""
    with _opening:
        had_one = bool(_spares)
        _spares.clear()
        return had_one


def _opened() -> Store | None:
    with _held(_warming), _held(_opening):  # what is being made ready is worth waiting for
        if not _places or len(_stores) >= MAX_STORES or not Path("/proc/self/fd").exists():
            return None
        store = _spares.pop() if _spares else Store(_places[-1])
        _stores.add(store)
        return store


@contextlib.contextmanager
def _held(lock: threading.Lock) -> Iterator[None]:
    """Holds a lock, but does not wait for it for ever: a signal handler may have interrupted who holds it.

    Raises:
        OSError: It is not to be had.
    """
    if not lock.acquire(timeout=_LOCK_SECS):
        raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
    try:
        yield
    finally:
        lock.release()


def _forget() -> None:
    """In a process that was forked: memory is its parent's, and so are the threads that hold locks."""
    global _opening, _warming
    _opening, _warming = threading.Lock(), threading.Lock()
    _places.clear()
    _spares.clear()


os.register_at_fork(after_in_child=_forget)


def _end(descriptor: int, names: list[Path], owner: int) -> None:
    os.close(descriptor)
    for path in names if os.getpid() == owner else ():
        with contextlib.suppress(OSError):
            path.unlink()


def _is_same(one: Array, other: Array) -> bool:
    def described(array: Array) -> tuple[Any, ...]:
        return array.dtype, array.shape, array.strides

    return described(one) == described(other)
