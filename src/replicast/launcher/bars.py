"""Keras' progress bar as text: where it ends, and how to shorten it. Pure functions.

Keras draws a bar of the same width on every terminal, without a line break. So the loss, which comes last,
is beyond the edge of a narrow terminal, and whatever is written next lands on the same line.
"""

from __future__ import annotations

import re

CELL = "━"
_MIN_CELLS = 5
_OMITTED = "…"
_COLOUR = r"(?:\x1b\[[0-9;]*m)*"
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_CELLS = re.compile(rf"{CELL}(?:{_COLOUR}{CELL})+")
_COUNT = rf"{_COLOUR} *\d+/(?:\d+{_COLOUR} {_COLOUR}{CELL}(?:{_COLOUR}{CELL})*|Unknown){_COLOUR}"
_TIME = rf" {_COLOUR}\d+(?:s|:\d\d(?::\d\d)?){_COLOUR} \d+(?:s|ms|us)/step"
_NUMBER = r"(?:-?\d+\.\d{4}(?:e[+-]\d\d)?|nan|-?inf)"  # a fixed number of decimals: the end is exact
_BAR = re.compile(rf"(?P<bar>{_COUNT}{_TIME}(?: - [^:]+: {_NUMBER})*) *")


def split_bar(line: str) -> tuple[str, str] | None:
    """Splits a line into a progress bar and the text that something else wrote after it."""
    found = _BAR.match(line)
    if found is None or found.end() == len(line):
        return None
    return found["bar"], line[found.end() :]


def with_shorter_bar(line: str, columns: int) -> str:
    """Removes as many cells of the bar as needed to fit the columns, down to a minimum; keeps the text."""
    excess = _width(line) - columns
    if excess <= 0 or CELL not in line:
        return line
    return _CELLS.sub(lambda cells: _fewer(cells[0], excess), line, count=1)


def with_its_loss(line: str, columns: int) -> str:
    """Fits a bar into the columns, with the loss and as many other metrics as there is room for.

    A line that is not a bar, or whose part before the metrics is too wide, is not cropped.
    """
    line = with_shorter_bar(line, columns).rstrip()
    if _width(line) <= columns or not _BAR.fullmatch(line):
        return line
    head, *metrics = line.split(" - ")
    kept: list[str] = []
    for metric in sorted(metrics, key=lambda metric: not metric.startswith("loss:")):
        if _width(" - ".join([head, *kept, metric, _OMITTED])) <= columns:
            kept.append(metric)
    return " - ".join([head, *sorted(kept, key=metrics.index), _OMITTED])


def _fewer(cells: str, excess: int) -> str:
    """Removes cells evenly, so that the coloured part stays in proportion."""
    drawn = cells.count(CELL)
    kept = max(min(_MIN_CELLS, drawn), drawn - excess)
    place = iter(range(drawn))

    def is_kept() -> bool:
        cell = next(place)
        return (cell + 1) * kept // drawn > cell * kept // drawn

    return "".join(sign for sign in cells if sign != CELL or is_kept())


def _width(line: str) -> int:
    return len(_COLOURS.sub("", line).expandtabs().rstrip())
