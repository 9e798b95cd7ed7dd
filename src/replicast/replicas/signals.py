"""SIGTERM as a request to leave: what it does the first time, and what when it is repeated."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

from replicast.config import read_launch
from replicast.replicas.leaving import Leaving, told_to_end

logger = logging.getLogger("replicast")

REPEAT_SECS = 5.0


class Handler:
    """Calls `act` on the first SIGTERM.

    Who ends a whole process group or cgroup reaches a worker twice: directly, and through its launcher, which
    passes the signal on. A repeated signal must not end a process that is writing its last checkpoint. With a
    launcher it does nothing: the launcher kills when the time is up. Without one it counts as the same signal
    for `REPEAT_SECS`; after that it ends the process at once.

    Attributes:
        act: What to do the first time.
    """

    def __init__(self, act: Callable[[], object], now: Callable[[], float]) -> None:
        self.act = act
        self._now = now
        self._launched = read_launch(os.environ).launched
        self._process = os.getpid()
        self._told_at: float | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """As the interpreter calls a handler."""
        if os.getpid() != self._process:  # A forked child has our handler, but no part in the training.
            _end()
        elif self._told_at is None:
            self._told_at = self._now()
            self.act()
        elif not self._launched and self._now() - self._told_at >= REPEAT_SECS:
            _end()


def on_sigterm(act: Callable[[], object], *, now: Callable[[], float] = time.monotonic) -> bool:
    """Has `act` called on SIGTERM, unless the script has a handler of its own.

    Args:
        act: What to do the first time. Takes the place of what was given before.
        now: The time in seconds.

    Returns:
        Whether there is a handler, ours or another. Only the main thread can set one.
    """
    there = signal.getsignal(signal.SIGTERM)
    if isinstance(there, Handler):
        there.act = act
    elif there is signal.SIG_DFL:
        if threading.current_thread() is not threading.main_thread():
            return False
        signal.signal(signal.SIGTERM, Handler(act, now))
    return True


def leave_on_sigterm(leaving: Leaving, leavings: list[Leaving]) -> None:
    """Has this model and all others of the script leave on SIGTERM.

    Args:
        leaving: This model's part.
        leavings: Those of all models that are open; this one is added.
    """
    leavings.append(leaving)
    leaving.companions = leavings
    if not on_sigterm(lambda: told_to_end(leavings)):
        logger.warning(
            "On SIGTERM this worker saves nothing: only the main thread can set a handler for signals, and "
            "this Replicas was made in another. Call replicas.leave() where you learn that the machine is "
            "taken away"
        )


def _end() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.raise_signal(signal.SIGTERM)
