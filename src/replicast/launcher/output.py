"""One worker's output: from a pipe or pseudo-terminal to its log and to the screen."""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import termios
from collections import deque

from replicast.launcher.chatter import is_chatter
from replicast.launcher.lines import LineAssembler
from replicast.launcher.screen import Screen
from replicast.paths import RunPath

TAIL_LINES = 20
_CHUNK = 65536
_MAX_BUFFERED = 1024 * 1024
"""The maximum that a pipe or terminal buffers on Linux."""
_ROWS = 24


class Output:
    """Receives what one worker writes. Never stops reading: a full disk must not block a worker."""

    def __init__(
        self, rank: int, log: RunPath, *, screen: Screen | None, columns: int | None, chatter: bool = True
    ) -> None:
        self._rank = rank
        self._screen = screen
        self._chatter = chatter
        self._assembler = LineAssembler()
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)
        self.at_end = False
        self.is_terminal = columns is not None
        self._log = os.fdopen(log.open(os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab", buffering=0)
        try:
            self.reading_end, self.writing_end = os.pipe() if columns is None else os.openpty()
        except OSError:
            self._log.close()
            raise
        if columns is not None:
            _leave_newlines_alone(self.writing_end)
            self.resize(columns)
        os.set_blocking(self.reading_end, False)

    def hand_over(self) -> None:
        """Closes the launcher's copy of the worker's end, once the worker has its own."""
        os.close(self.writing_end)
        self.writing_end = -1

    def resize(self, columns: int) -> None:
        """Sets the width of the worker's pseudo-terminal, if it has one."""
        if self.is_terminal:
            size = struct.pack("HHHH", _ROWS, columns, 0, 0)
            fcntl.ioctl(self.reading_end, termios.TIOCSWINSZ, size)

    def pump(self) -> int:
        """Passes on what can be read now."""
        try:
            data = os.read(self.reading_end, _CHUNK)
        except BlockingIOError:
            return 0
        except OSError:  # A pseudo-terminal whose last writer has closed it.
            data = b""
        if not data:
            self.at_end = True
            return 0
        self._keep(data)
        self._show(self._assembler.feed(data), self._assembler.partial)
        return len(data)

    def close(self) -> None:
        """Reads what the worker has written, and closes the files.

        A child in a session of its own outlives the worker and may write for ever. So this reads at most as
        much as a pipe or terminal buffers: anything beyond that was not written by the worker.
        """
        total = 0
        while total < _MAX_BUFFERED and (count := self.pump()):
            total += count
        self._show(self._assembler.finish())
        os.close(self.reading_end)
        if self.writing_end >= 0:
            self.hand_over()
        self._log.close()

    def _show(self, lines: list[str], partial: str = "") -> None:
        shown = [line for line in lines if self._is_shown(line)]
        self.tail.extend(shown)
        if self._screen is not None:
            self._screen.show(self._rank, shown, partial if self._is_shown(partial) else "")

    def _is_shown(self, line: str) -> bool:
        return self._chatter or not is_chatter(line)

    def _keep(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            while data:
                data = data[self._log.write(data) :]


def _leave_newlines_alone(terminal: int) -> None:
    """Turns off output processing of the terminal, so that the log has exactly what the worker wrote."""
    settings = termios.tcgetattr(terminal)
    settings[1] &= ~termios.OPOST
    termios.tcsetattr(terminal, termios.TCSANOW, settings)
