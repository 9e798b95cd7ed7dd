"""The metrics of a step: after it, each has the state that one process would have after the whole batch.

How a metric gets there depends on how `update_state` uses rows, which is decided when the step is traced:

- The classes of Keras add a sum over rows to their state. Each worker adds its own rows, and the step sums
  what the workers added: nothing is transferred but the state. `tests/scripts/test_metrics.py` holds every
  class of Keras to this.
- Any other `update_state` may do anything with its rows: keep a maximum, count its calls. It gets the rows of
  all workers, in their order, on every worker, and the state of worker 0 counts.
- So does a function that returns one number for its rows instead of one for each row.
- A scalar that is not weighted, such as a loss, is taken as a mean over rows: what it adds to a
  `keras.metrics.Mean` is averaged over the workers, weighted by rows.
- The losses in the logs of a model whose loss is a sum over rows are added up, and then weighted as by Keras.

Between steps, every worker holds the state of the whole job: reading and resetting are local, and decisions
that depend on a metric are the same everywhere. A `train_step` may return the results of its metrics under
any names. They were computed from this worker's rows, so they are recorded, and computed again from the final
states.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Private: the metric that holds those of `compile`; a metric does not tell what it consists of.
from keras.src.trainers.compile_utils import CompileMetrics

from replicast.errors import NotSupported
from replicast.training.collectives import Transfer
from replicast.training.feeding import first_input_is_whole, only_real, rows_of
from replicast.training.variables import SummedVariable, component, local

_MEAN = keras.metrics.Mean.update_state
_WRAPPER = keras.metrics.MeanMetricWrapper.update_state


@contextlib.contextmanager
def replaced(thing: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, this object has another method, but never its class. Keras has no hook where this is used."""
    own = vars(thing).get(name)  # the script, or the constructor, may have set it on this object
    object.__setattr__(thing, name, value)  # past Keras, which tracks attributes
    try:
        yield
    finally:
        object.__delattr__(thing, name)
        if own is not None:
            object.__setattr__(thing, name, own)


class StepMetrics:
    """The metrics of a model in one step."""

    def __init__(
        self,
        model: keras.Model,
        data: Any,
        gather: Callable[[list[tf.Tensor]], list[tf.Tensor]],
        mean: Callable[[list[tf.Tensor]], list[tf.Tensor]],
        *,
        sums_its_loss: bool,
    ) -> None:
        self._model = model
        self._sums_its_loss = sums_its_loss
        self._data = data
        self._rows = rows_of(data)
        self._gather = gather
        self._mean = mean
        self.variables = list(model.metrics_variables)
        # The value of each before the step, and the total of the job then: zeros if it is in parts, which the
        # step sums too.
        self._before: dict[int, tuple[tf.Tensor, tf.Tensor]] = {}
        for variable in self.variables:
            value, state = local(variable), variable.value
            total = state.zero_unless_whole(value) if isinstance(state, SummedVariable) else value
            self._before[id(variable)] = value, total
        self._gathered: dict[tuple[int, int], tuple[Any, Any]] = {}
        self._whole: dict[int, keras.metrics.Metric] = {}
        self._scalar: dict[int, keras.metrics.Metric] = {}
        self._summed: set[int] = set()
        self._updating_whole = False
        self._results: dict[int, tuple[Any, keras.metrics.Metric, int]] = {}

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Inside, it is decided how each metric is updated, and recorded what each returns as its result."""
        metrics = {id(metric): metric for metric in self._model.metrics}.values()
        parts = [part for m in metrics for part in (m.metrics if isinstance(m, CompileMetrics) else [m])]
        with contextlib.ExitStack() as stack:
            for metric in metrics:
                stack.enter_context(replaced(metric, "result", self._recording(metric)))
            for metric in {id(part): part for part in parts}.values():
                stack.enter_context(replaced(metric, "update_state", self._deciding(metric)))
            yield

    def is_result(self, value: Any) -> bool:
        return id(value) in self._results

    def recomputed(self, value: Any) -> Any:
        """The same result of a metric, from its current state."""
        _, metric, index = self._results[id(value)]
        return tf.nest.flatten(metric.result())[index]

    def add_states(self, written: list[keras.Variable], transfer: Transfer) -> Callable[[], None]:
        """Adds the states after the step to a transfer; returns a function that assigns those of the job."""
        rows, whole_first = self._rows, first_input_is_whole(self._data)
        is_first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
        of_all_rows = {id(v) for metric in self._whole.values() for v in metric.variables}
        means = (metric for key, metric in self._scalar.items() if key not in self._summed)
        of_scalars = {id(v) for metric in means for v in metric.variables}
        # Keras weights the loss in its logs by the first array of x, which may not be rows.
        tracker = getattr(self._model, "_loss_tracker", None)
        tracked = set() if tracker is None or whole_first is None else {id(v) for v in tracker.variables}
        flags = transfer.add([tf.cast(whole_first & (rows > 0), tf.int32)] if tracked else [])
        sums = {id(metric.total): metric for metric in self._losses()} if self._sums_its_loss else {}

        def state_of(variable: keras.Variable) -> Callable[[], tf.Tensor]:
            before, total = self._before[id(variable)]
            after = tf.where(rows > 0, local(variable), before)
            if id(variable) in of_all_rows or variable.aggregation == "only_first_replica":
                value = local(variable) if id(variable) in of_all_rows else after
                value = tf.cast(value, tf.int32) if value.dtype == tf.bool else value
                first = transfer.add([tf.where(is_first, value, tf.zeros_like(value))])
                return lambda: first()[0]
            if id(variable) in sums:
                return by_sum(before, total, after, sums[id(variable)])
            if variable.aggregation != "sum":
                mean = transfer.add([tf.cast(after, tf.float32)], averaged=True)
                return lambda: mean()[0]
            if id(variable) in of_scalars:
                return by_mean(before, total, after)
            added = transfer.add([_difference(total, after)])
            if id(variable) not in tracked:
                return lambda: total + added()[0]
            mean_of = by_mean(before, total, after)
            return lambda: tf.where(flags()[0] > 0, mean_of(), total + added()[0])

        def by_mean(before: tf.Tensor, total: tf.Tensor, after: tf.Tensor) -> Callable[[], tf.Tensor]:
            parts = transfer.add([_difference(total, before)])  # zero, unless each worker holds a part
            mean = transfer.add([precise(_difference(before, after))], averaged=True)
            return lambda: total + parts()[0] + tf.cast(mean()[0], total.dtype)

        def by_sum(
            before: tf.Tensor, total: tf.Tensor, after: tf.Tensor, metric: keras.metrics.Metric
        ) -> Callable[[], tf.Tensor]:
            # Keras has multiplied it by the number of workers, and by the weight: a number of rows, or of
            # those of an input that is the same on all workers, or none.
            by_rows = tf.constant(id(metric) in self._summed)
            if whole_first is not None and id(metric.total) in tracked:
                by_rows &= ~whole_first
            number = tf.where(by_rows, tf.cast(rows, tf.float32), 0.0)
            factor = tf.maximum(number, 1.0) * tf.distribute.get_strategy().num_replicas_in_sync
            parts = transfer.add([_difference(total, before)])  # zero, unless each worker holds a part
            added = transfer.add([precise(_difference(before, after)) / factor, number])
            return lambda: total + parts()[0] + tf.cast(added()[0] * tf.maximum(added()[1], 1.0), total.dtype)

        found = [(variable, state_of(variable)) for variable in written]

        def assign() -> None:
            for variable, state in found:
                component(variable).assign(tf.cast(state(), variable.value.dtype))
                if isinstance(variable.value, SummedVariable):
                    variable.value.mark_whole()

        return assign

    def _losses(self) -> list[keras.metrics.Metric]:
        """The metrics in which Keras keeps the loss, and with several outputs that of each."""
        # Private: there is no other way to them.
        compiled = getattr(self._model, "_compile_loss", None)
        found = [getattr(self._model, "_loss_tracker", None), *(compiled.metrics if compiled else ())]
        return [metric for metric in found if metric is not None]

    def _recording(self, metric: keras.metrics.Metric) -> Callable[[], Any]:
        result = metric.result

        def recording() -> Any:
            returned = result()
            for index, value in enumerate(tf.nest.flatten(returned)):
                # Keeps the value alive: its id cannot be reused then.
                self._results[id(value)] = (value, metric, index)
            return returned

        return recording

    def _deciding(self, metric: keras.metrics.Metric) -> Callable[..., Any]:
        update = metric.update_state
        method = getattr(update, "__func__", None)
        # A class of the user's that overrides it may do anything, also if it then calls that of Keras.
        known = method is not None and method.__module__.startswith("keras.")

        def of_each_row(function: Callable[..., Any]) -> Callable[..., Any]:
            def called(*args: Any, **kwargs: Any) -> Any:
                values = function(*args, **kwargs)
                if _rank(values) != 0:
                    return values
                args, kwargs = self._claimed(metric, (args, kwargs))
                return function(*args, **kwargs)

            return called

        def deciding(*args: Any, **kwargs: Any) -> Any:
            if self._updating_whole:  # a metric that is part of another one
                return update(*args, **kwargs)
            if not known:
                args, kwargs = self._claimed(metric, (args, kwargs))
                with replaced(self, "_updating_whole", True):
                    return update(*args, **kwargs)
            if method is _WRAPPER:
                # Private: only the function that this metric calls tells if there is a value for each row.
                with replaced(metric, "_fn", of_each_row(metric._fn)):
                    return update(*args, **kwargs)
            weight = args[1] if len(args) > 1 else kwargs.get("sample_weight")
            value = args[0] if args else kwargs.get("values")
            if method is _MEAN and weight is None and _rank(value) == 0:
                self._scalar[id(metric)] = metric
            else:
                self._summed.add(id(metric))
            return update(*args, **kwargs)

        return deciding

    def _claimed(self, metric: keras.metrics.Metric, structure: Any) -> Any:
        """The arguments of a metric as they would be in one process; constants stay as they are."""
        self._whole[id(metric)] = metric
        for variable in metric.variables:
            if isinstance(variable.value, SummedVariable):
                variable.value.refuse_parts(f"Metric {metric.name}")
        flat = [
            tf.convert_to_tensor(leaf) if isinstance(leaf, np.ndarray) and leaf.ndim else leaf
            for leaf in tf.nest.flatten(structure)
        ]
        varying = {leaf.shape[0] for leaf in flat if _varies(leaf) and leaf.shape.rank} - {None}
        for place, leaf in enumerate(flat):
            # A constant with one entry per row of this worker: labels of `tf.ones((tf.shape(x)[0], 1))`.
            constant = isinstance(leaf, tf.Tensor) and leaf.shape.rank and not _varies(leaf)
            if constant and leaf.shape[0] in varying:
                flat[place] = tf.compat.v1.placeholder_with_default(leaf, leaf.shape)  # is not folded
        here = id(None if tf.executing_eagerly() else tf.compat.v1.get_default_graph())
        varying_leaves = {(id(leaf), here): leaf for leaf in flat if _varies(leaf)}
        needed = {key: leaf for key, leaf in varying_leaves.items() if key not in self._gathered}
        parts = [_parts(metric, leaf) for leaf in needed.values()]
        rows = [only_real(part, self._rows) for leaf in parts for part in leaf if part.shape.rank != 0]
        scalars = [part for leaf in parts for part in leaf if part.shape.rank == 0]
        joined, means = iter(self._gather(rows) if rows else ()), iter(self._mean(scalars) if scalars else ())
        for (key, leaf), own in zip(needed.items(), parts, strict=True):
            received = [next(means if part.shape.rank == 0 else joined) for part in own]
            if isinstance(leaf, tf.RaggedTensor):
                whole = tf.RaggedTensor.from_nested_row_lengths(received[0], received[1:])
            else:
                whole = received[0]
                if len(received) > 1:
                    whole._keras_mask = received[1]
            # Keeps the leaf alive: its id cannot be reused then.
            self._gathered[key] = leaf, whole
        of_all = [self._gathered[id(leaf), here][1] if _varies(leaf) else leaf for leaf in flat]
        return tf.nest.pack_sequence_as(structure, of_all)


def _varies(leaf: Any) -> bool:
    """Whether an argument may differ between workers."""
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return True
    return isinstance(leaf, tf.Tensor) and (tf.executing_eagerly() or tf.get_static_value(leaf) is None)


def _parts(metric: keras.metrics.Metric, leaf: Any) -> list[tf.Tensor]:
    """The tensors of an argument that are joined over the workers."""
    if isinstance(leaf, tf.RaggedTensor):
        return [leaf.flat_values, *leaf.nested_row_lengths()]
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
    mask = getattr(leaf, "_keras_mask", None)
    return [leaf] if mask is None else [leaf, mask]


def _rank(value: Any) -> int | None:
    rank: int | None = tf.TensorShape(getattr(value, "shape", ())).rank
    return rank


def _difference(before: tf.Tensor, after: tf.Tensor) -> tf.Tensor:
    """What a step added to a state; zero where an infinity did not change."""
    return tf.where(before == after, tf.zeros_like(after), after - before)


def precise(value: tf.Tensor) -> tf.Tensor:
    """The value in a dtype whose rounding, repeated in every step, does not shift a mean."""
    return value if value.dtype == tf.float64 else tf.cast(value, tf.float32)
