"""A race: contestants take turns on long-lived processes, and every turn is checked."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

from benchmarks.fit import Contestant, Say, order_of_round
from benchmarks.report import Row
from benchmarks.runner import BaseTask, Clock, Entry
from benchmarks.workers import Failed, Ready, WorkerPool

TIMEOUT_SECS = 60.0
WORKERS = 2
TaskT = TypeVar("TaskT", bound=BaseTask)
TURNS = "Contestants take turns in every round; every round's weights are checked, number by number."


class Group(Protocol):
    """Long-lived processes that run one contestant at a time."""

    def prepare(self, entry: Entry, timeout_secs: float) -> None:
        """Sets a contestant up and runs it once; no-op if that was already done."""

    def order(self, order: str, entry: Entry, timeout_secs: float) -> None:
        """Makes all processes carry out an order: "arrange", "race" or "check"."""

    def end(self) -> None: ...


class PoolGroup:
    """A worker pool as a group.

    Args:
        strategy: The function of `benchmarks.contestants` that creates the strategy of the workers.
        workers: The number of workers.
    """

    def __init__(self, strategy: str, workers: int) -> None:
        self._pool = WorkerPool(f"benchmarks.contestants:{strategy}", workers)

    def prepare(self, entry: Entry, timeout_secs: float) -> None:
        for order in ("arrange", "race", "check"):
            self._pool.prepare(_ready(order, entry), timeout_secs)

    def order(self, order: str, entry: Entry, timeout_secs: float) -> None:
        self._pool.seconds(_ready(order, entry), timeout_secs)

    def end(self) -> None:
        self._pool.end()


class Race:
    """One interleaved run.

    Args:
        name: The name of the table, for messages.
        contestants: The contestants.
        groups: The processes, by the names of the contestants' pools.
        workers: The number of workers in each group.
        task: The task.
        say: Called with a progress message.

    Attributes:
        done: How many rounds were run.
    """

    def __init__(
        self,
        name: str,
        contestants: Sequence[Contestant],
        groups: Mapping[str, Group],
        workers: int,
        task: BaseTask,
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
        """Runs up to that many rounds after one warm-up round, and ends the processes.

        Args:
            rounds: How many turns each contestant gets, if time allows.
            budget_secs: After this time no further round starts.
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
        group, entry = self._groups[contestant.pool], Entry(contestant.factory, self._task)
        try:
            group.prepare(entry, TIMEOUT_SECS)  # no-op unless the group was lost
            group.order("arrange", entry, TIMEOUT_SECS)
            self._clock.clear()
            group.order("race", entry, TIMEOUT_SECS)
        except Failed as failure:
            self._problems[contestant] = str(failure)
            return None
        return self._clock.milliseconds()

    def _check_last_round(self, contestant: Contestant) -> None:
        if contestant in self._problems:
            return
        try:
            entry = Entry(contestant.factory, self._task)
            self._groups[contestant.pool].order("check", entry, TIMEOUT_SECS)
        except Failed as failure:
            self._problems[contestant] = str(failure)


def _ready(order: str, entry: Entry) -> Ready:
    return Ready("benchmarks.runner:do", (order, entry))


def race_of_two(
    name: str,
    contestants: Sequence[Contestant],
    kind: type[TaskT],
    rounds: int,
    budget_secs: float,
    say: Say,
) -> tuple[dict[Contestant, Row], int, TaskT]:
    """Lets contestants take turns on groups of two workers: replicast's, and stock ones if one needs them.

    Args:
        name: The name of the table, for messages.
        contestants: The contestants.
        kind: The class of the task.
        rounds: How many turns each gets, if time allows.
        budget_secs: After this time no further round starts.
        say: Called with a progress message.

    Returns:
        The row of each contestant, the number of rounds, and the task.
    """
    with tempfile.TemporaryDirectory(prefix="replicast-bench-") as directory:
        task = kind(Path(directory))
        wanted = sorted({contestant.pool for contestant in contestants})
        groups: dict[str, Group] = {pool: PoolGroup(f"{pool}_strategy", WORKERS) for pool in wanted}
        race = Race(name, contestants, groups, WORKERS, task, say)
        return race.run(rounds, budget_secs), race.done, task
