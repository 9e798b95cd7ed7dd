"""Where each value is in the message that a worker sends in one call, and in which chunk of it.

```
 header                     summed values, by dtype           gathered values
 signature weight rows…     same offsets on every worker      as many rows as this worker has
 ├──────────────────────────┼─────────────────────────────────┼───────────────────────────────►
 └── chunk 0 ──┴── chunk 1 ──┴── chunk 2 ──┴── …
```
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from replicast.mapped_memory import aligned

# Small enough that what one worker writes is still in the cache when another one reads it.
CHUNK_BYTES = 1 << 18


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

    def __init__(
        self, forms: Sequence[Form], shapes: Sequence[tuple[int, ...]], chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self.shapes = tuple(shapes)
        self.gathered = [i for i, form in enumerate(forms) if form.gathered]
        self.header_bytes = aligned(8 * (2 + len(self.gathered)))
        self.offsets = [0] * len(forms)
        summed = [i for i, form in enumerate(forms) if not form.gathered]
        summed.sort(key=lambda i: (forms[i].dtype.str, forms[i].weighted))
        sizes = [math.prod(shape) * form.dtype.itemsize for form, shape in zip(forms, shapes, strict=True)]
        self.sizes = sizes
        end = self._place(summed, sizes, self.header_bytes)
        self.summed_bytes = end - self.header_bytes
        self.nbytes = self._place(self.gathered, sizes, end)
        self.pieces: list[list[ValuePiece]] = [[] for _ in range(chunks_in(self.nbytes, chunk_bytes))]
        self.runs: list[list[SumRun]] = [[] for _ in range(chunks_in(end, chunk_bytes))]
        for i in (*summed, *self.gathered):
            form, start = forms[i], self.offsets[i]
            for chunk, first, last in _cut(start, sizes[i], chunk_bytes):
                begin = (chunk * chunk_bytes + first - start) // form.dtype.itemsize
                piece = ValuePiece(i, begin, begin + (last - first) // form.dtype.itemsize, first)
                self.pieces[chunk].append(piece)
                if not form.gathered:
                    self._extend(chunk, form, first, last, chunk * chunk_bytes)
        kinds = [
            (form.dtype.str, form.gathered, form.weighted, shape[1:] if form.gathered else shape)
            for form, shape in zip(forms, shapes, strict=True)
        ]
        self.signature = zlib.crc32(repr(kinds).encode())

    def _place(self, indices: Sequence[int], sizes: Sequence[int], offset: int) -> int:
        for i in indices:
            self.offsets[i] = offset
            offset += aligned(sizes[i])
        return offset

    def _extend(self, chunk: int, form: Form, first: int, last: int, start: int) -> None:
        """Adds a piece to the chunk's last run if it is of the same kind, with the padding in between."""
        runs = self.runs[chunk]
        if runs and (runs[-1].dtype, runs[-1].weighted) == (form.dtype, form.weighted):
            runs[-1] = runs[-1]._replace(last=last)
        else:
            runs.append(SumRun(form.dtype, form.weighted, first, last, start + first))


def chunks_in(nbytes: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """The number of chunks of a message."""
    return -(-nbytes // chunk_bytes)


def _cut(start: int, nbytes: int, chunk_bytes: int) -> Iterator[tuple[int, int, int]]:
    """Cuts bytes of a message at the borders of chunks: the chunk, and the first and last offset in it."""
    stop = start + nbytes
    while start < stop:
        chunk, first = divmod(start, chunk_bytes)
        last = min(chunk_bytes, first + stop - start)
        yield chunk, first, last
        start += last - first


class ExchangePlan:
    """What all workers exchange in one call of a step, and its layout for each set of shapes."""

    def __init__(self, forms: Sequence[Form]) -> None:
        self.forms = tuple(forms)
        self._layouts: dict[tuple[tuple[int, ...], ...], MessageLayout] = {}

    def layout(self, shapes: tuple[tuple[int, ...], ...]) -> MessageLayout:
        """The layout for values of these shapes; steps repeat, so it is kept."""
        found = self._layouts.get(shapes)
        if found is None:
            if len(self._layouts) >= _LAYOUTS_KEPT:
                self._layouts.clear()
            found = self._layouts[shapes] = MessageLayout(self.forms, shapes)
        return found


_LAYOUTS_KEPT = 64
