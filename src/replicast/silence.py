"""For calls that may never return: a watchdog, a time limit, and whether this process itself stood still."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

_POLL_SECS = 0.2
_MAX_DELAY_SECS = 5.0
"""A longer delay than this between two looks means that this process itself was stopped."""
_BUSY = 0.2
"""With more CPU time than this part of a delay, the process was running."""


class Pauses:
    """Notices when this process stood still: stopped by SIGSTOP, or suspended with its machine.

    Somebody must call `look` often. A long time between two calls is a pause if the process used hardly any
    CPU time in it: a call that only held Python's lock is none. Any thread may call any method.

    Args:
        shortest_secs: What counts as a pause.
        clock: Returns the time in seconds.
        cpu_clock: Returns the CPU time of this process in seconds.
    """

    def __init__(
        self,
        shortest_secs: float,
        clock: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._shortest_secs = shortest_secs
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._lock = threading.Lock()
        self._looked = (clock(), cpu_clock())
        self._last: tuple[float, float] | None = None

    def look(self) -> None:
        """Notes a pause that has just ended."""
        with self._lock:
            now, cpu = self._clock(), self._cpu_clock()
            secs, cpu_secs = now - self._looked[0], cpu - self._looked[1]
            self._looked = (now, cpu)
            if secs >= self._shortest_secs and cpu_secs < _BUSY * secs:
                self._last = (now, secs)

    def last_secs(self, within_secs: float) -> float | None:
        """How long the last pause was; None if it did not end in the last `within_secs`."""
        self.look()
        with self._lock:
            if self._last is None or self._clock() - self._last[0] > within_secs:
                return None
            return self._last[1]


def on_silence(
    count: Callable[[], int],
    limit_secs: float,
    act: Callable[[], None],
    *,
    until: threading.Event,
    look: Callable[[], None],
) -> None:
    """Starts a daemon thread that calls `act` once, when `count` has not changed for `limit_secs`.

    On a busy machine a wait takes longer than asked for, so the thread reads a clock. Time during which this
    process itself was stopped does not count.

    Args:
        count: Returns a counter that grows as long as all is well.
        limit_secs: How long the counter may stay the same.
        act: Called once the limit is exceeded.
        until: Ends the thread when set.
        look: Called several times a second.
    """

    def watch() -> None:
        last, silent_secs, looked = count(), 0.0, time.monotonic()
        while silent_secs < limit_secs:
            if until.wait(_POLL_SECS):
                return
            look()
            now, before = time.monotonic(), looked
            looked = now
            current = count()
            silent_secs = silent_secs + min(now - before, _MAX_DELAY_SECS) if current == last else 0.0
            last = current
        act()

    threading.Thread(target=watch, name="replicast-silence", daemon=True).start()


def within(limit_secs: float, act: Callable[[], Result]) -> Result | None:
    """Calls `act` in a daemon thread and waits at most `limit_secs`.

    Returns:
        The result; None if it took too long. The thread is left behind then.
    """
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(act()), name="replicast-within", daemon=True)
    thread.start()
    thread.join(limit_secs)
    return results[0] if results else None
