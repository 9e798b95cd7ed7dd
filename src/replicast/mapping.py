"""Files mapped into memory, without a file descriptor each and without holding the interpreter's lock.

Python's own `mmap` keeps a descriptor open for as long as the mapping lives. Here a mapping may live as long
as a variable that was assigned from it, and a model may have more variables than a process descriptors.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

ALIGNMENT = 64
"""What TensorFlow asks of memory that it reads in place, or takes over without a copy."""
POPULATE_READ = 22
"""MADV_POPULATE_READ of Linux 5.14: brings all pages in at once, and copies none of a private mapping."""
HUGE_PAGES = 14
"""MADV_HUGEPAGE of Linux; elsewhere, and where there are none, it does nothing."""

_AROUND_BYTES = 1 << 16
"""Linux maps so much around a page that is touched, of what it has in memory."""

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FAILED = ctypes.c_void_p(-1).value


class _Mapped:
    """The owner of one mapping: it ends with the last array that looks into it."""

    def __init__(self, descriptor: int, nbytes: int, flags: int, offset: int = 0) -> None:
        self._unmap = _libc.munmap  # still there when the interpreter ends and has cleared this module
        self._nbytes = nbytes
        access = mmap.PROT_READ | mmap.PROT_WRITE
        self._address = _libc.mmap(None, nbytes, access, flags, descriptor, offset)
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


def aligned(nbytes: int) -> int:
    """So many bytes, and what is missing to where the next array may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def map_private(descriptor: int, nbytes: int) -> Bytes:
    """Maps a file for this process alone: what is written to the array reaches neither file nor others.

    The descriptor may be closed and the file unlinked; the array stays valid.
    """
    return np.asarray(_Mapped(descriptor, nbytes, mmap.MAP_PRIVATE))


def map_shared(descriptor: int, nbytes: int, offset: int = 0) -> Bytes:
    """Maps a file for writing: what is written to the array is in the file.

    The offset is a multiple of a page. What lies behind the file's end must not be touched yet.
    """
    return np.asarray(_Mapped(descriptor, nbytes, mmap.MAP_SHARED, offset))


def fresh_memory(nbytes: int) -> Bytes:
    """Zeros in memory of this process, in large pages where the system has them: quicker to fill."""
    data = np.asarray(_Mapped(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))
    _libc.madvise(data.ctypes.data, nbytes, HUGE_PAGES)
    return data


def bring_in(data: Bytes) -> None:
    """Brings the pages of a whole mapping in, if this kernel can do it at once; else they come one by one."""
    _libc.madvise(data.ctypes.data, len(data), POPULATE_READ)


def touch(data: Bytes) -> None:
    """Brings in a mapping of a file that is complete; quicker than `bring_in`, which also fills holes."""
    data[::_AROUND_BYTES].sum()


def write_at(descriptor: int, offset: int, data: Bytes) -> None:
    """Writes all of it into a file, by the kernel's own copy: the quicker one where no mapping is warm.

    Raises:
        OSError: There is no room.
    """
    view = data.data
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
