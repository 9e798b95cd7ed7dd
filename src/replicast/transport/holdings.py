"""What a host can send to the next one: parcels that it has, and those that still arrive."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

from replicast.errors import UpdateRefused
from replicast.transport.segments import Segment

# So many parcels that are gone are remembered, to refuse them at once instead of waiting for them.
REMEMBERED = 1000


@dataclass(frozen=True, slots=True)
class SegmentReady:
    """The segment is here. The caller closes the descriptor of the file."""

    descriptor: int
    segment: Segment


@dataclass(frozen=True, slots=True)
class SegmentAwaited:
    """The segment is not here yet, because of this worker."""

    worker: int


@dataclass(frozen=True, slots=True)
class SegmentRefused:
    """The segment will not come: the fields of an `UpdateRefused`."""

    refusal: dict[str, Any]


@dataclass(slots=True)
class _Holding:
    descriptor: int
    segments: tuple[Segment, ...]
    here: set[int]
    waits_for: int


class Holdings:
    """One host's. All methods may be called from any thread."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._holdings: dict[str, _Holding] = {}
        self._gone: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self._changed = threading.Condition(threading.RLock())
        self._closing = False

    def add(
        self, parcel_id: str, descriptor: int, segments: tuple[Segment, ...], *, arrives_from: int | None
    ) -> None:
        here = set(range(len(segments))) if arrives_from is None else set()
        waits_for = self._rank if arrives_from is None else arrives_from
        with self._changed:
            self._gone.pop(parcel_id, None)
            self._holdings[parcel_id] = _Holding(descriptor, segments, here, waits_for)
            self._changed.notify_all()

    def arrived(self, parcel_id: str, segment: int) -> None:
        """A segment is here, verified."""
        with self._changed:
            holding = self._holdings.get(parcel_id)
            if holding is not None:
                holding.here.add(segment)
                self._changed.notify_all()

    def waits_for(self, parcel_id: str, worker: int) -> None:
        """The parcel does not arrive, because of this worker."""
        with self._changed:
            holding = self._holdings.get(parcel_id)
            if holding is not None:
                holding.waits_for = worker

    def remove(self, parcel_id: str, refusal: UpdateRefused | None = None) -> None:
        """The parcel is no longer here, or never will be. No-op if that is known."""
        with self._changed:
            holding = self._holdings.pop(parcel_id, None)
            if holding is not None:
                os.close(holding.descriptor)
            elif refusal is None:
                return
            why = refusal or UpdateRefused(
                f"Worker {self._rank} has released parcel {parcel_id!r}", worker=self._rank
            )
            self._gone[parcel_id] = why.to_json()
            if len(self._gone) > REMEMBERED:
                self._gone.popitem(last=False)
            self._changed.notify_all()

    def clear(self) -> None:
        with self._changed:
            for parcel_id in list(self._holdings):
                self.remove(parcel_id)

    def stop_waiting(self) -> None:
        """Ends all waits in `find`; later calls do not block."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()

    def find(
        self, parcel_id: str, segment: int, timeout_secs: float
    ) -> SegmentReady | SegmentAwaited | SegmentRefused:
        """A segment of a parcel. Blocks until there is something to say, at most `timeout_secs`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._is_known(parcel_id, segment), timeout_secs)
            if parcel_id in self._gone:
                return SegmentRefused(self._gone[parcel_id])
            holding = self._holdings.get(parcel_id)
            if holding is None:
                return SegmentAwaited(self._rank)
            if segment >= len(holding.segments):
                return SegmentRefused({"problem": f"Parcel {parcel_id!r} has no segment {segment}"})
            if segment not in holding.here:
                return SegmentAwaited(holding.waits_for)
            return SegmentReady(os.dup(holding.descriptor), holding.segments[segment])

    def _is_known(self, parcel_id: str, segment: int) -> bool:
        holding = self._holdings.get(parcel_id)
        if holding is None:
            return parcel_id in self._gone
        return segment in holding.here or segment >= len(holding.segments)
