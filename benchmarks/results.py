"""The figures of a run: tables of contestants, comparisons with targets, and the file that holds them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from statistics import linear_regression, median
from typing import Literal

import msgspec
import numpy as np

Bound = Literal["at most", "at least"]
Role = Literal["ours", "peer", "floor", "part"]
DIRECTORY = Path(__file__).with_name("results")
TORCH_PYTHON = Path(__file__).resolve().parents[1] / ".venv-torch" / "bin" / "python"


@dataclass(frozen=True, slots=True)
class Row:
    """One contestant.

    Attributes:
        name: Its name in the table.
        times: One figure per round; None for a round without one.
        problem: Why there are no (more) figures, or None.
        role: Whether it is ours, a peer, the floor, or a figure for orientation.
        series: In a question about growth: the line to which it belongs.
        at: In a question about growth: its place on the axis.
        topic: Only rows of the same topic are compared with each other.
    """

    name: str
    times: tuple[float | None, ...]
    problem: str | None = None
    role: Role = "part"
    series: str | None = None
    at: float | None = None
    topic: str | None = None

    def measured(self) -> list[float]:
        return [figure for figure in self.times if figure is not None]

    def median(self) -> float | None:
        figures = self.measured()
        return median(figures) if figures else None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A ratio of two rows, round by round, and its target, if there is one."""

    name: str
    per_round: tuple[float, ...]
    bound: Bound = "at most"
    target: float | None = None

    def median(self) -> float | None:
        return median(self.per_round) if self.per_round else None

    def met(self) -> bool | None:
        """Whether the median is within the target; None without one, or if nothing was measured."""
        middle = self.median()
        if middle is None or self.target is None:
            return None
        return middle <= self.target if self.bound == "at most" else middle >= self.target


@dataclass(frozen=True, slots=True)
class Result:
    """One table.

    Attributes:
        name: The name of the question, as in `--only`.
        title: The question.
        unit: Of the figures.
        rows: The contestants.
        ratios: The comparisons that have a target, or that are worth one.
        notes: How it was measured.
        axis: In a question about growth: what the axis of the rows' `at` is.
    """

    name: str
    title: str
    unit: str
    rows: tuple[Row, ...]
    ratios: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = ()
    axis: str | None = None

    def order(self) -> tuple[str, ...]:
        """The names of the measured contestants, the fastest first."""
        measured = [(middle, row.name) for row in self.rows if (middle := row.median()) is not None]
        return tuple(name for _, name in sorted(measured))

    def ratio_to_best(self, row: Row, role: Role) -> float | None:
        """The median ratio of a row to the fastest peer, or to the floor; None for that one itself."""
        best = self._best(role, row)
        return divided("", row, best).median() if best is not None and best is not row else None

    def slopes(self) -> dict[str, float]:
        """The exponent by which each line grows: 1 is in proportion to the axis."""
        lines = {name: line(self.rows, name) for name in series_of(self.rows)}
        return {name: slope(points) for name, points in lines.items() if len(points) > 1}

    def _best(self, role: Role, row: Row) -> Row | None:
        """The fastest of a role that is comparable with a row."""
        rivals = [
            one
            for one in self.rows
            if one.role == role and (one.at, one.topic) == (row.at, row.topic) and one.measured()
        ]
        return min(rivals, key=lambda one: median(one.measured()), default=None)


@dataclass(frozen=True, slots=True)
class Run:
    """All figures of one run of the benchmarks.

    Attributes:
        date: When it started.
        command: What was run.
        machine: Cores, memory, kernel and load.
        versions: Of Python and of all packages that are compared.
        results: The tables.
    """

    date: str
    command: str
    machine: dict[str, str]
    versions: dict[str, str]
    results: list[Result] = field(default_factory=list)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1) + b"\n")

    @classmethod
    def read(cls, path: Path) -> Run:
        return msgspec.json.decode(path.read_bytes(), type=cls)


def divided(
    name: str,
    above: Row,
    below: Row | float,
    bound: Bound = "at most",
    target: float | None = None,
    factor: float = 1.0,
) -> Comparison:
    """Divides the figures of the same round, because a slow machine slows down both."""
    others = below.times if isinstance(below, Row) else (below,) * len(above.times)
    pairs = zip(above.times, others, strict=True)
    return Comparison(
        name, tuple(factor * a / b for a, b in pairs if a is not None and b is not None), bound, target
    )


def series_of(rows: Sequence[Row]) -> list[str]:
    """The names of the lines, in the order of the table."""
    return list(dict.fromkeys(row.series for row in rows if row.series is not None))


def line(rows: Sequence[Row], series: str) -> list[tuple[float, float]]:
    """The points of one line: the place on the axis, and the median."""
    return [
        (row.at, middle)
        for row in rows
        if row.series == series and row.at is not None and (middle := row.median()) is not None
    ]


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The slope of the straight line that fits the points best, both axes being logarithmic."""
    across, up = (np.log([point[axis] for point in points]).tolist() for axis in (0, 1))
    return float(linear_regression(across, up).slope)


def versions() -> dict[str, str]:
    """The versions of everything that is compared."""
    found = {"Python": ".".join(str(part) for part in sys.version_info[:3])}
    found |= {name: _version(*names) for name, names in _PACKAGES.items()}
    return {**found, "torch": _torch_version()}


_PACKAGES = {
    "TensorFlow": ("tensorflow-cpu", "tensorflow"),
    "Keras": ("keras",),
    "tf_keras": ("tf-keras",),
    "mpi4py": ("mpi4py",),
    "mpich": ("mpich",),
}


def _version(*packages: str) -> str:
    for package in packages:
        try:
            return metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def _torch_version() -> str:
    """From the directory of its environment, without starting it."""
    library = TORCH_PYTHON.parents[1] / "lib"
    found = [path.stem.split("-")[1] for path in library.glob("python*/site-packages/torch-*.dist-info")]
    return found[0] if found else "not installed"
