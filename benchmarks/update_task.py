"""The task of the `update` table: 100 MB from one worker, added on all."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from benchmarks.runner import Array, BaseTask, Implementation

PERIOD = 251
"""The change repeats after this many numbers: a prime, so that no two variables get the same values."""


@dataclass(frozen=True, slots=True)
class Task(BaseTask):
    """The change: its values differ between elements and between rounds.

    Attributes:
        variables: The number of variables.
        shape: The shape of each, in float32.
    """

    variables: ClassVar[int] = 50
    shape: ClassVar[tuple[int, int]] = (500, 1000)

    def __str__(self) -> str:
        size = self.variables * self.shape[0] * self.shape[1] * 4 / 1e6
        return f"{size:.0f} MB in {self.variables} variables"

    def change(self, index: int) -> Array:
        """The change of a round: all variables, concatenated along the first axis."""
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
        return (np.arange(count) % PERIOD).astype(np.float32).reshape(self.variables, *self.shape)


class Adding(Implementation):
    """One way to add the change on every worker."""

    @abc.abstractmethod
    def weights(self) -> Iterable[Array]:
        """The variables' values now. Not timed."""

    def check(self, rounds: int) -> None:
        self.task.check(self.weights(), rounds)
