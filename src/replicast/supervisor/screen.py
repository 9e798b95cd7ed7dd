"""What people see while workers run: their lines, each with its worker, and one progress bar at the bottom.

Only whole lines are ever written for good. On a terminal, the unfinished line of one worker, the live one, is
drawn below them and redrawn when it changes, so that a bar moves and no two workers share a line.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from typing import TextIO

from replicast.supervisor.bars import CELL, with_its_loss, with_shorter_bar
from replicast.supervisor.lines import cropped, without_colours
from replicast.supervisor.outlet import Outlet

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_RESET = "\x1b[0m"


class Screen:
    """Writes workers' lines to one stream and the launcher's own messages to another.

    Only `close` blocks; it must be called, since what is shown or told may still have to be written.

    Args:
        out: Where the workers' lines go.
        messages: Where the launcher's own messages go.
        live_rank: The worker whose unfinished line is drawn; None when `out` is no terminal.
        colour: Whether colours may be used.
    """

    def __init__(self, out: TextIO, messages: TextIO, *, live_rank: int | None, colour: bool) -> None:
        self._stream = out
        self._out = Outlet(out)
        self._messages = self._out if _same_file(out, messages) else Outlet(messages)
        self.live_rank = live_rank
        self._colour = colour
        self._partial = ""

    def show(self, rank: int, lines: list[str], partial: str = "") -> None:
        """Writes finished lines of a worker and takes note of how its unfinished line looks."""
        if rank == self.live_rank:
            self._partial = partial
        if lines or rank == self.live_rank:
            shown = [f"{self._prefix(rank)}{self._painted(self._fitted(line))}" for line in lines]
            self._out.put(shown, self._drawn_partial())

    def tell(self, message: str) -> None:
        """Writes a message of the launcher itself, on a line of its own."""
        bottom = self._drawn_partial() if self._messages is self._out else ""
        self._messages.put([message], bottom, must_appear=True)

    def close(self) -> None:
        """Waits until everything is on the screen; a bounded time, should nobody read it."""
        self._out.close()
        if self._messages is not self._out:
            self._messages.close()

    def columns_for_live_worker(self) -> int:
        """The width that is left for the live worker beside its name."""
        rank = 0 if self.live_rank is None else self.live_rank
        return max(20, _columns(self._stream) - len(_name(rank)))

    def _drawn_partial(self) -> str:
        if not self._partial or self.live_rank is None:
            return ""
        room = self.columns_for_live_worker() - 1
        return self._prefix(self.live_rank) + self._painted(cropped(with_its_loss(self._partial, room), room))

    def _fitted(self, line: str) -> str:
        """On a terminal, a wide bar makes room for its text. All else of a finished line is shown."""
        if self.live_rank is None or CELL not in line:
            return line
        return with_shorter_bar(line, self.columns_for_live_worker())

    def _prefix(self, rank: int) -> str:
        if not self._colour:
            return _name(rank)
        return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{_name(rank)}{_RESET}"

    def _painted(self, line: str) -> str:
        if not self._colour:
            return without_colours(line)
        return f"{line}{_RESET}" if "\x1b" in line else line


def make_screen(out: TextIO, messages: TextIO, *, tee: frozenset[int], environ: Mapping[str, str]) -> Screen:
    """A screen that suits the streams: live and coloured on a terminal, plain lines elsewhere."""
    terminal = out.isatty() and environ.get("TERM", "dumb") != "dumb"
    return Screen(
        out,
        messages,
        live_rank=min(tee) if tee and terminal else None,
        colour=terminal and not environ.get("NO_COLOR"),
    )


def _name(rank: int) -> str:
    return f"[worker {rank}] "


def _columns(stream: TextIO) -> int:
    with contextlib.suppress(OSError, ValueError):
        columns = os.get_terminal_size(stream.fileno()).columns
        if columns > 0:
            return columns
    return shutil.get_terminal_size().columns


def _same_file(one: TextIO, other: TextIO) -> bool:
    """Whether two streams end in one file, where order matters: a terminal, `2>&1`."""
    if one is other:
        return True
    with contextlib.suppress(OSError, ValueError):
        return os.path.sameopenfile(one.fileno(), other.fileno())
    return False
