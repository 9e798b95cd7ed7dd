"""Each worker's share of the data: every example once per epoch, in an order that all workers share."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from replicast import NotSupported
from replicast.training.feeding import (
    Division,
    Excerpt,
    differing_parts,
    epoch_order,
    losses_that_mix_rows,
    predicting_all_rows,
    refuse_other_lengths,
    shares_of_order,
)
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


# Which worker gets which rows: pure functions, tested with tables.


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("shuffle", [False, True, "batch"])
def test_together_the_workers_have_every_row_of_each_batch_once(size: int, shuffle: bool | str) -> None:
    order = epoch_order(47, 9, shuffle, (1, 2))
    by_worker = [list(shares_of_order(order, 9, rank, size)) for rank in range(size)]
    batches = [np.concatenate(parts).tolist() for parts in zip(*by_worker, strict=True)]
    assert [len(batch) for batch in batches] == [9, 9, 9, 9, 9, 2]
    assert sorted(sum(batches, start=[])) == [*range(47)]  # noqa: RUF017 - six short lists


def test_the_order_of_an_epoch_follows_from_its_seed() -> None:
    orders = [
        epoch_order(100, 10, True, seed).tolist() for seed in ((1, 1, 0), (1, 1, 0), (1, 1, 1), (2, 1, 0))
    ]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2] != orders[3] != orders[0]


def test_shuffling_by_batch_keeps_each_batch_together() -> None:
    order = epoch_order(20, 5, "batch", (3,))
    assert [sorted(order[first : first + 5]) for first in range(0, 20, 5)] == np.arange(20).reshape(
        4, 5
    ).tolist()
    assert order.tolist() != [*range(20)]


def test_samples_of_arrays_see_the_first_row_the_last_row_and_rows_between() -> None:
    rows = np.arange(2000.0).reshape(1000, 2)
    for row in (0, 999, *range(0, 1000, 999 // 3)):
        changed = rows.copy()
        changed[row] = -1.0
        samples = {
            0: Excerpt.of_arrays("training data", rows),
            1: Excerpt.of_arrays("training data", changed),
        }
        assert differing_parts(samples) == {1: ["x"]}


def test_samples_of_batches_in_another_order_are_not_compared() -> None:
    samples = {0: Excerpt("training data", order="a", digests={"x": "1"})}
    samples[1] = Excerpt("training data", order="b", digests={"x": "2"})
    assert differing_parts(samples) == {}


def test_only_lengths_that_are_known_are_compared() -> None:
    refuse_other_lengths({0: Excerpt("training data", length=5), 1: Excerpt("training data")})
    with pytest.raises(NotSupported, match="worker 0 has 5 batches, worker 2 has 6 batches"):
        refuse_other_lengths({0: Excerpt("training data", length=5), 2: Excerpt("training data", length=6)})


def spec(*shape: int | None) -> tf.TensorSpec:
    return tf.TensorSpec(shape)


@pytest.mark.parametrize(
    ("batch", "kinds"),
    [
        ((spec(None, 3), spec(None)), [True, True]),
        ((spec(8, 3), spec(8)), [True, True]),
        (({"a": spec(None, 3), "table": spec(7, 6), "to": spec()}, spec(None)), [True, False, True]),
        (({"a": spec(None, 3), "square": spec(8, 8)}, spec(None)), [True, False, True]),
        (({"a": spec(8, 3), "table": spec(7, 6)}, spec(8), spec(8)), [True, False, True, True]),
        (((spec(None, 3), spec(None, 2)), spec(None)), [True, True, True]),
        ((spec(8, 3), spec(None)), [True, True]),
        ((tf.RaggedTensorSpec((None, None)), tf.SparseTensorSpec((None, 5))), [True, True]),
        ({"a": spec(None, 3), "b": spec(None)}, [True, True]),
        ((spec(None, 3), spec(None), spec(None), spec(None)), [True] * 4),
        (((spec(None, 3), spec(4, 4)),), [True, True]),
    ],
)
def test_which_arrays_of_a_batch_are_rows(batch: Any, kinds: list[bool | None]) -> None:
    found = Division(batch).kinds
    assert [found[place] for place in sorted(found)] == kinds


@pytest.mark.parametrize(
    "batch",
    [
        {"a": spec(8, 3), "table": spec(7, 6)},
        (spec(8, 3), spec(7)),
        (spec(8, 3), (spec(8), spec(7))),
        (spec(8, 3), spec(8), spec(7)),
    ],
)
def test_a_batch_without_one_number_of_rows_is_refused(batch: Any) -> None:
    with pytest.raises(NotSupported, match=r"number of rows cannot be told \(.*\(8, 3\).*7"):
        Division(batch)


def test_the_first_batch_tells_what_types_do_not() -> None:
    types = ((spec(None, 3), spec(None, 2)), spec(None))
    batch = ((np.zeros((8, 3)), np.zeros((5, 2))), np.zeros(8))
    division = Division(types, batch)
    assert (division.kinds, division.rows) == ({0: True, 1: False, 2: True}, None)


LOSSES = {name: kind for name, kind in vars(keras.losses).items() if inspect.isclass(kind)}


@pytest.mark.parametrize("name", sorted(LOSSES.keys() - {"Loss", "CTC"}))
def test_every_loss_of_keras_that_mixes_rows_is_known(name: str) -> None:
    """CTC computes one value for each row, from sequences."""
    random = np.random.default_rng(1)
    scores = random.uniform(0.1, 1.0, size=(8, 4)).astype("float32")
    scores /= np.sqrt((scores**2).sum(1, keepdims=True)) if name == "Circle" else scores.sum(1, keepdims=True)
    labels = np.array([0, 1, 0, 1, 0, 1, 1, 0])
    if name in ("Circle", "CategoricalGeneralizedCrossEntropy") or "Sparse" in name:
        targets = labels
    else:  # with more than zeros in the second half
        targets = np.maximum(
            np.eye(4, dtype="float32")[labels], np.linspace(0.1, 0.9, 8, dtype="float32")[:, None]
        )
    loss = LOSSES[name]()
    whole = float(loss(targets, scores))
    halves = [float(loss(targets[part], scores[part])) for part in (slice(0, 4), slice(4, 8))]
    assert bool(losses_that_mix_rows({"out": [loss]})) == (not np.isclose(whole, np.mean(halves)))


def test_losses_that_mix_rows_are_known_by_name_and_function_and_not_without_axis_0() -> None:
    given = ["dice", keras.losses.circle, keras.losses.Tversky(axis=(0, 1)), "mse", None]
    assert list(losses_that_mix_rows(given)) == ["Dice", "Circle", "Tversky"]
    assert losses_that_mix_rows(keras.losses.Dice(axis=(1, 2))) == {}


def test_predict_refuses_outputs_without_rows_and_names_them() -> None:
    x = tf.zeros((4, 3))
    for output, shape in ((tf.reduce_sum(x), "()"), (tf.zeros((7, 6)), "(7, 6)")):
        with pytest.raises(NotSupported, match=r"output\['a'\] has the shape") as error:
            predicting_all_rows(lambda _, output=output: {"a": output, "b": x})((x,))
        assert shape in str(error.value)
    assert predicting_all_rows(lambda data: tf.repeat(data[0], 2, axis=0))((x,)).shape == (8, 3)
