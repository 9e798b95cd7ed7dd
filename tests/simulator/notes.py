"""Virtual time, and the record of a schedule: a readable transcript, and counts of events."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from typing import Any

from tests.simulator.words import described


class Clock:
    """Calls functions in the order of their times."""

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


class Notes:
    """The notes of one schedule."""

    def __init__(self, clock: Clock, *, recording: bool) -> None:
        self.recording = recording
        self.lines: list[str] = []
        self.counts = Counter[str]()
        self.faults = Counter[str]()
        self._clock = clock

    def say(self, attempt: int | None, who: str, what: Any) -> None:
        """Adds a line to the transcript: when, in which attempt, who, what."""
        if self.recording:
            group = "" if attempt is None else f"#{attempt}"
            said = what if isinstance(what, str) else described(what)
            self.lines.append(f"{self._clock.now:7.3f} {group:<2} {who:<13} {said}".rstrip())

    def fired(self, fault: str) -> None:
        """Counts a fault."""
        self.faults[fault] += 1

    def count(self, what: str, number: int = 1) -> None:
        """Counts an event."""
        self.counts[what] += number
