"""Ctrl-C, SIGTERM and similar signals as a file to select on, instead of exceptions at any point."""

from __future__ import annotations

import signal
import socket
from types import FrameType
from typing import Any, Self

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WATCHED = (*STOP_SIGNALS, signal.SIGWINCH)


class Interruptions:
    """A context manager that queues the watched signals. Only in the main thread.

    A signal that is ignored (`nohup`) stays ignored.
    """

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1

    def __enter__(self) -> Self:
        self._wakeup_before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        for signum in _WATCHED:
            if signal.getsignal(signum) is not signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, _do_nothing)
        return self

    def __exit__(self, *_: object) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._wakeup_before)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """A descriptor that is readable when a signal has arrived."""
        return self._reader.fileno()

    def take(self) -> list[signal.Signals]:
        """Returns the signals that arrived since the last call, in order."""
        try:
            return [signal.Signals(number) for number in self._reader.recv(1024)]
        except BlockingIOError:
            return []


def _do_nothing(signum: int, frame: FrameType | None) -> None:
    """Python itself writes the signal's number to the wakeup descriptor."""
