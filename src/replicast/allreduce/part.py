"""A worker's part of the shared memory: what it sends, and the semaphores that say so.

One file, one owner, as in `transport.shared_file`: each worker creates its own part and maps those of others.
Once all are mapped the names are removed, and the kernel frees the memory with the last process that maps it,
however that ends. The owner's lock shows the others that it is alive.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from replicast.allreduce.message_layout import CHUNK_BYTES
from replicast.allreduce.semaphores import SEMAPHORE_BYTES, Semaphore
from replicast.mapped_memory import Bytes, aligned, map_shared
from replicast.transport.shared_file import SharedFile, opened

SLOTS = 4  # How many chunks a part holds: see `exchange.py` for why it is 4.


class WorkerPart:
    """What one worker sends to all others, mapped by this process."""

    def __init__(self, memory: Bytes, workers: int, descriptor: int) -> None:
        first = _slots_offset(workers)
        self.slots = [memory[first + i * CHUNK_BYTES :][:CHUNK_BYTES] for i in range(SLOTS)]
        self.written = [
            Semaphore(memory[i * SEMAPHORE_BYTES : (i + 1) * SEMAPHORE_BYTES]) for i in range(workers)
        ]
        self._descriptor = descriptor

    @classmethod
    def of(cls, file: SharedFile, workers: int) -> WorkerPart:
        """This worker's own part, in a new file of `part_bytes`."""
        part = cls(file.buffer, workers, -1)
        for semaphore in part.written:
            semaphore.create()
        return part

    @classmethod
    def open(cls, path: Path, workers: int) -> WorkerPart:
        with opened(path, os.O_RDWR) as descriptor:
            size = os.fstat(descriptor).st_size
            if size != part_bytes(workers):
                raise OSError(f"{path} has {size} bytes instead of {part_bytes(workers)}")
            return cls(map_shared(descriptor, size), workers, os.dup(descriptor))

    def owner_is_dead(self) -> bool:
        """Whether the process that created this part has ended. Only for another worker's part."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return True


def part_bytes(workers: int) -> int:
    return _slots_offset(workers) + SLOTS * CHUNK_BYTES


def _slots_offset(workers: int) -> int:
    return aligned(workers * SEMAPHORE_BYTES)
