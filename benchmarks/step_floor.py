"""The floor of the questions about tables: the memory of the touched rows. Needs numpy only."""

from __future__ import annotations

import numpy as np

from benchmarks.step_task import Training

TABLES = {"SGD": 1, "Adagrad": 2, "LazyAdam": 3}
"""The table, and the variables of the optimizer that have as many rows."""


class TouchedRows(Training):
    """Reads and writes the rows that a step touches, and computes next to nothing.

    One table stands for all of them, at other places: the accesses are as random, and there is room for it.
    """

    def setup(self) -> None:
        ids, _ = self.task.arrays()
        self.ids = ids.reshape(self.task.steps, -1).astype(np.intp)
        self.table = np.ones((self.task.table, self.task.width), np.float32)
        self.rows = np.empty((self.ids.shape[1], self.task.width), np.float32)
        self.steps = 0

    def train(self) -> None:
        tables = TABLES[self.task.optimizer]
        for of_step in self.ids:
            for number in range(tables):
                ids = (of_step + number * self.task.table // tables) % self.task.table
                np.take(self.table, ids, axis=0, out=self.rows, mode="clip")
                self.rows += 1.0
                self.table[ids] = self.rows
            self.steps += 1

    def trained(self) -> int:
        return self.steps
