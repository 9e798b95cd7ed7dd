"""For calls that may never return: a watchdog, a time limit, and whether this process itself stood still."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

Result = TypeVar("Result")

_POLL_SECS = 0.2
_MAX_DELAY_SECS = 5.0
"""A longer delay than this between two looks means that this process itself was stopped."""
_LEAST_JUMP_SECS = 0.5
"""A clock that a time server adjusts is moved by less than a thousandth of the time that passes."""
_TURNS_PER_SEC = 5
"""A thread that waits for Python's lock looks for it 200 times a second, and less on a busy machine."""


def turns_of(thread: int) -> int | None:
    """How often a thread of this process has waited and run again; None if the system does not tell."""
    try:
        text = Path(f"/proc/self/task/{thread}/status").read_text()
        return int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    except (OSError, IndexError, ValueError):
        return None


class Pauses:
    """Notices when this process stood still: stopped by SIGSTOP, or suspended with its machine.

    One thread must call `look` often. A long time between two calls is a pause if that thread hardly ran in
    it: while a call holds Python's lock, it runs often, to look for the lock. Any thread may ask.

    Args:
        shortest_secs: What counts as a pause.
        clock: Returns the time in seconds, including that in which the machine is suspended.
        turns: Returns how often a thread has run.
    """

    def __init__(
        self,
        shortest_secs: float,
        clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
        turns: Callable[[int], int | None] = turns_of,
    ) -> None:
        self._shortest_secs = shortest_secs
        self._clock = clock
        self._turns = turns
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._looked: tuple[float, int | None] = (clock(), None)
        self._last: tuple[float, float] | None = None

    def look(self) -> None:
        """Notes a pause that has just ended. Always called by the same thread."""
        self._thread = threading.get_native_id()
        self._compare()

    def last_secs(self, within_secs: float) -> float | None:
        """How long the last pause was; None if it did not end in the last `within_secs`."""
        self._compare()
        with self._lock:
            if self._last is None or self._clock() - self._last[0] > within_secs:
                return None
            return self._last[1]

    def _compare(self) -> None:
        if self._thread is None:
            return
        with self._lock:
            now, turns = self._clock(), self._turns(self._thread)
            secs, before = now - self._looked[0], self._looked[1]
            self._looked = (now, turns)
            if turns is None or before is None or secs < self._shortest_secs:
                return
            if turns - before < _TURNS_PER_SEC * secs:
                self._last = (now, secs)


class ClockJumps:
    """Notices when the wall clock of this host was set: it then goes apart from the clock since boot.

    TensorFlow's coordination service subtracts wall-clock times, as unsigned numbers, to tell how old a
    heartbeat is. So a clock that is set forward by more than the rest of the timeout, or back by any time,
    makes it take all workers for lost. Any thread may call any method; one should call `look` often.

    Args:
        shortest_secs: What counts as a jump forward.
        wall: Returns the wall-clock time in seconds.
        clock: Returns the time in seconds by a clock that nobody sets.
    """

    def __init__(
        self,
        shortest_secs: float,
        wall: Callable[[], float] = time.time,
        clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._shortest_secs = shortest_secs
        self._wall, self._clock = wall, clock
        self._lock = threading.Lock()
        self._apart: float | None = None
        self._last: tuple[float, float] | None = None

    def look(self) -> None:
        """Notes a jump since the last call."""
        with self._lock:
            before, wall, now = self._clock(), self._wall(), self._clock()
            if now - before > _LEAST_JUMP_SECS / 2:  # This thread was held up between two clocks.
                return
            secs = 0.0 if self._apart is None else wall - now - self._apart
            self._apart = wall - now
            if secs >= self._shortest_secs or secs <= -_LEAST_JUMP_SECS:
                self._last = (now, secs)

    def last_secs(self, within_secs: float) -> float | None:
        """By how much the clock was last set, back if negative; None if not in the last `within_secs`."""
        self.look()
        with self._lock:
            recent = self._last is not None and self._clock() - self._last[0] <= within_secs
            return self._last[1] if self._last is not None and recent else None


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
