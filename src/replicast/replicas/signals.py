"""SIGTERM as a wish to leave: what it does the first time, and what when it is repeated."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from replicast.config import read_launch

REPEAT_SECS = 5.0


def on_sigterm(act: Callable[[], object], *, now: Callable[[], float] = time.monotonic) -> None:
    """Has `act` called on SIGTERM, unless somebody has a handler already or this is not the main thread.

    Who ends a whole process group or cgroup reaches a worker twice: directly, and through its launcher, which
    passes the signal on. A repeated signal must not end a process that is writing its last checkpoint. With a
    launcher it does nothing: the launcher kills when the time is up. Without one it counts as the same signal
    for `REPEAT_SECS`; after that it ends the process at once.

    Args:
        act: What to do the first time.
        now: The time in seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        return
    launched = read_launch(os.environ).launched
    process = os.getpid()
    told_at: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal told_at
        if os.getpid() != process:  # A forked child has our handler, but no part in the training.
            _end()
        elif told_at is None:
            told_at = now()
            act()
        elif not launched and now() - told_at >= REPEAT_SECS:
            _end()

    signal.signal(signal.SIGTERM, handle)


def _end() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)
