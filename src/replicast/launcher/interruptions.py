"""Ctrl-C, SIGTERM and similar signals as a file to select on, instead of exceptions at any point."""

from __future__ import annotations

import os
import signal
from typing import Any, Self

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WATCHED = (*STOP_SIGNALS, signal.SIGWINCH)


class Interruptions:
    """A context manager that queues the watched signals. Only in the main thread.

    A signal that is ignored (`nohup`) stays ignored.
    """

    def __init__(self) -> None:
        self._reading_end, self._writing_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1

    def __enter__(self) -> Self:
        self._wakeup_before = signal.set_wakeup_fd(self._writing_end, warn_on_full_buffer=False)
        for signum in _WATCHED:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                # Python itself writes the signal's number to the wakeup descriptor.
                self._before[signum] = signal.signal(signum, lambda _signum, _frame: None)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        os.close(self._reading_end)
        os.close(self._writing_end)

    def fileno(self) -> int:
        return self._reading_end

    def take(self) -> list[signal.Signals]:
        """Returns the signals that arrived since the last call, in order."""
        try:
            return [signal.Signals(number) for number in os.read(self._reading_end, 1024)]
        except BlockingIOError:
            return []
