"""The task of the questions about updates: a change of one worker, added on all."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from benchmarks.runner import Array, BaseTask, Implementation

PERIOD = 251
"""The change repeats after this many numbers: a prime, so that no two variables get the same values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task(BaseTask):
    """The change: its values differ between elements and between rounds.

    Attributes:
        megabytes: Its size.
        variables: The number of variables in which it is.
    """

    megabytes: int = 100
    variables: int = 50

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of each variable, in float32."""
        return self.megabytes * 250 // self.variables, 1000

    def __str__(self) -> str:
        return f"{self.megabytes:,} MB in {self.variables} variables"

    def change(self, index: int) -> Array:
        """The change of a round: all variables, concatenated along the first axis."""
        change = self._pattern()
        change += np.float32(index)
        return change

    def check(self, weights: Iterable[Array], rounds: int) -> None:
        """Fails unless the weights are zero plus the changes of that many rounds, exactly."""
        # Whole numbers below 2 ** 24 are exact in float32, so the order of additions does not matter.
        expected = self._pattern()
        expected *= np.float32(rounds)
        expected += np.float32(rounds * (rounds - 1) // 2)
        for number, (found, wanted) in enumerate(zip(weights, expected, strict=True)):
            if not np.array_equal(found, wanted):
                raise RuntimeError(f"Variable {number} is wrong after {rounds} rounds")

    def _pattern(self) -> Array:
        return pattern(self.variables, *self.shape)


def pattern(*shape: int) -> Array:
    """Numbers that repeat after a period, made without an array of whole numbers beside them."""
    return np.resize(np.arange(PERIOD, dtype=np.float32), shape)


class Adding(Implementation):
    """One way to add the change on every worker."""

    @abc.abstractmethod
    def weights(self) -> Iterable[Array]:
        """The variables' values now. Not timed."""

    def check(self, rounds: int) -> None:
        self.task.check(self.weights(), rounds)
