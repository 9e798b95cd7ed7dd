"""`tf.train.Checkpoint` in the `checkpoint` table, on variables of the stock strategy."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import tensorflow as tf

from benchmarks.checkpoint_task import Keeping
from benchmarks.runner import Array, Times

KEPT_ROUND = 3
"""Read in every round: any state except zeros."""


class _Checkpoint(Keeping):
    def setup(self) -> None:
        with self.group.scope():
            self.variables = [
                tf.Variable(tf.zeros(self.task.shape), trainable=False) for _ in range(self.task.variables)
            ]
        self.local = [self.group.experimental_local_results(variable)[0] for variable in self.variables]
        self.checkpoint = tf.train.Checkpoint(variables=self.variables)
        self.directory: Path = self.task.directory / f"tensorflow-{type(self).__name__}"
        self.directory.mkdir(exist_ok=True)

    def assign(self, values: Iterable[Array]) -> None:
        for variable, value in zip(self.local, values, strict=True):
            variable.assign(value)


class Write(_Checkpoint):
    """One worker writes, then fsyncs the files and their directory, which TensorFlow does not."""

    def arrange(self, index: int) -> None:
        self.assign(self.state(index))
        if self.is_source:
            for file in self.directory.iterdir():
                file.unlink()

    def found(self, rounds: int) -> Iterable[Array] | None:
        if not self.is_source:
            return None
        reader = tf.train.load_checkpoint(str(self.directory / f"state-{rounds - 1}"))
        return [
            reader.get_tensor(f"variables/{number}/.ATTRIBUTES/VARIABLE_VALUE")
            for number in range(self.task.variables)
        ]

    def round(self, index: int) -> Times:
        start = time.monotonic_ns()
        if self.is_source:
            self.checkpoint.write(str(self.directory / f"state-{index}"))
            for path in (*self.directory.iterdir(), self.directory):
                _fsync(path)
        return start if self.is_source else None, time.monotonic_ns()


class Read(_Checkpoint):
    """Every worker reads the files separately. Nothing is verified."""

    def setup(self) -> None:
        super().setup()
        self.assign(self.state(KEPT_ROUND))
        if self.is_source:
            self.checkpoint.write(str(self.directory / "state"))

    def arrange(self, index: int) -> None:
        self.assign(np.zeros((self.task.variables, *self.task.shape), np.float32))

    def found(self, rounds: int) -> Iterable[Array] | None:
        return (variable.numpy() for variable in self.local)

    def kept(self, rounds: int) -> int:
        return KEPT_ROUND

    def round(self, index: int) -> Times:
        start = time.monotonic_ns()
        self.checkpoint.read(str(self.directory / "state")).assert_consumed()
        return start, time.monotonic_ns()


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
