"""The event loop of one worker: the only thread that calls its state machines.

Any thread may post events; the loop handles them one at a time and fires timers.
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
    """Calls `handle` with one event at a time. `run` is for the loop's thread.

    Args:
        handle: Handles one event.
        stopped: Whether the thread has to stop.
    """

    def __init__(self, handle: Callable[[Any], None], stopped: Callable[[], bool]) -> None:
        self._handle = handle
        self._stopped = stopped
        self._events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._timers: list[tuple[float, int, Any]] = []
        self._numbers = itertools.count()

    def post(self, event: Any) -> None:
        """Posts an event and returns at once. Any thread or signal handler."""
        self._events.put(event)

    def post_after(self, secs: float, event: Any) -> None:
        """Posts an event after a delay. Only from within `handle`."""
        heapq.heappush(self._timers, (time.monotonic() + secs, next(self._numbers), event))

    def run(self) -> None:
        """Handles events until the loop is stopped."""
        while not self._stopped() or not self._events.empty():
            event = self._next()
            if event is not _NOTHING:
                self._handle(event)
            while self._timers and self._timers[0][0] <= time.monotonic():
                self._handle(heapq.heappop(self._timers)[2])

    def _next(self) -> Any:
        """The next event, or `_NOTHING` if a timer is due first."""
        secs = IDLE_SECS
        if self._timers:
            secs = min(secs, max(0.0, self._timers[0][0] - time.monotonic()))
        try:
            return self._events.get(timeout=secs)
        except queue.Empty:
            return _NOTHING
