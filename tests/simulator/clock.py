"""Virtual time: the clock jumps to the next event."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """Calls functions in the order of their times.

    Attributes:
        now: The current time in virtual seconds.
        stopped: Whether no more functions are called.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.stopped = False
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._pushed = 0

    def at(self, time: float, act: Callable[..., None], *arguments: Any) -> None:
        """Calls a function at a time."""
        self._pushed += 1
        heapq.heappush(self._heap, (time, self._pushed, act, arguments))

    def after(self, secs: float, act: Callable[..., None], *arguments: Any) -> None:
        """Calls a function after some time."""
        self._pushed += 1
        heapq.heappush(self._heap, (self.now + secs, self._pushed, act, arguments))

    def run(self, most_secs: float, most_events: int) -> None:
        """Runs until it is stopped, nothing is left to call, or a limit is reached."""
        heap, events = self._heap, 0
        while heap and not self.stopped and self.now < most_secs and events < most_events:
            self.now, _, act, arguments = heapq.heappop(heap)
            act(*arguments)
            events += 1
