"""A learning rate that a schedule or a function computes, as one variable of the state.

    optimizer/learning_rate >= 0    this rate, in place of what the schedule computes
    optimizer/learning_rate = -f    f times what the schedule computes; at the start -1, the schedule itself

So `assign` replaces the schedule by a value, `scale` scales whichever of the two is in force, and a revert,
or `assign` of -1, gives the schedule back. The variable is agreed, journaled, saved and restored like all
others. It belongs to the job and not to the optimizer: files that Keras writes are as without replicast.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

THE_SCHEDULE = -1.0


class SteeredRate:
    """The learning rate of one optimizer, in place of its method: it reads the variable in every step."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self._compute = compute
        self.variable = keras.Variable(THE_SCHEDULE, trainable=False, dtype="float32", name="learning_rate")

    def __call__(self) -> tf.Tensor:
        computed = tf.convert_to_tensor(self._compute())
        steered = tf.cast(self.variable.value, computed.dtype)
        return tf.where(steered < 0, -steered * computed, steered)  # 1 times a number has its bits


def steered_rate(optimizer: Any) -> SteeredRate | None:
    """The rate of an optimizer that `steer` was called with, if a schedule or a function computes it."""
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    rate = vars(inner).get("_get_current_learning_rate")
    return rate if isinstance(rate, SteeredRate) else None


def steer(optimizer: keras.optimizers.Optimizer) -> bool:
    """Makes a computed learning rate part of the state, once. Returns whether its steps must be traced again.

    All workers call it, in the scope of their strategy.
    """
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    # Private: there is no public way to ask whether a rate is stored, or to replace what computes it without
    # replacing the schedule, which would change the files that Keras writes.
    if isinstance(inner._learning_rate, keras.Variable) or steered_rate(inner) is not None:
        return False
    inner._get_current_learning_rate = SteeredRate(inner._get_current_learning_rate)
    return True
