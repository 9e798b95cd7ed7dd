"""Writes to a stream whose reader may stop reading: `| less`, Ctrl-S, a log collector that hangs.

A write to such a stream may block for ever, so a thread does the writing and callers only enqueue: the
launcher must keep watching workers and handling signals.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Sequence
from typing import TextIO

_ERASE_LINE = "\r\x1b[K"
_CAPACITY = 8 * 1024 * 1024
"""How many characters may be queued; beyond that, lines are omitted."""
_STALLED_SECS = 5.0
_CLOSE_SECS = 30.0


class Outlet:
    """Writes lines to a stream, and below them a bottom line that is redrawn when it changes.

    `put` never blocks. A stream without a descriptor, in memory, is written to at once.
    """

    def __init__(self, stream: TextIO, *, capacity: int = _CAPACITY) -> None:
        self._stream = stream
        self._capacity = capacity
        self._encoding = stream.encoding or "utf-8"
        self._descriptor = _descriptor(stream)
        self._changed = threading.Condition()
        self._writer: threading.Thread | None = None
        self._queue: list[str] = []
        self._queue_size = 0
        self._omitted = 0
        self._bottom = ""
        self._drawn = ""
        self._bytes_written = 0
        self._closing = False
        self._ended = False

    def put(self, lines: Sequence[str], bottom: str = "", *, must_appear: bool = False) -> None:
        """Enqueues lines to write above the bottom line. Omits and counts them if the queue is full."""
        with self._changed:
            if self._ended or self._closing:
                return
            self._bottom = bottom
            if lines and not must_appear and (self._omitted or self._queue_size >= self._capacity):
                self._omitted += len(lines)  # So are the next lines, until the reader has caught up.
            elif lines:
                self._note_omitted()
                self._enqueue("".join(f"{line}\n" for line in lines))
            if self._descriptor is None:
                self._stream.write(self._take())
                self._stream.flush()
            else:
                self._start(self._descriptor)
                self._changed.notify_all()

    def close(self, *, stalled_secs: float = _STALLED_SECS, at_most_secs: float = _CLOSE_SECS) -> None:
        """Waits until everything is written, unless nobody reads."""
        end = time.monotonic() + at_most_secs
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            while self._writer is not None and not self._ended:
                written, remaining = self._bytes_written, end - time.monotonic()
                if remaining <= 0 or not self._changed.wait_for(
                    lambda written=written: self._ended or self._bytes_written != written,  # type: ignore[misc]
                    min(stalled_secs, remaining),
                ):
                    return  # The thread is a daemon: it ends with the process.
        if self._writer is not None:
            self._writer.join(stalled_secs)

    def _enqueue(self, text: str) -> None:
        self._queue.append(text)
        self._queue_size += len(text)

    def _note_omitted(self) -> None:
        if self._omitted:
            self._enqueue(f"… {_lines_are(self._omitted)} only in the log\n")
            self._omitted = 0

    def _has_work(self) -> bool:
        return bool(self._queue or self._omitted or self._bottom != self._drawn)

    def _take(self) -> str:
        """Takes all queued text, and the newest bottom line; older ones are skipped."""
        if not self._has_work():
            return ""
        self._note_omitted()
        text = (_ERASE_LINE if self._drawn else "") + "".join(self._queue) + self._bottom
        self._queue, self._queue_size = [], 0
        self._drawn = self._bottom
        return text.encode(self._encoding, "replace").decode(self._encoding)

    def _start(self, descriptor: int) -> None:
        if self._writer is None and self._has_work():
            self._writer = threading.Thread(
                target=self._write_on, args=[descriptor], name="screen", daemon=True
            )
            self._writer.start()

    def _write_on(self, descriptor: int) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing or self._has_work())
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
        except BlockingIOError:  # Another process that shares the file made it non-blocking.
            select.select([], [descriptor], [])
            return 0
        with self._changed:
            self._bytes_written += count
            self._changed.notify_all()
        return count


def _descriptor(stream: TextIO) -> int | None:
    """The descriptor of a stream, after flushing it; None if it has none."""
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):
        return None
    stream.flush()
    return descriptor


def _lines_are(count: int) -> str:
    return "1 line is" if count == 1 else f"{count} lines are"
