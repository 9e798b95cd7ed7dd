"""The launcher's terminal: how a worker's output gets there and into its log, and Ctrl-C as a file.

    worker ── pipe or pseudo-terminal ──→ Output ── every byte ──→ its log
                                            └─ LineAssembler ── lines ──→ Screen ──→ Outlet ──→ the terminal

Only complete lines are written permanently. On a terminal, the unfinished line of one worker, the live one,
is drawn below them and redrawn when it changes, so that a bar moves and no two workers share a line. Nothing
here ever waits for a reader or for a disk: the launcher must keep watching workers and handling signals.
"""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import os
import re
import select
import shutil
import signal
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Self, TextIO

from replicast.files import RunPath

TAIL_LINES = 20
_CHUNK = 65536
_MAX_BUFFERED = 1024 * 1024  # The maximum that a pipe or terminal buffers on Linux.
_ROWS = 24
LOG_LEVEL = "TF_CPP_MIN_LOG_LEVEL"  # If the user has set it, everything is shown.
_WORKER_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_RESET = "\x1b[0m"
_ERASE_LINE = "\r\x1b[K"
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CAPACITY = 8 * 1024 * 1024  # How many characters may be queued; beyond that, lines are omitted.
_STALLED_SECS = 5.0
_CLOSE_SECS = 30.0


# --- Keras' progress bar ---------------------------------------------------------------------------------
#
# Keras draws a bar of the same width on every terminal, without a line break. So the loss, which comes last,
# is beyond the edge of a narrow terminal, and whatever is written next lands on the same line.

_CELL = "━"
_MIN_CELLS = 5
_OMITTED = "…"
_COLOUR = r"(?:\x1b\[[0-9;]*m)*"
_CELLS = re.compile(rf"{_CELL}(?:{_COLOUR}{_CELL})+")
_COUNT = rf"{_COLOUR} *\d+/(?:\d+{_COLOUR} {_COLOUR}{_CELL}(?:{_COLOUR}{_CELL})*|Unknown){_COLOUR}"
_TIME = rf" {_COLOUR}\d+(?:s|:\d\d(?::\d\d)?){_COLOUR} \d+(?:s|ms|us)/step"
_NUMBER = r"(?:-?\d+\.\d{4}(?:e[+-]\d\d)?|nan|-?inf)"  # a fixed number of decimals: the end is exact
BAR = re.compile(rf"(?P<bar>{_COUNT}{_TIME}(?: - [^:]+: {_NUMBER})*) *")


def split_bar(line: str) -> tuple[str, str] | None:
    """Splits a line into a progress bar and the text that something else wrote after it."""
    found = BAR.match(line)
    if found is None or found.end() == len(line):
        return None
    return found["bar"], line[found.end() :]


def with_shorter_bar(line: str, columns: int) -> str:
    """Removes as many cells of the bar as needed to fit the columns, down to a minimum; keeps the text."""
    excess, cells = _width(line) - columns, _CELLS.search(line)
    if excess <= 0 or cells is None:
        return line
    drawn = cells[0].count(_CELL)
    kept = max(min(_MIN_CELLS, drawn), drawn - excess)
    # Removed evenly, so that the coloured part stays in proportion.
    left = (_CELL * ((cell + 1) * kept // drawn - cell * kept // drawn) for cell in range(drawn))
    return line[: cells.start()] + re.sub(_CELL, lambda _: next(left), cells[0]) + line[cells.end() :]


def with_its_loss(line: str, columns: int) -> str:
    """Fits a bar into the columns, with all metrics if there is room, else with the loss. Does not crop."""
    line = with_shorter_bar(line, columns).rstrip()
    if _width(line) <= columns or not BAR.fullmatch(line):
        return line
    head, *metrics = line.split(" - ")
    loss = [metric for metric in metrics if metric.startswith("loss:")]
    return " - ".join([head, *loss, _OMITTED])


def _width(line: str) -> int:
    return len(without_colours(line).expandtabs().rstrip())


# --- TensorFlow's info lines -----------------------------------------------------------------------------
#
# The screen omits them; a worker's log has every line. Warnings and errors are always shown, except for a few
# that every healthy job prints at its start, and the echoes of a transfer that replicast itself has aborted
# because another worker failed: the worker says that in a line of its own.

_LOGGED = re.compile(
    r"(?:(?P<absl>[IWEF])\d{4} \d\d:\d\d:\d+\.\d+ +\d+|"
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+: (?P<tensorflow>[IWEF]))"
    r" \S+\.(?:cc|cpp|c|h|inc):\d+\] "  # not .py: those lines come from the script
)
_AT_EVERY_START = re.compile(r"Unable to register cu\w+ factory|computation placer already registered")
_ABORTED_BY_US = re.compile(
    r"(BaseCollectiveExecutor::StartAbort|Aborting Ring\w+ with|Local rendezvous is aborting with status:) "
    r"ABORTED: (Collective ops is aborted by: )?worker \d+ "
)
_WITHOUT_LEVEL = re.compile(
    r"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR|"
    r"To enable the following instructions: .* rebuild TensorFlow with the appropriate compiler flags\.|"
    r"/job:\w+/replica:\d+/task:\d+|"  # a worker that has not connected yet
    r"The error could be from a previous operation\. Restart your program to reset\.( \[type\..*\])?|"
    r"\s*\[\[\{\{node \S+\}\}\]\] \[type\.googleapis.*\]"
)


def is_chatter(line: str) -> bool:
    """Whether a line is an info message of TensorFlow's C++ code."""
    logged = _LOGGED.match(line)
    if logged is None:
        return _WITHOUT_LEVEL.fullmatch(line) is not None
    level = logged["absl"] or logged["tensorflow"]
    ours = _AT_EVERY_START.match(line, logged.end()) or _ABORTED_BY_US.match(line, logged.end())
    return level == "I" or (level != "F" and ours is not None)


# --- Lines -----------------------------------------------------------------------------------------------

_MAX_UNFINISHED = 65536
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_]|[()][0-9A-Za-z])")
_UNFINISHED_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*|[()])?$")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f]")
_TOKEN = re.compile(rf"{_ESCAPE.pattern}|.", re.DOTALL)


class LineAssembler:
    """Turns the bytes of a worker into the lines that a terminal would show.

    Progress bars rewrite their line with carriage returns and backspaces. A finished line here is the final
    state of such a line, and the unfinished last line is its current state. Text that is written after a
    Keras bar becomes a separate line, and the bar stays the unfinished line until it is drawn again.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._unfinished = ""
        self._bar = ""  # A bar after which other text was written, until it is drawn again.

    def feed(self, data: bytes) -> list[str]:
        *complete, rest = (self._unfinished + self._decoder.decode(data)).split("\n")
        lines = []
        for line in complete:
            self._forget_bar_if_redrawn(line)
            shown = as_shown(line)
            self._bar, text = split_bar(shown) or (self._bar, shown)
            lines.append(text)
        self._forget_bar_if_redrawn(rest)
        self._unfinished = _last_rewrite(rest)[-_MAX_UNFINISHED:]
        return lines

    def finish(self) -> list[str]:
        rest = self._unfinished + self._decoder.decode(b"", final=True)
        self._unfinished = ""
        return list(split_bar(as_shown(rest)) or [as_shown(rest)]) if rest else []

    @property
    def partial(self) -> str:
        shown = as_shown(self._unfinished)
        return self._bar or (split_bar(shown) or [shown])[0]

    def _forget_bar_if_redrawn(self, line: str) -> None:
        if "\r" in line or "\b" in line:
            self._bar = ""


def as_shown(line: str) -> str:
    """The final state of a line on a terminal: with colours, without rewritten text and cursor movements."""
    line = _last_rewrite(line).strip("\r").rstrip("\b")
    if "\b" in line:
        kept: list[str] = []
        for token in _TOKEN.finditer(line):
            if token[0] != "\b":
                kept.append(token[0])
            elif kept:
                kept.pop()
        line = "".join(kept)
    if "\x1b" in line:
        line = _ESCAPE.sub(lambda found: found[0] if found[0].endswith("m") else "", line)
        line = _UNFINISHED_ESCAPE.sub("", line)
    return _CONTROL.sub("", line)


def without_colours(line: str) -> str:
    return _ESCAPE.sub("", line).replace("\x1b", "")


def cropped(line: str, columns: int) -> str:
    shown: list[str] = []
    room = columns
    for token in _TOKEN.finditer(line.expandtabs()):
        if len(token[0]) == 1:
            if room <= 0:
                return "".join(shown) + (_RESET if "\x1b" in line else "")
            room -= 1
        shown.append(token[0])
    return "".join(shown)


def _last_rewrite(line: str) -> str:
    """The text after the last carriage return that other text follows; one at the end erases nothing."""
    written = line.rstrip("\r")
    return line[written.rfind("\r") + 1 :]


# --- The screen ------------------------------------------------------------------------------------------


class Outlet:
    """Writes lines to a stream, and below them a bottom line that is redrawn when it changes.

    The reader of a stream may stop reading: `| less`, Ctrl-S, a log collector that hangs. A write may then
    block for ever, so a thread does the writing, and `put` only enqueues. A stream without a descriptor, in
    memory, is written to at once.
    """

    def __init__(self, stream: TextIO, *, capacity: int = _CAPACITY) -> None:
        self._stream = stream
        self._capacity = capacity
        self._encoding = stream.encoding or "utf-8"
        self._descriptor: int | None = None
        with contextlib.suppress(OSError, ValueError):
            self._descriptor = stream.fileno()
            stream.flush()
        self._changed = threading.Condition()
        self._writer: threading.Thread | None = None
        self._queue: list[str] = []
        self._queue_size = self._omitted = self._bytes_written = 0
        self._bottom = self._drawn = ""
        self._closing = False

    def put(self, lines: Sequence[str], bottom: str = "", *, must_appear: bool = False) -> None:
        """Enqueues lines to write above the bottom line. Omits and counts them if the queue is full."""
        with self._changed:
            if self._closing:
                return
            self._bottom = bottom
            if lines and not must_appear and (self._omitted or self._queue_size >= self._capacity):
                self._omitted += len(lines)  # So are the next lines, until the reader has caught up.
            elif lines:
                self._note_omitted()
                self._queue += [f"{line}\n" for line in lines]
                self._queue_size += sum(map(len, lines))
            if self._descriptor is None:
                self._stream.write(self._take())
                self._stream.flush()
                return
            if self._writer is None and self._has_work():
                self._writer = threading.Thread(
                    target=self._write_on, args=[self._descriptor], name="screen", daemon=True
                )
                self._writer.start()
            self._changed.notify_all()

    def close(self, *, stalled_secs: float = _STALLED_SECS) -> None:
        """Waits until everything is written, unless nobody reads."""
        end = time.monotonic() + _CLOSE_SECS
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        written = -1
        while self._writer is not None and self._writer.is_alive() and time.monotonic() < end:
            if self._bytes_written == written:
                return  # The thread is a daemon: it ends with the process.
            written = self._bytes_written
            self._writer.join(stalled_secs)

    def _note_omitted(self) -> None:
        if self._omitted:
            lines = "1 line is" if self._omitted == 1 else f"{self._omitted} lines are"
            self._queue.append(f"… {lines} only in the log\n")
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

    def _write_on(self, descriptor: int) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing or self._has_work())
                    data = self._take().encode(self._encoding)
                if not data:
                    return
                while data:
                    try:
                        count = os.write(descriptor, data[: select.PIPE_BUF])
                    except BlockingIOError:  # Another process that shares the file made it non-blocking.
                        select.select([], [descriptor], [])
                        continue
                    data = data[count:]
                    self._bytes_written += count
        except OSError:  # `replicast run … | head`: the logs still get everything.
            self._closing = True


class Screen:
    """Writes workers' lines to one stream and the launcher's own messages to another. Only `close` blocks."""

    def __init__(self, out: TextIO, messages: TextIO, *, live_rank: int | None, colour: bool) -> None:
        self._stream = out
        self._out = Outlet(out)
        is_same = out is messages  # where the order of lines matters: a terminal, `2>&1`
        with contextlib.suppress(OSError, ValueError):
            is_same = is_same or os.path.sameopenfile(out.fileno(), messages.fileno())
        self._messages = self._out if is_same else Outlet(messages)
        self.live_rank = live_rank
        self._colour = colour
        self._partial = ""

    def show(self, rank: int, lines: list[str], partial: str = "") -> None:
        """Writes finished lines of a worker and redraws its unfinished line."""
        if rank == self.live_rank:
            self._partial = partial
        if lines or rank == self.live_rank:
            if self.live_rank is not None:  # On a terminal, a wide bar makes room for its text.
                lines = [with_shorter_bar(line, self.columns_for_live_worker()) for line in lines]
            shown = [f"{self._prefix(rank)}{self._painted(line)}" for line in lines]
            self._out.put(shown, self._drawn_partial())

    def tell(self, message: str) -> None:
        bottom = self._drawn_partial() if self._messages is self._out else ""
        self._messages.put([message], bottom, must_appear=True)

    def close(self) -> None:
        self._out.close()
        if self._messages is not self._out:
            self._messages.close()

    def columns_for_live_worker(self) -> int:
        """The width left for the live worker's line after its name."""
        columns = 0
        with contextlib.suppress(OSError, ValueError):
            columns = os.get_terminal_size(self._stream.fileno()).columns
        name = f"[worker {self.live_rank or 0}] "
        return max(20, (columns or shutil.get_terminal_size().columns) - len(name))

    def _drawn_partial(self) -> str:
        if not self._partial or self.live_rank is None:
            return ""
        room = self.columns_for_live_worker() - 1
        return self._prefix(self.live_rank) + self._painted(cropped(with_its_loss(self._partial, room), room))

    def _prefix(self, rank: int) -> str:
        name = f"[worker {rank}] "
        return f"\x1b[{_WORKER_COLOURS[rank % len(_WORKER_COLOURS)]}m{name}{_RESET}" if self._colour else name

    def _painted(self, line: str) -> str:
        if not self._colour:
            return without_colours(line)
        return f"{line}{_RESET}" if "\x1b" in line else line


def make_screen(out: TextIO, messages: TextIO, *, tee: frozenset[int], environ: Mapping[str, str]) -> Screen:
    """A screen for the streams: live and coloured on a terminal, plain lines elsewhere."""
    terminal = out.isatty() and environ.get("TERM", "dumb") != "dumb"
    live_rank = min(tee) if tee and terminal else None
    return Screen(out, messages, live_rank=live_rank, colour=terminal and not environ.get("NO_COLOR"))


# --- One worker's output ---------------------------------------------------------------------------------


class Output:
    """Receives all that one worker writes. Never stops reading: a full disk must not block a worker."""

    def __init__(
        self, rank: int, log: RunPath, screen: Screen | None, columns: int | None, *, chatter: bool = True
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
            settings = termios.tcgetattr(self.writing_end)
            settings[1] &= ~termios.OPOST  # The log has exactly what the worker wrote.
            termios.tcsetattr(self.writing_end, termios.TCSANOW, settings)
            self.resize(columns)
        os.set_blocking(self.reading_end, False)

    def hand_over(self) -> None:
        os.close(self.writing_end)
        self.writing_end = -1

    def resize(self, columns: int) -> None:
        if self.is_terminal:
            size = struct.pack("HHHH", _ROWS, columns, 0, 0)
            fcntl.ioctl(self.reading_end, termios.TIOCSWINSZ, size)

    def pump(self) -> int:
        try:
            data = os.read(self.reading_end, _CHUNK)
        except BlockingIOError:
            return 0
        except OSError:  # A pseudo-terminal whose last writer has closed it.
            data = b""
        if not data:
            self.at_end = True
            return 0
        rest = data
        with contextlib.suppress(OSError):
            while rest:
                rest = rest[self._log.write(rest) :]
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


# --- Signals ---------------------------------------------------------------------------------------------


class Interruptions:
    """Signals as a file to select on, instead of exceptions at any point. Only in the main thread.

    A signal that is ignored (`nohup`) stays ignored.
    """

    def __init__(self) -> None:
        self._reading_end, self._writing_end = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1

    def __enter__(self) -> Self:
        self._wakeup_before = signal.set_wakeup_fd(self._writing_end, warn_on_full_buffer=False)
        for signum in (*STOP_SIGNALS, signal.SIGWINCH):
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
        try:
            return [signal.Signals(number) for number in os.read(self._reading_end, 1024)]
        except BlockingIOError:
            return []
