"""Tensor exchange between workers: sums, weighted means and concatenations of all workers' tensors.

Every collective runs on every worker, in the same order, and the n-th one of a worker belongs to the n-th one
of all others. That holds because all workers trace and run the same code; nothing else is checked before a
transfer.

Inside graphs, the workers of one host sum through shared memory (`SharedSums`). All else is left to
TensorFlow's collectives, which match transfers by a key. Keys work inside loops because they come from a
counter in the graph (`CountingLauncher`). Both kinds of transfer advance this counter, when the values to
send exist and before they wait: so `lifetime.py` can compare how far the workers are, and detect one that
waits in vain.

Replaced in TensorFlow: its launchers of collectives, and the class behind MultiWorkerMirroredStrategy, the
only place where they can be replaced. Replaced in Keras: `LossScaleOptimizer._tf_apply`
(`_scale_losses_between_steps`).
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Private: the launcher that draws the keys, and the class behind MultiWorkerMirroredStrategy.
from tensorflow.python.distribute import cross_device_utils
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

from replicast.allreduce import SEVERAL_HOSTS, Exchange, ExchangePlan, Form, open_exchange
from replicast.coordination import DirectExchange
from replicast.errors import NotSupported
from replicast.lifetime import Lifetime
from replicast.training.graphs import SliceKind, kind_of, lookups_of
from replicast.training.keras_call import (
    compiled_model,
    keras_looks_at_attributes,
    optimizer_that_applies,
    optimizer_that_sums,
    replaced,
)
from replicast.training.rows import SUMMED_AS, InitialRows, UndecidedSlices, once_for_each_row, once_if_summed
from replicast.training.variables import creator_in_scope, replicated, sharing_seed_generator, write_rows

logger = logging.getLogger("replicast")

# How long TensorFlow may take to connect the workers, all of which have met. Its own limit is an hour. Before
# it connects, each worker initializes its devices, for which a GPU's driver may need many seconds.
REGISTER_SECS = 60.0
# Far above the keys that TensorFlow uses to create variables, which start at 100. Transfers between steps and
# inside steps use separate key ranges: if one worker is still in its loop when another has left it, the two
# wait for each other, which is noticed, and never mix their values.
FIRST_KEY = 500_000_000
FIRST_KEY_BETWEEN_STEPS = 100_000_000
BROADCAST_BYTES = 2**26  # of an initial value, in one transfer
# Dtypes that TensorFlow's collectives do not support, and a dtype that holds all of their values.
CARRIERS = {
    tf.bfloat16: tf.float32,
    tf.uint8: tf.int32,
    tf.int8: tf.int32,
    tf.uint16: tf.int32,
    tf.int16: tf.int32,
    tf.uint32: tf.int64,
}
_GATHERED_AS = {**CARRIERS, tf.float16: tf.float32, tf.bool: tf.int32}
_NUMBERS = frozenset(np.dtype(code).type for code in "bBhHiIlqLQfdFD")
_ON_ACCELERATOR = "computes on an accelerator"


class SharedSums:
    """Sums, weighted means and concatenations over the workers of one host. Only inside graphs.

    One operation for all values: `tf.numpy_function` gives `replicast.allreduce` the tensors' own memory, and
    takes the results over without a copy.
    """

    def __init__(self, exchange: Exchange, counter: tf.Variable) -> None:
        self.exchange = exchange
        self._counter = counter

    def combine(self, values: Sequence[Any], weighted: Sequence[bool], weight: tf.Tensor) -> list[Any]:
        """The sum of each value over the workers, or its weighted mean; of row-sparse ones, all slices."""
        sent: list[tuple[tf.Tensor, bool, bool]] = []  # and whether it is gathered, and weighted
        for value, mean in zip(values, weighted, strict=True):
            sparse = isinstance(value, tf.IndexedSlices)
            given = value.values if sparse else value
            sent.append((tf.cast(given, SUMMED_AS.get(given.dtype, given.dtype)), sparse, mean))
            if sparse:
                sent.append((value.indices, True, False))
        results = iter(self._call(sent, weight))

        def like(value: Any) -> Any:
            result = tf.cast(next(results), value.dtype)
            if not isinstance(value, tf.IndexedSlices):
                return result
            return tf.IndexedSlices(result, next(results), value.dense_shape)

        return [like(value) for value in values]

    def gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """All workers' tensors, each concatenated along the first axis; they may have different lengths."""
        return self._call([(tensor, True, False) for tensor in tensors], tf.constant(1.0))

    def _call(self, sent: Sequence[tuple[tf.Tensor, bool, bool]], weight: tf.Tensor) -> list[tf.Tensor]:
        tensors = [tensor for tensor, _, _ in sent]
        plan = ExchangePlan([Form(np.dtype(tensor.dtype.as_numpy_dtype), *how) for tensor, *how in sent])

        def combine(weight: Any, *arrays: Any) -> list[Any]:
            return self.exchange.combine(plan, float(weight), [np.asarray(array) for array in arrays])

        with tf.device("CPU:0"), tf.control_dependencies([weight, *tensors]):
            count = self._counter.assign_add(1, read_value=False)
            with tf.control_dependencies([count]):
                results = tf.numpy_function(combine, [weight, *tensors], [t.dtype for t in tensors])
            with tf.control_dependencies(results):
                self._counter.assign_add(0, read_value=False)
        for (tensor, gathered, _), result in zip(sent, results, strict=True):
            result.set_shape([None, *tensor.shape[1:]] if gathered else tensor.shape)
        return list(results)


class CountingLauncher(cross_device_utils.CollectiveReplicaLauncher):
    """Sums through shared memory where that is possible; else draws each key from a counter, in the graph.

    TensorFlow draws a key in Python when a function is called and passes it in, which does not reach a
    function nested in control flow: `steps_per_execution` fails. A key fixed while tracing would reach it,
    but does not work for gathers whose lengths change. A counter that every worker advances in the same order
    solves both, and costs one local addition; outside of graphs, it is one of Python. A key is drawn only
    when the tensor to transfer exists: a step that finds no data left must not count as a transfer.

    All collectives of several tensors, of slices and of rows are made from the two methods that are replaced.
    """

    def __init__(self, stock: Any, owner: ReplicatedExtended) -> None:
        super().__init__(
            stock._group_key, stock._group_size, stock._collective_keys, stock._device, stock._options
        )
        self._owner = owner
        self._tensor: Any = None

    def all_reduce(self, input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if shared := self._owner.shared_sums([input_tensor]):
            return shared.combine([input_tensor], [False], tf.constant(1.0))[0]
        self._tensor = input_tensor
        return super().all_reduce(input_tensor, *args, **kwargs)

    def _all_gather(self, input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        if shared := self._owner.shared_sums([input_tensor]):
            return shared.gather([input_tensor])[0]
        self._tensor = input_tensor
        return super()._all_gather(input_tensor, *args, **kwargs)

    def _next_instance_key(self) -> tf.Tensor:
        if tf.executing_eagerly():
            return tf.constant(FIRST_KEY_BETWEEN_STEPS + self._owner.next_turn(), tf.int32)
        with tf.control_dependencies([self._tensor]):
            self._owner.keys.assign_add(1, read_value=False)
            return self._owner.keys.read_value()


class ReplicatedExtended(CollectiveAllReduceExtended):
    """The implementation of MultiWorkerMirroredStrategy, with what Keras 3 and our transfers need."""

    def __init__(
        self, container: tf.distribute.Strategy, cluster_resolver: Any, options: Any, heartbeat_secs: float
    ) -> None:
        self._heartbeat_secs = heartbeat_secs
        # Whether a sum over replicas returns its argument: an optimizer must not sum gradients a second time.
        self.summed_already = False
        self.in_keras_step = False  # which combines the gradients of the workers itself
        self._warned = False
        self._creating = False
        self._receive_parts: Callable[[Any], None] | None = None  # of the variable that is being created
        self.alone = False  # whether a step runs that is written for one process, and must see one replica
        self.variables_created = 0  # in the scope
        super().__init__(container, cluster_resolver, options)
        if len(self.worker_devices) != 1:
            raise NotSupported(
                f"A worker with {len(self.worker_devices)} devices",
                reason="replicast runs one replica per worker",
                remedy="Start one worker per device: 'replicast run -n N' does this; where TF_CONFIG has one "
                "task for each host, 'replicast run --from-tf-config'. Or set CUDA_VISIBLE_DEVICES to one of "
                "them",
            )
        with tf.init_scope(), tf.device("CPU:0"):
            self.keys = tf.Variable(FIRST_KEY, dtype=tf.int32, trainable=False)
        # Called before each transfer outside of a graph; returns its number.
        self.next_turn: Callable[[], int] = itertools.count(1).__next__
        # For all transfers in graphs, if it supports their dtypes. Those outside of graphs, between steps,
        # stay with TensorFlow, and have keys of their own.
        self.shared: SharedSums | None = None
        _scale_losses_between_steps()
        for operations in (self._cross_device_ops, self._host_cross_device_ops):
            operations._launchers = [CountingLauncher(stock, self) for stock in operations._launchers]

    def _update_config_proto(self, config_proto: Any) -> Any:
        """As in TensorFlow, with limits of ours for the call that connects the workers and for heartbeats."""
        updated = super()._update_config_proto(config_proto)
        service = updated.experimental.coordination_config
        service.cluster_register_timeout_in_ms = int(REGISTER_SECS * 1000)
        # Without it, worker 0 waits for ever for a worker that was lost before it was registered.
        service.cluster_register_with_barrier = True
        service.heartbeat_timeout_in_ms = int(self._heartbeat_secs * 1000)
        return updated

    def shared_sums(self, values: Sequence[Any]) -> SharedSums | None:
        numbers = all(SUMMED_AS.get(v.dtype, v.dtype).as_numpy_dtype in _NUMBERS for v in values)
        return self.shared if numbers and not tf.executing_eagerly() else None

    def transfers_started(self) -> int:
        """How many transfers this worker has started: equal on all workers at the same line of the script."""
        return int(self.keys.numpy()) - FIRST_KEY + self.variables_created

    def in_run(self) -> bool:
        return getattr(tf.distribute.get_replica_context(), "strategy", None) is self._container_strategy()

    def _call_for_each_replica(self, fn: Any, args: Any, kwargs: Any) -> Any:
        call = super()._call_for_each_replica
        if isinstance(fn, tf.types.experimental.PolymorphicFunction):  # TensorFlow traces it around the call
            return call(fn, args, kwargs)
        with sharing_seed_generator(self._container_strategy()) as sharing:
            return call(sharing(fn), args, kwargs)

    def _use_merge_call(self) -> bool:
        # With one replica per worker there is nothing to merge. Merging cannot be done inside tf.cond, so it
        # would make gradient accumulation and EMA fail. TensorFlow's own tests turn it off too.
        return False

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        # No transfer in two cases: a variable created while another one is being created, and an optimizer
        # that Keras creates only to inspect its attributes, on the one worker that saves.
        if self._creating or keras_looks_at_attributes():
            return next_creator(**kwargs)
        model = compiled_model()
        if model is not None:
            self._container_strategy().see_compiled(model)
        self.variables_created += 1  # each is a transfer, of worker 0's initial value
        # TensorFlow assigns ONLY_FIRST_REPLICA variables with a merge even if the strategy has none.
        # Optimizers count their steps in such a variable, inside tf.cond when the loss is scaled. With one
        # replica per worker every replica is the first, so no aggregation is needed.
        if kwargs.get("aggregation") == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            kwargs["aggregation"] = tf.VariableAggregation.NONE
        self._creating = True
        try:
            variable = replicated(super()._create_variable(next_creator, **kwargs))
            receive, self._receive_parts = self._receive_parts, None
            if receive is not None:
                receive(variable)
            return variable
        finally:
            self._creating, self._receive_parts = False, None

    def colocate_vars_with(self, colocate_with_variable: Any) -> Any:
        """As in TensorFlow, but also outside the scope, where a custom loop may first use its optimizer."""
        _check_in_job(colocate_with_variable)
        # A worker has one device, so there is nothing to colocate.
        return tf.variable_creator_scope(creator_in_scope(self._container_strategy()))

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: Any, primary_var: Any, **kwargs: Any
    ) -> Any:
        # TensorFlow broadcasts worker 0's initial value, but not of every dtype that Keras uses, and at most
        # 2 GiB: a large table goes in parts. The others create the variable with a value of their own, and
        # write the parts into it: together they would take the memory of a second table, and TensorFlow's
        # allocator returns none. So does worker 0 if it can draw the parts one by one.
        stock, given = super()._get_variable_creator_initial_value, kwargs["initial_value"]
        dtype = tf.as_dtype(kwargs["dtype"]) if kwargs.get("dtype") is not None else None

        def broadcast(part: tf.Tensor) -> tf.Tensor:
            carried = tf.cast(part, CARRIERS.get(part.dtype, part.dtype))
            sent = {**kwargs, "initial_value": carried, "dtype": carried.dtype}
            return tf.cast(stock(replica_id, device, primary_var, **sent)(), part.dtype)

        def initial_value() -> tf.Tensor:
            is_first = self._container_strategy().rank == 0
            by_rows = isinstance(given, InitialRows) and given.can_be_drawn(BROADCAST_BYTES)
            value = tf.zeros(given.shape) if by_rows else given() if callable(given) else given
            value = tf.convert_to_tensor(getattr(value, "wrapped_value", value), dtype)
            shape, rest, kind = value.shape, value.shape[1:], value.dtype
            nbytes = (shape.num_elements() or 0) * kind.size
            if nbytes <= BROADCAST_BYTES or (self._num_workers == 1 and not by_rows) or not shape.rank:
                return broadcast(value)
            # All workers have the same parts, also one with a GPU, which does not draw them one by one.
            step = 4 // math.gcd(4, rest.num_elements()) if isinstance(given, InitialRows) else 1
            rows = max(step, BROADCAST_BYTES * shape[0] // nbytes // step * step)
            parts = [slice(start, min(shape[0], start + rows)) for start in range(0, shape[0], rows)]

            def receive(variable: Any) -> None:
                for part in parts:
                    drawn = is_first and by_rows
                    own = given.rows(part) if drawn else tf.zeros([part.stop - part.start, *rest], kind)
                    received = broadcast(own)
                    # `component[part].assign` would read the variable first, and so copy it.
                    write_rows([variable.values[0].handle], tf.range(part.start, part.stop), [received])

            if is_first and not by_rows:
                for part in parts:
                    broadcast(value[part])
            else:
                self._receive_parts = receive
            return value

        return initial_value

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        # A single worker has nothing to send, and XLA cannot compile a transfer on CPUs (`jit_compile=True`).
        if self.summed_already or self._num_workers == 1:
            return value
        optimizer = optimizer_that_sums()
        if self.in_keras_step and optimizer is not None:
            raise NotSupported(
                f"An optimizer ({type(optimizer).__name__}) that train_step uses but the model does not hold",
                reason="its gradients would be clipped on each worker before they are combined",
                remedy="Make it an attribute of the model or of a layer, directly or in a list or dict",
            )
        if reduce_op != tf.distribute.ReduceOp.SUM:
            return super()._replica_ctx_all_reduce(reduce_op, value, options)
        flat = once_if_summed(tf.nest.flatten(value), optimizer)
        return tf.nest.pack_sequence_as(value, self.sums(flat, [False] * len(flat)))

    def sums(self, values: list[Any], averaged: list[bool], rows: tf.Tensor | None = None) -> list[Any]:
        """Sums values over the workers in one transfer; some of them are averaged, weighted by rows."""
        weight = tf.constant(1.0) if rows is None else rows
        shared, reduce = self.shared_sums(values), super()._replica_ctx_all_reduce

        def combine(parts: list[Any], means: list[bool]) -> list[Any]:
            if shared is not None:
                return shared.combine(parts, means, weight)
            # TensorFlow's collectives only sum, and not every dtype: one for each. A worker without rows has
            # 0 of the mean, even if its value is NaN.
            weighted = [
                mapped(part, lambda v: tf.math.multiply_no_nan(v, tf.cast(weight, v.dtype))) if mean else part
                for part, mean in zip(parts, means, strict=True)
            ]
            sent = (*weighted, *[weight] * any(means))
            carried = [tf.cast(value, CARRIERS.get(value.dtype, value.dtype)) for value in sent]
            summed: dict[int, Any] = {}
            for dtype in dict.fromkeys(value.dtype for value in carried):
                places = [place for place, value in enumerate(carried) if value.dtype == dtype]
                sums = reduce(tf.distribute.ReduceOp.SUM, [carried[place] for place in places])
                summed.update(zip(places, sums, strict=True))
            totals = [tf.cast(summed[place], part.dtype) for place, part in enumerate(parts)]
            return [
                mapped(total, lambda v: v / tf.cast(summed[len(parts)], v.dtype)) if mean else total
                for total, mean in zip(totals, means, strict=True)
            ]

        # A worker without rows has computed a row of zeros, which would touch a row of a table: its number 0.
        has_rows = None if rows is None else rows > 0
        return sum_over_workers(values, averaged, self._num_workers, combine, self.gather_rows, has_rows)

    def gather_rows(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """The rows of all workers, in their order: each tensor joined along its first axis."""
        carried = [tf.cast(t, _GATHERED_AS.get(t.dtype, t.dtype)) for t in tensors]
        shared = self.shared_sums(carried)
        context = tf.distribute.get_replica_context()
        whole = shared.gather(carried) if shared else [context.all_gather(t, axis=0) for t in carried]
        return [tf.cast(joined, own.dtype) for joined, own in zip(whole, tensors, strict=True)]

    def _gather_to_implementation(self, value: Any, destinations: Any, *how: Any) -> Any:
        # TensorFlow gathers to the device of the value. In a graph, what a batch holds has none: ids, labels.
        there = destinations or self.worker_devices[0] if isinstance(destinations, str) else destinations
        return super()._gather_to_implementation(value, there, *how)

    def update(
        self, var: Any, fn: Callable[..., Any], args: Any = (), kwargs: Any = None, group: bool = True
    ) -> Any:
        """As in TensorFlow; an optimizer outside of `strategy.run` gets the mean of the workers' gradients.

        Inside `run` it sums them. Outside, TensorFlow applies each worker's own gradients, so the replicas
        would silently diverge. The mean is correct for both kinds of loop that get here: every worker
        computes the whole batch, or each computes an equal share of it.
        """
        # By name: this is a nested function in a method of Keras' optimizers, and there is no other way to
        # distinguish an optimizer's step from an assignment.
        if not self.in_run() and getattr(fn, "__name__", "") == "apply_grad_to_update_var":
            _check_in_job(var)
            if not self.summed_already:
                args = (*self.means(once_if_summed(args[:1], optimizer_that_applies())), *args[1:])
        return super().update(var, fn, args, kwargs, group)

    def means(self, gradients: Sequence[Any]) -> list[Any]:
        """The means of the workers' gradients in a loop without `strategy.run`; None stays None."""
        if self._num_workers == 1:
            return list(gradients)
        if not self._warned and self._container_strategy().rank == 0:
            logger.warning(
                "An optimizer is used outside of strategy.run(): each worker computes every batch of its "
                "loop, and the mean of the workers' gradients is applied. To share the work, call the step "
                "with strategy.run() in a tf.function and divide the loss by the global batch size."
            )
        self._warned = True

        def mean_of(gradient: Any) -> Any:
            carried = tf.cast(gradient, CARRIERS.get(gradient.dtype, gradient.dtype))
            with self._container_strategy().scope():
                mean = self.reduce_to(tf.distribute.ReduceOp.MEAN, carried, self.worker_devices[0])
            is_sparse = isinstance(mean, tf.IndexedSlices)
            return tf.cast(_one_list_if_equal(mean, self._num_workers) if is_sparse else mean, gradient.dtype)

        return [None if gradient is None else mean_of(gradient) for gradient in gradients]


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
            self._combined = self._extended.sums(self._values, self._averaged, self._rows)


def _check_in_job(variable: Any) -> None:
    if not isinstance(variable, tf.distribute.DistributedValues):
        raise NotSupported(
            f"Training {variable.name.partition(':')[0]}, which was created outside strategy.scope(),",
            reason="it would not be the same on every worker",
            remedy="Build the model before the loop: call it once on a batch inside 'with strategy.scope():'",
        )


def _scale_losses_between_steps() -> None:
    """Lets `LossScaleOptimizer` be used in a scope, by a training loop without `strategy.run`.

    Keras refuses it there, although the optimizers that it wraps work. Whether the gradients are finite is
    decided on the mean over the workers: otherwise one worker would skip a step for which the others wait.
    """
    # Private, and on the class: Keras refuses in this method, and asks no object that we could replace.
    apply = keras.optimizers.LossScaleOptimizer._tf_apply
    if hasattr(apply, "__wrapped__"):
        return

    @functools.wraps(apply)
    def apply_mean(self: Any, grads: Any, trainable_variables: Any = None) -> None:
        extended = self._distribution_strategy.extended
        if not isinstance(extended, ReplicatedExtended) or extended.in_run():
            apply(self, grads, trainable_variables)
            return
        with replaced(extended, "summed_already", True):
            self._common_apply(extended.means(grads), trainable_variables)

    keras.optimizers.LossScaleOptimizer._tf_apply = apply_mean


def sum_through_shared_memory(
    extended: ReplicatedExtended, lifetime: Lifetime, wanted: bool
) -> Exchange | None:
    """Makes the steps of all workers sum through shared memory, if all of them can and want to.

    Blocks until all workers have called it, at most two minutes. Worker 0 logs why they cannot.
    """
    rank, unwilling = lifetime.rank, ""
    if not wanted:
        unwilling = f'worker {rank} has all_reduce="tensorflow"'
    elif extended._local_device_type != "CPU":
        unwilling = f"worker {rank} {_ON_ACCELERATOR}"
    direct = DirectExchange(lifetime.coordination, "allreduce", rank, lifetime.size, lifetime.has_left)
    exchange = open_exchange(direct, os.environ, lifetime.check, unwilling)
    if isinstance(exchange, Exchange):
        extended.shared = SharedSums(exchange, extended.keys)
        lifetime.dead_worker = exchange.dead_worker
        return exchange
    if rank == 0 and wanted:
        # Between accelerators TensorFlow's collectives are the right way, and between hosts the only one.
        expected = logging.INFO if exchange == SEVERAL_HOSTS else logging.WARNING
        level = logging.DEBUG if exchange.endswith(_ON_ACCELERATOR) else expected
        logger.log(level, "TensorFlow's collectives sum the gradients, not shared memory: %s", exchange)
    return None


def mapped(value: Any, function: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(function(value.values), value.indices, value.dense_shape)
    return function(value)


# Row-sparse gradients.
#
# The gradient of a lookup is a list of slices: one for each index that was looked up, including repeats.
# Clipping by norm, and optimizers that square gradients, use single slices. So the sum must have the slices
# that one process has on the whole batch. Which slices those are depends on where the indices come from:
#
#     ROWS      ids from the batch             the slices of all workers, concatenated
#     SHARED    positions, constants           the same list on every worker, summed slice by slice
#     UNIQUE    distinct ids from the batch    one slice for each index that any worker has
#     UNKNOWN   no graph to inspect, as with   decided by the values: indices that are distinct, and
#               `run_eagerly=True`, or inside  equal on all workers, count as SHARED
#               a `tf.function` of the script
#
# TensorFlow always does the first, which gives a position embedding two slices where one process has one.


def sum_over_workers(
    values: list[Any],
    averaged: list[bool],
    workers: int,
    all_reduce: Callable[[list[Any], list[bool]], list[Any]],
    all_gather: Callable[[list[tf.Tensor]], list[tf.Tensor]],
    has_rows: tf.Tensor | None = None,
) -> list[Any]:
    """The sums, or means, of tensors and row-sparse gradients over all workers, in one `all_reduce`.

    A worker that has no rows of the batch has no slices that come from rows.
    """
    if not any(isinstance(value, tf.IndexedSlices) for value in values):
        return list(all_reduce(values, averaged))

    def own(kind: SliceKind, part: Any) -> Any:
        if has_rows is None or kind is SliceKind.SHARED or not isinstance(part, tf.IndexedSlices):
            return part
        length = tf.where(has_rows, tf.size(part.indices), 0)
        return tf.IndexedSlices(part.values[:length], part.indices[:length], part.dense_shape)

    parts = [[(kind, own(kind, part)) for kind, part in _lookups(value)] for value in values]
    sent = [part.values if kind is SliceKind.SHARED else part for value in parts for kind, part in value]
    means = [mean for value, mean in zip(parts, averaged, strict=True) for _ in value]
    received = iter(all_reduce(sent, means))

    def whole(kind: SliceKind, part: Any, total: Any) -> Any:
        if kind is SliceKind.SHARED:
            return tf.IndexedSlices(total, part.indices, part.dense_shape)
        if kind is SliceKind.UNIQUE:
            return once_for_each_row(total)
        if kind is SliceKind.ROWS:
            return total
        (lengths,) = all_gather([tf.reshape(tf.size(part.indices), [1])])
        return _one_list_if_equal(total, workers, lengths)

    def joined(wholes: list[Any]) -> Any:
        if len(wholes) == 1:
            return wholes[0]
        values, indices = [one.values for one in wholes], [one.indices for one in wholes]
        return tf.IndexedSlices(tf.concat(values, 0), tf.concat(indices, 0), wholes[0].dense_shape)

    return [joined([whole(kind, part, next(received)) for kind, part in value]) for value in parts]


def _lookups(value: Any) -> list[tuple[SliceKind, Any]]:
    """The slices of each lookup, if the step uses a table more than once; a dense tensor is one part."""
    if not isinstance(value, tf.IndexedSlices):
        return [(SliceKind.ROWS, value)]
    if tf.executing_eagerly():
        return [(SliceKind.UNKNOWN, value)]
    lists, parts = lookups_of(value.indices), [value]
    if len(lists) > 1:
        lengths = [tf.size(indices) for indices in lists]
        pairs = zip(tf.split(value.values, lengths), tf.split(value.indices, lengths), strict=True)
        parts = [tf.IndexedSlices(*pair, value.dense_shape) for pair in pairs]
    kinds = [kind_of(indices) for indices in lists]
    if isinstance(value, UndecidedSlices):
        repeats = (SliceKind.ROWS, SliceKind.UNKNOWN)
        parts = [value.decided(p) if k in repeats else p for k, p in zip(kinds, parts, strict=True)]
    return list(zip(kinds, parts, strict=True))


def _one_list_if_equal(
    slices: tf.IndexedSlices, workers: int, lengths: tf.Tensor | None = None
) -> tf.IndexedSlices:
    """Adds the workers' slices one by one if all workers have the same indices; otherwise returns them all.

    For custom training loops without `strategy.run`: the indices are equal if every worker computes the whole
    batch. They may repeat, as a whole batch may have them, and no transfer is needed: all workers see all
    slices, so all decide alike. For UNKNOWN above, with the lengths of the workers' lists, they must not
    repeat: they may be ids from the batch that happen to be equal on all workers.
    """
    length = tf.shape(slices.indices)[0] // workers

    def lists(parts: tf.Tensor) -> tf.Tensor:
        shape = tf.concat([[workers, length], tf.shape(parts)[1:]], axis=0)
        return tf.reshape(parts[: workers * length], shape)

    table = lists(slices.indices)
    equal = (workers * length == tf.shape(slices.indices)[0]) & tf.reduce_all(table == table[0])
    if lengths is not None:
        equal &= tf.reduce_all(lengths == lengths[0]) & (tf.size(tf.unique(table[0])[0]) == length)
    values, indices = tf.cond(
        equal,
        lambda: (tf.reduce_sum(lists(slices.values), axis=0), table[0]),
        lambda: (slices.values, slices.indices),
    )
    return tf.IndexedSlices(values, indices, slices.dense_shape)
