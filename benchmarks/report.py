"""The output formats of results: tables on a terminal, plain lines in a file, JSON for programs."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Literal, TextIO

from rich.console import Console
from rich.table import Table

from benchmarks.workers import threads_of_a_worker

Bound = Literal["at most", "at least"]


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant.

    Attributes:
        name: Its name in the table.
        times: One figure per round; None for a round without one.
        problem: Why there are no (more) figures, or None.
    """

    name: str
    times: tuple[float | None, ...]
    problem: str | None = None

    def measured(self) -> list[float]:
        return [figure for figure in self.times if figure is not None]


@dataclass(frozen=True, slots=True)
class Ratio:
    """Two contestants compared round by round, and the target of the ratio, if there is one."""

    name: str
    per_round: tuple[float, ...]
    bound: Bound = "at most"
    target: float | None = None

    @classmethod
    def of(
        cls, name: str, above: Row, below: Row, bound: Bound = "at most", target: float | None = None
    ) -> Ratio:
        """Divides the figures of the same round, because a slow machine slows down both."""
        pairs = zip(above.times, below.times, strict=True)
        ratios = tuple(a / b for a, b in pairs if a is not None and b is not None)
        return cls(name, ratios, bound, target)

    @classmethod
    def to(cls, name: str, above: Row, below: float, bound: Bound, target: float) -> Ratio:
        """Divides the figures of all rounds by a given number."""
        return cls(name, tuple(figure / below for figure in above.measured()), bound, target)

    def met(self) -> bool | None:
        """Whether the median is within the target; None without one, or if nothing was measured."""
        if not self.per_round or self.target is None:
            return None
        middle = median(self.per_round)
        return middle <= self.target if self.bound == "at most" else middle >= self.target


@dataclass(frozen=True, slots=True)
class Result:
    """One table."""

    title: str
    unit: str
    rows: tuple[Row, ...]
    ratios: tuple[Ratio, ...]
    notes: tuple[str, ...]


def machine_facts() -> dict[str, str]:
    """The environment of these figures, for comparisons with others."""
    threads = ", ".join(f"{name}={value}" for name, value in threads_of_a_worker().items())
    return {
        "machine": f"{len(os.sched_getaffinity(0))} cores, {_processor()}, {platform.system()}",
        "versions": ", ".join(f"{name} {_version(*names)}" for name, names in _PACKAGES.items()),
        "each process": threads,
        "load at the start": f"{os.getloadavg()[0]:.1f}",
    }


def show(facts: dict[str, str], results: Sequence[Result], out: TextIO) -> None:
    """Prints everything."""
    for name, value in facts.items():
        out.write(f"{name}: {value}\n")
    for result in results:
        out.write("\n")
        if out.isatty():
            _show_table(result, Console(file=out))
        else:
            _show_plain(result, out)
        for ratio in result.ratios:
            out.write(f"{_sentence(ratio)}\n")
        for note in result.notes:
            out.write(f"{note}\n")


def write_json(facts: dict[str, str], results: Sequence[Result], path: Path) -> None:
    """Writes every single figure."""
    tables = [
        {
            **dataclasses.asdict(result),
            "rows": [
                {**dataclasses.asdict(row), "median": median(row.measured()) if row.measured() else None}
                for row in result.rows
            ],
            "ratios": [
                {
                    **dataclasses.asdict(ratio),
                    "median": median(ratio.per_round) if ratio.per_round else None,
                    "met": ratio.met(),
                }
                for ratio in result.ratios
            ],
        }
        for result in results
    ]
    path.write_text(json.dumps({"facts": facts, "tables": tables}, indent=2) + "\n")


_COLUMNS = ("contestant", "median", "lowest", "highest", "")
_PACKAGES = {
    "Python": (),
    "TensorFlow": ("tensorflow-cpu", "tensorflow"),
    "Keras": ("keras",),
    "tf_keras": ("tf-keras",),
    "torch": ("torch",),
}


def _cells(row: Row) -> tuple[str, ...]:
    figures = row.measured()
    if not figures:
        return (row.name, "", "", "", row.problem or "not measured")
    numbers = (median(figures), min(figures), max(figures))
    return (row.name, *(_short(number, 1) for number in numbers), row.problem or "")


def _show_table(result: Result, console: Console) -> None:
    table = Table(title=f"{result.title} ({result.unit})", title_justify="left")
    for place, column in enumerate(_COLUMNS):
        table.add_column(column, justify="right" if 1 <= place <= 3 else "left")
    for row in result.rows:
        table.add_row(*_cells(row))
    console.print(table)


def _show_plain(result: Result, out: TextIO) -> None:
    out.write(f"{result.title} ({result.unit})\n")
    lines = [_COLUMNS, *(_cells(row) for row in result.rows)]
    width = max(len(line[0]) for line in lines)
    for name, *numbers, note in lines:
        out.write(f"{name:{width}}{''.join(f'{n:>10}' for n in numbers)}  {note}".rstrip() + "\n")


def _sentence(ratio: Ratio) -> str:
    wanted = "no target" if ratio.target is None else f"target: {ratio.bound} {ratio.target:g}"
    if not ratio.per_round:
        return f"{ratio.name}: not measured ({wanted})"
    lowest, middle, highest = min(ratio.per_round), median(ratio.per_round), max(ratio.per_round)
    verdict = {True: ", met", False: ", MISSED", None: ""}[ratio.met()]
    return (
        f"{ratio.name}: {_short(middle, 2)} ({_short(lowest, 2)} to {_short(highest, 2)}); {wanted}{verdict}"
    )


def _short(number: float, digits: int) -> str:
    """Formats a number with this many decimals, but at least two significant digits."""
    return f"{number:.{digits}f}" if number >= 10**-digits * 10 else f"{number:.2g}"


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _version(*packages: str) -> str:
    if not packages:
        return ".".join(str(part) for part in sys.version_info[:3])
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"
