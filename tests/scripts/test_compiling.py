"""Building a model, or compiling it again, outside the scope in which it was created."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import ops

import replicast
from tests.pool.scripts import equal_on_all
from tests.scripts.compare import same_as_plain_keras, weights
from tests.scripts.models import data, network, values


def frozen_and_compiled_again(strategy: Any, **compiled: Any) -> Any:
    x, y = data(32, 3, 2)
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


@same_as_plain_keras("pool1")
def test_a_model_that_xla_compiles_trains_as_in_plain_keras_on_one_worker(strategy: Any) -> Any:
    return frozen_and_compiled_again(strategy, optimizer="adam", loss="mse", jit_compile=True)


@same_as_plain_keras("pool1")
def test_a_table_that_adam_trains_and_xla_compiles_trains_as_in_plain_keras_on_one_worker(
    strategy: Any,
) -> Any:
    ids, y = np.arange(32).reshape(16, 2) % 7, data(16, 3, 1)[1]
    with strategy.scope():
        table = keras.layers.Embedding(10, 3)
        model = keras.Sequential([keras.Input((2,), dtype="int32"), table, keras.layers.Flatten()])
        model.add(keras.layers.Dense(1))
        model.compile("adam", "mse", jit_compile=True)
    model.fit(ids, y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    return weights(model)


@same_as_plain_keras("pool2")
def test_a_model_that_is_compiled_outside_the_scope_trains_as_in_plain_keras(strategy: Any) -> Any:
    optimizer = keras.optimizers.Adam(0.05, clipnorm=0.5)
    compiled = {"loss": keras.losses.Huber(), "metrics": [keras.metrics.MeanAbsoluteError()]}
    result = frozen_and_compiled_again(strategy, optimizer=optimizer, **compiled)
    return {**result, "rate": float(optimizer.learning_rate), "steps": int(optimizer.iterations)}


@equal_on_all("pool2")
def test_an_optimizer_that_was_built_outside_the_scope_is_refused(strategy: Any) -> None:
    elsewhere = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    optimizer = keras.optimizers.Adam()
    optimizer.build(elsewhere.trainable_variables)
    refusal = r"An optimizer \(Adam\) that was built outside strategy.scope\(\)"
    with pytest.raises(replicast.NotSupported, match=refusal):
        frozen_and_compiled_again(strategy, optimizer=optimizer, loss="mse")


class Normalized(keras.Model):
    def __init__(self, layer: keras.Layer) -> None:
        super().__init__()
        self.scale, self.first, self.last = keras.layers.Normalization(), layer, keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.last(self.first(self.scale(x)))


@same_as_plain_keras("pool2")
def test_a_model_that_is_built_outside_the_scope_trains_as_in_plain_keras(strategy: Any) -> Any:
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


class Distiller(keras.Model):
    """As in keras.io's example of knowledge distillation."""

    def __init__(self, student: keras.Model, teacher: keras.Model) -> None:
        super().__init__()
        self.student, self.teacher = student, teacher

    def call(self, x: Any) -> Any:
        return self.student(x)

    def compute_loss(
        self, x: Any = None, y: Any = None, y_pred: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        taught = self.teacher(x, training=False)
        return ops.mean(ops.square(y - y_pred)) + ops.mean(ops.square(taught - y_pred))


@same_as_plain_keras("pool2")
def test_a_clone_that_was_made_outside_the_scope_and_compiled_inside_trains_as_in_plain_keras(
    strategy: Any,
) -> Any:
    x, y = data(24, 3, 2)
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    with strategy.scope():
        teacher, student = network(3, 2), network(3, 2)
        teacher.compile("adam", "mse")
    scratch = keras.models.clone_model(student)  # outside the scope
    first = teacher.fit(x, y, **options).history
    with strategy.scope():
        distiller = Distiller(student, teacher)
        distiller.compile(keras.optimizers.Adam(0.01))
        scratch.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    histories = [first, distiller.fit(x, y, **options).history, scratch.fit(x, y, **options).history]
    return {"histories": histories, "values": values(student.variables, scratch.variables)}
