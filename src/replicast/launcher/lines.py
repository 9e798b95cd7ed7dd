"""Turns the bytes of a worker into the lines that a terminal would show. Pure; independent of the screen.

Progress bars rewrite their line with carriage returns and backspaces. A finished line here is the final state
of such a line, and the unfinished last line is its current state. Text that is written after a Keras bar
becomes a separate line, and the bar stays the unfinished line until it is drawn again.
"""

from __future__ import annotations

import codecs
import re

from replicast.launcher.bars import split_bar

_MAX_UNFINISHED = 65536
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
        """A bar after which other text was written, until it is drawn again."""

    def feed(self, data: bytes) -> list[str]:
        """Takes the next bytes and returns the lines that they complete."""
        *complete, rest = (self._unfinished + self._decoder.decode(data)).split("\n")
        lines = [self._completed(line) for line in complete]
        self._forget_bar_if_redrawn(rest)
        self._unfinished = _last_rewrite(rest)[-_MAX_UNFINISHED:]
        return lines

    def finish(self) -> list[str]:
        """Returns what is left at the end of the output."""
        rest = self._unfinished + self._decoder.decode(b"", final=True)
        self._unfinished = ""
        return list(split_bar(as_shown(rest)) or [as_shown(rest)]) if rest else []

    @property
    def partial(self) -> str:
        """The current state of the unfinished line."""
        shown = as_shown(self._unfinished)
        bar_and_text = split_bar(shown)
        return self._bar or (shown if bar_and_text is None else bar_and_text[0])

    def _completed(self, line: str) -> str:
        self._forget_bar_if_redrawn(line)
        shown = as_shown(line)
        bar_and_text = split_bar(shown)
        if bar_and_text is None:
            return shown
        self._bar, text = bar_and_text
        return text

    def _forget_bar_if_redrawn(self, line: str) -> None:
        if "\r" in line or "\b" in line:
            self._bar = ""


def as_shown(line: str) -> str:
    """The final state of a line on a terminal: with colours, without rewritten text and cursor movements."""
    line = _last_rewrite(line).strip("\r").rstrip("\b")
    if "\b" in line:
        line = _with_backspaces_applied(line)
    if "\x1b" in line:
        line = _ESCAPE.sub(lambda found: found[0] if found[0].endswith("m") else "", line)
        line = _UNFINISHED_ESCAPE.sub("", line)
    return _CONTROL.sub("", line)


def without_colours(line: str) -> str:
    """The text of a line that `as_shown` returned."""
    return _ESCAPE.sub("", line).replace("\x1b", "")


def cropped(line: str, columns: int) -> str:
    """Crops a line that `as_shown` returned to a number of columns."""
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


def _with_backspaces_applied(line: str) -> str:
    kept: list[str] = []
    for token in _TOKEN.finditer(line):
        if token[0] != "\b":
            kept.append(token[0])
        elif kept:
            kept.pop()
    return "".join(kept)
