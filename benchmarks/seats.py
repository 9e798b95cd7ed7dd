"""A contestant's place in a worker's process: what it is asked to do, how that is timed and checked."""

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
class Ground:
    """What is common to the tasks of all races.

    Attributes:
        directory: For files that the workers share.
    """

    directory: Path

    @property
    def clock(self) -> Path:
        return self.directory / "clock"


class Contestant(abc.ABC):
    """One way to do a task; an object of it lives in each worker's process.

    Args:
        group: What the workers have in common: a strategy, a communicator.
        task: What to do.
        rank: Which worker this is.
        workers: How many there are.
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
        """Makes the variables, all zero, and whatever is made once. Not timed."""

    @abc.abstractmethod
    def check(self, rounds: int) -> None:
        """Fails unless this worker has what that many rounds come to. Not timed."""

    @abc.abstractmethod
    def arrange(self, index: int) -> None:
        """Prepares the next round. Not timed; all workers are done before any one goes on."""

    @abc.abstractmethod
    def round(self, index: int) -> tuple[int | None, int]:
        """Does it.

        Returns:
            When this worker started, if the time counts from there, and when it was done; both from
            `time.monotonic_ns`, which is the same clock in all processes of a machine. Or `lasted(...)`.
        """


def lasted(duration_ns: int) -> tuple[int, int]:
    """For rounds whose figure is the longest time that any one worker took, whenever that was."""
    return 1, 1 + duration_ns


class Clock:
    """Where the workers note their times and the parent reads them: a small file that all of them map."""

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


class Seat:
    """A contestant in a worker's process: counts its rounds, checks them and notes their times."""

    def __init__(self, contestant: Contestant, clock: Clock) -> None:
        self._contestant = contestant
        self._clock = clock
        self._rounds = 0
        contestant.setup()

    def arrange(self) -> None:
        """Checks all rounds until now, when no worker is at work any more, and prepares the next."""
        self._contestant.check(self._rounds)
        self._contestant.arrange(self._rounds)

    def race(self) -> None:
        start, end = self._contestant.round(self._rounds)
        self._clock.note(self._contestant.rank, start, end)
        self._rounds += 1

    def check(self) -> None:
        """Checks the last round, after which there is no other."""
        self._contestant.check(self._rounds)


@dataclass(frozen=True, slots=True)
class Entry:
    """Which contestant, as `module:Class`, and what it is to do."""

    contestant: str
    task: Ground


def seat(group: Any, entry: Entry, rank: int, workers: int) -> Seat:
    """Makes the contestant and has it set up."""
    module, name = entry.contestant.split(":")
    contestant = getattr(importlib.import_module(module), name)(group, entry.task, rank, workers)
    return Seat(contestant, Clock(entry.task.clock, workers))


def do(group: Any, order: str, entry: Entry) -> Callable[[], None]:
    """What a crew's worker runs: an order for the seat of this contestant."""
    action: Callable[[], None] = getattr(_seat(group, entry), order)
    return action


@functools.cache
def _seat(group: Any, entry: Entry) -> Seat:
    return seat(group, entry, int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
