"""Detects which variables a piece of code writes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf

# Private: TensorFlow's own answer to "which variables does this operation write?"; there is no public one.
from tensorflow.python.framework import auto_control_deps_utils


def component(variable: keras.Variable) -> tf.Variable:
    """The TensorFlow variable behind a Keras variable on this worker."""
    value = variable.value
    return value.values[0] if isinstance(value, tf.distribute.DistributedValues) else value


def local(variable: keras.Variable) -> tf.Tensor:
    """The value of a variable on this worker; never a transfer."""
    return component(variable).read_value()


def _operations() -> list[tf.Operation]:
    return [] if tf.executing_eagerly() else tf.compat.v1.get_default_graph().get_operations()


class Writes:
    """Detects which of some variables are written inside its `with` block.

    In a graph, it inspects the operations that were added. Eagerly, where there is no graph, it compares
    values, and a variable counts as written if it changed on any worker.
    """

    def __init__(self, candidates: list[keras.Variable]) -> None:
        self._candidates = candidates
        self._written: set[int] = set()
        self._before: list[Any] = []
        self._first = 0
        self._ignored: list[tuple[Any, range]] = []

    def __enter__(self) -> Writes:
        if tf.executing_eagerly():
            self._before = [local(v) for v in self._candidates]
        else:
            self._first = len(_operations())
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self._written = self._changed_values() if tf.executing_eagerly() else self._written_in_graph()

    @contextlib.contextmanager
    def ignoring(self) -> Iterator[None]:
        """Ignores what is written inside. Only in a graph; has no effect eagerly."""
        first = len(_operations())
        yield
        self._ignored.append((tf.compat.v1.get_default_graph(), range(first, len(_operations()))))

    def wrote(self, variable: keras.Variable) -> bool:
        """Whether this variable was written."""
        return id(variable) in self._written

    def written(self) -> list[keras.Variable]:
        """The variables that were written, in the order of the candidates."""
        return [v for v in self._candidates if id(v) in self._written]

    def _written_in_graph(self) -> set[int]:
        graph = tf.compat.v1.get_default_graph()
        outside = {id(inner): id(outer) for outer, inner in graph.captures}
        handles: set[int] = set()
        ignored = {place for where, places in self._ignored if where is graph for place in places}
        for place, operation in enumerate(_operations()):
            if place < self._first or place in ignored:
                continue
            _, writes = auto_control_deps_utils.get_read_write_resource_inputs(operation)
            handles.update(outside.get(id(handle), id(handle)) for handle in writes)
        return {id(v) for v in self._candidates if id(component(v).handle) in handles}

    def _changed_values(self) -> set[int]:
        if not self._candidates:
            return set()
        changed = [
            tf.reduce_any(tf.not_equal(before, local(v)))
            for before, v in zip(self._before, self._candidates, strict=True)
        ]
        context = tf.distribute.get_replica_context()
        flags = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(tf.stack(changed), tf.float32))
        return {id(v) for v, flag in zip(self._candidates, flags.numpy(), strict=True) if flag}
