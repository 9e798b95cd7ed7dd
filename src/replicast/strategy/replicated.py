"""The variables of a job: TensorFlow's, with the conversions that a variable of one process has.

TensorFlow's distributed variables cannot be converted by `float()` or `int()` and have no handle between
steps, because they may have several values in one process. Here each worker has one value, so each of these
has an answer, and it is local: reading a variable never waits for another worker.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

# Private: the classes of the variables that a strategy makes; there is no public way to derive from them.
from tensorflow.python.distribute.values import MirroredVariable, SyncOnReadVariable


class _Converted:
    """The conversions to Python's and NumPy's types that TensorFlow gives to a variable of one process.

    Except `bool()`, which TensorFlow itself applies to distributed variables in place of `is not None`.
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
    """A variable that each worker adds to for itself: the state of a metric.

    TensorFlow sums the workers' values whenever it is read between steps, which is a transfer. That is needed
    only after a custom step has added to it: a Keras step leaves the total of all workers on each of them.
    """

    whole = True
    """Whether each worker holds the total of all workers, so that reading and assigning are local."""

    def assign(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """As in TensorFlow, which assigns each worker its part of the sum; the total to a whole variable."""
        if self.whole and self._between_steps():
            return self._primary.assign(value, *args, **kwargs)
        return super().assign(value, *args, **kwargs)

    def assign_add(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """As in TensorFlow, which refuses it between steps; to a whole variable it is added."""
        if self.whole and self._between_steps():
            return self._primary.assign_add(value, *args, **kwargs)
        return super().assign_add(value, *args, **kwargs)

    def assign_sub(self, value: Any, *args: Any, **kwargs: Any) -> Any:
        """As in TensorFlow, which refuses it between steps; from a whole variable it is subtracted."""
        if self.whole and self._between_steps():
            return self._primary.assign_sub(value, *args, **kwargs)
        return super().assign_sub(value, *args, **kwargs)

    def _between_steps(self) -> bool:
        context = tf.distribute.get_replica_context()
        return context is None or context.strategy is not self._distribute_strategy

    def _update_replica(self, update_fn: Any, value: Any, **kwargs: Any) -> Any:
        self.whole = False  # a Keras step sets it again when it has summed what the workers added
        return super()._update_replica(update_fn, value, **kwargs)

    def _get_cross_replica(self) -> Any:
        return self._primary.read_value() if self.whole else super()._get_cross_replica()


def replicated(variable: Any) -> Any:
    """The same variable of a strategy in our class; what is no variable of a strategy stays as it is."""
    kinds = {MirroredVariable: ReplicatedVariable, SyncOnReadVariable: SummedVariable}
    kind = kinds.get(type(variable))
    if kind is None:
        return variable
    return kind(variable.distribute_strategy, variable.values, variable.aggregation)
