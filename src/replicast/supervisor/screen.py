"""What people see while workers run: their lines, each with its worker, and one progress bar at the bottom.

Only whole lines are ever written for good. On a terminal, the unfinished line of one worker, the live one, is
drawn below them and redrawn when it changes, so that a bar moves and no two workers share a line.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from replicast.supervisor.lines import cropped, without_colours

_COLOURS = (36, 33, 32, 35, 34, 96, 93, 92, 95, 94)
_ERASE_LINE = "\r\x1b[K"
_RESET = "\x1b[0m"


class Screen:
    """Writes workers' lines to one stream and the launcher's own messages to another.

    Args:
        out: Where the workers' lines go.
        messages: Where the launcher's own messages go.
        live_rank: The worker whose unfinished line is drawn; None when `out` is no terminal.
        colour: Whether colours may be used.
    """

    def __init__(self, out: TextIO, messages: TextIO, *, live_rank: int | None, colour: bool) -> None:
        self._out = out
        self._messages = messages
        self.live_rank = live_rank
        self._colour = colour
        self._partial = ""
        self._drawn = False
        self._reader_left = False

    def show(self, rank: int, lines: list[str], partial: str = "") -> None:
        """Writes finished lines of a worker and takes note of how its unfinished line looks."""
        text = "".join(f"{self._prefix(rank)}{self._painted(line)}\n" for line in lines)
        if rank == self.live_rank:
            if not lines and partial == self._partial:
                return
            self._partial = partial
        if text or rank == self.live_rank:
            self._write(self._erased() + text + self._drawn_partial())

    def tell(self, message: str) -> None:
        """Writes a message of the launcher itself, on a line of its own."""
        self._write(self._erased())
        with contextlib.suppress(OSError):
            self._messages.write(f"{message}\n")
            self._messages.flush()
        self._write(self._drawn_partial())

    def columns_for_live_worker(self) -> int:
        """The width that is left for the live worker beside its name."""
        rank = 0 if self.live_rank is None else self.live_rank
        return max(20, _columns(self._out) - len(_name(rank)))

    def _erased(self) -> str:
        erase, self._drawn = _ERASE_LINE if self._drawn else "", False
        return erase

    def _drawn_partial(self) -> str:
        if not self._partial or self.live_rank is None:
            return ""
        self._drawn = True
        room = self.columns_for_live_worker() - 1
        return self._prefix(self.live_rank) + self._painted(cropped(self._partial, room))

    def _prefix(self, rank: int) -> str:
        if not self._colour:
            return _name(rank)
        return f"\x1b[{_COLOURS[rank % len(_COLOURS)]}m{_name(rank)}{_RESET}"

    def _painted(self, line: str) -> str:
        if not self._colour:
            return without_colours(line)
        return f"{line}{_RESET}" if "\x1b" in line else line

    def _write(self, text: str) -> None:
        if not text or self._reader_left:
            return
        encoding = self._out.encoding or "utf-8"
        try:
            self._out.write(text.encode(encoding, "replace").decode(encoding))
            self._out.flush()
        except OSError:  # `replicast run … | head`: the logs still get everything.
            self._reader_left = True
            with contextlib.suppress(OSError, ValueError), Path(os.devnull).open("w") as nowhere:
                os.dup2(nowhere.fileno(), self._out.fileno())  # Nor may the flush at exit fail.


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
