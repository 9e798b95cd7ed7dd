"""Kinds of models."""

from __future__ import annotations

import types
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

# Private: Keras' own tests make trainers of it that are no models.
import replicast
from replicast.training.keras_call import Trainer
from tests.pool import Pool
from tests.pool.scripts import equal_on_all
from tests.scripts.compare import assert_same_as_plain_keras, same_as_plain_keras, weights
from tests.scripts.models import (
    CODE,
    FEATURES,
    Adversaries,
    Autoencoder,
    ForwardForward,
    data,
    values,
)


def functional(strategy: Any) -> Any:
    random = np.random.default_rng(7)
    x, y = random.normal(size=(60, 6)).astype("float32"), random.normal(size=(60, 1)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, "weights": weights(model)}


def autoencoder(strategy: Any) -> Any:
    images, noise = data(44, FEATURES, CODE)
    with strategy.scope():
        model = Autoencoder()
        model.compile(keras.optimizers.Adam(0.01))
    history = model.fit(images, noise, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    evaluated = model.evaluate(images, noise, batch_size=16, verbose=0, return_dict=True)
    return {"history": history, "evaluated": evaluated, "values": values(model.trainable_variables)}


def forward_forward(strategy: Any) -> Any:
    good, bad = data(48, FEATURES, FEATURES)
    with strategy.scope():
        model = ForwardForward()
        model.compile()
    history = model.fit(good, bad, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    of_optimizers = [part.optimizer.variables for part in model.parts]
    return {"history": history, "values": values(model.trainable_variables, *of_optimizers)}


class DenseTrainer(Trainer, keras.layers.Dense):
    """A trainer that is a layer and not a model."""

    def __init__(self, units: int) -> None:
        keras.layers.Dense.__init__(self, units)
        Trainer.__init__(self)


def trainer_that_is_no_model(strategy: Any) -> Any:
    x, y = data(44, 3, 2)
    with strategy.scope():
        trainer = DenseTrainer(2)
        trainer.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    history = trainer.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    return {
        "history": history,
        "evaluated": trainer.evaluate(x, y, batch_size=16, verbose=0, return_dict=True),
        "predicted": trainer.predict(x, batch_size=16, verbose=0),
        "values": values(trainer.trainable_variables, trainer.optimizer.variables),
    }


class SameNames(keras.Model):
    """Its optimizers have attributes and layers of the same name; one of its lists holds itself."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [keras.layers.Dense(2, name="part"), keras.layers.Dense(2, name="part")]
        self.opt, self._opt = (keras.optimizers.SGD(0.1, clipnorm=0.1) for _ in range(2))
        for part in self.parts:
            part.opt = keras.optimizers.SGD(0.1, clipnorm=0.1)
        loop: list[Any] = [self.opt]
        loop.append(loop)
        # Not by Keras' own setattr, which tracks what is in a list and would not end itself.
        object.__setattr__(self, "loop", loop)

    def call(self, x: Any) -> Any:
        return self.parts[1](self.parts[0](x))

    def train_step(self, batch: Any) -> Any:
        for optimizer in (self.opt, self._opt, *(part.opt for part in self.parts)):
            with tf.GradientTape() as tape:
                loss = keras.ops.mean(keras.ops.square(self(batch[0]) - batch[1]))
            optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def optimizers_of_the_same_name(strategy: Any) -> Any:
    with strategy.scope():
        model = SameNames()
        model.compile()
    history = model.fit(*data(12, 3, 2), batch_size=4, shuffle=False, verbose=0).history
    return {"history": history, "values": values(model.trainable_variables)}


@pytest.mark.parametrize(
    "script",
    [functional, autoencoder, forward_forward, trainer_that_is_no_model, optimizers_of_the_same_name],
    ids=lambda script: script.__name__,
)
def test_a_model_trains_as_in_plain_keras(script: Any, pool2: Pool, plain: Pool) -> None:
    assert_same_as_plain_keras(pool2, plain, script)


_optimizers: list[keras.optimizers.Optimizer] = []


class Forgetful(Adversaries):
    """Keeps its optimizers where nobody finds them."""

    def compile(self, optimizers: dict[str, Any], loss_fn: Any) -> None:
        super().compile({}, loss_fn)
        _optimizers[:] = optimizers.values()

    @property
    def optimizers(self) -> Any:
        return dict(zip(("generator", "discriminator"), _optimizers, strict=False))

    @optimizers.setter
    def optimizers(self, given: Any) -> None:
        pass


@equal_on_all("pool2")
def test_an_optimizer_that_the_model_does_not_hold_is_refused(strategy: Any) -> None:
    with strategy.scope():
        model = Forgetful()
        adams = {"generator": keras.optimizers.Adam(), "discriminator": keras.optimizers.Adam()}
        model.compile(adams, keras.losses.BinaryCrossentropy(from_logits=True))
    refusal = r"An optimizer \(Adam\) that train_step uses but the model does not hold"
    with pytest.raises(replicast.NotSupported, match=refusal):
        model.fit(*data(16, FEATURES, CODE), batch_size=16, verbose=0)


@same_as_plain_keras("pool2")
def test_methods_that_a_script_sets_on_a_model_and_its_optimizer_are_used(strategy: Any) -> Any:
    """A `train_step` and an `apply` that were set on the objects, not on their classes."""
    x, y = data(44, 3, 2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    applied: list[int] = []

    def apply(optimizer: Any, *args: Any) -> None:
        applied.append(1)
        type(optimizer).apply(optimizer, *args)

    def train_twice(model: Any, batch: Any) -> dict[str, Any]:
        for _ in range(2):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(batch[0]) - batch[1]) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            model.optimizer.apply(gradients, model.trainable_variables)
        return {"loss": loss}

    own_apply = types.MethodType(apply, model.optimizer)
    model.optimizer.apply = own_apply
    model.train_step = types.MethodType(train_twice, model)
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    assert applied
    assert model.optimizer.apply is own_apply
    return {"history": history, "weights": weights(model)}
