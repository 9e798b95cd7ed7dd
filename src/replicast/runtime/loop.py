"""The event loop of one worker: the only thread that calls its state machines.

Any thread posts events; the loop hands them on one at a time, and fires timers.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import time
from collections.abc import Callable
from typing import Any

IDLE_SECS = 1.0
_NOTHING = object()


class Loop:
    """Calls `handle` with one event after the other. `run` is its thread's.

    Args:
        handle: What to do with an event.
        stopped: Whether the thread has to end.
    """

    def __init__(self, handle: Callable[[Any], None], stopped: Callable[[], bool]) -> None:
        self._handle = handle
        self._stopped = stopped
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, Any]] = []
        self._numbers = itertools.count()

    def post(self, event: Any) -> None:
        """Any thread, and any signal handler: returns at once."""
        self._events.put(event)

    def post_after(self, secs: float, event: Any) -> None:
        """Posts an event after a time. Only from within `handle`."""
        heapq.heappush(self._timers, (time.monotonic() + secs, next(self._numbers), event))

    def run(self) -> None:
        """Until it is stopped."""
        while not self._stopped() or not self._events.empty():
            event = self._next()
            if event is not _NOTHING:
                self._handle(event)
            while self._timers and self._timers[0][0] <= time.monotonic():
                self._handle(heapq.heappop(self._timers)[2])

    def _next(self) -> Any:
        """The next event; nothing when a timer is due first."""
        secs = IDLE_SECS
        if self._timers:
            secs = min(secs, max(0.0, self._timers[0][0] - time.monotonic()))
        try:
            return self._events.get(timeout=secs)
        except queue.Empty:
            return _NOTHING
