"""The metrics of a run: a file of any length becomes a few thousand points in which every spike is visible.

A series keeps a bounded number of points. When there are too many, the steps are divided into buckets, of
which each keeps its first and its last point, the smallest and the largest value, and the first that is not
finite. A restarted job repeats steps: what the earlier attempt wrote of them is dropped.
"""

from __future__ import annotations

import io
import math
import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from replicast.codec import View, json_value
from replicast.files import RunPath, open_plain
from replicast.storage.run_files import MAX_METRICS_STEP, METRICS_LINE, MetricsLine, places_of

_Integers: TypeAlias = npt.NDArray[np.int64]
_Floats: TypeAlias = npt.NDArray[np.float64]

MAX_POINTS = 10_000  # Of a series: the most that can be asked for.
MAX_SERIES = 100
_KEPT_POINTS = 2 * MAX_POINTS
_PER_BUCKET = 5
_PIECE_BYTES = 4 * 2**20
_BEGIN_BYTES = 256
_MOST_BETWEEN = 24 * 2**20  # Some 300,000 steps, which are read in a second.
_LINE_BYTES = 64 * 1024  # More than any line that is not damaged.
_SAMPLED_BYTES, _SAMPLE_BYTES = 4 * 2**20, 16 * 1024  # What is longer is sampled; of each place, so much.
_MAX_ANSWER_POINTS = 100_000  # Of all series together: about 5 MB of JSON.


class Series:
    """One metric: its values by step, in the order of the steps.

    Attributes:
        means: Where points were left out, the mean of all values of each bucket, at its first point, and NaN
            at its others: what is kept of a bucket are mostly extremes, whose mean is another one.
        counts: Of how many values.
    """

    def __init__(
        self,
        steps: _Integers,
        times: _Floats,
        values: _Floats,
        means: _Floats | None = None,
        counts: _Integers | None = None,
    ) -> None:
        self.steps = steps
        self.times = times
        self.values = values
        self.means = values if means is None else means
        self.counts = np.isfinite(values).astype(np.int64) if counts is None else counts

    def __len__(self) -> int:
        return len(self.steps)

    def to_json(self) -> dict[str, Any]:
        values = [json_value(value) for value in self.values.tolist()]
        told = {"steps": self.steps.tolist(), "times": self.times.tolist(), "values": values}
        if not self.counts.max(initial=0) > 1:
            return told
        means = [None if math.isnan(mean) else float(f"{mean:.6g}") for mean in self.means.tolist()]
        return told | {"means": means}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Series:
        steps, times = np.array(fields["steps"], np.int64), np.array(fields["times"], np.float64)
        values = np.array([float(value) for value in fields["values"]], np.float64)
        if not steps.shape == times.shape == values.shape:
            raise ValueError("steps, times and values must be equally many")
        return cls(steps, times, values)

    def before(self, step: int) -> Series:
        return self._chosen(slice(0, int(np.searchsorted(self.steps, step))))

    def decimated(self, points: int) -> Series:
        """At most so many points, with the extremes of every part."""
        if len(self) <= points:
            return self
        first, last = int(self.steps[0]), int(self.steps[-1])
        width = -(-(last - first + 1) // max(1, points // _PER_BUCKET))
        bucket = (self.steps - first) // width
        starts = _firsts(bucket, np.arange(len(self)))
        sizes = np.diff(starts, append=len(self))
        finite = np.isfinite(self.values)
        chosen = [starts, starts + sizes - 1, _firsts(bucket, np.flatnonzero(~finite))]
        for reduced, absent in ((np.minimum, np.inf), (np.maximum, -np.inf)):
            values = np.where(finite, self.values, absent)
            extremes = np.repeat(reduced.reduceat(values, starts), sizes)
            chosen.append(_firsts(bucket, np.flatnonzero(values == extremes)))
        counts, means = np.zeros(len(self), np.int64), np.full(len(self), np.nan)
        counts[starts] = np.add.reduceat(self.counts, starts)
        sums = np.add.reduceat(np.where(self.counts > 0, self.means, 0) * self.counts, starts)
        np.divide(sums, counts[starts], out=sums, where=counts[starts] > 0)
        means[starts] = np.where(counts[starts] > 0, sums, np.nan)
        reduced_to = Series(self.steps, self.times, self.values, means, counts)
        return reduced_to._chosen(np.unique(np.concatenate(chosen)))

    def _arrays(self) -> tuple[npt.NDArray[Any], ...]:
        return self.steps, self.times, self.values, self.means, self.counts

    def _chosen(self, which: slice | _Integers) -> Series:
        return Series(*(array[which] for array in self._arrays()))


class Metrics(View, frozen=True):
    """The metrics of a run, or what came since an earlier look.

    Attributes:
        series: The values of each metric, by its name.
        position: What to give as `since` at the next look.
        since: Where these begin; None: at the beginning.
        damaged: How many lines cannot be read.
    """

    series: Mapping[str, Series]
    position: int
    since: int | None = None
    damaged: int = 0


@dataclass(slots=True)
class MetricsFile:
    """Reads metrics.jsonl once, and later only what was appended. For any number of threads.

    A run may be removed and another one begun under its name. Its file is told from the former one by how it
    begins, since the system may give it the same inode; the first line has the time of the first step. The
    positions in it follow those that were told of the former one, so that each belongs to one file.
    """

    path: RunPath
    _begins: bytes = b""
    _base: int = 0
    _last: int = 0
    _seen: _Seen = field(default_factory=lambda: _Seen())
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def between(self, start: float, end: float, points: int) -> Metrics:
        """Every step between two moments, and some beside them, from the file: `read` keeps fewer."""
        with self._opened() as file:
            if isinstance(file, io.BytesIO):
                return Metrics({}, 0)
            first, last = places_of(file.fileno(), start)[0], places_of(file.fileno(), end)[1]
            if last - first > _MOST_BETWEEN:
                return self.read(None, points)
            file.seek(first)
            content = file.read(last - first + _LINE_BYTES)
        seen = _Seen()
        seen.read(io.BytesIO(content.partition(b"\n")[2] if first else content))
        return seen.metrics(points, None, 0)

    def sampled(self, points: int) -> Metrics:
        """At once, however long the file is; of one that was not read yet, steps at evenly spaced places.

        To read a million steps takes seconds. Position 0 tells that this is a sample, without every spike.
        """
        points = min(max(points, _PER_BUCKET), MAX_POINTS)
        with self._opened() as file:
            size = file.seek(0, os.SEEK_END)
            if size - self._seen.position <= _SAMPLED_BYTES:
                return self.read(None, points)
            seen, lines = _Seen(), list[bytes]()
            for place in np.linspace(0, size - _SAMPLE_BYTES, points, dtype=np.int64).tolist():
                piece = os.pread(file.fileno(), _SAMPLE_BYTES, place)
                end = piece.rfind(b"\n")
                lines.append(piece[piece.rfind(b"\n", 0, max(0, end)) + 1 : end + 1])  # The last whole one.
        seen.read(io.BytesIO(b"".join(lines)))
        return Metrics(seen.metrics(points, None, 0).series, 0)

    def _opened(self) -> BinaryIO:
        try:
            return os.fdopen(open_plain(self.path), "rb")
        except OSError:
            return io.BytesIO()

    def read(self, since: int | None, points: int) -> Metrics:
        with self._opened() as file, self._lock:
            begins, size = file.read(_BEGIN_BYTES), file.seek(0, os.SEEK_END)
            if not begins.startswith(self._begins) or self._base + size < self._last:
                self._base, self._seen = self._last, _Seen()
            self._begins = begins
            seen = self._seen
            if since is None or not self._base < since <= self._base + size:
                since = None
            else:
                seen = _Seen(position=since - self._base)
            seen.read(file)
            self._last = max(self._last, self._base + seen.position)
            return seen.metrics(points, since, self._base)


@dataclass(slots=True)
class _Seen:
    """What was read of a file of metrics up to a position, in bounded memory."""

    position: int = 0
    damaged: int = 0
    last_step: int = -1
    series: dict[str, Series] = field(default_factory=dict)

    def metrics(self, points: int, since: int | None, base: int) -> Metrics:
        points = min(max(points, _PER_BUCKET), MAX_POINTS, _MAX_ANSWER_POINTS // max(1, len(self.series)))
        series = {name: one.decimated(points) for name, one in self.series.items() if len(one)}
        return Metrics(series, base + self.position, since, self.damaged)

    def read(self, file: BinaryIO) -> None:
        for piece in _pieces(file, self.position):
            try:
                lines = METRICS_LINE.decode_lines(piece)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                lines = []
                for line in filter(bytes.strip, piece.split(b"\n")):
                    try:
                        lines.append(METRICS_LINE.decode(line))
                    except (msgspec.MsgspecError, UnicodeDecodeError):
                        self.damaged += 1
            self.position += len(piece)
            if lines:
                self._add(lines)

    def _add(self, lines: list[MetricsLine]) -> None:
        steps = np.array([line.step for line in lines], np.int64)
        places = _counting(steps)
        lowest = int(steps.min())
        # Further values of the same step, to which no restart in these lines has gone back.
        goes_on = steps[0] == self.last_step and places[0] == 0
        self.series = {name: one.before(lowest + goes_on) for name, one in self.series.items()}
        self.last_step = int(steps[-1])
        if len(places) < len(lines):
            lines, steps = [lines[place] for place in places.tolist()], steps[places]
        times, names = np.array([line.time for line in lines]), dict[str, None]()
        for line in lines:
            if not names.keys() >= line.values.keys():
                names |= dict.fromkeys(line.values)
        for name in names:
            if name in self.series or len(self.series) < MAX_SERIES:
                self._extend(name, lines, steps, times)

    def _extend(self, name: str, lines: list[MetricsLine], steps: _Integers, times: _Floats) -> None:
        """Adds the lines that have a value of this name; of those with the same step, the last one counts."""
        found: list[Any] = [line.values.get(name) for line in lines]
        if None in found:
            has = [place for place, value in enumerate(found) if value is not None]
            lines, found = [lines[at] for at in has], [found[at] for at in has]
            steps, times = steps[has], times[has]
        values = np.array(found)
        if values.dtype != np.float64:  # Some are text. To ask each line takes ten times as long.
            values = np.array([line.number(name) for line in lines])
        is_last = np.diff(steps, append=MAX_METRICS_STEP) > 0
        new = Series(steps, times, values)._chosen(np.flatnonzero(is_last))
        if name in self.series:
            pairs = zip(self.series[name].before(int(steps[0]))._arrays(), new._arrays(), strict=True)
            new = Series(*map(np.concatenate, pairs))
        self.series[name] = new.decimated(_KEPT_POINTS) if len(new) > 2 * _KEPT_POINTS else new


def _counting(steps: _Integers) -> _Integers:
    """The places of the lines that count: those that no restart goes back to, or behind."""
    places = np.flatnonzero(steps == np.minimum.accumulate(steps[::-1])[::-1])
    attempt = np.cumsum(np.diff(places, prepend=places[0]) > 1)  # Between two: what a restart has dropped.
    last = np.searchsorted(steps[places], steps[places], side="right") - 1
    return np.compress(attempt == attempt[last], places)


def _firsts(bucket: _Integers, places: _Integers) -> _Integers:
    """Of some places, in order, the first one in each bucket."""
    return np.compress(np.diff(bucket[places], prepend=-1) != 0, places)


def _pieces(file: BinaryIO, position: int) -> Iterator[bytes]:
    """The file behind a position in pieces that end with a line.

    A line that is longer than a piece is cut, so that its parts are damaged lines.
    """
    while True:
        file.seek(position)
        piece = file.read(_PIECE_BYTES)
        if len(piece) < _PIECE_BYTES or b"\n" in piece:
            piece = piece[: piece.rfind(b"\n") + 1]
        if not piece:
            return
        position += len(piece)
        yield piece
