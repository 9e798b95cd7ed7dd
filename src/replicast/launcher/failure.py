"""What went wrong in a worker, from its log: the exception that ended it, and nothing printed after it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from replicast.launcher.chatter import is_chatter
from replicast.launcher.lines import without_colours
from replicast.paths import RunPath

_READ_BYTES = 256 * 1024
_FIRST_LINES, _LAST_LINES = 1, 18
_TRACEBACK = "Traceback (most recent call last):"
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: .*|$)")


def traceback_in(log: RunPath, before: int = 0) -> list[str]:
    """The last traceback in a log with its exception, shortened in its middle; empty if there is none."""
    lines = [line for line in map(without_colours, end_of(log)) if not is_chatter(line)]
    starts = [number for number, line in enumerate(lines) if line.strip() == _TRACEBACK]
    for start in reversed(starts):
        end = _end_of_traceback(lines, start)
        if end is not None:
            return lines[max(0, start - before) : start] + _shortened(lines[start : end + 1])
    return []


def exception_in(traceback: Sequence[str]) -> str:
    """The line of a traceback that names the exception; empty without a traceback."""
    found = (line for line in reversed(traceback) if _EXCEPTION.match(line))
    return next(found, "")


def _end_of_traceback(lines: Sequence[str], start: int) -> int | None:
    """The last line that belongs to a traceback: that of its exception, and of a message of several lines."""
    for number in range(start + 1, len(lines)):
        line = lines[number]
        if line and not line[0].isspace():
            return number if _EXCEPTION.match(line) else None
    return None


def _shortened(lines: Sequence[str]) -> list[str]:
    most = _FIRST_LINES + _LAST_LINES
    if len(lines) <= most + 1:
        return list(lines)
    left_out = len(lines) - most
    return [*lines[:_FIRST_LINES], f"  … {left_out} lines: see the log", *lines[-_LAST_LINES:]]


def end_of(log: RunPath) -> list[str]:
    """The last lines of a log; none if it cannot be read."""
    try:
        with os.fdopen(log.open(os.O_RDONLY), "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _READ_BYTES))
            return file.read(_READ_BYTES).decode(errors="replace").splitlines()
    except OSError:
        return []
