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
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any, Literal

import keras
import tensorflow as tf
from tensorflow.python.eager import record

from replicast.training.collectives import ReplicatedExtended
from replicast.training.feeding import at_least_one_row, first_input_is_whole, rows_of, with_unknown_rows
from replicast.training.step_metrics import MetricResults, MetricUpdates
from replicast.training.variables import (
    SummedVariable,
    Writes,
    added_by_keras_step,
    component,
    local,
    optimizers_of,
)

# Private: whether a tape is recording; there is no public way to ask.


logger = logging.getLogger("replicast")

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
        self._counted: list[keras.Variable] = []
        self._clips_own = False
        self._common = CommonTensors()

    def __call__(self, data: Any) -> Any:
        """Runs the step on this worker's share and returns its result for the whole batch."""
        # Until the results are computed: a state that is read in another step is taken to be in parts.
        with added_by_keras_step(v.value for v in self._model.metrics_variables):
            return waiting_for_data(fed_as_by_keras(self._model, self._run))(data)

    def _run(self, data: Any) -> Any:
        rows = rows_of(data)
        self._rows = tf.cast(rows, tf.float32) / ROWS_UNIT
        metrics = list(self._model.metrics_variables)
        states = {id(v): (value := local(v), total_before(v, value)) for v in metrics}
        self._watch = watch = Writes([*metrics, *self._assignable()])
        updates = MetricUpdates(self._model.metrics, rows, self._extended.gather_rows, self._means)
        results = MetricResults(self._model.metrics)
        with contextlib.ExitStack() as stack:
            stack.enter_context(watch)
            stack.enter_context(results)
            stack.enter_context(updates)
            for optimizer in optimizers_of(self._model):
                stack.enter_context(applying_with(optimizer, self._apply))
            if not self._applies_last:  # a stock step only applies its gradients: one transfer at the end
                stack.enter_context(tape_returning(self._of_the_whole_batch))
            stack.enter_context(self._extended.keras_step(alone=not _sums_its_loss(self._model)))
            logs = self._function(at_least_one_row(data, rows))
        written = [v for v in metrics if watch.wrote(v)]
        others = watch.written()[len(written) :]
        self._counted = [v for v in others if v.dtype not in _FLOATS]
        assigned = [v for v in others if v.dtype in _FLOATS and (v.trainable or self._average_statistics)]
        add_states = functools.partial(self._add_states, written, states, updates, data)
        return self._whole_batch(logs, results, add_states, assigned)

    def _add_states(
        self,
        written: list[Any],
        states: dict[int, Any],
        updates: MetricUpdates,
        data: Any,
        transfer: Transfer,
    ) -> Callable[[], None]:
        """Adds the states that metrics have after the step; returns a function that assigns them."""
        rows, whole_first = rows_of(data), first_input_is_whole(data)
        is_first = tf.equal(tf.distribute.get_replica_context().replica_id_in_sync_group, 0)
        of_all_rows, of_scalars = updates.from_all_rows(), updates.from_scalars()
        tracker = getattr(self._model, "_loss_tracker", None)
        tracked = set() if tracker is None or whole_first is None else {id(v) for v in tracker.variables}
        flags = transfer.add([tf.cast(whole_first & (rows > 0), tf.int32)] if tracked else [])

        def state_of(variable: keras.Variable) -> Callable[[], tf.Tensor]:
            before, total = states[id(variable)]
            after = tf.where(rows > 0, local(variable), before)
            if id(variable) in of_all_rows or variable.aggregation == "only_first_replica":
                value = _carried(local(variable) if id(variable) in of_all_rows else after)
                first = transfer.add([tf.where(is_first, value, tf.zeros_like(value))])
                return lambda: first()[0]
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
            mean = transfer.add([_precise(_difference(before, after))], averaged=True)
            return lambda: total + parts()[0] + tf.cast(mean()[0], total.dtype)

        found = [(variable, state_of(variable)) for variable in written]

        def assign() -> None:
            for variable, state in found:
                component(variable).assign(tf.cast(state(), variable.value.dtype))
                mark_whole(variable)

        return assign

    def _means(self, scalars: list[tf.Tensor]) -> list[tf.Tensor]:
        return self._extended.weighted_sums(scalars, [True] * len(scalars), self._rows)

    def _assignable(self) -> list[keras.Variable]:
        """Variables that the step may assign without an optimizer: mostly moving statistics.

        They become the mean over the workers. That is correct for weights too, if the assigned value is
        linear in the gradients; in a stock step only an optimizer assigns weights.
        """
        weights = [] if self._applies_last else self._model.trainable_variables
        variables = (*self._model.non_trainable_variables, *weights)
        numbers = [v for v in variables if v.dtype in _FLOATS]
        # Only compared: there is no mean of integers. Seeds are the same on all workers.
        return numbers + [v for v in variables if "int" in v.dtype and v.name != "seed_generator_state"]

    def _apply(self, apply: Callable[..., Any], gradients: list[Any], variables: Any) -> None:
        """Replaces `apply` of the model's optimizers."""
        if self._applies_last:
            self._kept.append((apply, gradients, variables))
            return
        self._warn_of_clipping(gradients)
        whole = self._of_the_whole_batch(gradients, from_tape=False)
        with self._watch.ignoring(), self._extended.summed_already():
            apply(whole, variables)

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

    def _of_the_whole_batch(self, gradients: list[Any], *, from_tape: bool = True) -> list[Any]:
        """The gradients over the rows of all workers. Those that are common already are not sent again.

        What was computed from common gradients and from this worker's rows is averaged: the common part has
        been summed, and its mean over the workers is itself.
        """
        origins = [self._common.origin(gradient, from_tape) for gradient in gradients]
        if all(origin == "common" for origin in origins):
            return gradients
        transfer, sums = Transfer(self._extended, self._rows), _sums_its_loss(self._model)
        whole: list[Any] = []
        for gradient, origin in zip(gradients, origins, strict=True):
            if origin == "common":
                whole.append(lambda gradient=gradient: gradient)
            elif origin == "mixed" and self._has_common_rows(gradient, from_tape):
                # A sum of slices would have each of these rows once per worker.
                values = transfer.add([gradient.values], averaged=True)
                whole.append(lambda g=gradient, v=values: tf.IndexedSlices(v()[0], g.indices, g.dense_shape))
            else:
                sent = transfer.add([gradient], averaged=origin == "mixed" or not sums)
                whole.append(lambda sent=sent: sent()[0])
        transfer.send()
        whole = [result() for result in whole]
        self._common.add(whole)
        return whole

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

    def _has_common_rows(self, gradient: Any, from_tape: bool) -> bool:
        """Whether it is row-sparse, with the same rows on all workers: not a worker's own, times a factor."""
        if not isinstance(gradient, tf.IndexedSlices):
            return False
        return tf.executing_eagerly() or self._common.origin(gradient.indices, from_tape) == "common"

    def _whole_batch(
        self,
        logs: Any,
        results: MetricResults,
        add_states: Callable[[Transfer], Callable[[], None]],
        statistics: list[keras.Variable],
    ) -> Any:
        own = [value for value in tf.nest.flatten(logs) if value not in results]
        transfer = Transfer(self._extended, self._rows)
        gradients = [self._add_gradients(transfer, kept) for _, kept, _ in self._kept]
        assign_states = add_states(transfer)
        compared = [*statistics, *self._counted]
        means = transfer.add([_precise(local(v)) for v in compared], averaged=True)
        mean_logs = transfer.add([tf.cast(v, tf.float32) for v in own], averaged=True)
        transfer.send()
        for (apply, kept, variables), summed in zip(self._kept, gradients, strict=True):
            self._apply_summed(apply, kept, summed(), variables)
        assign_states()
        self._warn_of_differences(compared, means())
        for variable, mean in zip(statistics, means(), strict=False):
            variable.assign(mean)
        each = iter(mean_logs())
        return tf.nest.map_structure(lambda v: results.recompute(v) if v in results else next(each), logs)

    def _warn_of_differences(self, variables: list[keras.Variable], means: list[tf.Tensor]) -> None:
        """Worker 0 warns once of a variable that each worker has filled from its own rows: a queue, a range.

        Its mean over the workers is right for a running mean, and for nothing else.
        """
        running = {id(v) for layer in self._model._flatten_layers() for v in _running_means(layer)}
        unknown = [(v, mean) for v, mean in zip(variables, means, strict=True) if id(v) not in running]
        # XLA cannot compile a call of Python.
        compiled = getattr(self._model, "jit_compile", False) is True
        if not unknown or compiled or tf.distribute.get_strategy().rank != 0:
            return
        # The mean of equal values is rounded. A worker without rows has computed a row of zeros.
        distances = [tf.reduce_max(tf.abs(_precise(local(v)) - mean)) for v, mean in unknown]
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


_FILLED_FROM_ROWS = (
    "%s comes out of a step with another value on each worker: each fills it from its own rows. The step "
    "replaces it with the mean over the workers, unless it is an integer. That is right for a running mean, "
    "and wrong for a queue, a range or a counter. Update it from the rows of all workers instead: "
    "rows = tf.distribute.get_replica_context().all_gather(rows, axis=0)"
)


def _running_means(layer: Any) -> list[keras.Variable]:
    if not isinstance(layer, keras.layers.BatchNormalization):
        return []
    return [v for v in layer.non_trainable_variables if v.name in ("moving_mean", "moving_variance")]


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
    """Values that are summed or averaged over the workers together."""

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
        if self._values:  # a step may have nothing to combine, on all workers alike
            self._combined = self._extended.weighted_sums(self._values, self._averaged, self._rows)


class CommonTensors:
    """The gradients of the whole batch in one step, and what was computed from them.

    In a graph, the origin of a tensor is found by walking back from it. Eagerly there is no graph: what an
    optimizer gets counts as mixed, and is averaged once more, which does not change a common value.
    """

    def __init__(self) -> None:
        self._kept: list[Any] = []  # so that no id and no name is used again
        self._names: set[tuple[int, str]] = set()

    def add(self, gradients: list[Any]) -> None:
        """Records gradients that are the same on all workers."""
        self._kept += gradients
        if not tf.executing_eagerly():
            self._names.update((id(tensor.graph), tensor.name) for tensor in _tensors(gradients))

    def origin(self, gradient: Any, from_tape: bool) -> Literal["common", "mixed", "local"]:
        """What a gradient was computed from: common tensors, this worker's rows ("local"), or both."""
        if gradient is None or any(gradient is kept for kept in self._kept):
            return "common"
        if tf.executing_eagerly():
            return "local" if from_tape or not self._kept else "mixed"
        from_common = from_rows = False
        waiting, seen = _tensors([gradient]), set()
        while waiting:
            tensor = waiting.pop()
            graph = id(tensor.graph)
            if (graph, tensor.name) in self._names:
                from_common = True
            elif (graph, tensor.op.name) not in seen:
                seen.add((graph, tensor.op.name))
                outside = _captured(tensor)
                from_rows = from_rows or (not outside and _may_differ(tensor))
                waiting += outside or tensor.op.inputs
        return ("mixed" if from_common else "local") if from_rows else "common"

    def misses_clipping(self, gradient: Any) -> bool:
        """Whether a script has clipped what a function, loop or branch returned, and that is local."""
        clips, calls, seen = False, False, set()
        waiting = [] if gradient is None else [(tensor, False) for tensor in _tensors([gradient])]
        while waiting:
            tensor, behind_call = waiting.pop()
            if (id(tensor.graph), tensor.name) in self._names:
                return False
            if tensor.op.name in seen:
                continue
            seen.add(tensor.op.name)
            if tensor.op.type == "Placeholder" and not behind_call:
                return False  # The gradient was computed here.
            calls = calls or tensor.op.type in _CALLS
            clips = clips or (not behind_call and tensor.op.type in _CLIPS)
            behind = behind_call or tensor.op.type in _CALLS
            waiting += [(one, behind) for one in tensor.op.inputs]
        return clips and calls


def _tensors(values: list[Any]) -> list[tf.Tensor]:
    return [tensor for tensor in tf.nest.flatten(values, expand_composites=True) if tensor is not None]


_CALLS = ("PartitionedCall", "StatefulPartitionedCall", "While", "StatelessWhile", "If", "StatelessIf")
_CLIPS = ("ClipByValue", "Minimum", "Maximum", "L2Loss", "Sqrt", "Rsqrt")


def _captured(tensor: tf.Tensor) -> list[tf.Tensor]:
    """The tensor outside of a branch or loop that a placeholder in it stands for, as the only element."""
    if tensor.op.type != "Placeholder" or tensor.dtype == tf.resource:
        return []
    captures = getattr(tensor.graph, "captures", ())
    return [outer for outer, inner in captures if inner is tensor and tf.is_symbolic_tensor(outer)]


def _is_of_some_rows(target: Any) -> bool:
    """Whether a loss comes from a part of the rows only: of one row, or of a few, in a loop of Python."""
    found, seen = False, set()
    waiting = _tensors([target])
    while waiting:
        operation = waiting.pop().op
        if operation.name in seen or operation.type in ("Shape", "Size", "Rank"):
            continue
        seen.add(operation.name)
        if _takes_some_rows(operation):
            found = True
        elif operation.outputs and _may_differ(operation.outputs[0]):
            return False
        else:
            waiting += operation.inputs
    return found


def _takes_some_rows(operation: tf.Operation) -> bool:
    if operation.type == "StridedSlice":
        masks = [operation.get_attr(name) & 1 for name in ("ellipsis_mask", "new_axis_mask")]
        whole = operation.get_attr("begin_mask") & 1 and operation.get_attr("end_mask") & 1
        return not any(masks) and not whole
    if operation.type == "Unpack":
        return bool(operation.get_attr("axis") == 0)
    axis = {"Split": 0, "SplitV": 2}.get(operation.type)
    return axis is not None and tf.get_static_value(operation.inputs[axis]) == 0


def _may_differ(tensor: tf.Tensor) -> bool:
    """Whether an operation may give each worker another value from the same inputs: data, stateful ones.

    Weights are equal on all workers.
    """
    if tensor.op.type == "Placeholder":
        return bool(tensor.dtype != tf.resource)
    return tensor.op.op_def.is_stateful and tensor.op.type not in ("ReadVariableOp", "ResourceGather")


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
    stock, thread, graph = tf.GradientTape.gradient, threading.get_ident(), _graph()

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]  # TensorFlow has no types
    def gradient(tape: Any, target: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        found = stock(tape, target, sources, *args, **kwargs)
        nested = threading.get_ident() != thread or _graph() is not graph or _in_vectorized_map()
        of_some_rows = not nested and graph is not None and _is_of_some_rows(target)
        if nested or of_some_rows or record.could_possibly_record():
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


def _graph() -> Any:
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def _in_vectorized_map() -> bool:
    """By the name scope in which TensorFlow traces the body: it has no graph of its own."""
    scope = "" if tf.executing_eagerly() else tf.compat.v1.get_default_graph().get_name_scope()
    return any(part.startswith("loop_body") for part in scope.split("/"))


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


def _carried(value: tf.Tensor) -> tf.Tensor:
    return tf.cast(value, tf.int32) if value.dtype == tf.bool else value


def _precise(value: tf.Tensor) -> tf.Tensor:
    """The value in a dtype whose rounding, repeated in every step, does not shift a mean."""
    return value if value.dtype == tf.float64 else tf.cast(value, tf.float32)


def _sums_its_loss(model: keras.Model) -> bool:
    """Whether the loss is a sum: every example already has the same weight, and another would be wrong."""
    losses = [loss for loss in tf.nest.flatten(getattr(model, "loss", None)) if loss is not None]
    return any(getattr(loss, "reduction", "sum_over_batch_size") in ("sum", "none", None) for loss in losses)
