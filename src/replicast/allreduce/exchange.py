"""The exchange: every worker gives some arrays, and every worker gets their sums.

A message is sent in chunks through four slots in the sender's part of the shared memory. Per chunk:

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
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from replicast.allreduce.message_layout import CHUNK_BYTES, ExchangePlan, MessageLayout, chunks_in
from replicast.allreduce.part import SLOTS, WorkerPart
from replicast.allreduce.semaphores import spins_on_this_host
from replicast.errors import JobFailed
from replicast.mapped_memory import Bytes, aligned, memory_to_fill

Array = npt.NDArray[Any]


class Exchange:
    """One worker's end. All workers must make the same calls in the same order."""

    def __init__(self, rank: int, parts: Sequence[WorkerPart], check: Callable[[], None]) -> None:
        self._rank = rank
        self._parts = parts
        self._check = check
        self._others = [worker for worker in range(len(parts)) if worker != rank]
        self._spins = spins_on_this_host(len(parts))
        self._next = 0
        self._unfinished = False
        self._one_call = threading.Lock()

    def combine(self, plan: ExchangePlan, weight: float, values: Sequence[Array]) -> list[Array]:
        """Sums, averages or concatenates the values of all workers, as their forms say.

        Blocks until all workers have called it, as long as the job has not failed.
        """
        with self._one_call, np.errstate(all="ignore"):
            if self._unfinished:  # what the others have written since then belongs to other calls
                raise JobFailed(
                    f"worker {self._rank} goes on after a step in which its values were not summed with "
                    "those of the others: nothing can be summed any more",
                    worker=self._rank,
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
        """The slots of all workers for a chunk, by rank."""
        return [part.slots[chunk % SLOTS] for part in self._parts]

    def post(self) -> None:
        """Says that this worker has written its next chunk."""
        for worker in self._others:
            self._parts[self._rank].written[worker].post()

    def wait(self) -> None:
        """Waits until every other worker has written its next chunk."""
        for worker in self._others:
            self._parts[worker].written[self._rank].take(self._check, self._spins)

    @property
    def rank(self) -> int:
        return self._rank


class _Call:
    """One call of `combine` on this worker."""

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
    """A value of as many rows as all workers have together."""

    def __init__(
        self, dtype: np.dtype[Any], row: tuple[int, ...], rows: Sequence[int], starts: Sequence[int]
    ) -> None:
        self.value = np.empty((sum(rows), *row), dtype)
        row_bytes = math.prod(row) * dtype.itemsize
        self.sizes = [count * row_bytes for count in rows]
        self._starts = list(starts)
        self._bytes = self.value.reshape(-1).view(np.uint8)

    def read(self, chunk: int, slots: Sequence[Bytes]) -> None:
        """Copies what is in this chunk of each worker's message."""
        place, begin = 0, chunk * CHUNK_BYTES
        for slot, start, size in zip(slots, self._starts, self.sizes, strict=True):
            first, last = max(start, begin), min(start + size, begin + CHUNK_BYTES)
            if first < last:
                target = self._bytes[place + first - start : place + last - start]
                target[...] = slot[first - begin : last - begin]
            place += size
