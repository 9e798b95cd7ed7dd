"""Results on the screen: tables on a terminal, plain lines in a file, and what two runs have in common."""

from __future__ import annotations

from statistics import median
from typing import TextIO

from rich.console import Console
from rich.table import Table

from benchmarks.results import Comparison, Result, Row, Run

MOVED = 0.15
COLUMNS = ("contestant", "median", "lowest", "highest", "/ best peer", "/ floor", "")


def show(run: Run, out: TextIO) -> None:
    """Prints everything."""
    for name, value in {"date": run.date, **run.machine, **run.versions}.items():
        out.write(f"{name}: {value}\n")
    for result in run.results:
        show_result(result, out)


def show_result(result: Result, out: TextIO) -> None:
    """Prints one table, its ratios with their targets, and how it grows."""
    out.write("\n")
    if out.isatty():
        _show_table(result, Console(file=out))
    else:
        _show_plain(result, out)
    for ratio in result.ratios:
        out.write(f"{sentence(ratio)}\n")
    for name, exponent in result.slopes().items() if result.axis else ():
        out.write(f"{name}: grows with {result.axis} to the power of {exponent:.2f}\n")
    for note in result.notes:
        out.write(f"{note}\n")


def compare(before: Run, after: Run, out: TextIO) -> bool:
    """Prints whether two runs have the same order of contestants, and which rows moved.

    Contestants within 15 % of each other in either run may change places: that is noise, not an order.

    Returns:
        Whether the order is the same in every question that both have.
    """
    same = True
    later = {result.name: result for result in after.results}
    for result in before.results:
        other = later.get(result.name)
        if other is None:
            out.write(f"{result.name}: only in the first run\n")
            continue
        swapped = swaps(result, other)
        same &= not swapped
        out.write(f"{result.name}: {'the same order' if not swapped else 'ANOTHER ORDER'}\n")
        for one, two in swapped:
            out.write(f"  {one} was faster than {two}, and now is slower\n")
        for line in moves(result, other):
            out.write(f"  {line}\n")
    return same


def swaps(before: Result, after: Result) -> list[tuple[str, str]]:
    """Pairs of contestants whose order differs by more than noise: the first was faster, now it is slower."""
    then, now = _medians(before), _medians(after)
    both = [name for name in before.order() if name in now]
    return [
        (one, two)
        for place, one in enumerate(both)
        for two in both[place + 1 :]
        if then[two] > then[one] * (1 + MOVED) and now[one] > now[two] * (1 + MOVED)
    ]


def moves(before: Result, after: Result) -> list[str]:
    """The rows whose median differs by more than 15 %."""
    then, now = _medians(before), _medians(after)
    return [
        f"{name}: {short(then[name])} → {short(now[name])} ({now[name] / then[name] - 1:+.0%})"
        for name in then
        if name in now and abs(now[name] / then[name] - 1) > MOVED
    ]


def _medians(result: Result) -> dict[str, float]:
    return {row.name: middle for row in result.rows if (middle := row.median()) is not None}


def cells(result: Result, row: Row) -> tuple[str, ...]:
    """A row of a table: name, median, lowest and highest figure, ratios to the best, and its problem."""
    figures = row.measured()
    if not figures:
        return (row.name, *[""] * (len(COLUMNS) - 2), row.problem or "not measured")
    numbers = [short(number) for number in (median(figures), min(figures), max(figures))]
    ratios = [result.ratio_to_best(row, role) for role in ("peer", "floor")]
    known = ["" if ratio is None else short(ratio, 2) for ratio in ratios]
    return (row.name, *numbers, *known, row.problem or "")


def _show_table(result: Result, console: Console) -> None:
    table = Table(title=f"{result.title} ({result.unit})", title_justify="left")
    for place, column in enumerate(COLUMNS):
        table.add_column(column, justify="right" if 1 <= place <= 5 else "left")
    for row in result.rows:
        table.add_row(*cells(result, row))
    console.print(table)


def _show_plain(result: Result, out: TextIO) -> None:
    out.write(f"{result.title} ({result.unit})\n")
    lines = [COLUMNS, *(cells(result, row) for row in result.rows)]
    width = max(len(line[0]) for line in lines)
    for name, *numbers, note in lines:
        out.write(f"{name:{width}}{''.join(f'{n:>12}' for n in numbers)}  {note}".rstrip() + "\n")


def sentence(ratio: Comparison) -> str:
    """A ratio, its range over the rounds, its target, and whether that is met."""
    wanted = "" if ratio.target is None else f"; target: {ratio.bound} {ratio.target:g}"
    if not ratio.per_round:
        return f"{ratio.name}: not measured{wanted}"
    lowest, middle, highest = min(ratio.per_round), median(ratio.per_round), max(ratio.per_round)
    verdict = {True: ", met", False: ", MISSED", None: ""}[ratio.met()]
    return f"{ratio.name}: {short(middle, 2)} ({short(lowest, 2)} to {short(highest, 2)}){wanted}{verdict}"


def short(number: float, digits: int = 1) -> str:
    """Formats a number with this many decimals, but at least two significant digits."""
    if number >= 1000:
        return f"{number:,.0f}"
    return f"{number:.{digits}f}" if number >= 10**-digits * 10 else f"{number:.2g}"
