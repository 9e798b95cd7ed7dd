"""One concept for every table: a question, put to contestants that take turns, with a floor and targets."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from benchmarks.results import TORCH_PYTHON, Bound, Comparison, Result, Role, Row, divided
from benchmarks.runner import BaseTask
from tests.hosts import network

Say = Callable[[str], None]
WORKERS = 2
QUICK_SECS = 25.0
"""The budget of a question in a quick run."""
TURNS = "Contestants take turns in every round; every round's weights are checked, number by number."


@dataclass(frozen=True, slots=True)
class Contestant:
    """One row of a table.

    Attributes:
        name: Its name in the table.
        pool: The kind of processes on which it runs, as in `groups.group_of`.
        factory: Its `Implementation`, as `module:Class`.
        needs: A package that may be missing, or None.
        role: "floor" for the work that nobody can avoid, "part" for a figure for orientation. By default,
            what runs on our processes is ours, and everything else is a peer.
        task: Its task if that differs from the question's.
        workers: Its number of workers if that differs from the question's.
        series: In a question about growth: the line to which it belongs.
        at: In a question about growth: its place on the axis.
        topic: Only contestants of the same topic are compared with each other; None if there is but one.
    """

    name: str
    pool: str
    factory: str
    needs: str | None = None
    role: Role | None = None
    task: BaseTask | None = None
    workers: int | None = None
    series: str | None = None
    at: float | None = None
    topic: str | None = None

    def missing(self) -> str | None:
        if self.pool == "torch":
            return None if TORCH_PYTHON.exists() else "torch is not installed: there is no .venv-torch"
        if self.pool.startswith("hosts"):
            return network.missing() or None
        if self.needs is None or importlib.util.find_spec(self.needs) is not None:
            return None
        return f"{self.needs} is not installed"

    def row(self, times: tuple[float | None, ...], problem: str | None) -> Row:
        usual: Role = "ours" if self.pool.partition(":")[0] in ("replicast", "hosts", "page") else "peer"
        return Row(self.name, times, problem, self.role or usual, self.series, self.at, self.topic)


@dataclass(frozen=True, slots=True)
class Ratio:
    """Which contestant is divided by which, round by round, and what should come out.

    Attributes:
        name: Its name in the report.
        above: The contestant whose figures are divided.
        below: The contestant, or the number, by which they are divided.
        bound: On which side of the target the ratio should be.
        target: The target, if there is one.
        factor: What the ratio is multiplied with.
        beyond: Two contestants: what the first takes more than the second is added to `above`.
    """

    name: str
    above: Contestant
    below: Contestant | float
    bound: Bound = "at most"
    target: float | None = None
    factor: float = 1.0
    beyond: tuple[Contestant, Contestant] | None = None

    def of(self, rows: Mapping[Contestant, Row]) -> Comparison:
        below = rows[self.below] if isinstance(self.below, Contestant) else self.below
        above = rows[self.above]
        medians = [] if self.beyond is None else [rows[one].median() for one in self.beyond]
        if None in medians:
            above = replace(above, times=(None,) * len(above.times))
        elif medians:  # not round by round: the two may have been measured in another stage
            more = medians[0] - medians[1]
            above = replace(above, times=tuple(None if time is None else time + more for time in above.times))
        return divided(self.name, above, below, self.bound, self.target, self.factor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A table to be measured.

    Attributes:
        name: For `--only` and the names of pictures.
        title: The question.
        unit: Of the figures.
        contestants: Who takes turns.
        task: What they do.
        workers: How many processes each has.
        ratios: What is compared, with its target.
        notes: How it is measured.
        turns: How many turns a contestant has per round: several where a turn is short.
        budget_secs: No round starts that would end later: a busy machine runs fewer rounds, not longer.
        axis: In a question about growth: what grows.
        staged: One place on the axis after the other, because not all processes have room at once.
    """

    name: str
    title: str
    unit: str
    contestants: tuple[Contestant, ...]
    task: BaseTask
    workers: int = WORKERS
    ratios: tuple[Ratio, ...] = ()
    notes: tuple[str, ...] = ()
    turns: int = 1
    budget_secs: float = 90.0
    axis: str | None = None
    staged: bool = False

    def answered(self, rows: Mapping[Contestant, Row], rounds: int) -> Result:
        """The table of these figures."""
        known = tuple(ratio.of(rows) for ratio in self.ratios if ratio.above in rows)
        unit = f"{self.unit}, {rounds} round{'s' if rounds > 1 else ''}"
        return Result(self.name, self.title, unit, tuple(rows.values()), known, self.notes, self.axis)
