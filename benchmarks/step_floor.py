"""The floor of the questions about tables: the touched rows, in TensorFlow's own gathers and scatters."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from benchmarks.step_task import Training


class TouchedRows(Training):
    """Reads and writes the rows that a step touches as the optimizer has to, and computes next to nothing.

    One table stands for those of the optimizer, at other places: the accesses are as random, and there is
    room for it. Each worker looks up its share of the ids, and writes the rows of all.
    """

    def setup(self) -> None:
        task = self.task
        ids, _ = task.arrays()
        self.ids = tf.constant(ids.reshape(task.steps, -1))
        self.table = tf.Variable(tf.zeros((task.table, task.width)))
        self.steps = 0
        self.train_steps = tf.function(self._train_steps)

    def _train_steps(self, ids: Any) -> None:
        values = tf.ones((ids.shape[1], self.task.width))
        own = ids.shape[1] // self.workers
        for of_step in ids:
            values = values + 0.0 * self._touched(of_step, values, own)

    def train(self) -> None:
        self.train_steps(self.ids)
        self.steps += self.task.steps

    def trained(self) -> int:
        return self.steps

    def _touched(self, ids: Any, values: Any, own: int) -> Any:
        """The passes of the optimizers in `training/rows.py` and `training/row_optimizers.py`."""
        handle, optimizer = self.table.handle, self.task.optimizer
        of_moments = [(ids + number * self.task.table // 3) % self.task.table for number in (1, 2)]

        def read(places: Any) -> Any:
            return tf.raw_ops.ResourceGather(resource=handle, indices=places, dtype=tf.float32)

        def write(scatter: Any, places: Any) -> None:
            scatter(ref=handle, indices=places[:, tf.newaxis], updates=values)

        looked_up = read(ids[:own])
        if optimizer == "Adagrad":
            write(tf.raw_ops.ResourceScatterNdAdd, of_moments[0])
            read(of_moments[0])
        if optimizer == "LazyAdam":
            for places in of_moments:
                read(places)
                write(tf.raw_ops.ResourceScatterNdUpdate, places)
        write(tf.raw_ops.ResourceScatterNdSub, ids)
        return tf.reduce_sum(looked_up)
