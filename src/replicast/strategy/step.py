"""One step of a Keras model on several workers: weighted gradients, exact metrics, equal statistics.

Keras averages each worker's loss over that worker's own rows, decides about clipping and float16 overflow on
its own gradients, reports the mean of the workers' metrics, and lets each worker keep its own moving
statistics. Here, one step on each of N workers, where worker r has n_r rows, is:

    forward, backward           Keras, on this worker's rows
    one transfer                sums over r: n_r * g_r, what r added to the metrics' states, n_r * statistics
    clip, scale, apply          Keras, on the same gradients everywhere
    what the step returns       computed by Keras from the metrics' states, which are now those of the job

A custom `train_step` may read the weights that it has just changed, so its gradients are transferred when it
applies them, and the rest in a second transfer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from replicast.strategy.collectives import ReplicatedExtended
from replicast.strategy.optimizers import optimizers_of
from replicast.strategy.replicated import SummedVariable, added_by_keras_step
from replicast.strategy.results import MetricResults
from replicast.strategy.rows import at_least_one_row, rows_of, with_unknown_rows
from replicast.strategy.writes import Writes, component, local

ROWS_UNIT = 1024.0
"""Rows are counted in units of 1024, so that a gradient times its rows stays in the range of float16."""


class Agreed:
    """A value that is already the same on every worker: Keras' reduction returns it unchanged."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class KerasStep:
    """Runs `model.train_step` or `model.test_step` so that its result is that of the whole batch.

    One object per traced step. It runs in the replica context and keeps no state between steps.
    """

    def __init__(
        self, extended: ReplicatedExtended, model: keras.Model, function: Callable[..., Any], average: bool
    ) -> None:
        self._extended = extended
        self._model = model
        self._function = function
        self._average_statistics = average
        self._applies_last = _is_stock(model)
        self._rows = tf.constant(0.0)
        self._watch = Writes([])
        self._kept: list[tuple[Callable[..., Any], list[Any], Any]] = []

    def __call__(self, data: Any) -> Any:
        """Runs the step on this worker's share and returns its result for the whole batch."""
        return waiting_for_data(fed_as_by_keras(self._model, self._run))(data)

    def _run(self, data: Any) -> Any:
        rows = rows_of(data)
        self._rows = tf.cast(rows, tf.float32) / ROWS_UNIT
        metrics = list(self._model.metrics_variables)
        before = [local(v) for v in metrics]
        totals = [total_before(v, value) for v, value in zip(metrics, before, strict=True)]
        self._watch = watch = Writes([*metrics, *self._assignable()])
        results = MetricResults(self._model.metrics)
        with contextlib.ExitStack() as stack:
            stack.enter_context(watch)
            stack.enter_context(results)
            stack.enter_context(added_by_keras_step([v.value for v in metrics]))
            for optimizer in optimizers_of(self._model):
                stack.enter_context(applying_with(optimizer, self._apply))
            stack.enter_context(self._extended.keras_step(alone=not _sums_its_loss(self._model)))
            logs = self._function(at_least_one_row(data))
        added = [
            (v, total, tf.where(rows > 0, local(v), value))
            for v, value, total in zip(metrics, before, totals, strict=True)
            if watch.wrote(v)
        ]
        assigned = [v for v in watch.written()[len(added) :] if v.trainable or self._average_statistics]
        return self._whole_batch(logs, results, added, assigned)

    def _assignable(self) -> list[keras.Variable]:
        """Variables that the step may assign without an optimizer: mostly moving statistics.

        They become the mean over the workers. That is correct for weights too, if the assigned value is
        linear in the gradients; in a stock step only an optimizer assigns weights.
        """
        weights = [] if self._applies_last else self._model.trainable_variables
        return [v for v in (*self._model.non_trainable_variables, *weights) if v.dtype in _FLOATS]

    def _apply(self, apply: Callable[..., Any], gradients: list[Any], variables: Any) -> None:
        """Replaces `apply` of the model's optimizers."""
        if self._applies_last:
            self._kept.append((apply, gradients, variables))
            return
        transfer = Transfer(self._extended, self._rows)
        summed = self._add_gradients(transfer, gradients)
        transfer.send()
        with self._watch.ignoring():
            self._apply_summed(apply, gradients, summed(), variables)

    def _add_gradients(self, transfer: Transfer, gradients: list[Any]) -> Callable[[], list[Any]]:
        """Every example has the same weight on every worker."""
        present = [g for g in gradients if g is not None]
        return transfer.add(present, averaged=not _sums_its_loss(self._model))

    def _apply_summed(
        self, apply: Callable[..., Any], gradients: list[Any], summed: list[Any], variables: Any
    ) -> None:
        each = iter(summed)
        with self._extended.summed_already():
            apply([g if g is None else next(each) for g in gradients], variables)

    def _whole_batch(
        self, logs: Any, results: MetricResults, added: list[Any], statistics: list[keras.Variable]
    ) -> Any:
        own = [value for value in tf.nest.flatten(logs) if value not in results]
        transfer = Transfer(self._extended, self._rows)
        gradients = [self._add_gradients(transfer, kept) for _, kept, _ in self._kept]
        states = transfer.add([_difference(before, after) for _, before, after in added])
        means = transfer.add([_precise(local(v)) for v in statistics], averaged=True)
        mean_logs = transfer.add([tf.cast(v, tf.float32) for v in own], averaged=True)
        transfer.send()
        for (apply, kept, variables), summed in zip(self._kept, gradients, strict=True):
            self._apply_summed(apply, kept, summed(), variables)
        for (variable, before, _), total in zip(added, states(), strict=True):
            component(variable).assign(before + total)
            mark_whole(variable)
        for variable, mean in zip(statistics, means(), strict=True):
            variable.assign(mean)
        each = iter(mean_logs())
        return tf.nest.map_structure(lambda v: results.recompute(v) if v in results else next(each), logs)


def fed_as_by_keras(model: keras.Model, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a step so that the losses of a model's outputs count every batch alike.

    Keras weights the loss that it tracks for each output by the static number of rows, if there is one. A
    short last batch has none, because it is the second shape that is traced, and would count as one row. The
    arrays that Keras itself feeds have none.
    """

    def fed(data: Any) -> Any:
        has_losses_of_outputs = any(metric.name.endswith("_loss") for metric in model.metrics)
        return step(with_unknown_rows(data) if has_losses_of_outputs else data)

    return fed


def waiting_for_data(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a step so that none of its operations runs before its data exists.

    The step that finds no data left fails, but operations that do not depend on the data may already have
    run: if the number of rows is known while tracing, Keras would count the rows of a missing batch.
    """

    def waiting(data: Any) -> Any:
        leaves = [x for x in tf.nest.flatten(data, expand_composites=True) if isinstance(x, tf.Tensor)]
        with tf.control_dependencies([] if tf.executing_eagerly() else leaves[:1]):
            return step(data)

    return waiting


class Transfer:
    """Values that are summed or averaged over the workers together.

    Args:
        extended: What sums them.
        rows: This worker's rows, its weight in averages.
    """

    def __init__(self, extended: ReplicatedExtended, rows: tf.Tensor) -> None:
        self._extended = extended
        self._rows = rows
        self._values: list[Any] = []
        self._averaged: list[bool] = []
        self._combined: list[Any] = []

    def add(self, values: list[Any], *, averaged: bool = False) -> Callable[[], list[Any]]:
        """Adds values to the transfer; returns a function that returns the results after `send`."""
        first, after = len(self._values), len(self._values) + len(values)
        self._values += values
        self._averaged += [averaged] * len(values)
        return lambda: self._combined[first:after]

    def send(self) -> None:
        """Combines the values. Blocks until every worker has sent the same kinds of values."""
        self._combined = self._extended.weighted_sums(self._values, self._averaged, self._rows)


def total_before(variable: keras.Variable, value: tf.Tensor) -> tf.Tensor:
    """The total of a metric's state before a step; zeros if it is in parts, which the step sums too."""
    state = variable.value
    return state.zero_unless_whole(value) if isinstance(state, SummedVariable) else value


def mark_whole(variable: keras.Variable) -> None:
    """Records that a metric's variable holds the state of the whole job, on every worker."""
    if isinstance(variable.value, SummedVariable):
        variable.value.mark_whole()


@contextlib.contextmanager
def applying_with(
    optimizer: keras.optimizers.Optimizer, act: Callable[[Callable[..., Any], list[Any], Any], None]
) -> Iterator[None]:
    """Inside, the optimizer's `apply` calls `act` with the original `apply`, the gradients and variables.

    Keras clips, accumulates and decides about float16 overflow on a worker's own gradients and sums last:
    workers then clip differently, and with float16 one of them skips the step while the others wait for it.
    Keras has no hook in between, so `apply` is replaced during the step, on this optimizer object, never on
    its class.
    """
    apply, own = optimizer.apply, vars(optimizer).get("apply")

    def sum_and_apply(grads: Any, trainable_variables: Any = None) -> None:
        act(apply, list(grads), trainable_variables)

    object.__setattr__(optimizer, "apply", sum_and_apply)
    try:
        yield
    finally:
        object.__delattr__(optimizer, "apply")
        if own is not None:
            object.__setattr__(optimizer, "apply", own)


_FLOATS = ("float16", "bfloat16", "float32", "float64")


def _is_stock(model: keras.Model) -> bool:
    """Whether nothing in the step can read the weights after they were changed."""
    names = ("train_step", "compute_metrics", "get_metrics_result")
    methods = [getattr(getattr(model, name), "__func__", None) for name in names]
    return methods == [getattr(keras.Model, name) for name in names]


def _difference(before: tf.Tensor, after: tf.Tensor) -> tf.Tensor:
    """What a step added to a state; zero where an infinity did not change."""
    return tf.where(before == after, tf.zeros_like(after), after - before)


def _precise(value: tf.Tensor) -> tf.Tensor:
    """The value in a dtype whose rounding, repeated in every step, does not shift a mean."""
    return value if value.dtype == tf.float64 else tf.cast(value, tf.float32)


def _sums_its_loss(model: keras.Model) -> bool:
    """Whether the loss is a sum: every example already has the same weight, and another would be wrong."""
    losses = [loss for loss in tf.nest.flatten(getattr(model, "loss", None)) if loss is not None]
    return any(getattr(loss, "reduction", "sum_over_batch_size") in ("sum", "none", None) for loss in losses)
