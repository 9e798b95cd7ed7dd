"""The one kind of deadline: every wait has one, and what it raises says who was waited for."""

from __future__ import annotations

import math
import time


class Deadline:
    """A moment after which nobody waits any more; without a number of seconds, it never comes."""

    def __init__(self, secs: float | None) -> None:
        self._ends = math.inf if secs is None else time.monotonic() + secs

    def left(self, at_most: float = math.inf) -> float:
        return max(0.0, min(at_most, self._ends - time.monotonic()))

    def has_passed(self) -> bool:
        return time.monotonic() >= self._ends
