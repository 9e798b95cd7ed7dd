"""One step of a Keras model on several workers: weighted gradients, exact metrics, equal statistics.

Keras averages each worker's loss over that worker's own rows, decides about clipping and float16 overflow on
its own gradients, reports the mean of the workers' metrics, and lets each worker keep its own moving
statistics. Here, what happens inside one step on each of N workers, worker r having n_r rows:

    forward, backward           Keras, on this worker's rows
    gradients                   sum over r of n_r * g_r, divided by the sum of n_r   (one transfer)
    clip, scale, apply          Keras, on the same summed gradients everywhere
    metric states, statistics   summed over the workers                              (one transfer)
    what the step returns       computed by Keras from the summed states
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

# Private: TensorFlow's own answer to "which variables does this operation write?"; there is no public one.
from tensorflow.python.framework import auto_control_deps_utils

from replicast.strategy.collectives import ReplicatedExtended

ROWS_UNIT = 1024.0
"""Rows are counted in units of 1024, so that a gradient times its rows stays in the range of float16."""


class Agreed:
    """A value that is the same on every worker already, on its way through Keras' own reduction."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class KerasStep:
    """Runs `model.train_step` or `model.test_step` so that its outcome is that of the whole batch.

    One object per traced step. It lives in the replica context and holds no state between steps.
    """

    def __init__(
        self, extended: ReplicatedExtended, model: keras.Model, function: Callable[..., Any], average: bool
    ) -> None:
        self._extended = extended
        self._model = model
        self._function = function
        self._average_statistics = average
        self._rows = tf.constant(0.0)

    def __call__(self, data: Any) -> Any:
        """Runs the step on this worker's share and returns what it returned, for the whole batch."""
        self._rows = _rows_of(data) / ROWS_UNIT
        watch = _Writes(self._written_candidates())
        with contextlib.ExitStack() as stack:
            stack.enter_context(watch)
            for optimizer in optimizers_of(self._model):
                stack.enter_context(summing_first(optimizer, self._sum_gradients, self._extended))
            logs = self._function(data)
        return self._whole_batch(logs, watch)

    def _written_candidates(self) -> list[keras.Variable]:
        statistics = [v for v in self._model.non_trainable_variables if v.dtype in _FLOATS]
        return [*self._model.metrics_variables, *statistics]

    def _sum_gradients(self, gradients: list[Any]) -> list[Any]:
        """Sums over the workers, each example counting the same however the batch was divided."""
        present = [g for g in gradients if g is not None]
        if not present:
            return gradients
        if _sums_its_loss(self._model):
            summed = iter(_all_reduce(present))
            return [g if g is None else next(summed) for g in gradients]
        weighted = [_times(g, self._rows) for g in present]
        *totals, rows = _all_reduce([*weighted, self._rows])
        share = self._extended._num_replicas_in_sync / rows
        summed = iter([_times(g, share) for g in totals])
        return [g if g is None else next(summed) for g in gradients]

    def _whole_batch(self, logs: Any, watch: _Writes) -> Any:
        states = [v for v in self._model.metrics_variables if watch.wrote(v)]
        metric_ids = {id(v) for v in self._model.metrics_variables}
        statistics = []
        if self._average_statistics:
            statistics = [v for v in watch.written() if id(v) not in metric_ids]
        own = _own_values(self._model, logs, states)
        local_states = [_local(v) for v in states]
        weighted = [_times(_local(v), self._rows) for v in statistics]
        weighted_logs = [_times(tf.cast(value, tf.float32), self._rows) for value in own.values()]
        summed = _all_reduce([*local_states, *weighted, *weighted_logs, self._rows])
        rows = summed[-1]
        for variable, total in zip(statistics, summed[len(states) :], strict=False):
            variable.assign(_times(total, 1.0 / rows))
        with keras.StatelessScope(state_mapping=list(zip(states, summed, strict=False))):
            results = _flat(self._model.get_metrics_result())
        results.update(
            zip(own, (total / rows for total in summed[len(states) + len(statistics) : -1]), strict=True)
        )
        return _replaced(logs, results)


def optimizers_of(model: keras.Model) -> list[keras.optimizers.Optimizer]:
    """The model's optimizer, and those of a custom `train_step` that has several, as a GAN does."""
    held = [getattr(model, "optimizer", None), *vars(model).values()]
    return list({id(o): o for o in held if isinstance(o, keras.optimizers.Optimizer)}.values())


@contextlib.contextmanager
def summing_first(
    optimizer: keras.optimizers.Optimizer,
    sum_gradients: Callable[[list[Any]], list[Any]],
    extended: ReplicatedExtended,
) -> Iterator[None]:
    """Inside, the optimizer sums gradients over the workers before it looks at them.

    Keras clips, accumulates and decides about float16 overflow on a worker's own gradients and sums last:
    workers then clip differently, and with float16 one of them skips the step while the others wait for it.
    Keras has no hook in between, so for the time of the step this one optimizer object, never its class,
    has an `apply` that sums first.
    """
    apply = optimizer.apply

    def sum_and_apply(grads: Any, trainable_variables: Any = None) -> Any:
        summed = sum_gradients(list(grads))
        with extended.summed_already():
            return apply(summed, trainable_variables)

    object.__setattr__(optimizer, "apply", sum_and_apply)
    try:
        yield
    finally:
        object.__delattr__(optimizer, "apply")


class _Writes:
    """Notices which of some variables are written inside its `with` block."""

    def __init__(self, candidates: list[keras.Variable]) -> None:
        self._candidates = candidates
        self._written: set[int] = set()
        self._before: list[Any] = []

    def __enter__(self) -> _Writes:
        if tf.executing_eagerly():
            self._before = [tf.identity(_local(v)) for v in self._candidates]
        else:
            self._first = len(tf.compat.v1.get_default_graph().get_operations())
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self._written = self._changed_values() if tf.executing_eagerly() else self._written_in_graph()

    def wrote(self, variable: keras.Variable) -> bool:
        return id(variable) in self._written

    def written(self) -> list[keras.Variable]:
        return [v for v in self._candidates if id(v) in self._written]

    def _written_in_graph(self) -> set[int]:
        graph = tf.compat.v1.get_default_graph()
        outside = {id(inner): id(outer) for outer, inner in graph.captures}
        handles: set[int] = set()
        for operation in graph.get_operations()[self._first :]:
            _, writes = auto_control_deps_utils.get_read_write_resource_inputs(operation)
            handles.update(outside.get(id(handle), id(handle)) for handle in writes)
        return {id(v) for v in self._candidates if id(_component(v).handle) in handles}

    def _changed_values(self) -> set[int]:
        """Eagerly there is no graph to look at: a variable was written if it changed on any worker."""
        if not self._candidates:
            return set()
        changed = [
            tf.reduce_any(tf.not_equal(before, _local(v)))
            for before, v in zip(self._before, self._candidates, strict=True)
        ]
        flags = _all_reduce([tf.cast(tf.stack(changed), tf.float32)])[0]
        return {id(v) for v, flag in zip(self._candidates, flags.numpy(), strict=True) if flag}


_FLOATS = ("float16", "bfloat16", "float32", "float64")


def _component(variable: keras.Variable) -> tf.Variable:
    value = variable.value
    return value.values[0] if isinstance(value, tf.distribute.DistributedValues) else value


def _local(variable: keras.Variable) -> tf.Tensor:
    return _component(variable).read_value()


def _rows_of(data: Any) -> tf.Tensor:
    for leaf in tf.nest.flatten(data, expand_composites=False):
        shape = getattr(leaf, "shape", None)
        if shape is None or shape.rank == 0:
            continue
        if isinstance(leaf, tf.RaggedTensor):
            return tf.cast(leaf.nrows(), tf.float32)
        first = leaf.dense_shape[0] if isinstance(leaf, tf.SparseTensor) else tf.shape(leaf)[0]
        return tf.cast(first, tf.float32)
    return tf.constant(1.0)


def _times(value: Any, factor: tf.Tensor) -> Any:
    """Product in which a worker without rows contributes 0, whatever its NaN says."""
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(_times(value.values, factor), value.indices, value.dense_shape)
    return tf.math.multiply_no_nan(value, tf.cast(factor, value.dtype))


def _all_reduce(values: list[Any]) -> list[Any]:
    """Sums each of `values` over the workers, the dense ones of a dtype together in one transfer."""
    context = tf.distribute.get_replica_context()
    summed: dict[int, Any] = {}
    for dtype in dict.fromkeys(value.dtype for value in values):
        places = [place for place, value in enumerate(values) if value.dtype == dtype]
        totals = context.all_reduce(tf.distribute.ReduceOp.SUM, [values[place] for place in places])
        summed.update(zip(places, totals, strict=True))
    return [summed[place] for place in range(len(values))]


def _sums_its_loss(model: keras.Model) -> bool:
    """Whether the loss is a sum: then every example counts the same already, and a weight would be wrong."""
    losses = [loss for loss in tf.nest.flatten(getattr(model, "loss", None)) if loss is not None]
    return any(getattr(loss, "reduction", "sum_over_batch_size") in ("sum", "none", None) for loss in losses)


def _flat(results: dict[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in results.items():
        flat.update(_flat(value) if isinstance(value, dict) else {name: value})
    return flat


def _own_values(model: keras.Model, logs: Any, states: list[keras.Variable]) -> dict[str, Any]:
    """What the step returned that is not the result of one of the model's metrics."""
    if not isinstance(logs, dict):
        return {str(place): value for place, value in enumerate(tf.nest.flatten(logs))}
    updated = {id(v) for v in states}
    unused = {m.name for m in model.metrics if m.variables and not any(id(v) in updated for v in m.variables)}
    metric_names = set(_flat(model.get_metrics_result())) - unused
    return {name: value for name, value in _flat(logs).items() if name not in metric_names}


def _replaced(logs: Any, results: dict[str, Any]) -> Any:
    if isinstance(logs, dict):
        return {k: _replaced(v, results) if isinstance(v, dict) else results[k] for k, v in logs.items()}
    return tf.nest.pack_sequence_as(logs, [results[str(i)] for i in range(len(tf.nest.flatten(logs)))])
