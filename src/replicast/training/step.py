"""One step of a Keras model on several workers: weighted gradients, exact metrics, equal statistics.

Keras averages each worker's loss over that worker's own rows, decides about clipping and float16 overflow on
its own gradients, reports the mean of the workers' metrics, and lets each worker keep its own moving
statistics. Here, one step on each of N workers, where worker r has n_r rows, is:

    forward, backward           Keras, on this worker's rows
    one transfer                sums over r: n_r * g_r, what r added to the metrics' states, n_r * statistics
    clip, scale, apply          Keras, on the same gradients everywhere
    what the step returns       computed by Keras from the metrics' states, which are now those of the job

A custom `train_step` may read the weights that it has just changed, and may clip, log or combine gradients
before it applies them. So its gradients are transferred where its tape returns them (`tape_returning`), and
all that follows sees those of the whole batch; the rest goes in a second transfer.

All workers trace the same code, so they have the same transfers in the same order: the rows of a metric that
is not one of Keras, where it is updated; the gradients of each tape or optimizer, where they are computed;
then the rest. A worker without rows takes part in all of them, with a row of zeros whose weight is 0.

What is replaced, until the step is traced, because Keras and TensorFlow have no hook there: `apply` of the
model's optimizers and `update_state` and `result` of its metrics, on these objects; `GradientTape.gradient`,
on its class, because the script creates the tape.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Private: the metric that holds those of `compile`; a metric does not tell what it consists of.
from keras.src.trainers.compile_utils import CompileMetrics

# Private: whether a tape is recording; and which variables an operation writes. There is no public way to
# ask.
from tensorflow.python.eager import record
from tensorflow.python.framework import auto_control_deps_utils

from replicast.errors import NotSupported, logger
from replicast.training.collectives import ReplicatedExtended, Transfer, mapped
from replicast.training.feeding import (
    at_least_one_row,
    first_input_is_whole,
    only_real,
    rows_of,
    with_unknown_rows,
)
from replicast.training.graphs import CommonTensors, in_vectorized_map, is_of_some_rows, tensors_in
from replicast.training.keras_call import replaced
from replicast.training.rows import UndecidedSlices, once_if_summed, sums_repeated_rows
from replicast.training.variables import SummedVariable, component, components, held_optimizers, local
from replicast.update.edits import FLOAT_DTYPES

# Rows are counted in units of 1024, so that a gradient times its rows stays in the range of float16.
ROWS_UNIT = 1024.0
_FILLED_FROM_ROWS = (
    "%s comes out of a step with another value on each worker: each fills it from its own rows. The step "
    "replaces it with the mean over the workers, unless it is an integer. That is right for a running mean, "
    "and wrong for a queue, a range or a counter. Update it from the rows of all workers instead: "
    "rows = tf.distribute.get_replica_context().all_gather(rows, axis=0)"
)


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
        self, extended: ReplicatedExtended, model: keras.Model, function: Callable[..., Any]
    ) -> None:
        self._extended = extended
        self._model = model
        self._function = function
        # A loss that is a sum gives every example the same weight already; another weight would be wrong.
        losses = [loss for loss in tf.nest.flatten(getattr(model, "loss", None)) if loss is not None]
        reductions = [getattr(loss, "reduction", "sum_over_batch_size") for loss in losses]
        self._sums_its_loss = any(reduction in ("sum", "none", None) for reduction in reductions)
        # In a stock step nothing reads the weights after they were changed: one transfer at its end will do.
        names = ("train_step", "compute_metrics", "get_metrics_result")
        methods = [getattr(getattr(model, name), "__func__", None) for name in names]
        self._applies_last = methods == [getattr(keras.Model, name) for name in names]
        self._kept: list[tuple[Callable[..., Any], list[Any], Any]] = []
        self._clips_own = False
        self._common = CommonTensors()
        optimizers = held_optimizers(model).values()
        self._may_add_up = not tf.executing_eagerly() and any(map(sums_repeated_rows, optimizers))
        self._adding_up: set[tf.Operation] = set()
        self._undecided: list[tuple[UndecidedSlices, tf.IndexedSlices]] = []

    def __call__(self, data: Any) -> Any:
        """Runs the step on this worker's share and returns its result for the whole batch."""
        # Until the results are computed: a state that is read in another step is taken to be in parts.
        with contextlib.ExitStack() as stack:
            for variable in self._model.metrics_variables:
                if isinstance(variable.value, SummedVariable):
                    stack.enter_context(replaced(variable.value, "in_keras_step", True))
            return fed_as_by_keras(self._model, self._run)(data)

    def _run(self, data: Any) -> Any:
        rows = rows_of(data)
        self._rows = tf.cast(rows, tf.float32) / ROWS_UNIT
        metrics = StepMetrics(self._model, data, self._extended, self._rows, self._sums_its_loss)
        self._watch = watch = Writes([*metrics.variables, *self._assignable()])
        with contextlib.ExitStack() as stack:
            stack.enter_context(watch)
            stack.enter_context(metrics.watched())
            for optimizer in held_optimizers(self._model).values():
                # Keras clips, accumulates and decides about float16 overflow on a worker's own gradients and
                # sums last: workers then clip differently, and with float16 one of them skips the step while
                # the others wait for it.
                summing = functools.partial(self._apply, optimizer, optimizer.apply)
                stack.enter_context(replaced(optimizer, "apply", summing))
            if not self._applies_last:
                stack.enter_context(tape_returning(self._of_the_whole_batch))
            stack.enter_context(replaced(self._extended, "in_keras_step", True))
            stack.enter_context(replaced(self._extended, "alone", not self._sums_its_loss))
            logs = self._function(at_least_one_row(data, rows))
        self._decide_what_is_sent(logs)

        states = {id(v) for v in metrics.variables}
        others = [v for v in watch.written if id(v) not in states]
        statistics = [v for v in others if v.dtype in FLOAT_DTYPES]
        compared = [*statistics, *(v for v in others if v.dtype not in FLOAT_DTYPES)]
        own = [value for value in tf.nest.flatten(logs) if not metrics.is_result(value)]
        transfer = Transfer(self._extended, self._rows)
        gradients = [
            transfer.add([g for g in kept if g is not None], averaged=not self._sums_its_loss)
            for _, kept, _ in self._kept
        ]
        assign_states = metrics.add_states([v for v in watch.written if id(v) in states], transfer)
        means = transfer.add([precise(local(v)) for v in compared], averaged=True)
        mean_logs = transfer.add([tf.cast(v, tf.float32) for v in own], averaged=True)
        transfer.send()
        for (apply, kept, variables), summed in zip(self._kept, gradients, strict=True):
            each = iter(summed())
            with replaced(self._extended, "summed_already", True):
                apply([g if g is None else next(each) for g in kept], variables)
        assign_states()
        self._warn_of_differences(compared, means())
        for variable, mean in zip(statistics, means(), strict=False):
            variable.assign(mean)
        each = iter(mean_logs())
        return tf.nest.map_structure(
            lambda v: metrics.recomputed(v) if metrics.is_result(v) else next(each), logs
        )

    def _assignable(self) -> list[keras.Variable]:
        """Variables that the step may assign without an optimizer: mostly moving statistics.

        They become the mean over the workers. That is correct for weights too, if the assigned value is
        linear in the gradients; in a stock step only an optimizer assigns weights.
        """
        weights = [] if self._applies_last else self._model.trainable_variables
        variables = (*self._model.non_trainable_variables, *weights)
        numbers = [v for v in variables if v.dtype in FLOAT_DTYPES]
        # Only compared: there is no mean of integers. Seeds are the same on all workers.
        return numbers + [v for v in variables if "int" in v.dtype and v.name != "seed_generator_state"]

    def _apply(
        self, optimizer: Any, apply: Callable[..., Any], grads: Any, trainable_variables: Any = None
    ) -> None:
        """Replaces `apply` of the model's optimizers."""
        gradients = list(grads)
        if self._applies_last:
            own = once_if_summed(map(self._of_rows, gradients), optimizer)
            self._kept.append((apply, own, trainable_variables))
            return
        self._warn_of_clipping(gradients)
        whole = self._of_the_whole_batch(gradients, optimizer)
        with self._watch.ignoring() as ignored, replaced(self._extended, "summed_already", True):
            apply(whole, trainable_variables)
        if sums_repeated_rows(optimizer):
            self._adding_up.update(ignored)

    def _of_the_whole_batch(self, gradients: list[Any], optimizer: Any = None) -> list[Any]:
        """The gradients over the rows of all workers. Those that are common already are not sent again.

        Without an optimizer, they are those that a tape returns.

        What was computed from common gradients and from this worker's rows is averaged: the common part has
        been summed, and its mean over the workers is itself.
        """
        from_tape = optimizer is None
        origins = [self._common.origin(gradient, from_tape) for gradient in gradients]
        if all(origin == "common" for origin in origins):
            return gradients
        transfer = Transfer(self._extended, self._rows)
        sent: dict[int, Callable[[], list[Any]]] = {}
        rows_are_common: set[int] = set()
        undecided: dict[int, UndecidedSlices] = {}
        for place, (gradient, origin) in enumerate(zip(gradients, origins, strict=True)):
            if origin == "mixed" and self._has_common_rows(gradient, from_tape):
                # A sum of slices would have each of these rows once per worker.
                rows_are_common.add(place)
                sent[place] = transfer.add([gradient.values], averaged=True)
            elif origin != "common":
                averaged = origin == "mixed" or not self._sums_its_loss
                (slices,) = once_if_summed([gradient if averaged else self._of_rows(gradient)], optimizer)
                if from_tape and isinstance(slices, tf.IndexedSlices) and self._may_add_up:
                    slices = undecided[place] = UndecidedSlices(slices)
                sent[place] = transfer.add([slices], averaged=averaged)
        transfer.send()
        whole = list(gradients)
        for place, received in sent.items():
            (whole[place],) = received()
            if place in rows_are_common:
                slices = gradients[place]
                whole[place] = tf.IndexedSlices(whole[place], slices.indices, slices.dense_shape)
        self._undecided += [(slices, whole[place]) for place, slices in undecided.items()]
        self._common.add(whole)
        return whole

    def _of_rows(self, gradient: Any) -> Any:
        """A sum of losses counts each row; a worker without rows has computed a row of zeros instead."""
        if gradient is None or not self._sums_its_loss:
            return gradient
        return mapped(gradient, lambda values: tf.where(self._rows > 0, values, tf.zeros_like(values)))

    def _decide_what_is_sent(self, logs: Any) -> None:
        """Slices that only an optimizer uses which adds them up are sent once for each row."""
        logged = {id(tensor) for tensor in tensors_in(logs)}
        for slices, received in self._undecided:
            tensors = [received.values, received.indices]
            users = {user for tensor in tensors for user in tensor.consumers()}
            if users <= self._adding_up and logged.isdisjoint(map(id, tensors)):
                with tf.init_scope():
                    slices.once.assign(True, read_value=False)
        # A graph does not hold the variables that it reads.
        tf.compat.v1.get_default_graph()._replicast_undecided = self._undecided

    def _has_common_rows(self, gradient: Any, from_tape: bool) -> bool:
        """Whether it is row-sparse, with the same rows on all workers: not a worker's own, times a factor."""
        if not isinstance(gradient, tf.IndexedSlices):
            return False
        return tf.executing_eagerly() or self._common.origin(gradient.indices, from_tape) == "common"

    def _warn_of_clipping(self, gradients: list[Any]) -> None:
        if self._clips_own or tf.executing_eagerly() or not any(map(self._common.misses_clipping, gradients)):
            return
        self._clips_own = True
        if tf.distribute.get_strategy().rank == 0:
            logger.warning(
                "train_step clips gradients that each worker has computed from its own rows, because the "
                "tape is in a tf.function, a loop or a branch. The result is not that of one process. Call "
                "tape.gradient in train_step itself, or use clipnorm, global_clipnorm or clipvalue of the "
                "optimizer"
            )

    def _warn_of_differences(self, variables: list[keras.Variable], means: list[tf.Tensor]) -> None:
        """Worker 0 warns once of a variable that each worker has filled from its own rows: a queue, a range.

        Its mean over the workers is right for a running mean, and for nothing else.
        """
        kind = keras.layers.BatchNormalization
        layers = [one for one in self._model._flatten_layers() if isinstance(one, kind)]
        statistics = [v for layer in layers for v in layer.non_trainable_variables]
        running = {id(v) for v in statistics if v.name in ("moving_mean", "moving_variance")}
        unknown = [(v, mean) for v, mean in zip(variables, means, strict=True) if id(v) not in running]
        # XLA cannot compile a call of Python.
        compiled = getattr(self._model, "jit_compile", False) is True
        if not unknown or compiled or tf.distribute.get_strategy().rank != 0:
            return
        # The mean of equal values is rounded. A worker without rows has computed a row of zeros.
        distances = [tf.reduce_max(tf.abs(precise(local(v)) - mean)) for v, mean in unknown]
        limits = [1e-5 * tf.reduce_max(tf.abs(mean)) for _, mean in unknown]
        differs = tf.logical_and(tf.stack(distances) > tf.stack(limits), self._rows > 0)
        told: set[str] = set()

        def tell(found: Any) -> bool:
            paths = {v.path for (v, _), differ in zip(unknown, found, strict=True) if differ}
            for path in sorted(paths - told):
                logger.warning(_FILLED_FROM_ROWS, path)
            told.update(paths)
            return True

        tf.cond(tf.reduce_any(differs), lambda: tf.numpy_function(tell, [differs], tf.bool), lambda: False)


def fed_as_by_keras(model: keras.Model, step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wraps a step so that it is fed with its data as Keras means it, and not before.

    None of its operations runs before its data exists. The step that finds no data left fails, but operations
    that do not depend on the data may already have run: if the number of rows is known while tracing, Keras
    would count the rows of a missing batch.

    The losses of a model's outputs count every batch alike. Keras weights the loss that it tracks for each
    output by the static number of rows, if there is one. A short last batch has none, because it is the
    second shape that is traced, and would count as one row. The arrays that Keras itself feeds have none.
    """

    def fed(data: Any) -> Any:
        leaves = [x for x in tf.nest.flatten(data, expand_composites=True) if isinstance(x, tf.Tensor)]
        with tf.control_dependencies([] if tf.executing_eagerly() else leaves[:1]):
            has_losses_of_outputs = any(metric.name.endswith("_loss") for metric in model.metrics)
            return step(with_unknown_rows(data) if has_losses_of_outputs else data)

    return fed


@contextlib.contextmanager
def tape_returning(whole_batch: Callable[[list[Any]], list[Any]]) -> Iterator[None]:
    """Inside, `tf.GradientTape.gradient` returns what `whole_batch` makes of the gradients of variables.

    A `train_step` may clip by the norm, which is another one on each worker. Its code lies between the tape
    and the optimizer, so the tape is the only place; and since the script creates the tape, its class has to
    be changed, for this thread and until the step is traced. Left as they are:
    - gradients of inputs (a gradient penalty): each belongs to a row of this worker;
    - gradients through which an outer tape differentiates: a transfer has no gradient;
    - gradients in a loop, a branch, a vectorized map or a `tf.function` of the script, and of a loss over
      some of the rows: they may be of one row each, and the workers may have different numbers of rows.
      Eagerly, such a loss is not recognized.
    """

    def graph_here() -> Any:
        return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

    stock, thread, graph = tf.GradientTape.gradient, threading.get_ident(), graph_here()

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        found = stock(tape, target, sources, *args, **kwargs)
        elsewhere = threading.get_ident() != thread or graph_here() is not graph or in_vectorized_map()
        if elsewhere or record.could_possibly_record():
            return found
        if graph is not None and is_of_some_rows(target):
            return found
        values, by = tf.nest.flatten(found), tf.nest.flatten(sources)
        variables = [place for place, source in enumerate(by) if not isinstance(source, tf.Tensor)]
        for place, value in zip(variables, whole_batch([values[place] for place in variables]), strict=True):
            values[place] = value
        return tf.nest.pack_sequence_as(found, values)

    tf.GradientTape.gradient = gradient
    try:
        yield
    finally:
        tf.GradientTape.gradient = stock


class Writes:
    """Finds which of some variables are written inside its `with` block, in the order of the candidates.

    In a graph, it inspects the operations that were added. Eagerly, where there is no graph, it compares
    values, and a variable counts as written if it changed on any worker.
    """

    def __init__(self, candidates: list[keras.Variable]) -> None:
        self.written: list[keras.Variable] = []
        self._candidates = candidates
        self._before: list[Any] = []
        self._first = 0
        self._ignored: set[tf.Operation] = set()

    def __enter__(self) -> Writes:
        if tf.executing_eagerly():
            self._before = [local(v) for v in self._candidates]
        else:
            self._first = len(_operations())
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None or not self._candidates:
            return
        if tf.executing_eagerly():
            differs = [
                tf.not_equal(old, local(v)) for old, v in zip(self._before, self._candidates, strict=True)
            ]
            changed = tf.cast(tf.stack([tf.reduce_any(each) for each in differs]), tf.float32)
            context = tf.distribute.get_replica_context()
            flags = context.all_reduce(tf.distribute.ReduceOp.SUM, changed).numpy()
        else:
            outside = {id(inner): id(outer) for outer, inner in tf.compat.v1.get_default_graph().captures}
            handles: set[int] = set()
            for operation in _operations()[self._first :]:
                if operation not in self._ignored:
                    _, writes = auto_control_deps_utils.get_read_write_resource_inputs(operation)
                    handles.update(outside.get(id(handle), id(handle)) for handle in writes)
            flags = [id(component(v).handle) in handles for v in self._candidates]
        self.written = [v for v, flag in zip(self._candidates, flags, strict=True) if flag]

    @contextlib.contextmanager
    def ignoring(self) -> Iterator[list[tf.Operation]]:
        """Ignores the operations that are added inside, which it then yields. No effect eagerly."""
        first, ignored = len(_operations()), list[tf.Operation]()
        yield ignored
        ignored += _operations()[first:]
        self._ignored.update(ignored)


def _operations() -> list[tf.Operation]:
    return [] if tf.executing_eagerly() else tf.compat.v1.get_default_graph().get_operations()


# The metrics of a step: after it, each has the state that one process would have after the whole batch.
#
# How a metric gets there depends on how `update_state` uses rows, which is decided when the step is traced:
#
# - The classes of Keras add a sum over rows to their state. Each worker adds its own rows, and the step sums
#   what the workers added: nothing is transferred but the state. `tests/scripts/test_metrics.py` holds every
#   class of Keras to this.
# - Any other `update_state` may do anything with its rows: keep a maximum, count its calls. It gets the rows
#   of all workers, in their order, on every worker, and the state of worker 0 counts.
# - So does a function that returns one number for its rows instead of one for each row.
# - A scalar that is not weighted, such as a loss, is taken as a mean over rows: what it adds to a
#   `keras.metrics.Mean` is averaged over the workers, weighted by rows.
# - The losses in the logs of a model whose loss is a sum over rows are added up, and then weighted as by
#   Keras.
#
# Between steps, every worker holds the state of the whole job: reading and resetting are local, and decisions
# that depend on a metric are the same everywhere. A `train_step` may return the results of its metrics under
# any names. They were computed from this worker's rows, so they are recorded, and computed again from the
# final states.

_MEAN = keras.metrics.Mean.update_state
_WRAPPER = keras.metrics.MeanMetricWrapper.update_state


@dataclass(eq=False, repr=False)
class StepMetrics:
    model: keras.Model
    data: Any
    extended: ReplicatedExtended
    weight: tf.Tensor
    sums_its_loss: bool

    def __post_init__(self) -> None:
        self._rows = rows_of(self.data)
        self.variables = list(self.model.metrics_variables)
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
        metrics = {id(metric): metric for metric in self.model.metrics}.values()
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
        rows, whole_first = self._rows, first_input_is_whole(self.data)
        is_first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
        of_all_rows = {id(v) for metric in self._whole.values() for v in metric.variables}
        means = (metric for key, metric in self._scalar.items() if key not in self._summed)
        of_scalars = {id(v) for metric in means for v in metric.variables}
        # Keras weights the loss in its logs by the first array of x, which may not be rows. Private: there is
        # no other way to the metrics in which it keeps the loss, and with several outputs that of each.
        tracker = getattr(self.model, "_loss_tracker", None)
        tracked = set() if tracker is None or whole_first is None else {id(v) for v in tracker.variables}
        flags = transfer.add([tf.cast(whole_first & (rows > 0), tf.int32)] if tracked else [])
        compiled = getattr(self.model, "_compile_loss", None)
        losses = [one for one in (tracker, *(compiled.metrics if compiled else ())) if one is not None]
        sums = {id(metric.total): metric for metric in losses} if self.sums_its_loss else {}

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
        joined = iter(self.extended.gather_rows(rows) if rows else ())
        means = iter(self.extended.sums(scalars, [True] * len(scalars), self.weight) if scalars else ())
        for (key, leaf), own in zip(needed.items(), parts, strict=True):
            received = [next(means if part.shape.rank == 0 else joined) for part in own]
            whole = received[0]
            if len(received) > 1:
                whole._keras_mask = received[1]
            # Keeps the leaf alive: its id cannot be reused then.
            self._gathered[key] = leaf, whole
        of_all = [self._gathered[id(leaf), here][1] if _varies(leaf) else leaf for leaf in flat]
        return tf.nest.pack_sequence_as(structure, of_all)


class EpochMetrics:
    """What the logs of a running `fit` are, once its first batch has ended: Keras builds metrics in it.

    Attributes:
        means: Of each metric in the logs, whether it is a running mean over the epoch. What a custom
            `train_step` returns is missing, unless it has the name of a metric: then the count of that tells.
    """

    def __init__(self, model: Any, logs: Mapping[str, Any]) -> None:
        named: dict[str, Any] = {}
        for each in model.metrics:
            # Private: what `compile` got, in lists that know the output whose name is before the metric's.
            lists = [*getattr(each, "_flat_metrics", ()), *getattr(each, "_flat_weighted_metrics", ())]
            for group in filter(None, lists or [each]):
                output = getattr(group, "output_name", None)
                prefix = f"{output}_" if output else ""
                for one in getattr(group, "metrics", None) or [group]:
                    twice = bool(lists) and prefix + one.name in named
                    named[f"{prefix}weighted_{one.name}" if twice else prefix + one.name] = one
        named = {name: one for name, one in named.items() if name in logs}
        self.means = {name: _is_mean(type(one)) for name, one in named.items()}
        means = {name: one for name, one in named.items() if isinstance(one, keras.metrics.Mean)}
        self._counts = {name: components(one.count) for name, one in means.items()}

    def counts(self) -> dict[str, tuple[tf.Tensor, ...]]:
        """The number of rows, batches or weights that each mean of the epoch so far is over: parts of a sum.

        Like the logs, they are not waited for: on a GPU that would end its work ahead of Python.
        """
        read = tf.raw_ops.ReadVariableOp  # several times as fast as `read_value`
        return {
            name: tuple(read(resource=part.handle, dtype=part.dtype) for part in parts)
            for name, parts in self._counts.items()
        }


def _is_mean(kind: type) -> bool:
    """Finds Mean by its name: tf_keras has one, too. A subclass with a result of its own does not count."""
    base = next((one for one in kind.__mro__ if one.__name__ == "Mean"), None)
    return base is not None and kind.result is base.result  # type: ignore[attr-defined]


def _varies(leaf: Any) -> bool:
    """Whether an argument may differ between workers."""
    if isinstance(leaf, (tf.RaggedTensor, tf.SparseTensor)):
        return True
    return isinstance(leaf, tf.Tensor) and (tf.executing_eagerly() or tf.get_static_value(leaf) is None)


def _parts(metric: keras.metrics.Metric, leaf: Any) -> list[tf.Tensor]:
    """The tensors of an argument that are joined over the workers."""
    scalar_number = _rank(leaf) == 0 and not leaf.dtype.is_floating
    is_dense = isinstance(leaf, tf.Tensor)
    if not is_dense or leaf.dtype == tf.string or scalar_number:
        kind = f"a {leaf.dtype.name}" if is_dense else "a sparse or ragged tensor"
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
