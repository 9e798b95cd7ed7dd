"""Time that a test adds: no time limit runs out before it says so, however busy the machine is."""

from __future__ import annotations

import time


class Clock:
    """Takes the place of the module `time`: the real time, and what a test adds."""

    sleep = staticmethod(time.sleep)
    time = staticmethod(time.time)

    def __init__(self) -> None:
        self.added_secs = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.added_secs
