"""Variables that were made outside `strategy.scope()`: taken over where that is safe, else refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from replicast.errors import NotSupported
from replicast.strategy.optimizers import optimizers_of


def take_over(strategy: tf.distribute.Strategy, model: Any) -> None:
    """Makes everything of a model that was built or compiled outside the scope part of the job.

    Before the first step nothing depends on which variables these are, so they can still become variables of
    the job, with worker 0's values. All workers call this: each variable that is taken over is a transfer.

    Raises:
        NotSupported: An optimizer was built outside: it knows the variables of the model as they were.
    """
    for optimizer in optimizers_of(model):
        for one in (optimizer, getattr(optimizer, "inner_optimizer", optimizer)):
            if one._distribution_strategy is strategy:
                continue
            if one.built:
                raise NotSupported(
                    f"An optimizer ({type(one).__name__}) that was built outside strategy.scope()",
                    reason="it would not be the same on every worker",
                    remedy="Build it inside 'with strategy.scope():', or leave that to fit",
                )
            _move(strategy, one.variables)
            # Private: where an optimizer remembers the scope it was made in; there is no argument for it.
            one._distribution_strategy = strategy
    _move(strategy, model.metrics_variables)
    _move(strategy, model.variables)


def _move(strategy: tf.distribute.Strategy, variables: Iterable[keras.Variable]) -> None:
    for variable in variables:
        if not _is_distributed(variable):
            with tf.init_scope(), strategy.scope():
                # Private: what Keras' constructor calls to make the variable of TensorFlow behind this one.
                variable._initialize(variable.numpy())


def _is_distributed(variable: keras.Variable) -> bool:
    return isinstance(variable.value, tf.distribute.DistributedValues)
