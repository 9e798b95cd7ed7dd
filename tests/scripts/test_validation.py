"""Validation and `steps` use the same data as in plain Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.pool import Pool
from tests.scripts.compare import assert_same_as_plain_keras

ROWS, FEATURES = 60, 5


def columns(rows: int = ROWS, seed: int = 7) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(rows, FEATURES)).astype("float32"), random.integers(0, 3, rows).astype("int32")


def rows_of(seed: int, rows: int = 40) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(columns(rows, seed))


def compiled(strategy: Any, **options: Any) -> keras.Model:
    with strategy.scope():
        layers = [keras.Input((FEATURES,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(3)]
        model = keras.Sequential(layers)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.02), loss, weighted_metrics=["accuracy"], **options)
    return model


class Pieces(keras.utils.PyDataset):
    """Batches of arrays; with `turning`, each epoch has another order of rows."""

    def __init__(self, seed: int, *, turning: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.x, self.y = columns(40, seed)
        self.turning = turning
        self.epochs = 0

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = (np.arange(index * 8, index * 8 + 8) + 3 * self.epochs * self.turning) % 40
        return self.x[rows], self.y[rows]

    def on_epoch_end(self) -> None:
        self.epochs += 1


def validated_with_steps(strategy: Any, steps: int) -> Any:
    model = compiled(strategy)
    repeated = rows_of(3).shuffle(40, seed=5).repeat().batch(8)
    x, y = columns()
    history = model.fit(
        x, y, shuffle=False, epochs=4, verbose=0, validation_data=repeated, validation_steps=steps
    ).history
    return {"history": history, "evaluated": [model.evaluate(repeated, steps=3, verbose=0) for _ in range(2)]}


def test_validation_steps_see_the_batches_that_they_see_in_plain_keras(pool2: Pool, plain: Pool) -> None:
    assert_same_as_plain_keras(pool2, plain, validated_with_steps, 3)  # part of a repetition
