"""Models of every kind that `Replicas` accepts, each with a step of a custom training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

FEATURES, OUTPUTS, ROWS = 3, 2, 4  # rows of each replica in a step


class Trained(NamedTuple):
    """What to give to `Replicas`, its optimizer if that is apart, and a step."""

    model: Any
    optimizer: Any
    step: Callable[[], float]
    weight: str
    """The name of a weight of this shape: (FEATURES, OUTPUTS)."""
    slot: str
    """The name of a variable that the optimizer has for it; empty if it has none."""


KINDS = ("keras 3", "tf_keras", "tf.Module", "tf.train.Checkpoint", "dict")


class Linear(tf.Module):
    """A module with a list, a constant and, on a stock strategy, a metric."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [tf.Variable(tf.ones((FEATURES, OUTPUTS)), name="w")]
        self.bias = tf.Variable(tf.zeros((OUTPUTS,)), name="b")
        self.scale = tf.constant(2.0)
        self.seen = tf.Variable(
            0.0,
            trainable=False,
            synchronization=tf.VariableSynchronization.ON_READ,
            aggregation=tf.VariableAggregation.SUM,
        )

    def __call__(self, x: tf.Tensor, training: bool = True) -> tf.Tensor:
        self.seen.assign_add(1.0)
        return self.scale * (x @ self.layers[0] + self.bias)


def trained(strategy: Any, kind: str) -> Trained:
    """A model of this kind, in the scope of the strategy, the same on all workers."""
    import tf_keras

    keras.utils.set_random_seed(3)
    tf_keras.utils.set_random_seed(3)
    with strategy.scope():
        if kind == "keras 3":
            layers = [keras.Input((FEATURES,)), keras.layers.Dense(OUTPUTS, name="out")]
            called: Any = keras.Sequential(
                [*layers, keras.layers.BatchNormalization(name="norm")], name="net"
            )
            optimizer: Any = keras.optimizers.Adam(0.1)
            weights = called.trainable_variables
            found = (called, optimizer, "net/out/kernel", "optimizer/net_out_kernel_momentum")
        elif kind == "tf_keras":
            layers = [tf_keras.layers.Input((FEATURES,)), tf_keras.layers.Dense(OUTPUTS, name="out")]
            called = tf_keras.Sequential([*layers, tf_keras.layers.BatchNormalization(name="norm")])
            optimizer = tf_keras.optimizers.Adam(0.1)
            weights = called.trainable_variables
            found = (called, optimizer, "out/kernel", "optimizer/m/out/kernel")
        else:
            called = Linear()
            optimizer = tf_keras.optimizers.SGD(0.1, momentum=0.9)
            weights = called.trainable_variables
            slot = "optimizer/m/w"
            if kind == "tf.Module":
                found = (called, optimizer, "layers/0", slot)
            elif kind == "tf.train.Checkpoint":
                found = (tf.train.Checkpoint(net=called, optimizer=optimizer), None, "net/layers/0", slot)
            else:
                found = (
                    {"w": called.layers[0], "b": called.bias, "scale": called.scale},
                    optimizer,
                    "w",
                    slot,
                )
    model, given, weight, slot = found
    random = np.random.default_rng(5)
    batches = tf.constant(random.normal(size=(64, ROWS, FEATURES)), tf.float32)

    def replica_step(place: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        x = batches[place * strategy.num_replicas_in_sync + context.replica_id_in_sync_group]
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((called(x, training=True) - 1.0) ** 2) / strategy.num_replicas_in_sync
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))
        return loss

    @tf.function
    def job_step(place: tf.Tensor) -> tf.Tensor:
        return strategy.reduce("SUM", strategy.run(replica_step, args=(place,)), axis=None)

    places = iter(range(1000))
    return Trained(model, given, lambda: float(job_step(tf.constant(next(places) % 8))), weight, slot)
