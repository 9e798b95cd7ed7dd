"""What the contestants of the `checkpoint` table have in common: a state, another one in every round."""

from __future__ import annotations

import abc
from collections.abc import Iterable

import numpy as np

from benchmarks.seats import Array, Contestant


class Keeping(Contestant):
    """One way to write a state down, or to get it back."""

    @abc.abstractmethod
    def found(self, rounds: int) -> Iterable[Array] | None:
        """The variables as that many rounds have left them; None where this worker has nothing to show."""

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
        """Which round's state is there after that many: the last one's."""
        return rounds - 1
