"""TensorFlow's own ways on its strategy: a sum, a checkpoint, broadcasts; and the lower bound."""

from __future__ import annotations

import abc
import time
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from benchmarks.runner import Array, Times
from benchmarks.update_task import Adding

_GROUP_KEY = 7_000
_FIRST_KEY = 700_000_000
"""Above all keys that the strategy uses for its own transfers."""


class _Mirrored(Adding):
    """Variables of the strategy, and the parts of them that are on this worker."""

    def setup(self) -> None:
        with self.group.scope():
            self.variables = [
                tf.Variable(tf.zeros(self.task.shape), trainable=False) for _ in range(self.task.variables)
            ]
        self.local = [self.group.experimental_local_results(variable)[0] for variable in self.variables]
        self.deltas: list[Any] = []
        self.step: Any = tf.function(self._step)

    def weights(self) -> Iterable[Array]:
        return (variable.numpy() for variable in self.local)

    def arrange(self, index: int) -> None:
        if self.is_source:
            self.deltas = self._change(index)

    def round(self, index: int) -> Times:
        start = time.monotonic_ns()
        self.step(self.deltas, self._first_key(index))
        return start if self.is_source else None, time.monotonic_ns()

    @abc.abstractmethod
    def _step(self, deltas: list[Any], first_key: Any) -> None:
        """A contestant whose round is a `tf.function`."""

    def _first_key(self, index: int) -> Any:
        """A different key for every broadcast of every round."""
        return tf.constant(_FIRST_KEY + index * self.task.variables)

    def _change(self, index: int) -> list[Any]:
        return [tf.constant(array) for array in self.task.change(index)]

    def _add(self, deltas: Iterable[Any]) -> None:
        for variable, delta in zip(self.local, deltas, strict=True):
            variable.assign_add(delta, read_value=False)


class Floor(_Mirrored):
    """No transfer at all: the change is already on every worker."""

    def arrange(self, index: int) -> None:
        self.deltas = self._change(index)

    def round(self, index: int) -> Times:
        start = time.monotonic_ns()
        self.step(self.deltas, self._first_key(index))
        return start, time.monotonic_ns()

    def _step(self, deltas: list[Any], first_key: Any) -> None:
        self._add(deltas)


class AllReduce(_Mirrored):
    """The usual trick: the source contributes the change, the others zeros, and all add the sum."""

    def arrange(self, index: int) -> None:
        if self.is_source:
            self.deltas = self._change(index)
        elif not self.deltas:
            self.deltas = [tf.zeros(self.task.shape) for _ in self.local]

    def _step(self, deltas: list[Any], first_key: Any) -> None:
        self._add(self.group.run(self._sum, args=(deltas,)))

    @staticmethod
    def _sum(deltas: list[Any]) -> Any:
        # all_reduce refuses an argument of a tf.function, which has no device yet; identity copies nothing.
        placed = [tf.identity(delta) for delta in deltas]
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, placed)


class Checkpoint(_Mirrored):
    """The source adds and writes a checkpoint; then all read it. Nothing is fsynced."""

    def setup(self) -> None:
        super().setup()
        self.checkpoint = tf.train.Checkpoint(variables=self.variables)
        self.barrier: Any = tf.function(self._barrier)
        self.barrier()

    def arrange(self, index: int) -> None:
        super().arrange(index)
        if self.is_source:
            for file in self.task.directory.glob("checkpoint-*"):
                file.unlink()

    def round(self, index: int) -> Times:
        path = str(self.task.directory / f"checkpoint-{index}")
        start = time.monotonic_ns()
        if self.is_source:
            self.step(self.deltas, self._first_key(index))
            self.checkpoint.write(path)
        self.barrier()
        self.checkpoint.read(path).assert_consumed()
        return start if self.is_source else None, time.monotonic_ns()

    def _step(self, deltas: list[Any], first_key: Any) -> None:
        self._add(deltas)

    def _barrier(self) -> None:
        self.group.run(self._count)

    @staticmethod
    def _count() -> Any:
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.ones([]))


class BroadcastEach(_Mirrored):
    """TensorFlow's broadcast, one for each variable."""

    def _step(self, deltas: list[Any], first_key: Any) -> None:
        self._add(
            self._broadcast(deltas[number] if self.is_source else None, self.task.shape, first_key + number)
            for number in range(self.task.variables)
        )

    def _broadcast(self, value: Any, shape: tuple[int, ...], key: Any) -> Any:
        names = {"group_size": self.workers, "group_key": self._group(), "instance_key": key}
        if value is not None:
            return tf.raw_ops.CollectiveBcastSendV2(input=value, **names)
        return tf.raw_ops.CollectiveBcastRecvV2(T=tf.float32, shape=shape, **names)

    def _group(self) -> int:
        return _GROUP_KEY


class BroadcastFused(BroadcastEach):
    """TensorFlow's broadcast, once: the source already has the change of all variables in one buffer."""

    def _change(self, index: int) -> list[Any]:
        return [tf.constant(self.task.change(index).reshape(-1, self.task.shape[1]))]

    def _step(self, deltas: list[Any], first_key: Any) -> None:
        rows, columns = self.task.shape
        whole = deltas[0] if self.is_source else None
        received = self._broadcast(whole, (self.task.variables * rows, columns), first_key)
        self._add(received[first : first + rows] for first in range(0, self.task.variables * rows, rows))

    def _group(self) -> int:
        return _GROUP_KEY + 1
