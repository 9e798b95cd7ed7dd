"""Errors and warnings about workers with different data: more kinds than tests/scripts/test_data.py."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.pool import Pool
from tests.scripts.compare import assert_same_as_plain_keras, weights
from tests.scripts.test_data import (
    assert_nobody_warns,
    assert_worker_0_warns_once,
    heard,
)
from tests.scripts.test_validation import columns, compiled


def test_worker_0_warns_once_of_every_kind_of_data(pool2: Pool) -> None:
    assert_worker_0_warns_once(
        pool2,
        {
            "arrays, only y": "differ in y of a sample of its rows",
            "arrays, strided by rank": "differ in x, y of a sample of its rows",
            "dataset, inputs only": "differ in x of its first batch",
            "dataset, shard by rank": "differ in x, y of its first batch",
            "generator": "differ in x, y of its first batch",
            "sequence": "differ in x, y of its first batch",
            "shuffled sequence": "differ in x, y of its first batch",
            "validation arrays": "different validation data",
            "validation dataset": "different validation data",
            "validation sequence": "different validation data",
        },
    )


def test_what_may_differ_causes_no_warning(pool2: Pool) -> None:
    assert_nobody_warns(pool2, ["the same dataset", "augmented generator", "left to TensorFlow"])


def other_calls(strategy: Any) -> list[str]:
    model = compiled(strategy)
    x, y = columns(32, seed=strategy.rank)
    with heard() as said:
        model.train_on_batch(x, y)
        model.test_on_batch(x, y)
        model.evaluate(x, y, verbose=0)
        model.predict(tf.data.Dataset.from_tensor_slices(x).batch(8), verbose=0)
    return list(said)


def test_evaluate_and_predict_are_compared_and_single_batches_are_not(pool2: Pool) -> None:
    first, second = pool2.run(other_calls)
    assert [said.split(" (")[0] for said in first] == [
        "The workers have different data for evaluate",
        "The workers have different data for predict",
    ]
    assert second == []


def dropped(strategy: Any, batch: int) -> Any:
    model = compiled(strategy)
    pairs = tf.data.Dataset.from_tensor_slices(columns(40)).batch(batch, drop_remainder=True)
    history = model.fit(pairs, epochs=2, validation_data=pairs, verbose=0).history
    return {"history": history, "weights": weights(model), "predicted": model.predict(pairs, verbose=0)}


def test_batches_of_a_fixed_size_are_divided_though_they_do_not_divide_evenly(
    pool2: Pool, pool3: Pool, plain: Pool
) -> None:
    assert_same_as_plain_keras(pool2, plain, dropped, 9)
    assert_same_as_plain_keras(pool3, plain, dropped, 10)
    assert_same_as_plain_keras(pool3, plain, dropped, 2)  # fewer rows than workers


class Normalizing(keras.Model):
    """Normalizes with the statistics of the batch."""

    def __init__(self, synchronized: bool) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(4)
        self.normalization = keras.layers.BatchNormalization(synchronized=synchronized, momentum=0.5)
        self.head = keras.layers.Dense(3)

    def call(self, x: Any, training: Any = None) -> Any:
        return self.head(self.normalization(self.dense(x), training=training))


def normalized(strategy: Any) -> Any:
    x, y = columns(48)
    with strategy.scope():
        model = Normalizing(synchronized=strategy.size > 1)
        model.compile(
            keras.optimizers.Adam(0.02), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        )
    history = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0).history
    kernel, *_ = (np.asarray(keras.ops.convert_to_numpy(v)) for v in model.trainable_variables)
    return {"history": history, "kernel": kernel}


def test_synchronized_normalization_trains_as_on_the_whole_batch(pool2: Pool, plain: Pool) -> None:
    assert_same_as_plain_keras(pool2, plain, normalized, rtol=1e-3, atol=1e-4)
