"""What every contestant of the `update` table does, how it is timed, and how it is checked."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
SOURCE = 0
"""The worker that writes."""
_PERIOD = 251
"""The change repeats after this many numbers: a prime, so that no two variables get the same values."""


@dataclass(frozen=True, slots=True)
class Task:
    """The change: its values differ from place to place and from round to round.

    Attributes:
        directory: For files that the workers share.
        variables: How many.
        shape: Of each of them, in float32.
    """

    directory: Path
    variables: ClassVar[int] = 50
    shape: ClassVar[tuple[int, int]] = (500, 1000)

    def __str__(self) -> str:
        size = self.variables * self.shape[0] * self.shape[1] * 4 / 1e6
        return f"{size:.0f} MB in {self.variables} variables"

    @property
    def clock(self) -> Path:
        return self.directory / "clock"

    def change(self, index: int) -> Array:
        """What is added in a round: all variables, one after the other along the first axis."""
        return self._pattern() + np.float32(index)

    def check(self, weights: Iterable[Array], rounds: int) -> None:
        """Fails unless the weights are zero plus the changes of that many rounds, exactly."""
        # Whole numbers below 2 ** 24 are exact in float32, so the order of additions does not matter.
        expected = self._pattern() * np.float32(rounds) + np.float32(rounds * (rounds - 1) // 2)
        for number, (found, wanted) in enumerate(zip(weights, expected, strict=True)):
            if not np.array_equal(found, wanted):
                raise RuntimeError(f"Variable {number} is wrong after {rounds} rounds")

    def _pattern(self) -> Array:
        count = self.variables * self.shape[0] * self.shape[1]
        return (np.arange(count) % _PERIOD).astype(np.float32).reshape(self.variables, *self.shape)


class Contestant(abc.ABC):
    """One way to bring the change to every worker; an object of it lives in each worker's process.

    Args:
        group: What the workers have in common: a strategy, a communicator.
        task: What to do.
        rank: Which worker this is.
        workers: How many there are.
    """

    def __init__(self, group: Any, task: Task, rank: int, workers: int) -> None:
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
    def weights(self) -> Iterable[Array]:
        """The variables' values now. Not timed."""

    @abc.abstractmethod
    def arrange(self, index: int) -> None:
        """Gives the source the change of the next round. Not timed; all are done before any one goes on."""

    @abc.abstractmethod
    def round(self, index: int) -> tuple[int | None, int]:
        """Adds the change everywhere.

        Returns:
            When this worker started, if the time counts from there, and when it had applied the change; both
            from `time.monotonic_ns`, which is the same clock in all processes of a machine.
        """


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
        self._contestant.task.check(self._contestant.weights(), self._rounds)
        self._contestant.arrange(self._rounds)

    def race(self) -> None:
        start, end = self._contestant.round(self._rounds)
        self._clock.note(self._contestant.rank, start, end)
        self._rounds += 1
