"""Files and memory mapped without a file descriptor each and without holding the interpreter's lock.

Python's own `mmap` keeps a descriptor open for as long as the mapping lives. Here a mapping may live as
long as a variable that was assigned from it, and a model may have more variables than a process
descriptors.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

ALIGNMENT = 64  # What TensorFlow asks of memory that it reads in place, or takes over without a copy.
# Copies of this size or larger go into huge pages: three times as fast as page by page.
LARGE_BYTES = 1 << 20

REUSED_BYTES = 1 << 31  # The most memory that is kept for later arrays of the same size.

_READ_AND_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_HUGE_PAGE = 1 << 21
_ADVISE_FREE = 8  # MADV_FREE of Linux
_ADVISE_HUGE_PAGES = 14  # MADV_HUGEPAGE of Linux; has no effect where there are none
_AROUND_BYTES = 1 << 16  # Linux maps this much around a page that is touched, if it is in memory

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


class _Mapped:
    """The owner of one mapping, which ends with the last array that looks into it."""

    def __init__(self, descriptor: int, nbytes: int, flags: int, access: int = _READ_AND_WRITE) -> None:
        self._unmap = _libc.munmap  # still there when the interpreter ends and has cleared this module
        self._nbytes = nbytes
        self._address = _libc.mmap(None, nbytes, access, flags, descriptor, 0)
        if self._address == _FAILED:
            self._address = None
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))

    def __del__(self) -> None:
        if self._address is not None:
            self._unmap(self._address, self._nbytes)

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"data": (self._address, False), "shape": (self._nbytes,), "typestr": "|u1", "version": 3}


class _Reused(_Mapped):
    """Memory of this process in huge pages, which the next array of the same size takes over.

    The system has to find and clear new pages, which takes longer than to fill them. Until the memory is
    taken over, the system may take the pages back if it needs them (MADV_FREE).
    """

    _free: ClassVar[dict[int, deque[int]]] = {}
    _unmap, _madvise = _libc.munmap, _libc.madvise  # as above
    _advice, _most, _queue = _ADVISE_FREE, REUSED_BYTES, deque

    def __init__(self, nbytes: int) -> None:
        try:
            self._address: int | None = self._free[nbytes].pop()
            self._nbytes = nbytes
        except LookupError:  # there is none, or another thread was faster
            super().__init__(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            _libc.madvise(self._address, nbytes, _ADVISE_HUGE_PAGES)

    def __del__(self) -> None:
        if self._address is None:
            return
        kept = sum(size * len(addresses) for size, addresses in list(self._free.items()))
        is_kept = kept + self._nbytes <= self._most
        if is_kept and self._madvise(self._address, self._nbytes, self._advice) == 0:
            self._free.setdefault(self._nbytes, self._queue()).append(self._address)
        else:
            self._unmap(self._address, self._nbytes)


def aligned(nbytes: int) -> int:
    """The number of bytes, rounded up to where the next array may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def map_private(descriptor: int, nbytes: int) -> Bytes:
    """Maps a complete file, with its pages brought in. Writes to the array reach neither file nor others."""
    data = np.asarray(_Mapped(descriptor, nbytes, mmap.MAP_PRIVATE))
    data[::_AROUND_BYTES].sum()
    return data


def map_to_read(descriptor: int, nbytes: int) -> Bytes:
    """Maps a file whose later changes are to be seen. Writing to the array would end the process.

    It is not marked as read-only: TensorFlow reads an array in place only if numpy takes it for writable.
    """
    data = np.asarray(_Mapped(descriptor, nbytes, mmap.MAP_SHARED, mmap.PROT_READ))
    data[::_AROUND_BYTES].sum()
    return data


def map_shared(descriptor: int, nbytes: int) -> Bytes:
    """Maps a file for writing: writes to the array are in the file. The pages are brought in."""
    return np.asarray(_Mapped(descriptor, nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE))


def memory_to_fill(nbytes: int) -> Bytes:
    """Memory of this process with any content, in huge pages where the system has them: faster to fill."""
    rounded = -(-nbytes // _HUGE_PAGE) * _HUGE_PAGE
    return np.asarray(_Reused(rounded))[:nbytes]


def copied(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A row-major copy of the caller's own. A large one is in `memory_to_fill`."""
    if array.nbytes < LARGE_BYTES:
        return np.array(array, order="C")
    copy = memory_to_fill(array.nbytes).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy
