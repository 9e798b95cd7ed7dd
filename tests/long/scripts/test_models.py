"""More kinds of models with a custom `train_step`."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all
from tests.scripts.compare import assert_same_as_plain_keras
from tests.scripts.models import (
    CODE,
    FEATURES,
    Adversaries,
    Autoencoder,
    Critics,
    ForwardForward,
    data,
    values,
)


def fitted(model: keras.Model, *arrays: Any, **given: Any) -> Any:
    return model.fit(*arrays, batch_size=16, epochs=2, shuffle=False, verbose=0, **given).history


def autoencoder(strategy: Any, **compiled: Any) -> Any:
    with strategy.scope():
        model = Autoencoder()
        model.compile(keras.optimizers.Adam(0.01), **compiled)
    return {
        "history": fitted(model, *data(48, FEATURES, CODE)),
        "values": values(model.trainable_variables, model.optimizer.variables),
    }


def adversaries(strategy: Any) -> Any:
    real, noise = data(48, FEATURES, CODE)
    with strategy.scope():
        model = Adversaries()
        optimizers = {"generator": keras.optimizers.Adam(0.02), "discriminator": keras.optimizers.SGD(0.1)}
        model.compile(optimizers, keras.losses.BinaryCrossentropy(from_logits=True))
    history = model.fit(real, noise, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    of_optimizers = [one.variables for one in optimizers.values()]
    return {"history": history, "values": values(model.trainable_variables, *of_optimizers)}


def critics(strategy: Any) -> Any:
    real, noise, mix = data(46, FEATURES, 3 * CODE, 1)
    with strategy.scope():
        model = Critics(critic_steps=2)
        model.compile(keras.optimizers.Adam(0.01), keras.optimizers.Adam(0.02, global_clipnorm=0.5))
    y = (noise.reshape(-1, 3, CODE), np.abs(mix))
    history = model.fit(real, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    of_optimizers = [model.critic_optimizer.variables, model.generator_optimizer.variables]
    return {"history": history, "values": values(model.trainable_variables, *of_optimizers)}


def run_eagerly(strategy: Any) -> Any:
    return autoencoder(strategy, run_eagerly=True)


def several_steps_per_execution(strategy: Any) -> Any:
    return autoencoder(strategy, steps_per_execution=2)


def evaluated_before_it_is_trained(strategy: Any) -> Any:
    with strategy.scope():
        model = Autoencoder()
        model.compile(keras.optimizers.Adam(0.01))
    evaluated = model.evaluate(*data(44, FEATURES, CODE), batch_size=16, verbose=0, return_dict=True)
    return {"evaluated": evaluated, "history": fitted(model, *data(48, FEATURES, CODE))}


def optimizers_made_outside(strategy: Any) -> Any:
    with strategy.scope():
        model = Adversaries()
    optimizers = {"generator": keras.optimizers.Adam(0.02), "discriminator": keras.optimizers.SGD(0.1)}
    model.compile(optimizers, keras.losses.BinaryCrossentropy(from_logits=True))
    history = fitted(model, *data(48, FEATURES, CODE))
    of_optimizers = [one.variables for one in optimizers.values()]
    return {"history": history, "values": values(model.trainable_variables, *of_optimizers)}


def batches_that_do_not_divide(strategy: Any) -> Any:
    with strategy.scope():
        model = ForwardForward()
        model.compile()
    model.fit(*data(45, FEATURES, FEATURES), batch_size=15, epochs=2, shuffle=False, verbose=0)
    return values(model.trainable_variables, *(part.optimizer.variables for part in model.parts))


class WithoutOptimizer(keras.Model):
    """Assigns its weights itself."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self.dense(x) - y))
        for weight, slope in zip(
            self.trainable_variables, tape.gradient(loss, self.trainable_variables), strict=True
        ):
            weight.assign_sub(0.1 * slope)
        return {"loss": loss}


def weights_assigned_by_the_step(strategy: Any) -> Any:
    with strategy.scope():
        model = WithoutOptimizer()
        model.compile()
    model.fit(*data(45, 3, 1), batch_size=15, epochs=2, shuffle=False, verbose=0)
    return values(model.trainable_variables)


class Pairs(keras.Model):
    """Its `train_step` calls it on something other than the data, and it has compiled losses and metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(3, "tanh")
        self.last = keras.layers.Dense(1)

    def call(self, first: Any, second: Any) -> Any:
        return self.last(self.dense(first) * self.dense(second))

    def train_step(self, data: Any) -> Any:
        x, y = data
        with tf.GradientTape() as tape:
            found = self(x["first"], x["second"])
            loss = self.compute_loss(x=x, y=y, y_pred=found)
        weights = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        self._loss_tracker.update_state(loss, sample_weight=ops.shape(y)[0])
        return self.compute_metrics(x, y, found)


def called_on_something_other_than_the_data(strategy: Any) -> Any:
    first, second, y = data(44, 3, 3, 1)
    with strategy.scope():
        model = Pairs()
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    history = fitted(model, {"first": first, "second": second}, y)
    return {"history": history, "values": values(model.trainable_variables, model.optimizer.variables)}


@pytest.mark.parametrize(
    "script",
    [
        adversaries,
        critics,
        run_eagerly,
        several_steps_per_execution,
        evaluated_before_it_is_trained,
        optimizers_made_outside,
        batches_that_do_not_divide,
        weights_assigned_by_the_step,
        called_on_something_other_than_the_data,
    ],
    ids=lambda script: script.__name__,
)
def test_a_model_with_its_own_step_trains_as_in_plain_keras(script: Any, pool2: Pool, plain: Pool) -> None:
    assert_same_as_plain_keras(pool2, plain, script)


def with_random_numbers_and_statistics(strategy: Any) -> Any:
    with strategy.scope():
        model = Autoencoder(normalized=True)
        model.compile(keras.optimizers.Adam(0.01))
    history = fitted(model, *data(44, FEATURES))
    assert np.isfinite(history["loss"]).all()
    return {"history": history, "values": values(model.variables, model.optimizer.variables)}


@pytest.mark.parametrize("workers", ["pool2", "pool3"])
def test_random_numbers_in_a_step_leave_the_replicas_equal(
    workers: str, request: pytest.FixtureRequest
) -> None:
    assert_equal_on_all(request.getfixturevalue(workers).run(with_random_numbers_and_statistics))


@pytest.mark.parametrize("script", [autoencoder, optimizers_made_outside], ids=lambda script: script.__name__)
def test_a_job_of_one_trains_models_without_call(script: Any, pool1: Pool, plain: Pool) -> None:
    assert_same_as_plain_keras(pool1, plain, script)
