"""TensorFlow's own way to give every worker a new table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from benchmarks.peers.mirrored import BroadcastEach


class BroadcastTable(BroadcastEach):
    """TensorFlow's broadcast of the table, which is then assigned."""

    def check(self, rounds: int) -> None:
        (table,) = self.weights()
        self.task.check_table(table, rounds)

    def _change(self, index: int) -> list[Any]:
        return [tf.constant(self.task.table(index))]

    def _add(self, deltas: Iterable[Any]) -> None:
        for variable, table in zip(self.local, deltas, strict=True):
            variable.assign(table, read_value=False)
