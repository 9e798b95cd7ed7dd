"""A file that people look at, and may stop looking at: `| less`, Ctrl-S, a collector of logs that hangs.

Nobody knows beforehand whether a write to it returns, so a thread writes, and whoever has something to say
only puts it down: the launcher must go on watching workers and obeying signals.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Sequence
from typing import TextIO

_ERASE_LINE = "\r\x1b[K"
_ROOM = 8 * 1024 * 1024
"""How many characters wait for a reader; with more, lines are left out."""
_STALLED_SECS = 5.0
_CLOSE_SECS = 30.0


class Outlet:
    """Lines for one stream, and at its bottom one that is drawn again when it changes. Never blocks in `put`.

    A stream without a descriptor, in memory, is written to at once.

    Args:
        stream: Where to write.
        room: How many characters may wait.
    """

    def __init__(self, stream: TextIO, *, room: int = _ROOM) -> None:
        self._stream = stream
        self._room = room
        self._encoding = stream.encoding or "utf-8"
        self._descriptor = _descriptor(stream)
        self._changed = threading.Condition()
        self._writer: threading.Thread | None = None
        self._waiting: list[str] = []
        self._waiting_size = 0
        self._left_out = 0
        self._bottom = ""
        self._drawn = ""
        self._taken = 0
        self._closing = False
        self._ended = False

    def put(self, lines: Sequence[str], bottom: str = "", *, must_appear: bool = False) -> None:
        """Has lines written above the one at the bottom; many that nobody reads are left out, and counted.

        Args:
            lines: The lines.
            bottom: What stands below them from now on, without a newline.
            must_appear: Whether to keep them however many wait.
        """
        with self._changed:
            if self._ended or self._closing:
                return
            self._bottom = bottom
            if lines and not must_appear and (self._left_out or self._waiting_size >= self._room):
                self._left_out += len(lines)  # And so does what follows, until the reader has caught up.
            elif lines:
                self._own_up()
                self._wait("".join(f"{line}\n" for line in lines))
            if self._descriptor is None:
                self._stream.write(self._take())
                self._stream.flush()
            else:
                self._start(self._descriptor)
                self._changed.notify_all()

    def close(self, *, stalled_secs: float = _STALLED_SECS, at_most_secs: float = _CLOSE_SECS) -> None:
        """Waits until all is written, unless nobody reads.

        Args:
            stalled_secs: How long to wait for a reader that takes nothing.
            at_most_secs: How long to wait for one that takes something now and then.
        """
        end = time.monotonic() + at_most_secs
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            while self._writer is not None and not self._ended:
                taken, remaining = self._taken, end - time.monotonic()
                if remaining <= 0 or not self._changed.wait_for(
                    lambda taken=taken: self._ended or self._taken != taken,  # type: ignore[misc]
                    min(stalled_secs, remaining),
                ):
                    return  # The thread is a daemon: it ends with the process.
        if self._writer is not None:
            self._writer.join(stalled_secs)

    def _wait(self, text: str) -> None:
        self._waiting.append(text)
        self._waiting_size += len(text)

    def _own_up(self) -> None:
        if self._left_out:
            self._wait(f"… {_lines_are(self._left_out)} only in the log\n")
            self._left_out = 0

    def _anything(self) -> bool:
        return bool(self._waiting or self._left_out or self._bottom != self._drawn)

    def _take(self) -> str:
        """All that is to be written now. The bar is the newest one, whatever became of those before."""
        if not self._anything():
            return ""
        self._own_up()
        text = (_ERASE_LINE if self._drawn else "") + "".join(self._waiting) + self._bottom
        self._waiting, self._waiting_size = [], 0
        self._drawn = self._bottom
        return text.encode(self._encoding, "replace").decode(self._encoding)

    def _start(self, descriptor: int) -> None:
        if self._writer is None and self._anything():
            self._writer = threading.Thread(
                target=self._write_on, args=[descriptor], name="screen", daemon=True
            )
            self._writer.start()

    def _write_on(self, descriptor: int) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing or self._anything())
                    data = self._take().encode(self._encoding)
                if not data:
                    return
                while data:
                    data = data[self._written(descriptor, data[: select.PIPE_BUF]) :]
        except OSError:  # `replicast run … | head`: the logs still get everything.
            pass
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _written(self, descriptor: int, data: bytes) -> int:
        try:
            count = os.write(descriptor, data)
        except BlockingIOError:  # Somebody who shares the file made it so.
            select.select([], [descriptor], [])
            return 0
        with self._changed:
            self._taken += count
            self._changed.notify_all()
        return count


def _descriptor(stream: TextIO) -> int | None:
    """The file below a stream, with nothing left in between."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return None
    stream.flush()
    return descriptor


def _lines_are(count: int) -> str:
    return "1 line is" if count == 1 else f"{count} lines are"
