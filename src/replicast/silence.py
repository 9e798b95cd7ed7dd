"""For calls that may never return: a watchdog that notices when a counter stops growing, and a time limit."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

_POLL_SECS = 0.2
_MAX_DELAY_SECS = 5.0
"""A longer delay than this between two looks means that this process itself was stopped."""


def on_silence(
    count: Callable[[], int], limit_secs: float, act: Callable[[], None], *, until: threading.Event
) -> None:
    """Starts a daemon thread that calls `act` once, when `count` has not changed for `limit_secs`.

    On a busy machine a wait takes longer than asked for, so the thread reads a clock. Time during which this
    process itself was stopped does not count.

    Args:
        count: Returns a counter that grows as long as all is well.
        limit_secs: How long the counter may stay the same.
        act: Called once the limit is exceeded.
        until: Ends the thread when set.
    """

    def watch() -> None:
        last, silent_secs, looked = count(), 0.0, time.monotonic()
        while silent_secs < limit_secs:
            if until.wait(_POLL_SECS):
                return
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
