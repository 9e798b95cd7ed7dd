"""What is noted of a story: a transcript that a person can read, and what has happened how often."""

from __future__ import annotations

from collections import Counter
from typing import Any

from replicast.testing.simulation.clock import Clock
from replicast.testing.simulation.words import described


class Notes:
    """The notes of one story.

    Args:
        clock: For the times.
        recording: Whether to keep a transcript.

    Attributes:
        lines: The transcript.
        counts: What has happened, and how often.
        faults: Which faults have fired, and how often.
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
        """A fault has happened."""
        self.faults[fault] += 1

    def count(self, what: str, number: int = 1) -> None:
        """Something is counted for the report."""
        self.counts[what] += number
