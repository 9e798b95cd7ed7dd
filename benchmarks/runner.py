"""Runs a contestant in a worker's process: its rounds, their times and their checks."""

from __future__ import annotations

import abc
import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Times = tuple[int | None, int]
SOURCE = 0
"""The worker that writes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseTask:
    """The base of the tasks of all races.

    Attributes:
        directory: For files that the workers share.
    """

    directory: Path = Path()


class Implementation(abc.ABC):
    """One way to do a task; there is one object of it in each worker's process.

    Args:
        group: What the workers share: a strategy or a communicator.
        task: The task.
        rank: The rank of this worker.
        workers: The number of workers.
    """

    def __init__(self, group: Any, task: Any, rank: int, workers: int) -> None:
        self.group = group
        self.task = task
        self.rank = rank
        self.workers = workers

    @property
    def is_source(self) -> bool:
        return self.rank == SOURCE

    @abc.abstractmethod
    def setup(self) -> None:
        """Creates the variables, all zero, and everything else that is created once. Not timed."""

    @abc.abstractmethod
    def check(self, rounds: int) -> None:
        """Fails unless this worker has the expected values after that many rounds. Not timed."""

    @abc.abstractmethod
    def arrange(self, index: int) -> None:
        """Prepares the next round. Not timed; all workers finish this before any continues."""

    @abc.abstractmethod
    def round(self, index: int) -> Times:
        """Runs one round.

        Returns:
            When this worker started, if the time is measured from there, and when it was done; both from
            `time.monotonic_ns`, which is the same clock in all processes of a machine. Or `lasted(...)`.
        """


def lasted(duration_ns: int) -> Times:
    """For rounds whose figure is the longest duration on any worker, independent of start times."""
    return 1, 1 + duration_ns


def milliseconds(times: list[Times]) -> float:
    """From the first start on any worker to the last end."""
    starts = [start for start, _ in times if start is not None]
    return (max(end for _, end in times) - min(starts)) / 1e6


@dataclass(frozen=True, slots=True)
class Entry:
    """A contestant, as `module:Class`, and its task."""

    contestant: str
    task: BaseTask


class Runner:
    """Runs a contestant in a worker's process: counts its rounds and checks them."""

    def __init__(self, contestant: Implementation) -> None:
        self._contestant = contestant
        self._rounds = 0
        contestant.setup()

    def arrange(self) -> None:
        """Checks all rounds so far, which no worker is still running, and prepares the next."""
        self._contestant.check(self._rounds)
        self._contestant.arrange(self._rounds)

    def race(self) -> Times:
        times = self._contestant.round(self._rounds)
        self._rounds += 1
        return times

    def check(self) -> None:
        """Checks after the last round."""
        self._contestant.check(self._rounds)


def runner_of(group: Any, entry: Entry, rank: int, workers: int) -> Runner:
    """Creates a contestant and sets it up."""
    return Runner(load(entry.contestant)(group, entry.task, rank, workers))


def load(address: str) -> Any:
    """The object at `module:name`."""
    module, name = address.split(":")
    return getattr(importlib.import_module(module), name)
