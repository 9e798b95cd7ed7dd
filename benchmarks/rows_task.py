"""The task of the `rows` table: send some rows of a large table, or all of it, to every worker."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.runner import Array, BaseTask
from benchmarks.update_task import PERIOD, pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class TableTask(BaseTask):
    """A table, initially zeros in float32, and its changes.

    Attributes:
        changed: The number of rows that a round changes.
        variables: One, the table.
        shape: The shape of the table.
    """

    changed: int = 1_000
    variables: int = 1
    shape: tuple[int, int] = (1_000_000, 64)

    def __str__(self) -> str:
        rows, columns = self.shape
        return f"{self.changed:,} rows of a table of {rows:,} × {columns}"

    def indices(self, index: int) -> Array:
        """The rows that a round changes: different ones in each, spread over the table."""
        return np.random.default_rng(index).choice(self.shape[0], self.changed, replace=False)

    def rows(self, index: int) -> Array:
        """What is added to these rows."""
        return pattern(self.changed, self.shape[1]) + np.float32(index)

    def table(self, index: int) -> Array:
        """The whole table as it is sent in a round."""
        table = pattern(*self.shape)
        table += np.float32(index)
        return table

    def check_rows(self, found: Array, rounds: int) -> None:
        """Fails unless the table is zero plus the rows of that many rounds, exactly."""
        expected = np.zeros(self.shape, np.float32)
        for index in range(rounds):
            expected[self.indices(index)] += self.rows(index)
        _check(np.array_equal(found, expected), rounds)

    def check_table(self, found: Array, rounds: int) -> None:
        """Fails unless the table is that of the last round, exactly."""
        if rounds == 0:
            _check(not found.any(), rounds)
            return
        # Period by period, because creating a second table would take longer than sending one.
        numbers = np.arange(PERIOD, dtype=np.float32) + np.float32(rounds - 1)
        flat = found.reshape(-1)
        whole = flat.size // PERIOD * PERIOD
        rest = flat[whole:]
        same = (flat[:whole].reshape(-1, PERIOD) == numbers).all() and (rest == numbers[: rest.size]).all()
        _check(bool(same), rounds)


def _check(same: bool, rounds: int) -> None:
    if not same:
        raise RuntimeError(f"The table is wrong after {rounds} rounds")
