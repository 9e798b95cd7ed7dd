"""Memory that a large update is made in, so that proposing it needs no copy: the other workers map the same.

An update copies its values anyway. While this process is a worker whose transport shares memory, large ones
are copied into a file there that has no name, and goes with whoever holds it, kill -9 included. To propose
the update, the file gets a name; see `transport.shared`. Where that cannot be (no room, too many files,
another file system), values are copied into ordinary memory, and once more when they are proposed.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from replicast.blocks import digest_blocks
from replicast.edits import Array
from replicast.finite import is_finite
from replicast.mapping import Bytes, bring_in, map_shared, write_at

LARGE_BYTES = 1 << 20
"""From here on a value goes into a store."""
MAX_STORES = 16
"""Each holds a file open; the updates that somebody keeps are not to use up what a process may open."""
ALIGNMENT = 64
"""Of every array, as TensorFlow asks of memory that it reads in place."""
_SEGMENT_BYTES = 1 << 26
_PAGE = 4096

_places: list[Path] = []
_stores: weakref.WeakSet[Store] = weakref.WeakSet()
_spares: list[Store] = []
"""At most one."""
_opening = threading.Lock()
_warming = threading.Lock()


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


class Store:
    """A file without a name that grows at its end; what is in it never changes. Any thread may use it.

    Args:
        place: A directory of the file system that it is to be part of.
        warm_bytes: So much of it is made ready at once: filling it is then one copy and nothing else.
    """

    def __init__(self, place: Path, warm_bytes: int = 0) -> None:
        self._descriptor = os.open(place, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._changing = threading.Lock()
        self._placed: dict[int, Placed] = {}
        self._segment: Bytes | None = None
        self._segment_start = 0
        self._warm_bytes = 0
        self.nbytes = 0
        """All that is in it, a multiple of 64."""
        if warm_bytes:
            os.posix_fallocate(self._descriptor, 0, warm_bytes)
            self._mapped(0, warm_bytes)[::_PAGE] = 0
            self._warm_bytes = warm_bytes

    def append(self, array: Array, after: int) -> Placed | None:
        """Copies an array to the end, if the end is there still; else another has been there.

        Raises:
            OSError: There is no room.
        """
        with self._changing:
            return self._append(array) if self.nbytes == after else None

    def place(self, array: Array) -> Placed:
        """Where an array is; one that is not here is copied to the end.

        Raises:
            OSError: There is no room.
        """
        with self._changing:
            placed = self._placed.get(array.ctypes.data)
            if placed is None or not _is_same(placed.array, array):
                return self._append(array)
            return placed

    def link(self, name: str, directory: int) -> None:
        """Gives the file a name in an open directory, for others to map; what it had ready it gives back.

        Raises:
            OSError: It has had one before, or the directory is part of another file system.
        """
        with self._changing:
            if self._warm_bytes > self.nbytes:
                os.ftruncate(self._descriptor, self.nbytes)
            self._warm_bytes = 0
        os.link(f"/proc/self/fd/{self._descriptor}", name, dst_dir_fd=directory)

    def has_room_for(self, nbytes: int) -> bool:
        """Whether as much would be left for others."""
        held = os.fstatvfs(self._descriptor)
        return self.nbytes + nbytes <= self._warm_bytes or 2 * nbytes <= held.f_bavail * held.f_frsize

    def _append(self, array: Array) -> Placed:
        content: Bytes = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start, end = self.nbytes, self.nbytes + _aligned(len(content))
        warm = self._mapped(start, end) if end <= self._warm_bytes else None
        finite = True

        def write(at: int, chunk: Bytes) -> None:
            nonlocal finite
            finite = finite and is_finite(chunk.view(array.dtype))
            if warm is not None:
                warm[at : at + len(chunk)] = chunk
            else:  # so the kernel need not clear the pages, and says so when there are none
                write_at(self._descriptor, start + at, chunk)

        blocks = digest_blocks(content, write)
        if warm is None:
            write_at(self._descriptor, start + len(content), np.zeros(end - start - len(content), np.uint8))
        mapped = (self._mapped(start, end, new=True) if warm is None else warm)[: len(content)]
        placed = Placed(start, blocks, finite, mapped.view(array.dtype).reshape(array.shape))
        if len(content):
            self._placed[placed.array.ctypes.data] = placed
        self.nbytes = end
        return placed

    def _mapped(self, start: int, end: int, *, new: bool = False) -> Bytes:
        """This range of the file, in one mapping with what came before as long as it is large enough."""
        if self._segment is None or end > self._segment_start + len(self._segment):
            self._segment_start = start // _PAGE * _PAGE
            size = max(_SEGMENT_BYTES, -(-(end - self._segment_start) // _PAGE) * _PAGE)
            self._segment = map_shared(self._descriptor, size, self._segment_start)
        first = start - self._segment_start
        last = end - self._segment_start
        if new:
            bring_in(self._segment[first // _PAGE * _PAGE : last])
        return self._segment[first:last]


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
        placed = self._place(array) if array.nbytes >= LARGE_BYTES else None
        return copied(array) if placed is None else placed.array.view()

    def _place(self, array: Array) -> Placed | None:
        with contextlib.suppress(OSError):
            store, end = self.kept or (_open(), 0)
            if store is not None and store.has_room_for(array.nbytes):
                placed = store.append(array, end)
                if placed is not None:
                    self.kept = Kept(store, placed.offset + _aligned(array.nbytes))
                return placed
        return None


def offer(place: Path) -> None:
    """From now on large values of updates go into stores that can be linked into this directory."""
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
        store = Store(place, nbytes)
        with _opening:
            if place in _places:
                _spares.append(store)


def _open() -> Store | None:
    with _warming, _opening:  # what is being made ready is worth waiting for: it is half the work
        if not _places or len(_stores) >= MAX_STORES:
            return None
        store = _spares.pop() if _spares else Store(_places[-1])
        _stores.add(store)
        return store


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _is_same(one: Array, other: Array) -> bool:
    def described(array: Array) -> tuple[Any, ...]:
        return array.dtype, array.shape, array.strides

    return described(one) == described(other)
