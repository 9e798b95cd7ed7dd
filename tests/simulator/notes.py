"""The record of a schedule: a readable transcript, and counts of events."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.simulator.clock import Clock
from tests.simulator.words import described


class Notes:
    """The notes of one schedule.

    Args:
        clock: The source of the times.
        recording: Whether to keep a transcript.

    Attributes:
        lines: The transcript.
        counts: How often each event has happened.
        faults: How often each fault has fired.
    """

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
