"""The slices of the sum of a row-sparse gradient, for every source of the indices of a lookup."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from replicast.training.collectives import sum_over_workers
from tests.pool import Pool

BATCH = np.array([[1, 5, 2, 2], [7, 1, 0, 3], [2, 9, 4, 1]], "int32")
ROWS, LENGTH = BATCH.shape
DISTINCT = len(np.unique(BATCH))
Lookup = Callable[[Any, Any], Any]
CONSTANT = np.arange(2000) % 10


def as_features(x: Any) -> Any:
    return tf.cast(x, tf.float32)[..., None]


LOOKUPS: dict[str, tuple[Lookup, int]] = {
    "ids of the batch": (lambda table, x: table(x), 2 * ROWS * LENGTH),
    "one id for each row": (lambda table, x: table(x[:, 0]), 2 * ROWS),
    "ids computed from the batch": (lambda table, x: table(tf.argmax(x, 1)), 2 * ROWS),
    "ids by a cumulated sum": (lambda table, x: table(tf.cumsum(tf.ones_like(x), 1)), 2 * ROWS * LENGTH),
    "ids that pass a mask": (lambda table, x: table(tf.boolean_mask(x, x > 1)), 2 * int((BATCH > 1).sum())),
    "zeros like the batch": (lambda table, x: table(tf.zeros_like(x)), 2 * ROWS * LENGTH),
    "positions": (lambda table, x: table(ops.arange(ops.shape(x)[1])) + as_features(x), LENGTH),
    "positions of one row": (
        lambda table, x: table(ops.arange(ops.shape(x)[1])[None]) + as_features(x),
        LENGTH,
    ),
    "positions for each row": (
        lambda table, x: table(ops.tile(ops.arange(ops.shape(x)[1])[None], [ops.shape(x)[0], 1])),
        2 * ROWS * LENGTH,
    ),
    "distances between positions": (
        lambda table, x: table(ops.abs(ops.arange(LENGTH)[:, None] - ops.arange(LENGTH))),
        LENGTH * LENGTH,
    ),
    "distances as many as rows": (
        lambda table, x: table(ops.abs(ops.arange(ROWS)[:, None] - ops.arange(ROWS))),
        ROWS * ROWS,
    ),
    "a constant": (lambda table, x: table(CONSTANT), len(CONSTANT)),
    "distinct ids of the batch": (lambda table, x: table(tf.unique(tf.reshape(x, [-1]))[0]), DISTINCT),
    "tf.nn.embedding_lookup_sparse": (
        lambda table, x: tf.nn.embedding_lookup_sparse(table.embeddings.value, tf.sparse.from_dense(x), None),
        DISTINCT - 1,  # without 0
    ),
    "ids and positions in one table": (
        lambda table, x: table(x) + table(ops.arange(ops.shape(x)[1])),
        2 * ROWS * LENGTH + LENGTH,
    ),
    "ids that are the same on all workers, inside a tf.function": (
        lambda table, x: tf.function(lambda y: table(y))(x),
        2 * ROWS * LENGTH,
    ),
    "positions inside a tf.function": (
        lambda table, x: tf.function(lambda y: table(ops.arange(ops.shape(y)[1])) + as_features(y))(x),
        LENGTH,
    ),
}


def as_two_equal_workers(values: list[Any], averaged: list[bool]) -> list[Any]:
    def doubled(value: Any) -> Any:
        if not isinstance(value, tf.IndexedSlices):
            return 2 * value
        parts = tf.concat([value.values] * 2, 0), tf.concat([value.indices] * 2, 0)
        return tf.IndexedSlices(*parts, value.dense_shape)

    return [doubled(value) for value in values]


def slices_found(_: None, shape: list[int | None]) -> dict[str, int]:
    table = keras.layers.Embedding(20, 2)
    table.build()
    weight = table.embeddings.value
    found = {}
    for name, (lookup, _) in LOOKUPS.items():

        def slices(x: Any, lookup: Lookup = lookup) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(lookup(table, x) ** 2)
            gradient = tape.gradient(loss, weight)
            gather = lambda tensors: [tf.concat([t, t], 0) for t in tensors]  # noqa: E731
            (total,) = sum_over_workers([gradient], [False], 2, as_two_equal_workers, gather)
            difference = tf.convert_to_tensor(total) - 2 * tf.convert_to_tensor(gradient)
            return tf.size(total.indices), tf.reduce_max(tf.abs(difference))

        run = tf.function(slices, input_signature=[tf.TensorSpec(shape, tf.int32)], autograph=False)
        count, furthest = run(tf.constant(BATCH))
        assert furthest < 1e-4, f"{name}: the sum is wrong by {furthest}"
        found[name] = int(count)
    return found


@pytest.mark.parametrize("shape", [[ROWS, LENGTH]])  # shapes that leave something open: tests/long
def test_a_sum_has_the_slices_that_one_process_would_have(shape: list[int | None], plain: Pool) -> None:
    assert plain.run(slices_found, shape)[0] == {name: expected for name, (_, expected) in LOOKUPS.items()}
