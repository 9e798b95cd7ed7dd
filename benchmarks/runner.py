"""Runs a contestant in a worker's process: its rounds, their times and their checks."""

from __future__ import annotations

import abc
import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
SOURCE = 0
"""The worker that writes."""


@dataclass(frozen=True, slots=True)
class BaseTask:
    """The base of the tasks of all races.

    Attributes:
        directory: For files that the workers share.
    """

    directory: Path

    @property
    def clock(self) -> Path:
        return self.directory / "clock"


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
    def round(self, index: int) -> tuple[int | None, int]:
        """Runs one round.

        Returns:
            When this worker started, if the time is measured from there, and when it was done; both from
            `time.monotonic_ns`, which is the same clock in all processes of a machine. Or `lasted(...)`.
        """


def lasted(duration_ns: int) -> tuple[int, int]:
    """For rounds whose figure is the longest duration on any worker, independent of start times."""
    return 1, 1 + duration_ns


class Clock:
    """A small mapped file in which the workers note their times and from which the parent reads them."""

    def __init__(self, path: Path, workers: int) -> None:
        mode: Any = "r+" if path.exists() else "w+"
        self._times = np.memmap(path, dtype=np.int64, mode=mode, shape=(workers, 2))

    def clear(self) -> None:
        self._times[:] = 0

    def note(self, rank: int, start: int | None, end: int) -> None:
        self._times[rank] = (start or 0, end)

    def milliseconds(self) -> float:
        """From the first start to the last end."""
        starts = self._times[:, 0]
        if not starts.any() or not self._times[:, 1].all():
            raise RuntimeError(f"A worker did not note its times. Received: {self._times.tolist()}")
        return float(self._times[:, 1].max() - starts[starts > 0].min()) / 1e6


class Runner:
    """Runs a contestant in a worker's process: counts its rounds, checks them and notes their times."""

    def __init__(self, contestant: Implementation, clock: Clock) -> None:
        self._contestant = contestant
        self._clock = clock
        self._rounds = 0
        contestant.setup()

    def arrange(self) -> None:
        """Checks all rounds so far, which no worker is still running, and prepares the next."""
        self._contestant.check(self._rounds)
        self._contestant.arrange(self._rounds)

    def race(self) -> None:
        start, end = self._contestant.round(self._rounds)
        self._clock.note(self._contestant.rank, start, end)
        self._rounds += 1

    def check(self) -> None:
        """Checks after the last round."""
        self._contestant.check(self._rounds)


@dataclass(frozen=True, slots=True)
class Entry:
    """A contestant, as `module:Class`, and its task."""

    contestant: str
    task: BaseTask


def runner_of(group: Any, entry: Entry, rank: int, workers: int) -> Runner:
    """Creates a contestant and sets it up."""
    module, name = entry.contestant.split(":")
    contestant = getattr(importlib.import_module(module), name)(group, entry.task, rank, workers)
    return Runner(contestant, Clock(entry.task.clock, workers))


def do(group: Any, order: str, entry: Entry) -> Callable[[], None]:
    """What a worker of a pool runs: one order for the runner of this contestant."""
    action: Callable[[], None] = getattr(_cached_runner(group, entry), order)
    return action


@functools.cache
def _cached_runner(group: Any, entry: Entry) -> Runner:
    return runner_of(group, entry, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
