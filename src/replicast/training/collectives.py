"""Tensor exchange between workers: TensorFlow's collectives, with keys that work inside loops."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import cross_device_utils
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

from replicast.allreduce import SEVERAL_HOSTS, Exchange, Form, Plan, open_exchange
from replicast.allreduce import Exchange as AllReduce
from replicast.coordination import Coordination
from replicast.errors import NotSupported
from replicast.lifetime import Lifetime
from replicast.training.connecting import REGISTER_SECS
from replicast.training.keras_call import compiled_model, keras_looks_at_attributes, optimizer_that_sums
from replicast.training.sparse_gradients import SliceExchange, one_list_if_equal, sum_over_workers
from replicast.training.variables import creator_in_scope, replicated, sharing_seed_generator

# Weighted means with TensorFlow's collectives, which only sum, and not every dtype.

CARRIERS = {
    tf.bfloat16: tf.float32,
    tf.uint8: tf.int32,
    tf.int8: tf.int32,
    tf.uint16: tf.int32,
    tf.int16: tf.int32,
    tf.uint32: tf.int64,
}
"""Dtypes that TensorFlow's collectives do not support, and a dtype that holds all of their values."""


def weighted_with(
    all_reduce: Callable[[list[Any]], list[Any]], parts: list[Any], means: list[bool], weight: tf.Tensor
) -> list[Any]:
    """Sums values over the workers; some of them are averaged. One collective for each dtype."""
    weighted = [_times(part, weight) if mean else part for part, mean in zip(parts, means, strict=True)]
    carried = [_cast(value, CARRIERS.get(value.dtype, value.dtype)) for value in (*weighted, weight)]
    summed: dict[int, Any] = {}
    for dtype in dict.fromkeys(value.dtype for value in carried):
        places = [place for place, value in enumerate(carried) if value.dtype == dtype]
        summed.update(zip(places, all_reduce([carried[place] for place in places]), strict=True))
    totals = [_cast(summed[place], part.dtype) for place, part in enumerate(parts)]
    all_weights = summed[len(parts)]
    return [_over(t, all_weights) if mean else t for t, mean in zip(totals, means, strict=True)]


def _times(value: Any, factor: tf.Tensor) -> Any:
    """The product, which is 0 for a worker without rows even if its value is NaN."""
    return _mapped(value, lambda v: tf.math.multiply_no_nan(v, tf.cast(factor, v.dtype)))


def _over(value: Any, total: tf.Tensor) -> Any:
    return _mapped(value, lambda v: v / tf.cast(total, v.dtype))


def _cast(value: Any, dtype: tf.DType) -> Any:
    return value if value.dtype == dtype else _mapped(value, lambda v: tf.cast(v, dtype))


def _mapped(value: Any, function: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    if isinstance(value, tf.IndexedSlices):
        return tf.IndexedSlices(function(value.values), value.indices, value.dense_shape)
    return function(value)


# Sums over the workers of one host inside a graph: `replicast.allreduce` as one operation of TensorFlow.
#
# `tf.numpy_function` gives the function the tensors' own memory, and takes the results over without a copy.

SUMMED_AS = {tf.float16: tf.float32, tf.bfloat16: tf.float32}
"""Half-precision values are summed in float32, in rank order, and rounded once."""


class SharedSums:
    """Sums, weighted means and concatenations over the workers. Only inside graphs."""

    def __init__(self, exchange: Exchange, counter: tf.Variable) -> None:
        self._exchange = exchange
        self._counter = counter

    @staticmethod
    def supports(values: Sequence[Any]) -> bool:
        """Whether this can sum these tensors and row-sparse gradients."""
        return all(SUMMED_AS.get(v.dtype, v.dtype).as_numpy_dtype in _NUMBERS for v in values)

    def sum(self, values: Sequence[Any]) -> list[Any]:
        """The sum of each value over the workers; for row-sparse gradients, all workers' slices."""
        return self.combine(values, [False] * len(values), tf.constant(1.0))

    def combine(self, values: Sequence[Any], weighted: Sequence[bool], weight: tf.Tensor) -> list[Any]:
        """The sum of each value over the workers, or its weighted mean."""
        tensors: list[tf.Tensor] = []
        forms: list[Form] = []
        for value, mean in zip(values, weighted, strict=True):
            sparse = isinstance(value, tf.IndexedSlices)
            given = value.values if sparse else value
            tensors.append(tf.cast(given, SUMMED_AS.get(given.dtype, given.dtype)))
            forms.append(_form(tensors[-1], gathered=sparse, weighted=mean))
            if sparse:
                tensors.append(value.indices)
                forms.append(_form(value.indices, gathered=True))
        results = iter(self._call(forms, weight, tensors))
        return [_like(value, results) for value in values]

    def gather(self, tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """All workers' tensors, each concatenated along the first axis; they may have different lengths."""
        return self._call([_form(tensor, gathered=True) for tensor in tensors], tf.constant(1.0), tensors)

    def _call(
        self, forms: Sequence[Form], weight: tf.Tensor, tensors: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        plan = Plan(forms)

        def combine(weight: Any, *arrays: Any) -> list[Any]:
            return self._exchange.combine(plan, float(weight), [np.asarray(array) for array in arrays])

        with tf.device("CPU:0"), tf.control_dependencies([weight, *tensors]):
            count = self._counter.assign_add(1, read_value=False)
            with tf.control_dependencies([count]):
                results = tf.numpy_function(combine, [weight, *tensors], [t.dtype for t in tensors])
            with tf.control_dependencies(results):
                self._counter.assign_add(0, read_value=False)
        for form, tensor, result in zip(forms, tensors, results, strict=True):
            result.set_shape([None, *tensor.shape[1:]] if form.gathered else tensor.shape)
        return list(results)


_NUMBERS = frozenset(np.dtype(code).type for code in "bBhHiIlqLQfdFD")


def _form(tensor: tf.Tensor, *, gathered: bool, weighted: bool = False) -> Form:
    return Form(np.dtype(tensor.dtype.as_numpy_dtype), gathered, weighted)


def _like(value: Any, results: Any) -> Any:
    """The next result, with the kind and dtype of the value."""
    result = tf.cast(next(results), value.dtype)
    if not isinstance(value, tf.IndexedSlices):
        return result
    return tf.IndexedSlices(result, next(results), value.dense_shape)


# Private: the launcher that draws the keys, and the class behind MultiWorkerMirroredStrategy, which is the
# only place to replace its launchers.


logger = logging.getLogger("replicast")

FIRST_KEY = 500_000_000
FIRST_KEY_BETWEEN_STEPS = 100_000_000
"""Both are far above the keys that TensorFlow uses to create variables, which start at 100.

Transfers between steps and inside steps use separate key ranges. If one worker is still in its loop when
another has left it, the two wait for each other, which is noticed, and never mix their values.
"""

_GATHERED_AS = {**CARRIERS, tf.float16: tf.float32, tf.bool: tf.int32}


class CountingLauncher(cross_device_utils.CollectiveReplicaLauncher):
    """Draws each collective's key from a counter variable, in the graph.

    All workers must use the same key for the same collective. TensorFlow draws it in Python when a function
    is called and passes it in, which does not reach a function nested in control flow: `steps_per_execution`
    fails. A key fixed while tracing would reach it, but does not work for gathers whose lengths change. A
    counter that every worker advances in the same order solves both, and costs one local addition. Outside
    of graphs, a Python counter is used. A key is drawn only when the tensor to transfer exists: a step that
    finds no data left must not count as a transfer.
    """

    def __init__(self, stock: Any, owner: ReplicatedExtended) -> None:
        super().__init__(
            stock._group_key, stock._group_size, stock._collective_keys, stock._device, stock._options
        )
        self._owner = owner
        self._tensor: Any = None

    def all_reduce(self, input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """As in TensorFlow; through shared memory where that is possible."""
        shared = self._owner.shared_sums([input_tensor])
        if shared is not None:
            return shared.sum([input_tensor])[0]
        self._tensor = input_tensor
        return super().all_reduce(input_tensor, *args, **kwargs)

    def batch_all_reduce(self, input_tensor_packs: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [tensor for pack in input_tensor_packs for tensor in pack]
        shared = self._owner.shared_sums(tensors)
        if shared is not None:
            return shared.sum(tensors)
        return super().batch_all_reduce(input_tensor_packs, *args, **kwargs)

    def all_reduce_indexed_slices(self, input_slices: Any, *args: Any, **kwargs: Any) -> Any:
        """As `all_reduce`, for row-sparse gradients."""
        shared = self._owner.shared_sums([input_slices])
        if shared is not None:
            return shared.sum([input_slices])[0]
        return super().all_reduce_indexed_slices(input_slices, *args, **kwargs)

    def _all_gather(self, input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        shared = self._owner.shared_sums([input_tensor])
        if shared is not None:
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
    """The implementation of MultiWorkerMirroredStrategy, with these changes.

    Collectives count their keys (`CountingLauncher`); an optimizer may run inside `tf.cond`
    (`_use_merge_call`, `_create_variable`); row-sparse gradients are summed to the slices of one process
    (`slices.py`); gradients are not summed twice (`summed_already`); outside of `strategy.run`, an optimizer
    applies the mean of the workers' gradients (`update`).
    """

    def __init__(
        self, container: tf.distribute.Strategy, cluster_resolver: Any, options: Any, heartbeat_secs: float
    ) -> None:
        self._heartbeat_secs = heartbeat_secs
        self._summed_already = False
        self._in_keras_step = False
        self._warned = False
        self._creating = False
        self.alone = False
        """Whether a step runs that is written for one process, and must see one replica."""
        self.variables_created = 0
        """The number of variables created in the scope."""
        super().__init__(container, cluster_resolver, options)
        if len(self.worker_devices) != 1:
            raise NotSupported(
                f"A worker with {len(self.worker_devices)} devices",
                reason="replicast runs one replica per worker",
                remedy="Start one worker per device ('replicast run -n N' does this), or set "
                "CUDA_VISIBLE_DEVICES to one device for each worker",
            )
        with tf.init_scope(), tf.device("CPU:0"):
            self.keys = tf.Variable(FIRST_KEY, dtype=tf.int32, trainable=False)
        self.next_turn: Callable[[], int] = itertools.count(1).__next__
        """Called before each transfer outside of a graph; returns its number."""
        self.compiles: Callable[[keras.Model], None] = lambda model: None
        """Called at least once with each model that is compiled in the scope."""
        self._shared: SharedSums | None = None
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

    def sum_through(self, exchange: AllReduce) -> None:
        """Makes all transfers in graphs go through shared memory, if it supports their dtypes.

        Those outside of graphs, between steps, stay with TensorFlow, and have keys of their own.
        """
        self._shared = SharedSums(exchange, self.keys)

    def shared_sums(self, values: Sequence[Any]) -> SharedSums | None:
        """How to sum these values through shared memory; None if TensorFlow has to."""
        possible = self._shared is not None and not tf.executing_eagerly()
        return self._shared if possible and SharedSums.supports(values) else None

    def transfers_started(self) -> int:
        """How many transfers this worker has started, inside steps and to create variables.

        The same on all workers at the same line of the script.
        """
        return int(self.keys.numpy()) - FIRST_KEY + self.variables_created

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
            self.compiles(model)
        self.variables_created += 1  # each is a transfer, of worker 0's initial value
        # TensorFlow assigns ONLY_FIRST_REPLICA variables with a merge even if the strategy has none.
        # Optimizers count their steps in such a variable, inside tf.cond when the loss is scaled. With one
        # replica per worker every replica is the first, so no aggregation is needed.
        if kwargs.get("aggregation") == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            kwargs["aggregation"] = tf.VariableAggregation.NONE
        self._creating = True
        try:
            return replicated(super()._create_variable(next_creator, **kwargs))
        finally:
            self._creating = False

    def colocate_vars_with(self, colocate_with_variable: Any) -> Any:
        """As in TensorFlow, but also outside the scope, where a custom loop may first use its optimizer."""
        _check_in_job(colocate_with_variable)
        # A worker has one device, so there is nothing to colocate.
        return tf.variable_creator_scope(creator_in_scope(self._container_strategy()))

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: Any, primary_var: Any, **kwargs: Any
    ) -> Any:
        # TensorFlow broadcasts worker 0's initial value, but not for every dtype that Keras uses.
        dtype = tf.as_dtype(kwargs["dtype"]) if kwargs.get("dtype") is not None else None
        if dtype not in CARRIERS:
            return super()._get_variable_creator_initial_value(replica_id, device, primary_var, **kwargs)
        given = kwargs["initial_value"]

        def carried() -> tf.Tensor:
            value = given() if callable(given) else given
            return tf.cast(
                tf.convert_to_tensor(getattr(value, "wrapped_value", value), dtype), CARRIERS[dtype]
            )

        kwargs = {**kwargs, "initial_value": carried, "dtype": CARRIERS[dtype]}
        initial_value = super()._get_variable_creator_initial_value(replica_id, device, primary_var, **kwargs)
        return lambda: tf.cast(initial_value(), dtype)

    @contextlib.contextmanager
    def keras_step(self, *, alone: bool) -> Iterator[None]:
        """Marks the run of a Keras step, which combines the workers' gradients itself."""
        before = self.alone, self._in_keras_step
        self.alone, self._in_keras_step = alone, True
        try:
            yield
        finally:
            self.alone, self._in_keras_step = before

    @contextlib.contextmanager
    def summed_already(self) -> Iterator[None]:
        """Inside, a sum over replicas returns its argument: the optimizer must not sum a second time."""
        before, self._summed_already = self._summed_already, True
        try:
            yield
        finally:
            self._summed_already = before

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        # A single worker has nothing to send, and XLA cannot compile a transfer on CPUs (`jit_compile=True`).
        if self._summed_already or self._num_workers == 1:
            return value
        if self._in_keras_step:
            self._refuse_unknown_optimizer()
        reduce = super()._replica_ctx_all_reduce
        if reduce_op != tf.distribute.ReduceOp.SUM:
            return reduce(reduce_op, value, options)
        shared = self.shared_sums(tf.nest.flatten(value))
        return sum_over_workers(
            value,
            SliceExchange(
                workers=self._num_workers,
                all_reduce=lambda parts, _: (
                    shared.sum(parts) if shared else reduce(reduce_op, parts, options)
                ),
                all_gather=self._gather,
            ),
        )

    def weighted_sums(self, values: list[Any], averaged: list[bool], weight: tf.Tensor) -> list[Any]:
        """Sums values over the workers in one transfer; some of them are averaged."""
        shared, reduce = self.shared_sums(values), super()._replica_ctx_all_reduce

        def combine(parts: list[Any], means: list[bool]) -> list[Any]:
            if shared is not None:
                return shared.combine(parts, means, weight)
            return weighted_with(functools.partial(reduce, tf.distribute.ReduceOp.SUM), parts, means, weight)

        exchange = SliceExchange(workers=self._num_workers, all_reduce=combine, all_gather=self._gather)
        return list(sum_over_workers(values, exchange, averaged))

    def gather_rows(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        """The rows of all workers, in their order: each tensor joined along its first axis."""
        carried = [tf.cast(t, _GATHERED_AS.get(t.dtype, t.dtype)) for t in tensors]
        shared = self.shared_sums(carried)
        whole = shared.gather(carried) if shared is not None else [self._gather(t) for t in carried]
        return [tf.cast(joined, own.dtype) for joined, own in zip(whole, tensors, strict=True)]

    def _gather(self, tensor: tf.Tensor) -> tf.Tensor:
        return tf.distribute.get_replica_context().all_gather(tensor, axis=0)

    def _refuse_unknown_optimizer(self) -> None:
        optimizer = optimizer_that_sums()
        if optimizer is not None:
            raise NotSupported(
                f"An optimizer ({type(optimizer).__name__}) that train_step uses but the model does not hold",
                reason="its gradients would be clipped on each worker before they are combined",
                remedy="Make it an attribute of the model or of a layer, directly or in a list or dict",
            )

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
        applied = getattr(fn, "__name__", "") == "apply_grad_to_update_var"
        if not self.in_run():
            _check_in_job(var)
            if applied and not self._summed_already:
                args = (*self.means(args[:1], [var]), *args[1:])
        return super().update(var, fn, args, kwargs, group)

    def in_run(self) -> bool:
        """Whether this thread is inside `strategy.run`."""
        context = tf.distribute.get_replica_context()
        return context is not None and context.strategy is self._container_strategy()

    def means(self, gradients: Sequence[Any], variables: Sequence[Any]) -> list[Any]:
        """The means of the workers' gradients in a loop without `strategy.run`; None stays None."""
        if self._num_workers == 1:
            return list(gradients)
        self._warn_once()
        pairs = zip(gradients, variables, strict=True)
        return [None if gradient is None else self._mean(gradient, variable) for gradient, variable in pairs]

    def _mean(self, gradient: Any, variable: Any) -> Any:
        carried = tf.cast(gradient, CARRIERS.get(gradient.dtype, gradient.dtype))
        with self._container_strategy().scope():
            mean = self.reduce_to(tf.distribute.ReduceOp.MEAN, carried, variable)
        if isinstance(mean, tf.IndexedSlices):
            mean = one_list_if_equal(mean, self._num_workers)
        return tf.cast(mean, gradient.dtype)

    def _warn_once(self) -> None:
        if not self._warned and self._task_id == 0:
            logger.warning(
                "An optimizer is used outside of strategy.run(): each worker computes every batch of its "
                "loop, and the mean of the workers' gradients is applied. To share the work, call the step "
                "with strategy.run() in a tf.function and divide the loss by the global batch size."
            )
        self._warned = True


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
        updated = trainable_variables or self._trainable_variables
        means = extended.means(grads, [getattr(v, "value", v) for v in updated])
        with extended.summed_already():
            self._common_apply(means, trainable_variables)

    keras.optimizers.LossScaleOptimizer._tf_apply = apply_mean


# Decides, once and for all workers together, whether they sum through shared memory.

_ON_ACCELERATOR = "computes on an accelerator"


def sum_through_shared_memory(
    extended: ReplicatedExtended, coordination: Coordination, rank: int, lifetime: Lifetime, wanted: bool
) -> bool:
    """Makes the steps of all workers sum through shared memory, if all of them can and want to.

    Blocks until all workers have called it, at most two minutes. Worker 0 logs why they cannot.
    """
    unwilling = None
    if not wanted:
        unwilling = f'worker {rank} has all_reduce="tensorflow"'
    elif extended._local_device_type != "CPU":
        unwilling = f"worker {rank} {_ON_ACCELERATOR}"
    exchange = open_exchange(
        coordination, rank, extended._num_workers, os.environ, unwilling=unwilling, check=lifetime.check
    )
    if isinstance(exchange, str):
        if rank == 0 and wanted:
            text = "TensorFlow's collectives sum the gradients, not shared memory: %s"
            logger.log(_level(exchange), text, exchange)
        return False
    extended.sum_through(exchange)
    lifetime.dead_worker = exchange.dead_worker
    return True


def _level(reason: str) -> int:
    """Between accelerators TensorFlow's collectives are the right way, and between hosts the only one."""
    if reason.endswith(_ON_ACCELERATOR):
        return logging.DEBUG
    return logging.INFO if reason == SEVERAL_HOSTS else logging.WARNING
