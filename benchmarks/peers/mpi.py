"""MPI with mpi4py: a broadcast and an addition in numpy or TensorFlow."""

from __future__ import annotations

import time
from collections.abc import Iterable

import numpy as np

from benchmarks.runner import SOURCE, Array, Times
from benchmarks.update_task import Adding


class Fused(Adding):
    """One broadcast of all variables, which are in one buffer."""

    def setup(self) -> None:
        self.variables = np.zeros((self.task.variables, *self.task.shape), np.float32)
        self.delta = np.zeros_like(self.variables)

    def weights(self) -> Iterable[Array]:
        return self.variables

    def arrange(self, index: int) -> None:
        if self.is_source:
            self.delta[:] = self.task.change(index)

    def round(self, index: int) -> Times:
        start = time.monotonic_ns()
        self._transfer_and_add()
        return start if self.is_source else None, time.monotonic_ns()

    def _transfer_and_add(self) -> None:
        self.group.Bcast(self.delta, root=SOURCE)
        np.add(self.variables, self.delta, out=self.variables)


class Each(Fused):
    """One broadcast for each variable."""

    def _transfer_and_add(self) -> None:
        for variable, delta in zip(self.variables, self.delta, strict=True):
            self.group.Bcast(delta, root=SOURCE)
            np.add(variable, delta, out=variable)


class Tensors(Fused):
    """One broadcast into an array, and `assign_add` on the variables of TensorFlow, as its users write it."""

    def setup(self) -> None:
        import tensorflow as tf

        super().setup()
        self.tensors = [
            tf.Variable(tf.zeros(self.task.shape), trainable=False) for _ in range(self.task.variables)
        ]
        self.variables = np.zeros(0, np.float32)

    def weights(self) -> Iterable[Array]:
        return (variable.numpy() for variable in self.tensors)

    def _transfer_and_add(self) -> None:
        self.group.Bcast(self.delta, root=SOURCE)
        for variable, change in zip(self.tensors, self.delta, strict=True):
            variable.assign_add(change, read_value=False)
