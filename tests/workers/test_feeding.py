"""Each worker's share of the data: every example once per epoch, in an order that all workers share."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all, digest
from tests.workers.recipes import arrays, perceptron


class Taster(keras.Model):
    """Notes the rows that it is given, and learns next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(1)
        self.seen: list[int] = []

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        # Rows are numbered from 1: a row of zeros stands in for a share without rows, and counts for nothing.
        self.seen += [int(row) for row in data[0].numpy()[:, 0] if row]
        return {"loss": tf.zeros(())}


def rows_seen(strategy: Any, kind: str, epochs: int = 2) -> list[int]:
    rows = np.arange(1, 48, dtype="float32").reshape(-1, 1)
    with strategy.scope():
        model = Taster()
        model.compile("sgd", "mse", run_eagerly=True)
    options: dict[str, Any] = {"epochs": epochs, "verbose": 0}
    if kind == "arrays":
        model.fit(rows, rows, batch_size=9, **options)
    elif kind == "arrays in order":
        model.fit(rows, rows, batch_size=9, shuffle=False, **options)
    elif kind == "dataset":
        pairs = tf.data.Dataset.from_tensor_slices((rows, rows)).shuffle(47, seed=1).batch(9)
        model.fit(pairs, **options)
    elif kind == "dataset of unknown length":
        pairs = tf.data.Dataset.from_tensor_slices((rows, rows)).batch(9).filter(lambda x, y: True)
        model.fit(pairs, **options)
    elif kind == "shuffled sequence":
        model.fit(Pieces(rows), **options)
    elif kind == "generator":
        model.fit(pieces(rows), **{**options, "epochs": 1})
    return list(model.seen)


class Pieces(keras.utils.PyDataset):
    def __init__(self, rows: np.ndarray) -> None:
        super().__init__()
        self.rows = rows

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        piece = self.rows[index * 9 : (index + 1) * 9]
        return piece, piece


def pieces(rows: np.ndarray) -> Any:
    for first in range(0, len(rows), 9):
        yield rows[first : first + 9], rows[first : first + 9]


def joined(lists: Iterable[list[int]]) -> list[int]:
    return [*itertools.chain.from_iterable(lists)]


KINDS = ("arrays", "arrays in order", "dataset", "dataset of unknown length", "shuffled sequence")


@pytest.mark.parametrize("kind", KINDS)
def test_every_example_is_used_once_per_epoch(kind: str, pool2: Pool) -> None:
    assert sorted(joined(pool2.run(rows_seen, kind))) == sorted([*range(1, 48)] * 2)


def test_every_example_of_a_generator_is_used_once(pool3: Pool) -> None:
    assert sorted(joined(pool3.run(rows_seen, "generator"))) == [*range(1, 48)]


def unseeded_rows(strategy: Any) -> list[int]:
    tf.random.set_seed(None)  # as in a script that sets no seed: the pool sets one
    return rows_seen(strategy, "arrays")


def test_arrays_are_shuffled_alike_on_all_workers_without_a_seed(pool3: Pool) -> None:
    assert sorted(joined(pool3.run(unseeded_rows))) == sorted([*range(1, 48)] * 2)


def order_of_epochs(strategy: Any) -> list[list[int]]:
    keras.utils.set_random_seed(11)
    seen = rows_seen(strategy, "arrays")
    keras.utils.set_random_seed(11)
    return [seen, rows_seen(strategy, "arrays")]


def test_arrays_are_shuffled_anew_each_epoch_and_again_alike_after_the_same_seed(pool2: Pool) -> None:
    for first, again in pool2.run(order_of_epochs):
        half = len(first) // 2
        assert first == again
        assert first[:half] != first[half:]


def distributed_by_a_function(strategy: Any) -> dict[str, str]:
    def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
        whole = tf.data.Dataset.from_tensor_slices(arrays())
        own = whole.shard(context.num_input_pipelines, context.input_pipeline_id)
        return own.batch(context.get_per_replica_batch_size(30))

    model = perceptron(strategy)
    model.fit(strategy.distribute_datasets_from_function(of_worker), epochs=2, verbose=0)
    return digest(model)


def test_a_dataset_that_a_function_makes_for_each_worker_is_left_to_tensorflow(pool2: Pool) -> None:
    assert_equal_on_all(pool2.run(distributed_by_a_function))


def custom_loop(strategy: Any) -> dict[str, Any]:
    with strategy.scope():
        model = keras.Sequential([keras.Input((12,)), keras.layers.Dense(4)])
        optimizer = keras.optimizers.Adam(0.01)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def step(batch: Any) -> Any:
        x, y = batch
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(loss_of(y, model(x, training=True))) / 30
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def global_step(batch: Any) -> Any:
        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

    shares = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensor_slices(arrays()).batch(30))
    losses = [float(global_step(batch)) for _ in range(2) for batch in shares]
    return {"losses": losses, "weights": [w.numpy() for w in model.weights]}


def test_a_custom_loop_gives_the_numbers_of_one_process(pool2: Pool, pool1: Pool) -> None:
    results = pool2.run(custom_loop)
    assert_equal_on_all(results)
    alone = pool1.run(custom_loop)[0]
    np.testing.assert_allclose(results[0]["losses"], alone["losses"], rtol=1e-5)
    for found, expected in zip(results[0]["weights"], alone["weights"], strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


def distributed_by_hand(strategy: Any) -> list[int]:
    with strategy.scope():
        model = Taster()
        model.compile("sgd", "mse", run_eagerly=True)
    rows = np.arange(1, 48, dtype="float32").reshape(-1, 1)
    pairs = tf.data.Dataset.from_tensor_slices((rows, rows)).batch(9)
    model.fit(strategy.experimental_distribute_dataset(pairs), verbose=0)
    return list(model.seen)


def test_a_dataset_distributed_by_hand_is_not_divided_twice(pool2: Pool) -> None:
    assert sorted(joined(pool2.run(distributed_by_hand))) == [*range(1, 48)]


def sparse_and_ragged(strategy: Any) -> dict[str, Any]:
    ragged = tf.ragged.constant([[1.0] * (1 + i % 3) for i in range(10)])
    sparse = tf.sparse.from_dense(np.eye(10, dtype="float32"))
    dataset = tf.data.Dataset.from_tensor_slices({"ragged": ragged, "sparse": sparse, "row": np.arange(10)})
    seen: dict[str, list[Any]] = {"ragged": [], "sparse": [], "row": []}
    for batch in strategy.experimental_distribute_dataset(dataset.batch(4)):
        seen["ragged"] += batch["ragged"].to_list()
        seen["sparse"] += tf.sparse.to_dense(batch["sparse"]).numpy().argmax(axis=1).tolist()
        seen["row"] += batch["row"].numpy().tolist()
    return seen


def test_ragged_and_sparse_parts_are_divided_like_the_rest(pool3: Pool) -> None:
    results = pool3.run(sparse_and_ragged)
    assert sorted(joined(r["row"] for r in results)) == [*range(10)]
    for result in results:
        assert result["sparse"] == result["row"]
        assert [len(row) for row in result["ragged"]] == [1 + row % 3 for row in result["row"]]
