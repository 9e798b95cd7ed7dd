"""Asks a question: its contestants take turns on long-lived processes, and every turn is checked."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from benchmarks.groups import Failed, Group, group_of
from benchmarks.question import Contestant, Question, Say
from benchmarks.results import Result, Row
from benchmarks.runner import Entry, milliseconds

TIMEOUT_SECS = 90.0
MakeGroup = Callable[[str, int], Group]


def ask(question: Question, rounds: int, say: Say, make_group: MakeGroup = group_of) -> Result:
    """Lets the contestants take turns.

    Args:
        question: The question.
        rounds: How many rounds, if time allows.
        say: Called with a progress message.
        make_group: Makes the processes of a pool.
    """
    stages = _stages(question)
    found: dict[Contestant, Row] = {}
    done = []
    for contestants in stages:
        with tempfile.TemporaryDirectory(prefix="replicast-bench-") as directory:
            race = Race(question, contestants, Path(directory), say, make_group)
            found |= race.run(rounds * question.turns, question.budget_secs / len(stages))
            done.append(race.done)
    return question.answered({one: found[one] for one in question.contestants}, min(done))


def _stages(question: Question) -> list[tuple[Contestant, ...]]:
    if not question.staged:
        return [question.contestants]
    places = sorted({one.at or 0 for one in question.contestants})
    return [tuple(one for one in question.contestants if (one.at or 0) == place) for place in places]


class Race:
    """One interleaved run.

    Attributes:
        done: How many rounds were run.
    """

    def __init__(
        self,
        question: Question,
        contestants: tuple[Contestant, ...],
        directory: Path,
        say: Say,
        make_group: MakeGroup,
    ) -> None:
        self.done = 0
        self._question = question
        self._contestants = contestants
        self._directory = directory
        self._say = say
        self._make_group = make_group
        self._groups: dict[tuple[str, int], Group] = {}
        self._problems = {one: problem for one in contestants if (problem := one.missing()) is not None}
        self._times: dict[Contestant, list[float | None]] = {one: [] for one in contestants}

    def run(self, rounds: int, budget_secs: float) -> dict[Contestant, Row]:
        """Runs up to that many rounds, at least one, after a round to warm up; ends the processes."""
        begun = time.monotonic()
        try:
            for contestant in self._contestants:
                self._warm_up(contestant)
            ends = begun + budget_secs
            longest = 0.0
            while self.done < rounds and (self.done == 0 or time.monotonic() + longest < ends):
                began = time.monotonic()
                for contestant in order_of_round(self._contestants, self.done):
                    figure = self._turn(contestant, f"round {self.done + 1} of {rounds}")
                    self._times[contestant].append(figure)
                self.done += 1
                longest = max(longest, time.monotonic() - began)
            for contestant in self._contestants:
                self._check_last_round(contestant)
        finally:
            for group in self._groups.values():
                group.end()
        return {one: one.row(tuple(self._times[one]), self._problems.get(one)) for one in self._contestants}

    def _warm_up(self, contestant: Contestant) -> None:
        if contestant in self._problems:
            return
        self._say(f"{self._question.name}: warming up {contestant.name}")
        try:
            self._group(contestant).prepare(self._entry(contestant), TIMEOUT_SECS)
        except Failed as failure:
            self._problems[contestant] = str(failure)

    def _turn(self, contestant: Contestant, what: str) -> float | None:
        if contestant in self._problems:
            return None
        self._say(f"{self._question.name}: {what}, {contestant.name}")
        group, entry = self._group(contestant), self._entry(contestant)
        try:
            group.prepare(entry, TIMEOUT_SECS)  # no-op unless the group was lost
            group.order("arrange", entry, TIMEOUT_SECS)
            return milliseconds(group.order("race", entry, TIMEOUT_SECS))
        except Failed as failure:
            self._problems[contestant] = str(failure)
            return None

    def _check_last_round(self, contestant: Contestant) -> None:
        if contestant in self._problems:
            return
        try:
            self._group(contestant).order("check", self._entry(contestant), TIMEOUT_SECS)
        except Failed as failure:
            self._problems[contestant] = str(failure)

    def _group(self, contestant: Contestant) -> Group:
        key = contestant.pool, contestant.workers or self._question.workers
        if key not in self._groups:
            self._groups[key] = self._make_group(*key)
        return self._groups[key]

    def _entry(self, contestant: Contestant) -> Entry:
        task = contestant.task or self._question.task
        return Entry(contestant.factory, replace(task, directory=self._directory))


def order_of_round(contestants: tuple[Contestant, ...], number: int) -> tuple[Contestant, ...]:
    """Rotates and reverses the order, so that no contestant always follows the same one."""
    first = number % len(contestants)
    rotated = contestants[first:] + contestants[:first]
    return rotated if number % 2 == 0 else rotated[::-1]
