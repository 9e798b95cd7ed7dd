"""Row-sparse gradients: lookups of ids, of positions and of distinct ids train as in one process."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tests.pool import Pool
from tests.pool.scripts import equal_on_all
from tests.scripts.compare import assert_same_as_plain_keras, same_as_plain_keras, weights

ROWS, LENGTH, WORDS, FEATURES = 46, 6, 20, 30
OPTIMIZERS = (
    *("SGD", "RMSprop", "Adagrad", "Adadelta", "Adam", "AdamW", "Adamax", "Nadam", "Adafactor", "Ftrl"),
    *("Lion", "Lamb", "Muon", "ScheduleFreeAdamW", "MultiOptimizer"),
)


def optimizer_of(name: str, **options: Any) -> keras.optimizers.Optimizer:
    if name == "MultiOptimizer":
        others = {".*embeddings": keras.optimizers.Adam(0.01)}
        return keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(keras.optimizers.RMSprop(0.01), others)
        )
    return getattr(keras.optimizers, name)(learning_rate=0.01, **options)


class Positions(keras.layers.Layer):
    """A learned position embedding: one slice for each position, whatever the batch."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.table = keras.layers.Embedding(LENGTH, size)

    def build(self, shape: Any) -> None:
        self.table.build()
        self.built = True

    def call(self, x: Any) -> Any:
        return x + self.table(ops.arange(ops.shape(x)[1]))


class Distances(keras.layers.Layer):
    """A bias for each distance between two positions: the same few indices many times, whatever the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = keras.layers.Embedding(4, 1)

    def build(self, shape: Any) -> None:
        self.table.build()
        self.built = True

    def call(self, x: Any) -> Any:
        places = ops.arange(LENGTH)
        distances = ops.minimum(ops.abs(places[:, None] - places[None, :]), 3)
        return x + ops.matmul(self.table(distances)[..., 0], x)


class TwoLookups(keras.layers.Layer):
    """One table for words and positions alike."""

    def __init__(self) -> None:
        super().__init__()
        self.table = keras.layers.Embedding(WORDS, 4)

    def build(self, shape: Any) -> None:
        self.table.build()
        self.built = True

    def call(self, words: Any) -> Any:
        return self.table(words) + self.table(ops.arange(LENGTH))


def words(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    return random.integers(0, WORDS, (rows, LENGTH)).astype("int32"), random.normal(size=(rows, 1)).astype(
        "float32"
    )


def transformer_like(strategy: Any, optimizer: Any, **compiled: Any) -> keras.Model:
    with strategy.scope():
        inputs = keras.Input((LENGTH,), dtype="int32")
        x = Distances()(Positions(4)(keras.layers.Embedding(WORDS, 4)(inputs)))
        x = keras.layers.Dense(3, "tanh")(TwoLookups()(inputs) + x)
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(x)))
        model.compile(optimizer(), "mse", **compiled)
        # Plain Keras forgets what ScheduleFreeAdamW assigns when `fit` builds it.
        model.optimizer.build(model.trainable_variables)
    return model


def lookups(
    strategy: Any, name: str, options: dict[str, Any], policy: str = "float32", **compiled: Any
) -> dict[str, Any]:
    keras.config.set_dtype_policy(policy)
    model = transformer_like(strategy, lambda: optimizer_of(name, **options), **compiled)
    x, y = words()
    history = model.fit(x, y, batch_size=15, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, "weights": weights(model)}


def sparse_inputs(strategy: Any, name: str) -> dict[str, Any]:
    """`keras.Input(sparse=True)` into `Dense`: the features that occur in a batch, each once."""
    random = np.random.default_rng(5)
    x = (random.normal(size=(ROWS, FEATURES)) * (random.random((ROWS, FEATURES)) < 0.15)).astype("float32")
    y = random.normal(size=(ROWS, 1)).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((tf.sparse.from_dense(x), y)).batch(15)
    with strategy.scope():
        inputs = keras.Input((FEATURES,), sparse=True)
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dense(4, "tanh")(inputs)))
        model.compile(optimizer_of(name), "mse")
        model.optimizer.build(model.trainable_variables)
    history = model.fit(data, epochs=2, verbose=0).history
    return {"history": history, "weights": weights(model)}


@same_as_plain_keras("pool2")
def test_ids_that_are_distinct_on_each_worker_train_as_in_plain_keras(strategy: Any) -> dict[str, Any]:
    """One id for each row: different ids within a worker's rows, the same ids on every worker."""
    ids = np.tile(np.arange(8), 6).astype("int32")[:, None]
    y = np.random.default_rng(1).normal(size=(48, 1)).astype("float32")
    with strategy.scope():
        layers = [keras.layers.Embedding(8, 4), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((1,), dtype="int32"), *layers])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    history = model.fit(ids, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, "weights": weights(model)}


class PositionsOfOneRow(Positions):
    """Positions as one row for the whole batch, as vision transformers write them."""

    def call(self, x: Any) -> Any:
        return x + self.table(ops.arange(LENGTH)[None, :])


@pytest.mark.parametrize("batch_size", [1, 3])
@same_as_plain_keras("pool2")
def test_lookups_of_few_rows_train_as_in_plain_keras(strategy: Any, batch_size: int) -> dict[str, Any]:
    """So few rows that a worker has one, or none."""
    with strategy.scope():
        inputs = keras.Input((LENGTH,), dtype="int32")
        x = PositionsOfOneRow(3)(keras.layers.Embedding(WORDS, 3)(inputs))
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(x)))
        model.compile(keras.optimizers.Adam(0.02), "mse")
    history = model.fit(*words(6), batch_size=batch_size, shuffle=False, verbose=0).history
    return {"history": history, "weights": weights(model)}


@same_as_plain_keras("pool2")
def test_lookups_in_a_custom_training_loop_train_as_in_plain_keras(strategy: Any) -> dict[str, Any]:
    model = transformer_like(strategy, lambda: keras.optimizers.Adam(0.01))
    x, y = words(44)

    def step(inputs: tf.Tensor, targets: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(inputs, training=True) - targets) ** 2) / 11.0
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))

    @tf.function
    def train(batch: Any) -> None:
        if isinstance(strategy, tf.distribute.Strategy):
            strategy.run(step, args=batch)
        else:
            step(*batch)

    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(11)
    if isinstance(strategy, tf.distribute.Strategy):
        batches = strategy.experimental_distribute_dataset(batches)
    for batch in batches:
        train(batch)
    return {"weights": weights(model)}


class Watching(keras.optimizers.SGD):
    """Notes what kind of gradient it is given for the table."""

    kinds: tuple[str, ...] = ()

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        if variable.shape[0] == WORDS:
            self.kinds = (*self.kinds, type(gradient).__name__)
        super().update_step(gradient, variable, learning_rate)


@equal_on_all("pool2")
def test_the_gradient_of_a_table_stays_sparse(strategy: Any) -> None:
    model = transformer_like(strategy, Watching)
    model.fit(*words(), batch_size=23, verbose=0)
    assert set(model.optimizer.kinds) == {"IndexedSlices"}


def test_lookups_of_ids_and_positions_train_as_in_plain_keras(pool2: Pool, plain: Pool) -> None:
    assert_same_as_plain_keras(pool2, plain, lookups, "Adam", {})


def test_sparse_inputs_train_as_in_plain_keras(pool2: Pool, plain: Pool) -> None:
    assert_same_as_plain_keras(pool2, plain, sparse_inputs, "Adam")
