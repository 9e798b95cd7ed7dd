"""POSIX semaphores in shared memory: how a worker tells another one that a chunk is written.

POSIX requires `sem_post` and `sem_wait` to synchronize memory: after the wait, a process sees everything that
was written before the post. Plain loads and stores guarantee that on x86-64, but not on aarch64. A post makes
no system call if nobody sleeps, and a process that dies leaves nothing to repair.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable

from replicast.mapped_memory import Bytes

SEMAPHORE_BYTES = 64  # One cache line for each. A `sem_t` has 32 bytes.
CHECK_SECS = 0.2  # How long a worker sleeps before it checks whether the job has failed.
# Attempts before a worker sleeps, about 70 microseconds: less than it takes to fall asleep and wake up.
SPINS = 100


class _Timespec(ctypes.Structure):
    _fields_ = (("secs", ctypes.c_long), ("nanosecs", ctypes.c_long))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
_libc.sem_post.argtypes = [ctypes.c_void_p]
_libc.sem_trywait.argtypes = [ctypes.c_void_p]
_libc.sem_timedwait.argtypes = [ctypes.c_void_p, ctypes.POINTER(_Timespec)]
_IS_MONOTONIC = hasattr(_libc, "sem_clockwait")  # since glibc 2.30
if _IS_MONOTONIC:
    _libc.sem_clockwait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec)]


class Semaphore:
    """One semaphore, in memory that several processes map."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory  # keeps the mapping
        self._address = ctypes.c_void_p(memory.ctypes.data)

    def create(self) -> None:
        """Sets it to 0. Once, by the owner of the memory, before anybody else maps it."""
        if _libc.sem_init(self._address, 1, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def post(self) -> None:
        """Adds 1, and wakes a process that waits."""
        _libc.sem_post(self._address)

    def take(self, check: Callable[[], None], spins: int = SPINS) -> None:
        """Subtracts 1; waits for a post, as long as `check` does not raise. It is called every 0.2 s.

        Python's lock is free while this waits.
        """
        trywait, address = _libc.sem_trywait, self._address
        for _ in range(spins):
            if trywait(address) == 0:
                return
        while not _sleep(address, CHECK_SECS):
            check()


def spins_on_this_host(workers: int) -> int:
    """How often to try before sleeping: not at all if another worker may need this core."""
    return SPINS if len(os.sched_getaffinity(0)) >= workers else 0


def _sleep(address: ctypes.c_void_p, secs: float) -> bool:
    """Waits for a post, at most so long; returns whether there was one.

    By the monotonic clock: when the wall clock is set back by hours, a wait by that one would last as long.
    """
    nanosecs = (time.monotonic_ns() if _IS_MONOTONIC else time.time_ns()) + int(secs * 1e9)
    until = _Timespec(nanosecs // 1_000_000_000, nanosecs % 1_000_000_000)
    if _IS_MONOTONIC:
        return bool(_libc.sem_clockwait(address, time.CLOCK_MONOTONIC, until) == 0)
    return bool(_libc.sem_timedwait(address, until) == 0)
