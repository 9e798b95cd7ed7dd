"""How the workers exchange tensors: TensorFlow's collectives, with keys that work inside loops."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

# Private: the launcher that draws the keys, and the class behind MultiWorkerMirroredStrategy, which is the
# only place to give it other launchers.
from tensorflow.python.distribute import cross_device_utils
from tensorflow.python.distribute.collective_all_reduce_strategy import CollectiveAllReduceExtended

from replicast.errors import NotSupported
from replicast.strategy.caller import compiled_model, keras_looks_at_attributes
from replicast.strategy.slices import Exchange, sum_over_workers

FIRST_KEY = 500_000_000
FIRST_KEY_BETWEEN_STEPS = 100_000_000
"""Both are far above the keys that TensorFlow gives out while it creates variables, from 100 on.

A transfer between steps has a key of another range than one inside a step: should one worker be still in its
loop when another one has left it, the two wait for each other, which is noticed, and never mix their values.
"""


CARRIERS = {
    tf.bfloat16: tf.float32,
    tf.uint8: tf.int32,
    tf.int8: tf.int32,
    tf.uint16: tf.int32,
    tf.int16: tf.int32,
    tf.uint32: tf.int64,
}
"""Dtypes that TensorFlow's transfers do not know, and one that holds all of their values."""


class CountingLauncher(cross_device_utils.CollectiveReplicaLauncher):
    """Draws each collective's key from a counter variable, in the graph.

    All workers must use the same key for the same collective. TensorFlow draws it in Python when a function
    is called and feeds it in, which does not reach a function nested in control flow: `steps_per_execution`
    fails. A key fixed while tracing reaches it, but cannot be used for gathers whose lengths change. A
    counter that every worker advances in the same order serves both, and costs one local addition. Outside
    of graphs, Python counts. A key is drawn when the tensor to transfer is there: a step that finds no data
    left must not count as a transfer.
    """

    def __init__(self, stock: Any, owner: ReplicatedExtended) -> None:
        super().__init__(
            stock._group_key, stock._group_size, stock._collective_keys, stock._device, stock._options
        )
        self._owner = owner
        self._tensor: Any = None

    def all_reduce(self, input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """As in TensorFlow."""
        self._tensor = input_tensor
        return super().all_reduce(input_tensor, *args, **kwargs)

    def _all_gather(self, input_tensor: Any, *args: Any, **kwargs: Any) -> Any:
        self._tensor = input_tensor
        return super()._all_gather(input_tensor, *args, **kwargs)

    def _next_instance_key(self) -> tf.Tensor:
        if tf.executing_eagerly():
            return tf.constant(FIRST_KEY_BETWEEN_STEPS + self._owner.next_turn(), tf.int32)
        with tf.control_dependencies([self._tensor]):
            self._owner.keys.assign_add(1, read_value=False)
            return self._owner.keys.read_value()


class ReplicatedExtended(CollectiveAllReduceExtended):
    """What MultiWorkerMirroredStrategy does behind its public methods, with a few changes.

    Collectives count their keys (`CountingLauncher`); an optimizer may run inside `tf.cond`
    (`_use_merge_call`, `_create_variable`); row-sparse gradients are summed to the slices of one process
    (`slices.py`); and gradients that were summed already are not summed twice (`summed_already`).
    """

    def __init__(self, container: tf.distribute.Strategy, cluster_resolver: Any, options: Any) -> None:
        self._summed_already = False
        self.alone = False
        """Whether a step runs that is written as for one process: it sees one replica."""
        self._variables_created = 0
        super().__init__(container, cluster_resolver, options)
        if len(self.worker_devices) != 1:
            raise NotSupported(
                f"A worker with {len(self.worker_devices)} devices",
                reason="replicast runs one replica per worker",
                remedy="Start one worker per device ('replicast run -n N' does it), or let each see one "
                "with CUDA_VISIBLE_DEVICES",
            )
        with tf.init_scope(), tf.device("CPU:0"):
            self.keys = tf.Variable(FIRST_KEY, dtype=tf.int32, trainable=False)
        self.next_turn: Callable[[], int] = itertools.count(1).__next__
        """Called before each transfer outside of a graph; gives its number."""
        self.compiles: Callable[[keras.Model], None] = lambda model: None
        """Called with each model that is compiled in the scope, at least once."""
        for operations in (self._cross_device_ops, self._host_cross_device_ops):
            operations._launchers = [CountingLauncher(stock, self) for stock in operations._launchers]

    def transfers_started(self) -> int:
        """How many transfers this worker has started inside steps and to create variables.

        The same on all workers at the same line of the script.
        """
        return int(self.keys.numpy()) - FIRST_KEY + self._variables_created

    def _use_merge_call(self) -> bool:
        # With one replica per worker there is nothing to merge, and merging is what makes gradient
        # accumulation and EMA fail: it cannot be done inside tf.cond. TensorFlow's own tests turn it off.
        return False

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        if keras_looks_at_attributes():  # on the one worker that saves: nobody would join a transfer
            return next_creator(**kwargs)
        model = compiled_model()
        if model is not None:
            self.compiles(model)
        self._variables_created += 1  # each is a transfer, of worker 0's initial value
        # "Only the first replica's value counts" is written with a merge even when the strategy has none;
        # optimizers count their steps in such a variable, inside tf.cond when the loss is scaled. With one
        # replica per worker every replica is the first.
        if kwargs.get("aggregation") == tf.VariableAggregation.ONLY_FIRST_REPLICA:
            kwargs["aggregation"] = tf.VariableAggregation.NONE
        return super()._create_variable(next_creator, **kwargs)

    def _get_variable_creator_initial_value(
        self, replica_id: int, device: Any, primary_var: Any, **kwargs: Any
    ) -> Any:
        # TensorFlow broadcasts worker 0's initial value, and cannot for every dtype that Keras uses.
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
    def as_if_alone(self) -> Iterator[None]:
        """Inside, the strategy says that there is one replica."""
        before, self.alone = self.alone, True
        try:
            yield
        finally:
            self.alone = before

    @contextlib.contextmanager
    def summed_already(self) -> Iterator[None]:
        """Inside, a sum over replicas returns its argument: the optimizer's own sum would be the second."""
        before, self._summed_already = self._summed_already, True
        try:
            yield
        finally:
            self._summed_already = before

    def _replica_ctx_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        if self._summed_already:
            return value
        reduce = super()._replica_ctx_all_reduce
        if reduce_op != tf.distribute.ReduceOp.SUM:
            return reduce(reduce_op, value, options)
        exchange = Exchange(
            workers=self._num_workers,
            all_reduce=lambda parts: reduce(reduce_op, parts, options),
            all_gather=lambda tensor: tf.distribute.get_replica_context().all_gather(tensor, axis=0),
        )
        return sum_over_workers(value, exchange)
