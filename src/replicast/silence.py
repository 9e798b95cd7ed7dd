"""Notices that something has stopped, from a thread that waits for nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable

_LOOK_SECS = 0.2


def on_silence(
    count: Callable[[], int], limit_secs: float, act: Callable[[], None], *, until: threading.Event
) -> None:
    """Starts a daemon thread that calls `act`, once, when `count` has been the same for `limit_secs`.

    It adds up its own waits rather than looking at a clock: time in which this process itself was stopped
    does not count.

    Args:
        count: Grows as long as all is well.
        limit_secs: How long it may stay as it is.
        act: What to do then.
        until: Ends the thread.
    """

    def watch() -> None:
        last, silent_secs = count(), 0.0
        while silent_secs < limit_secs:
            if until.wait(_LOOK_SECS):
                return
            now = count()
            silent_secs = silent_secs + _LOOK_SECS if now == last else 0.0
            last = now
        act()

    threading.Thread(target=watch, name="replicast-silence", daemon=True).start()
