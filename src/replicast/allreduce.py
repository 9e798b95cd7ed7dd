"""Sums arrays over the workers of one host through shared memory, without TensorFlow.

Every worker gives some arrays, and every worker gets their sums. A message is sent in chunks through four
slots in the sender's part of the shared memory. Per chunk:

```
 every worker                                                          its slots
 write chunk n+1, post "written" to every other worker                 n+1 overwrites n-3
 wait for chunk n of every other worker
 sum chunk n of all workers, in rank order, into memory of its own
```

**Equal bits.** All workers add the same numbers in the same order, whichever of them was faster.

**One meeting per chunk, and four slots, are enough.** Worker w writes chunk n-1 after it has read chunk n-3.
A worker that overwrites its chunk n-3 with n+1 has waited for w's chunk n-1 before. So nobody can still read
what is overwritten, and nobody waits for a slot.

The chunks of all calls are one sequence. The first chunk of a call begins with a header: a number that is
equal if the workers exchange the same kinds of values, the worker's weight, and the rows of its gathered
values.

```
 header                     summed values, by dtype           gathered values
 signature weight rows…     same offsets on every worker      as many rows as this worker has
 ├──────────────────────────┼─────────────────────────────────┼───────────────────────────────►
 └── chunk 0 ──┴── chunk 1 ──┴── chunk 2 ──┴── …
```

**Memory.** One file, one owner, as in `transport.shared`: each worker creates its own part and maps those of
others. Once all are mapped the names are removed, and the kernel frees the memory with the last process that
maps it, however that ends. The owner's lock shows the others that it is alive.

**Order of memory.** POSIX requires `sem_post` and `sem_wait` to synchronize memory: after the wait, a process
sees everything that was written before the post. Plain loads and stores guarantee that on x86-64, but not on
aarch64. A post makes no system call if nobody sleeps, and a process that dies leaves nothing to repair.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import math
import os
import threading
import time
import uuid
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from replicast.config import host_id, shared_memory_directory
from replicast.coordination import DirectExchange
from replicast.errors import JobFailed
from replicast.mapped_memory import Bytes, aligned, map_shared, memory_to_fill
from replicast.transport.shared import SharedFile, name_prefix, opened, remove_leftovers
from replicast.update.edits import Array

SEVERAL_HOSTS = "the workers are on several hosts"
OPEN_SECS = 120.0  # How long workers wait for each other, in each round at the start.
SLOTS = 4  # How many chunks a part holds.
# Small enough that what one worker writes is still in the cache when another one reads it.
CHUNK_BYTES = 1 << 18
SEMAPHORE_BYTES = 64  # One cache line for each. A `sem_t` has 32 bytes.
CHECK_SECS = 0.2  # How long a worker sleeps before it checks whether the job has failed.
# Attempts before a worker sleeps, about 70 microseconds: less than it takes to fall asleep and wake up.
SPINS = 100
_LAYOUTS_KEPT = 64


# --- Opening: on all workers, or on none -----------------------------------------------------------------


def open_exchange(
    direct: DirectExchange, environ: Mapping[str, str], check: Callable[[], None], unwilling: str = ""
) -> Exchange | str:
    """The exchange of this job, or why there is none. On every worker; all get the same answer.

    Blocks until all have said whether they can take part. `check` raises when the job has failed.
    """
    rank, size, directory = direct.rank, direct.size, shared_memory_directory(environ)
    path, problem = directory / f"{name_prefix()}{uuid.uuid4().hex}-allreduce", unwilling
    with contextlib.ExitStack() as on_failure:
        if not problem:
            try:
                remove_leftovers(directory)
                file = SharedFile(directory, part_bytes(size))
                on_failure.callback(file.remove)
                own = WorkerPart.of(file, size)
                file.complete(path)
            except OSError as error:
                problem = f"worker {rank} has no shared memory ({error})"
        said = json.dumps((host_id(environ), path.name, problem))
        told = [json.loads(text) for text in direct.agree("shared memory", said, OPEN_SECS).values()]
        if len({host for host, _, _ in told}) > 1:
            return SEVERAL_HOSTS
        for _, _, theirs in told:
            if theirs:
                return str(theirs)
        try:
            parts = [
                own if worker == rank else WorkerPart.open(directory / name, size)
                for worker, (_, name, _) in enumerate(told)
            ]
        except OSError as error:
            problem = f"worker {rank} cannot map the shared memory of all workers ({error})"
        for theirs in direct.agree("mapping", problem, OPEN_SECS).values():
            if theirs:
                return theirs
        file.hide()
        on_failure.pop_all()
    return Exchange(rank, parts, check)


# --- One call ----------------------------------------------------------------------------------------------


class Exchange:
    """One worker's end. All workers must make the same calls in the same order."""

    def __init__(self, rank: int, parts: Sequence[WorkerPart], check: Callable[[], None]) -> None:
        self.rank = rank
        self._parts = parts
        self._check = check
        self._others = [worker for worker in range(len(parts)) if worker != rank]
        # Not at all if another worker may need this core.
        self._spins = SPINS if len(os.sched_getaffinity(0)) >= len(parts) else 0
        self._next = 0
        self._unfinished = False
        self._one_call = threading.Lock()
        self.waited_secs = 0.0  # For other workers, in all calls: the one that waits least holds up the rest.

    def combine(self, plan: ExchangePlan, weight: float, values: Sequence[Array]) -> list[Array]:
        """Sums, averages or concatenates the values of all workers, once all have called it."""
        with self._one_call, np.errstate(all="ignore"):
            if self._unfinished:  # what the others have written since then belongs to other calls
                raise JobFailed(
                    f"worker {self.rank} continues after a step in which its values were not summed with "
                    "those of the others. No later step can be summed: start the job again",
                    worker=self.rank,
                )
            self._unfinished = True
            call = _Call(self, plan, weight, values)
            results = call.run(self._next)
            self._next += call.chunks
            self._unfinished = False
            return results

    def dead_worker(self) -> int | None:
        """A worker whose process has ended, if there is one. Any thread; does not wait."""
        return next((w for w in self._others if self._parts[w].owner_is_dead()), None)

    def slots(self, chunk: int) -> list[Bytes]:
        return [part.slots[chunk % SLOTS] for part in self._parts]

    def post(self) -> None:
        for worker in self._others:
            self._parts[self.rank].written[worker].post()

    def wait(self) -> None:
        began = time.perf_counter()
        for worker in self._others:
            self._parts[worker].written[self.rank].take(self._check, self._spins)
        self.waited_secs += time.perf_counter() - began


class _Call:
    def __init__(
        self, exchange: Exchange, plan: ExchangePlan, weight: float, values: Sequence[Array]
    ) -> None:
        self._exchange = exchange
        self._forms = plan.forms
        self._weight = np.float32(weight)
        self._values = [value.reshape(-1) for value in values]
        self._layout: MessageLayout = plan.layout(tuple([value.shape for value in values]))
        # How many chunks the call has: those of the longest message, once all headers are known.
        self.chunks = chunks_in(self._layout.nbytes)
        self._total = np.float32(0)

    def run(self, first: int) -> list[Array]:
        exchange, layout = self._exchange, self._layout
        summed = memory_to_fill(max(1, layout.summed_bytes))
        gathered: list[_Gathered] = []
        written = chunk = 0
        while chunk < self.chunks:
            while written < min(self.chunks, chunk + 2):
                self._write(written, exchange.slots(first + written)[exchange.rank])
                exchange.post()
                written += 1
            exchange.wait()
            slots = exchange.slots(first + chunk)
            if chunk == 0:
                gathered = self._read_headers(slots)
            self._sum(chunk, slots, summed)
            for value in gathered:
                value.read(chunk, slots)
            chunk += 1
        return self._results(summed, gathered)

    def _write(self, chunk: int, slot: Bytes) -> None:
        layout = self._layout
        if chunk == 0:
            header = slot[: layout.header_bytes].view(np.int64)
            header[0] = layout.signature
            header[1:2].view(np.float64)[0] = self._weight
            header[2 : 2 + len(layout.gathered)] = [layout.shapes[i][0] for i in layout.gathered]
        for i, begin, end, offset in layout.pieces[chunk] if chunk < len(layout.pieces) else ():
            piece = self._values[i][begin:end]
            place = slot[offset : offset + piece.nbytes].view(piece.dtype)
            if not self._forms[i].weighted:
                place[...] = piece
            elif self._weight == 0:
                place[...] = 0
            else:
                np.multiply(piece, self._weight, out=place)

    def _read_headers(self, slots: Sequence[Bytes]) -> list[_Gathered]:
        layout = self._layout
        headers = [slot[: layout.header_bytes].view(np.int64) for slot in slots]
        for worker, header in enumerate(headers):
            if header[0] != layout.signature:
                raise JobFailed(
                    f"worker {worker} sums other values than worker {self._exchange.rank} in the same step: "
                    "other shapes, dtypes or another number of them. Every worker must build the same model "
                    "and make the same calls",
                    worker=worker,
                )
        for header in headers:
            self._total = self._total + header[1:2].view(np.float64)[0].astype(np.float32)
        start = layout.header_bytes + layout.summed_bytes
        ends = [start] * len(slots)
        gathered = []
        for place, i in enumerate(layout.gathered, 2):
            rows = [int(header[place]) for header in headers]
            value = _Gathered(self._forms[i].dtype, layout.shapes[i][1:], rows, ends)
            ends = [end + aligned(nbytes) for end, nbytes in zip(ends, value.sizes, strict=True)]
            gathered.append(value)
        self.chunks = max(chunks_in(end) for end in ends)
        return gathered

    def _sum(self, chunk: int, slots: Sequence[Bytes], summed: Bytes) -> None:
        layout = self._layout
        for dtype, weighted, begin, end, offset in layout.runs[chunk] if chunk < len(layout.runs) else ():
            place = offset - layout.header_bytes
            total = summed[place : place + end - begin].view(dtype)
            one, other, *rest = [slot[begin:end].view(dtype) for slot in slots]
            np.add(one, other, out=total)
            for more in rest:
                np.add(total, more, out=total)
            if weighted:
                np.divide(total, self._total, out=total)

    def _results(self, summed: Bytes, gathered: Sequence[_Gathered]) -> list[Array]:
        layout, results = self._layout, []
        each = iter(gathered)
        for i, form in enumerate(self._forms):
            if form.gathered:
                result = next(each).value
                if form.weighted:
                    np.divide(result, self._total, out=result)
            else:
                place = layout.offsets[i] - layout.header_bytes
                part = summed[place : place + layout.sizes[i]]
                result = part.view(form.dtype).reshape(layout.shapes[i])
            results.append(result)
        return results


class _Gathered:
    def __init__(
        self, dtype: np.dtype[Any], row: tuple[int, ...], rows: Sequence[int], starts: Sequence[int]
    ) -> None:
        self.value = np.empty((sum(rows), *row), dtype)
        row_bytes = math.prod(row) * dtype.itemsize
        self.sizes = [count * row_bytes for count in rows]
        self._starts = list(starts)
        self._bytes = self.value.reshape(-1).view(np.uint8)

    def read(self, chunk: int, slots: Sequence[Bytes]) -> None:
        place, begin = 0, chunk * CHUNK_BYTES
        for slot, start, size in zip(slots, self._starts, self.sizes, strict=True):
            first, last = max(start, begin), min(start + size, begin + CHUNK_BYTES)
            if first < last:
                target = self._bytes[place + first - start : place + last - start]
                target[...] = slot[first - begin : last - begin]
            place += size


# --- Where each value is in a message, and in which chunk of it --------------------------------------------


@dataclass(frozen=True, slots=True)
class Form:
    """What is known about a value before it exists: the same on all workers."""

    dtype: np.dtype[Any]
    gathered: bool = False
    weighted: bool = False


class ValuePiece(NamedTuple):
    """A part of a value in a chunk: its elements `first` to `last`, at an offset in the chunk."""

    value: int
    first: int
    last: int
    offset: int


class SumRun(NamedTuple):
    """Bytes of a chunk that are summed in one go, and where they begin in the message."""

    dtype: np.dtype[Any]
    weighted: bool
    first: int
    last: int
    offset: int


class MessageLayout:
    """The message of a worker whose values have these shapes."""

    def __init__(self, forms: Sequence[Form], shapes: Sequence[tuple[int, ...]]) -> None:
        self.shapes = tuple(shapes)
        self.gathered = [i for i, form in enumerate(forms) if form.gathered]
        self.header_bytes = aligned(8 * (2 + len(self.gathered)))
        self.offsets = [0] * len(forms)
        summed = [i for i, form in enumerate(forms) if not form.gathered]
        summed.sort(key=lambda i: (forms[i].dtype.str, forms[i].weighted))
        pairs = list(zip(forms, shapes, strict=True))
        self.sizes = [math.prod(shape) * form.dtype.itemsize for form, shape in pairs]
        end = self._place(summed, self.header_bytes)
        self.summed_bytes = end - self.header_bytes
        self.nbytes = self._place(self.gathered, end)
        self.pieces: list[list[ValuePiece]] = [[] for _ in range(chunks_in(self.nbytes))]
        self.runs: list[list[SumRun]] = [[] for _ in range(chunks_in(end))]
        for i in (*summed, *self.gathered):
            form, at, element = forms[i], self.offsets[i], 0
            stop = at + self.sizes[i]
            while at < stop:  # cut at the borders of chunks
                chunk, first = divmod(at, CHUNK_BYTES)
                last = min(CHUNK_BYTES, first + stop - at)
                after = element + (last - first) // form.dtype.itemsize
                self.pieces[chunk].append(ValuePiece(i, element, after, first))
                start, at, element = at, at + last - first, after
                if form.gathered:
                    continue
                runs = self.runs[chunk]
                if runs and (runs[-1].dtype, runs[-1].weighted) == (form.dtype, form.weighted):
                    runs[-1] = runs[-1]._replace(last=last)  # of the same kind, with the padding in between
                else:
                    runs.append(SumRun(form.dtype, form.weighted, first, last, start))
        kinds = [
            (form.dtype.str, form.gathered, form.weighted, shape[1:] if form.gathered else shape)
            for form, shape in pairs
        ]
        self.signature = zlib.crc32(repr(kinds).encode())

    def _place(self, indices: Sequence[int], offset: int) -> int:
        for i in indices:
            self.offsets[i] = offset
            offset += aligned(self.sizes[i])
        return offset


def chunks_in(nbytes: int) -> int:
    return -(-nbytes // CHUNK_BYTES)


class ExchangePlan:
    """What all workers exchange in one call of a step, and its layout for each set of shapes."""

    def __init__(self, forms: Sequence[Form]) -> None:
        self.forms = tuple(forms)
        # For values of these shapes. Steps repeat, so layouts are kept.
        self.layout = lru_cache(_LAYOUTS_KEPT)(partial(MessageLayout, self.forms))


# --- A worker's part of the shared memory: what it sends, and the semaphores that say so -------------------


class WorkerPart:
    """What one worker sends to all others, mapped by this process."""

    def __init__(self, memory: Bytes, workers: int, descriptor: int) -> None:
        first = _slots_offset(workers)
        self.slots = [memory[first + i * CHUNK_BYTES :][:CHUNK_BYTES] for i in range(SLOTS)]
        self.written = [Semaphore(memory[i * SEMAPHORE_BYTES :][:SEMAPHORE_BYTES]) for i in range(workers)]
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
    def __init__(self, memory: Bytes) -> None:
        self._memory = memory  # keeps the mapping
        self._address = ctypes.c_void_p(memory.ctypes.data)

    def create(self) -> None:
        """Sets it to 0. Once, by the owner of the memory, before anybody else maps it."""
        if _libc.sem_init(self._address, 1, 0) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def post(self) -> None:
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


def _sleep(address: ctypes.c_void_p, secs: float) -> bool:
    """Waits for a post, at most so long; returns whether there was one.

    By the monotonic clock: when the wall clock is set back by hours, a wait by that one would last as long.
    """
    nanosecs = (time.monotonic_ns() if _IS_MONOTONIC else time.time_ns()) + int(secs * 1e9)
    until = _Timespec(nanosecs // 1_000_000_000, nanosecs % 1_000_000_000)
    if _IS_MONOTONIC:
        return bool(_libc.sem_clockwait(address, time.CLOCK_MONOTONIC, until) == 0)
    return bool(_libc.sem_timedwait(address, until) == 0)
