"""Building a model, or compiling it again, outside the scope in which it was created."""

from __future__ import annotations

from typing import Any

import keras
import pytest

import replicast
from tests.pool import Pool
from tests.scripts.compare import assert_same_as_plain_keras, weights
from tests.scripts.models import data


def frozen_and_compiled_again(strategy: Any, **compiled: Any) -> Any:
    x, y = data(44, 3, 2)
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(4, "tanh", name="base"), keras.layers.Dense(2)]
        )
        model.compile("sgd", "mse")
    model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    model.get_layer("base").trainable = False
    model.compile(**compiled)
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, "weights": weights(model)}


def by_object(strategy: Any) -> Any:
    optimizer = keras.optimizers.Adam(0.05, clipnorm=0.5)
    compiled = {"loss": keras.losses.Huber(), "metrics": [keras.metrics.MeanAbsoluteError()]}
    result = frozen_and_compiled_again(strategy, optimizer=optimizer, **compiled)
    return {**result, "rate": float(optimizer.learning_rate), "steps": int(optimizer.iterations)}


def test_a_model_that_is_compiled_outside_the_scope_trains_as_in_plain_keras(
    pool2: Pool, plain: Pool
) -> None:
    assert_same_as_plain_keras(pool2, plain, by_object)


def with_an_optimizer_that_is_built(strategy: Any) -> str:
    elsewhere = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.Adam()
    optimizer.build(elsewhere.trainable_variables)
    with pytest.raises(replicast.NotSupported) as refusal:
        frozen_and_compiled_again(strategy, optimizer=optimizer, loss="mse")
    return str(refusal.value)


def test_an_optimizer_that_was_built_outside_the_scope_is_refused(pool2: Pool) -> None:
    for message in pool2.run(with_an_optimizer_that_is_built):
        assert "An optimizer (Adam) that was built outside strategy.scope()" in message


class Normalized(keras.Model):
    def __init__(self, layer: keras.Layer) -> None:
        super().__init__()
        self.scale, self.first, self.last = keras.layers.Normalization(), layer, keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.last(self.first(self.scale(x)))


def built_outside(strategy: Any) -> Any:
    """A layer from outside, statistics that are adapted outside, and a call that builds the rest."""
    x, y = data(44, 3, 2)
    layer = keras.layers.Dense(4, "tanh")
    layer.build((None, 3))
    with strategy.scope():
        model = Normalized(layer)
        model.compile("adam", "mse")
    model.scale.adapt(x)
    model(x[:2])
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, "weights": weights(model)}


def test_a_model_that_is_built_outside_the_scope_trains_as_in_plain_keras(pool2: Pool, plain: Pool) -> None:
    assert_same_as_plain_keras(pool2, plain, built_outside)
