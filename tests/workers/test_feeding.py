"""Each worker's share of the data: every example once per epoch, in an order that all workers share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.pool import Pool
from tests.pool.checks import digest
from tests.pool.scripts import equal_on_all
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


ROWS = np.arange(1, 48, dtype="float32").reshape(-1, 1)
KINDS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "arrays": lambda strategy: {"x": ROWS, "y": ROWS, "batch_size": 9},
    "arrays in order": lambda strategy: {"x": ROWS, "y": ROWS, "batch_size": 9, "shuffle": False},
    "dataset": lambda strategy: {"x": pairs().shuffle(47, seed=1).batch(9)},
    "dataset of unknown length": lambda strategy: {"x": pairs().batch(9).filter(lambda x, y: True)},
    "shuffled sequence": lambda strategy: {"x": Pieces()},
    "dataset that was distributed by hand, and is not divided twice": lambda strategy: {
        "x": strategy.experimental_distribute_dataset(pairs().batch(9))
    },
    "generator": lambda strategy: {"x": (Pieces()[index] for index in range(6)), "epochs": 1},
}


def pairs() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((ROWS, ROWS))


def rows_seen(strategy: Any, kind: str) -> list[int]:
    with strategy.scope():
        model = Taster()
        model.compile("sgd", "mse", run_eagerly=True)
    model.fit(**{"epochs": 2, "verbose": 0, **KINDS[kind](strategy)})
    return list(model.seen)


class Pieces(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        piece = ROWS[index * 9 : (index + 1) * 9]
        return piece, piece


def joined(lists: Iterable[list[int]]) -> list[int]:
    return [*itertools.chain.from_iterable(lists)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_example_is_used_once_per_epoch(kind: str, pool2: Pool) -> None:
    epochs = 1 if kind == "generator" else 2
    assert sorted(joined(pool2.run(rows_seen, kind))) == sorted([*range(1, 48)] * epochs)


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


@equal_on_all("pool2")
def test_a_dataset_that_a_function_makes_for_each_worker_is_left_to_tensorflow(
    strategy: Any,
) -> dict[str, str]:
    def of_worker(context: tf.distribute.InputContext) -> tf.data.Dataset:
        whole = tf.data.Dataset.from_tensor_slices(arrays())
        own = whole.shard(context.num_input_pipelines, context.input_pipeline_id)
        return own.batch(context.get_per_replica_batch_size(30))

    model = perceptron(strategy)
    model.fit(strategy.distribute_datasets_from_function(of_worker), epochs=2, verbose=0)
    return digest(model)


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
