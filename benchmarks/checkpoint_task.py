"""The task of the `checkpoint` table: a state that differs in every round."""

from __future__ import annotations

import abc
from collections.abc import Iterable

import numpy as np

from benchmarks.runner import Array, Implementation


class Keeping(Implementation):
    """One way to save or restore a state."""

    @abc.abstractmethod
    def found(self, rounds: int) -> Iterable[Array] | None:
        """The variables after that many rounds; None if there is nothing to check on this worker."""

    def state(self, index: int) -> Array:
        """The state of a round: all variables, one after the other along the first axis."""
        values: Array = self.task.change(index)
        return values

    def check(self, rounds: int) -> None:
        found = self.found(rounds) if rounds else None
        if found is None:
            return
        for number, (value, wanted) in enumerate(zip(found, self.state(self.kept(rounds)), strict=True)):
            if not np.array_equal(value, wanted):
                raise RuntimeError(f"Variable {number} is wrong after {rounds} rounds")

    def kept(self, rounds: int) -> int:
        """The round whose state is expected after that many rounds: the last one."""
        return rounds - 1
