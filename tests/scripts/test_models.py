"""Kinds of models."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tests.pool import Pool
from tests.scripts.compare import assert_same_as_plain_keras, weights


def functional(strategy: Any) -> Any:
    random = np.random.default_rng(7)
    x, y = random.normal(size=(60, 6)).astype("float32"), random.normal(size=(60, 1)).astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, "weights": weights(model)}


def test_a_functional_model_trains_as_in_plain_keras(pool2: Pool, plain: Pool) -> None:
    assert_same_as_plain_keras(pool2, plain, functional)
