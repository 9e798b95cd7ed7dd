"""What users see while workers run: lines with the name of their worker, and a progress bar at the bottom.

Only complete lines are written permanently. On a terminal, the unfinished line of one worker, the live one,
is drawn below them and redrawn when it changes, so that a bar moves and no two workers share a line.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from typing import TextIO

from replicast.launcher.bars import CELL, with_its_loss, with_shorter_bar
from replicast.launcher.lines import cropped, without_colours
from replicast.launcher.outlet import Outlet

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_RESET = "\x1b[0m"


class Screen:
    """Writes workers' lines to one stream and the launcher's own messages to another.

    Only `close` blocks. Call it at the end: some output may still be queued.
    """

    def __init__(self, out: TextIO, messages: TextIO, *, live_rank: int | None, colour: bool) -> None:
        self._stream = out
        self._out = Outlet(out)
        self._messages = self._out if _same_file(out, messages) else Outlet(messages)
        self.live_rank = live_rank
        self._colour = colour
        self._partial = ""

    def show(self, rank: int, lines: list[str], partial: str = "") -> None:
        """Writes finished lines of a worker and redraws its unfinished line."""
        if rank == self.live_rank:
            self._partial = partial
        if lines or rank == self.live_rank:
            shown = [f"{self._prefix(rank)}{self._painted(self._fitted(line))}" for line in lines]
            self._out.put(shown, self._drawn_partial())

    def tell(self, message: str) -> None:
        """Writes a message of the launcher itself, on a separate line."""
        bottom = self._drawn_partial() if self._messages is self._out else ""
        self._messages.put([message], bottom, must_appear=True)

    def close(self) -> None:
        """Waits until everything is written, with a time limit in case nobody reads."""
        self._out.close()
        if self._messages is not self._out:
            self._messages.close()

    def columns_for_live_worker(self) -> int:
        """The width left for the live worker's line after its name."""
        rank = 0 if self.live_rank is None else self.live_rank
        return max(20, _columns(self._stream) - len(_name(rank)))

    def _drawn_partial(self) -> str:
        if not self._partial or self.live_rank is None:
            return ""
        room = self.columns_for_live_worker() - 1
        return self._prefix(self.live_rank) + self._painted(cropped(with_its_loss(self._partial, room), room))

    def _fitted(self, line: str) -> str:
        """On a terminal, shortens a wide bar to make room for its text; shows finished lines in full."""
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
    """Creates a screen for the streams: live and coloured on a terminal, plain lines elsewhere."""
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
    """Whether two streams write to the same file, where order matters: a terminal, `2>&1`."""
    if one is other:
        return True
    with contextlib.suppress(OSError, ValueError):
        return os.path.sameopenfile(one.fileno(), other.fileno())
    return False
