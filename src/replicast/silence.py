"""A watchdog thread that notices when a counter stops growing."""

from __future__ import annotations

import threading
from collections.abc import Callable

_POLL_SECS = 0.2


def on_silence(
    count: Callable[[], int], limit_secs: float, act: Callable[[], None], *, until: threading.Event
) -> None:
    """Starts a daemon thread that calls `act` once, when `count` has not changed for `limit_secs`.

    The thread adds up its own waits instead of reading a clock: time during which this process itself was
    stopped does not count.

    Args:
        count: Returns a counter that grows as long as all is well.
        limit_secs: How long the counter may stay the same.
        act: Called once the limit is exceeded.
        until: Ends the thread when set.
    """

    def watch() -> None:
        last, silent_secs = count(), 0.0
        while silent_secs < limit_secs:
            if until.wait(_POLL_SECS):
                return
            now = count()
            silent_secs = silent_secs + _POLL_SECS if now == last else 0.0
            last = now
        act()

    threading.Thread(target=watch, name="replicast-silence", daemon=True).start()
