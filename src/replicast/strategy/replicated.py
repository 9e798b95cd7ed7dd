"""The variables of a job: TensorFlow's, with the conversions of a variable of one process.

TensorFlow's distributed variables do not support `float()` or `int()` and have no handle between steps,
because they may have several values in one process. Here each worker has one value, so these operations are
well defined. They are local: reading a variable never waits for another worker.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

# Private: the classes of a strategy's variables, how one is saved, and whether a model without them is being
# exported; there is no public way to subclass them or to ask.
from tensorflow.python.distribute import values_util
from tensorflow.python.distribute.values import MirroredVariable, SyncOnReadVariable, _SyncOnReadSaveable

# Private: a variable that bypasses creators; in a scope, `tf.Variable` would create one of the strategy.
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from replicast.strategy.functions import per_worker


class _Converted:
    """The conversions to Python and NumPy types that TensorFlow's variables of one process have.

    Except `bool()`, which TensorFlow itself applies to distributed variables instead of `is not None`.
    """

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self.numpy(), dtype)  # type: ignore[attr-defined]

    def __int__(self) -> int:
        return int(self.numpy())  # type: ignore[attr-defined]

    def __float__(self) -> float:
        return float(self.numpy())  # type: ignore[attr-defined]

    def __complex__(self) -> complex:
        return complex(self.numpy())  # type: ignore[attr-defined]


class ReplicatedVariable(_Converted, MirroredVariable):
    """A variable with the same value on every worker: weights, optimizer variables, seeds."""

    @property
    def handle(self) -> Any:
        """The resource on this worker; TensorFlow has none between steps, so a gradient tape fails there."""
        return self._primary.handle


class SummedVariable(_Converted, SyncOnReadVariable):
    """A variable to which each worker adds separately: the state of a metric.

    It is either whole (each worker holds the total of all workers) or in parts (whose sum is the total). A
    Keras step and an assignment between steps leave it whole, so reading it is local; a custom step leaves
    parts, and reading it is a transfer. Which of the two applies is stored in a variable too, because the
    graph of a step runs many times after its trace, with other steps in between.
    """

    def __init__(self, strategy: Any, values: Any, aggregation: Any, var_policy: Any = None) -> None:
        super().__init__(strategy, values, aggregation, var_policy)
        self.in_keras_step = False
        """Whether a Keras step, which sums what the workers add to this variable, is being traced or run."""
        with tf.init_scope(), tf.device(self._primary.device):
            self._whole = ResourceVariable(True, trainable=False, name="whole")

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """As in TensorFlow; between steps, each worker gets the total."""
        if self._between_steps():
            self.mark_whole()
            return self._primary.assign(value, *args, **kwargs)
        return super().assign(value, *args, **kwargs)

    def assign_add(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """As in TensorFlow, which refuses it between steps; here the value is added to the total once."""
        if self._between_steps():
            return self._primary.assign_add(self._once(value), *args, **kwargs)
        return super().assign_add(value, *args, **kwargs)

    def assign_sub(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """As in TensorFlow, which refuses it between steps; here it is subtracted from the total once."""
        if self._between_steps():
            return self._primary.assign_sub(self._once(value), *args, **kwargs)
        return super().assign_sub(value, *args, **kwargs)

    def mark_whole(self) -> None:
        """Records that each worker now holds the total."""
        self._whole.assign(True, read_value=False)

    def zero_unless_whole(self, value: tf.Tensor) -> tf.Tensor:
        """The value if each worker holds the total; zeros if each holds a part."""
        return tf.where(self._whole, value, tf.zeros_like(value))

    def refuse_parts(self, owner: str) -> None:
        """Fails if each worker holds a part: only a sum of parts is the state of the job."""
        message = (
            f"{owner} was updated in strategy.run and then in a Keras step: call its reset_state() between."
        )
        tf.debugging.Assert(self._whole.read_value(), [message])

    def total(self, sum_parts: Callable[[], Any]) -> Any:
        """The value if it is whole; else the sum of the parts, which is a transfer."""
        if tf.executing_eagerly() or values_util.is_saving_non_distributed():
            with tf.init_scope():
                whole = bool(self._whole.numpy())
            return self._primary.read_value() if whole else sum_parts()
        return tf.cond(self._whole, self._primary.read_value, sum_parts)

    def _between_steps(self) -> bool:
        return not self._in_step() and not values_util.is_saving_non_distributed()

    def _in_step(self) -> bool:
        context = tf.distribute.get_replica_context()
        return context is not None and context.strategy is self._distribute_strategy

    def _in_custom_step(self) -> bool:
        several = self._distribute_strategy.size > 1
        return several and self._in_step() and not self.in_keras_step

    def _once(self, value: Any) -> Any:
        """The value to add on this worker; if the variable is in parts, zeros except on worker 0."""
        if self.aggregation != tf.VariableAggregation.SUM or self._distribute_strategy.rank == 0:
            return value
        return self.zero_unless_whole(tf.convert_to_tensor(value, self.dtype))

    def _part(self) -> tf.Tensor:
        """This worker's part. A total is divided equally as in TensorFlow; integers go to worker 0."""
        value, strategy = self._primary.read_value(), self._distribute_strategy
        if self.aggregation != tf.VariableAggregation.SUM:
            return value
        if self.dtype.is_floating:
            share = value / tf.cast(strategy.size, self.dtype)
        else:
            share = tf.where(per_worker(strategy.rank == 0), value, tf.zeros_like(value))
        return tf.where(self._whole, share, value)

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        if self._in_custom_step():
            # Only once the data exists: a step that finds no data left must change nothing.
            with tf.control_dependencies([value] if tf.is_symbolic_tensor(value) else []):
                self._primary.assign(self._part(), read_value=False)
                self._whole.assign(False, read_value=False)
        return super()._update_replica(update_fn, value, **kwargs)

    def _get(self) -> Any:
        return self._part() if self._in_custom_step() else super()._get()

    def value(self) -> Any:
        """As in TensorFlow: in a custom step this worker's part, between steps the total."""
        return self._part() if self._in_custom_step() else super().value()

    def _get_cross_replica(self) -> Any:
        return self.total(super()._get_cross_replica)

    def _gather_saveables_for_checkpoint(self) -> dict[str, Callable[..., Any]]:
        def saveable(name: str = self.name) -> _Total:
            return _Total(self, name)

        return dict.fromkeys(super()._gather_saveables_for_checkpoint(), saveable)


class _Total(_SyncOnReadSaveable):
    """Saves and restores the total of a `SummedVariable`. TensorFlow would restore a part on each worker."""

    def __init__(self, variable: SummedVariable, name: str) -> None:
        super().__init__(variable, name)
        self._variable = variable

    def restore(self, restored_tensors: Any, restored_shapes: Any) -> Any:
        return self._variable.assign(restored_tensors[0])


@contextlib.contextmanager
def added_by_keras_step(variables: Iterable[Any]) -> Iterator[None]:
    """Marks these variables as updated by a Keras step, which sums the workers' parts itself."""
    summed = [variable for variable in variables if isinstance(variable, SummedVariable)]
    for variable in summed:
        variable.in_keras_step = True
    try:
        yield
    finally:
        for variable in summed:
            variable.in_keras_step = False


def replicated(variable: Any) -> Any:
    """Converts a variable of a strategy to our class; returns any other variable unchanged."""
    kinds = {MirroredVariable: ReplicatedVariable, SyncOnReadVariable: SummedVariable}
    kind = kinds.get(type(variable))
    if kind is None:
        return variable
    return kind(variable.distribute_strategy, variable.values, variable.aggregation)
