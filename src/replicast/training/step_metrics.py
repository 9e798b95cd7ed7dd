"""The metrics of a step: how each is updated, and which of the values that a step returns are their results.

A metric must have the state that one process would have after the whole batch. How it gets there depends on
how `update_state` uses rows, which is decided when the step is traced:

- The classes of Keras add a sum over rows to their state. Each worker adds its own rows, and the step sums
  what the workers added: nothing is transferred but the state. `tests/scripts/test_metrics.py` holds every
  class of Keras to this.
- Any other `update_state` may do anything with its rows: keep a maximum, count its calls. It gets the rows of
  all workers, in their order, on every worker, and the state of worker 0 counts.
- So does a function that returns one number for its rows instead of one for each row.
- A scalar that is not weighted, such as a loss, is taken as a mean over rows: what it adds to a
  `keras.metrics.Mean` is averaged over the workers, weighted by rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.trainers.compile_utils import CompileMetrics

from replicast.errors import NotSupported
from replicast.training.feeding import only_real
from replicast.training.variables import SummedVariable

# Private: the metric that holds those of `compile`; a metric does not tell what it consists of.


_MEAN = keras.metrics.Mean.update_state
_WRAPPER = keras.metrics.MeanMetricWrapper.update_state


class MetricUpdates:
    """Decides inside its `with` block how each metric is updated.

    Keras has no hook for this, so the method is replaced on each metric object, never on its class.
    """

    def __init__(
        self,
        metrics: Iterable[keras.metrics.Metric],
        rows: tf.Tensor,
        gather: Callable[[list[tf.Tensor]], list[tf.Tensor]],
        mean: Callable[[list[tf.Tensor]], list[tf.Tensor]],
    ) -> None:
        parts = [part for m in metrics for part in (m.metrics if isinstance(m, CompileMetrics) else [m])]
        self._metrics = list({id(metric): metric for metric in parts}.values())
        self._own = [vars(metric).get("update_state") for metric in self._metrics]
        self._rows = rows
        self._gather = gather
        self._mean = mean
        self._gathered: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._whole: dict[int, keras.metrics.Metric] = {}
        self._scalar: dict[int, keras.metrics.Metric] = {}
        self._summed: set[int] = set()
        self._updating_whole = False

    def __enter__(self) -> MetricUpdates:
        for metric in self._metrics:
            object.__setattr__(metric, "update_state", self._deciding(metric))
        return self

    def __exit__(self, *_: Any) -> None:
        for metric, own in zip(self._metrics, self._own, strict=True):
            _restore(metric, "update_state", own)

    def from_all_rows(self) -> set[int]:
        """The ids of the variables that were updated from the rows of all workers."""
        return {id(v) for metric in self._whole.values() for v in metric.variables}

    def from_scalars(self) -> set[int]:
        """The ids of the variables to which only scalars were added."""
        means = (metric for key, metric in self._scalar.items() if key not in self._summed)
        return {id(v) for metric in means for v in metric.variables}

    def _deciding(self, metric: keras.metrics.Metric) -> Callable[..., Any]:
        update = metric.update_state
        method = getattr(update, "__func__", None)
        # A class of the user's that overrides it may do anything, also if it then calls that of Keras.
        known = method is not None and method.__module__.startswith("keras.")

        def deciding(*args: Any, **kwargs: Any) -> Any:
            if self._updating_whole:  # a metric that is part of another one
                return update(*args, **kwargs)
            if not known:
                return self._update_whole(metric, update, args, kwargs)
            if method is _WRAPPER:
                return self._update_by_function(metric, update, args, kwargs)
            weight = args[1] if len(args) > 1 else kwargs.get("sample_weight")
            value = args[0] if args else kwargs.get("values")
            if method is _MEAN and weight is None and _rank(value) == 0:
                self._scalar[id(metric)] = metric
            else:
                self._summed.add(id(metric))
            return update(*args, **kwargs)

        return deciding

    def _update_whole(self, metric: keras.metrics.Metric, update: Any, args: Any, kwargs: Any) -> Any:
        self._claim(metric)
        args, kwargs = self._of_all_workers(metric, (args, kwargs))
        self._updating_whole = True
        try:
            return update(*args, **kwargs)
        finally:
            self._updating_whole = False

    def _update_by_function(self, metric: keras.metrics.Metric, update: Any, args: Any, kwargs: Any) -> Any:
        # Private: only the function that this metric calls tells whether there is a value for each row.
        function, own = metric._fn, vars(metric).get("_fn")

        def of_each_row(*args: Any, **kwargs: Any) -> Any:
            values = function(*args, **kwargs)
            if _rank(values) != 0:
                return values
            self._claim(metric)
            args, kwargs = self._of_all_workers(metric, (args, kwargs))
            return function(*args, **kwargs)

        object.__setattr__(metric, "_fn", of_each_row)
        try:
            return update(*args, **kwargs)
        finally:
            _restore(metric, "_fn", own)

    def _claim(self, metric: keras.metrics.Metric) -> None:
        self._whole[id(metric)] = metric
        for variable in metric.variables:
            if isinstance(variable.value, SummedVariable):
                variable.value.refuse_parts(f"Metric {metric.name}")

    def _of_all_workers(self, metric: keras.metrics.Metric, structure: Any) -> Any:
        """Arguments of `update_state` as they would be in one process; constants stay as they are."""
        flat = [
            tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) and leaf.ndim else leaf
            for leaf in tf.nest.flatten(structure)
        ]
        varying = {leaf.shape[0] for leaf in flat if _varies(leaf) and leaf.shape.rank}
        flat = [_not_folded(leaf) if _is_constant_of(varying, leaf) else leaf for leaf in flat]
        here = id(None if tf.executing_eagerly() else tf.compat.v1.get_default_graph())
        needed: dict[tuple[int, int], Any] = {}
        for leaf in flat:
            if _varies(leaf) and (id(leaf), here) not in self._gathered:
                needed[id(leaf), here] = leaf
        parts = [[*_parts(metric, leaf)] for leaf in needed.values()]
        rows = [only_real(part, self._rows) for leaf in parts for part in leaf if part.shape.rank != 0]
        scalars = [part for leaf in parts for part in leaf if part.shape.rank == 0]
        joined, means = iter(self._gather(rows) if rows else ()), iter(self._mean(scalars) if scalars else ())
        for key, leaf, own in zip(needed, needed.values(), parts, strict=True):
            received = [next(means if part.shape.rank == 0 else joined) for part in own]
            # Keeps the leaf alive: its id cannot be reused then.
            self._gathered[key] = leaf, _assembled(leaf, received)
        whole = [self._gathered[id(leaf), here][1] if _varies(leaf) else leaf for leaf in flat]
        return tf.nest.pack_sequence_as(structure, whole)


def _varies(leaf: Any) -> bool:
    """Whether an argument may differ between workers."""
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return True
    return isinstance(leaf, tf.Tensor) and (tf.executing_eagerly() or tf.get_static_value(leaf) is None)


def _is_constant_of(rows: set[int | None], leaf: Any) -> bool:
    """Whether a constant has one entry per row of this worker: labels of `tf.ones((tf.shape(x)[0], 1))`."""
    is_constant = isinstance(leaf, tf.Tensor) and not _varies(leaf) and bool(leaf.shape.rank)
    return is_constant and leaf.shape[0] is not None and leaf.shape[0] in rows


def _not_folded(leaf: tf.Tensor) -> tf.Tensor:
    return tf.compat.v1.placeholder_with_default(leaf, leaf.shape)


def _parts(metric: keras.metrics.Metric, leaf: Any) -> Iterator[tf.Tensor]:
    """The tensors of an argument that are joined over the workers."""
    if isinstance(leaf, tf.RaggedTensor):
        yield from (leaf.flat_values, *leaf.nested_row_lengths())
        return
    scalar_number = _rank(leaf) == 0 and not leaf.dtype.is_floating
    if isinstance(leaf, tf.SparseTensor) or leaf.dtype == tf.string or scalar_number:
        kind = "a sparse tensor" if isinstance(leaf, tf.SparseTensor) else f"a {leaf.dtype.name}"
        raise NotSupported(
            f"Metric {metric.name} ({type(metric).__name__}), which is updated with {kind}"
            f"{', a single one for all rows' if scalar_number else ''}",
            reason="its update_state is not one of Keras, so it gets the rows of all workers, and these "
            "cannot be joined",
            remedy="Pass dense numbers, one entry per row",
        )
    yield leaf
    mask = getattr(leaf, "_keras_mask", None)
    if mask is not None:
        yield mask


def _assembled(leaf: Any, parts: list[tf.Tensor]) -> Any:
    if isinstance(leaf, tf.RaggedTensor):
        return tf.RaggedTensor.from_nested_row_lengths(parts[0], parts[1:])
    whole, *mask = parts
    if mask:
        whole._keras_mask = mask[0]
    return whole


def _rank(value: Any) -> int | None:
    rank: int | None = tf.TensorShape(getattr(value, "shape", ())).rank
    return rank


def _restore(metric: keras.metrics.Metric, name: str, own: Any) -> None:
    if own is None:
        object.__delattr__(metric, name)
    else:  # the script, or the constructor, had set it on this object
        object.__setattr__(metric, name, own)


class MetricResults:
    """Records what the metrics' `result` methods return inside its `with` block.

    A `train_step` may return the results of its metrics under any names. Each was computed from this worker's
    rows, and must be recomputed once the metric has the state of the whole batch.
    """

    def __init__(self, metrics: Iterable[keras.metrics.Metric]) -> None:
        self._metrics = list({id(metric): metric for metric in metrics}.values())
        self._own = [vars(metric).get("result") for metric in self._metrics]
        self._recorded: dict[int, tuple[Any, keras.metrics.Metric, int]] = {}

    def __enter__(self) -> MetricResults:
        for metric in self._metrics:
            object.__setattr__(metric, "result", self._recording(metric))
        return self

    def __exit__(self, *_: Any) -> None:
        for metric, own in zip(self._metrics, self._own, strict=True):
            _restore(metric, "result", own)

    def __contains__(self, value: Any) -> bool:
        return id(value) in self._recorded

    def recompute(self, value: Any) -> Any:
        """The same result, from the metric's current state."""
        _, metric, index = self._recorded[id(value)]
        return tf.nest.flatten(metric.result())[index]

    def _recording(self, metric: keras.metrics.Metric) -> Callable[[], Any]:
        result = metric.result

        def recording() -> Any:
            returned = result()
            for index, value in enumerate(tf.nest.flatten(returned)):
                # Keeps the value alive: its id cannot be reused then.
                self._recorded[id(value)] = (value, metric, index)
            return returned

        return recording
