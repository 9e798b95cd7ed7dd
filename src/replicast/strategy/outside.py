"""Variables created outside `strategy.scope()`: moved into the job where that is safe, else refused."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from replicast.errors import NotSupported
from replicast.strategy.building import creator_in_scope
from replicast.strategy.optimizers import optimizers_of


def take_over(strategy: tf.distribute.Strategy, model: Any) -> None:
    """Moves all variables of a model that were created outside the scope into the job.

    Before the first step nothing depends on the identity of these variables, so they can still become
    variables of the job, with worker 0's values. All workers call this: each moved variable is a transfer.

    Raises:
        NotSupported: An optimizer was built outside: it refers to the previous variables of the model.
    """
    for optimizer in optimizers_of(model):
        for one in (optimizer, getattr(optimizer, "inner_optimizer", optimizer)):
            if one._distribution_strategy is strategy:
                continue
            if one.built:
                raise NotSupported(
                    f"An optimizer ({type(one).__name__}) that was built outside strategy.scope()",
                    reason="it would not be the same on every worker",
                    remedy="Build it inside 'with strategy.scope():', or let fit build it",
                )
            move(strategy, one.variables)
            # Private: an optimizer stores the scope of its creation here; there is no argument for it.
            one._distribution_strategy = strategy
    move(strategy, model.metrics_variables)
    move(strategy, model.variables)


def move(strategy: tf.distribute.Strategy, variables: Iterable[keras.Variable]) -> None:
    """Moves those of these variables into the job that are not in it, with worker 0's values."""
    for variable in variables:
        if not is_distributed(variable):
            with tf.init_scope():
                value = variable.numpy()
            with tf.variable_creator_scope(creator_in_scope(strategy)):
                # Private: Keras' constructor calls this to create the TensorFlow variable behind this one.
                variable._initialize(value)


def is_distributed(variable: keras.Variable) -> bool:
    """Whether a variable is part of a job."""
    return isinstance(variable.value, tf.distribute.DistributedValues)
