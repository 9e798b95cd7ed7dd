"""Turns the bytes of a worker into the lines that a terminal would show. Pure; knows no screen.

Progress bars rewrite their line with carriage returns and backspaces. A line of ours is what such a line
looks like in the end, and the unfinished last one is what it looks like now. What is written behind a bar of
Keras is a line of its own, and the bar stays the unfinished one until it is drawn again.
"""

from __future__ import annotations

import codecs
import re

from replicast.supervisor.bars import torn

_LONGEST_UNFINISHED = 65536
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\^_]|[()][0-9A-Za-z])")
_UNFINISHED_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|\][^\x07\x1b]*|[()])?$")
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1a\x1c-\x1f\x7f]")
_TOKEN = re.compile(rf"{_ESCAPE.pattern}|.", re.DOTALL)
_RESET = "\x1b[0m"


class LineAssembler:
    """Collects one worker's output into lines."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._unfinished = ""
        self._bar = ""
        """A bar that other lines were written behind, while it waits to be drawn again."""

    def feed(self, data: bytes) -> list[str]:
        """Takes the next bytes and returns the lines that they complete."""
        *complete, rest = (self._unfinished + self._decoder.decode(data)).split("\n")
        lines = [self._completed(line) for line in complete]
        self._forget_bar_if_redrawn(rest)
        self._unfinished = _last_rewrite(rest)[-_LONGEST_UNFINISHED:]
        return lines

    def finish(self) -> list[str]:
        """Returns what is left when nothing more will come."""
        rest = self._unfinished + self._decoder.decode(b"", final=True)
        self._unfinished = ""
        return list(torn(as_shown(rest)) or [as_shown(rest)]) if rest else []

    @property
    def partial(self) -> str:
        """How the unfinished line looks now."""
        shown = as_shown(self._unfinished)
        bar_and_text = torn(shown)
        return self._bar or (shown if bar_and_text is None else bar_and_text[0])

    def _completed(self, line: str) -> str:
        self._forget_bar_if_redrawn(line)
        shown = as_shown(line)
        bar_and_text = torn(shown)
        if bar_and_text is None:
            return shown
        self._bar, text = bar_and_text
        return text

    def _forget_bar_if_redrawn(self, line: str) -> None:
        if "\r" in line or "\b" in line:
            self._bar = ""


def as_shown(line: str) -> str:
    """What a terminal shows of a line in the end: colours stay, rewritten text and cursor movements go."""
    line = _last_rewrite(line).strip("\r").rstrip("\b")
    if "\b" in line:
        line = _with_backspaces_done(line)
    if "\x1b" in line:
        line = _ESCAPE.sub(lambda found: found[0] if found[0].endswith("m") else "", line)
        line = _UNFINISHED_ESCAPE.sub("", line)
    return _CONTROL.sub("", line)


def without_colours(line: str) -> str:
    """The text of a line that `as_shown` returned."""
    return _ESCAPE.sub("", line).replace("\x1b", "")


def cropped(line: str, columns: int) -> str:
    """The beginning of a line that `as_shown` returned, at most so many columns wide."""
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
    """From the last text that begins at the start of the line; a bare carriage return erases nothing."""
    written = line.rstrip("\r")
    return line[written.rfind("\r") + 1 :]


def _with_backspaces_done(line: str) -> str:
    kept: list[str] = []
    for token in _TOKEN.finditer(line):
        if token[0] != "\b":
            kept.append(token[0])
        elif kept:
            kept.pop()
    return "".join(kept)
