"""A race: contestants take turns on processes that stay up, and every turn is checked."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from benchmarks.fit import Contestant, Say, order_of_round
from benchmarks.report import Row
from benchmarks.seats import Clock, Entry, Ground
from benchmarks.workers import Crew, Failed, Ready

PATIENCE_SECS = 60.0
WORKERS = 2
GroundT = TypeVar("GroundT", bound=Ground)
TURNS = "Contestants take turns in every round; every round's weights are checked, number by number."


class Group(Protocol):
    """Processes that stay up and run one contestant at a time."""

    def prepare(self, entry: Entry, patience_secs: float) -> None:
        """Sets up and runs once, unless that was done before."""

    def order(self, order: str, entry: Entry, patience_secs: float) -> None:
        """Has all processes do one thing: "arrange", "race" or "check"."""

    def end(self) -> None: ...


class CrewGroup:
    """A crew as a group.

    Args:
        strategy: The function of `benchmarks.contestants` that makes what the workers have in common.
        workers: How many.
    """

    def __init__(self, strategy: str, workers: int) -> None:
        self._crew = Crew(f"benchmarks.contestants:{strategy}", workers)

    def prepare(self, entry: Entry, patience_secs: float) -> None:
        for order in ("arrange", "race", "check"):
            self._crew.prepare(_ready(order, entry), patience_secs)

    def order(self, order: str, entry: Entry, patience_secs: float) -> None:
        self._crew.seconds(_ready(order, entry), patience_secs)

    def end(self) -> None:
        self._crew.end()


class Race:
    """One interleaved run.

    Args:
        name: Of the table, for messages.
        contestants: Who takes part.
        groups: The processes, by the names that the contestants know them by.
        workers: How many there are in each group.
        task: What is done.
        say: Told what is being done now.

    Attributes:
        done: How many rounds were run.
    """

    def __init__(
        self,
        name: str,
        contestants: Sequence[Contestant],
        groups: Mapping[str, Group],
        workers: int,
        task: Ground,
        say: Say,
    ) -> None:
        self.done = 0
        self._name = name
        self._contestants = tuple(contestants)
        self._groups = groups
        self._task = task
        self._say = say
        self._clock = Clock(task.clock, workers)
        self._problems = {c: problem for c in contestants if (problem := c.missing()) is not None}
        self._times: dict[Contestant, list[float | None]] = {c: [] for c in contestants}

    def run(self, rounds: int, budget_secs: float) -> dict[Contestant, Row]:
        """Runs up to that many rounds after one that does not count, and ends the processes.

        Args:
            rounds: How many turns each contestant gets, if time allows.
            budget_secs: No round but the first begins after this.
        """
        begun = time.monotonic()
        try:
            for contestant in self._contestants:
                self._turn(contestant, "warming up")
            while self.done < rounds and (self.done == 0 or time.monotonic() - begun < budget_secs):
                for contestant in order_of_round(self._contestants, self.done):
                    figure = self._turn(contestant, f"round {self.done + 1} of {rounds}")
                    self._times[contestant].append(figure)
                self.done += 1
            for contestant in self._contestants:
                self._check_last_round(contestant)
        finally:
            for group in self._groups.values():
                group.end()
        return {c: Row(c.name, tuple(self._times[c]), self._problems.get(c)) for c in self._contestants}

    def _turn(self, contestant: Contestant, what: str) -> float | None:
        if contestant in self._problems:
            return None
        self._say(f"{self._name}: {what}, {contestant.name}")
        group, entry = self._groups[contestant.crew], Entry(contestant.factory, self._task)
        try:
            group.prepare(entry, PATIENCE_SECS)  # nothing to do, unless another one has cost us the group
            group.order("arrange", entry, PATIENCE_SECS)
            self._clock.clear()
            group.order("race", entry, PATIENCE_SECS)
        except Failed as failure:
            self._problems[contestant] = str(failure)
            return None
        return self._clock.milliseconds()

    def _check_last_round(self, contestant: Contestant) -> None:
        if contestant in self._problems:
            return
        try:
            entry = Entry(contestant.factory, self._task)
            self._groups[contestant.crew].order("check", entry, PATIENCE_SECS)
        except Failed as failure:
            self._problems[contestant] = str(failure)


def _ready(order: str, entry: Entry) -> Ready:
    return Ready("benchmarks.seats:do", (order, entry))


def race_of_two(
    name: str,
    contestants: Sequence[Contestant],
    kind: type[GroundT],
    rounds: int,
    budget_secs: float,
    say: Say,
) -> tuple[dict[Contestant, Row], int, GroundT]:
    """Lets contestants take turns on groups of two workers: replicast's, and stock ones if one needs them.

    Args:
        name: Of the table, for messages.
        contestants: Who takes part.
        kind: What is done.
        rounds: How many turns each gets, if time allows.
        budget_secs: No round but the first begins after this.
        say: Told what is being done now.

    Returns:
        What each has measured, how many rounds there were, and the task.
    """
    with tempfile.TemporaryDirectory(prefix="replicast-bench-") as directory:
        task = kind(Path(directory))
        wanted = sorted({contestant.crew for contestant in contestants})
        groups: dict[str, Group] = {crew: CrewGroup(f"{crew}_strategy", WORKERS) for crew in wanted}
        race = Race(name, contestants, groups, WORKERS, task, say)
        return race.run(rounds, budget_secs), race.done, task
