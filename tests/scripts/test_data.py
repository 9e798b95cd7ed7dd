"""Warnings and errors about workers with different data, and losses that use the rows of other workers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from replicast import NotSupported
from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all
from tests.scripts.compare import heard, same_as_plain_keras, weights
from tests.scripts.test_validation import Pieces, columns, compiled

Kind = str


def generated(x: np.ndarray, y: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for first in range(0, len(x), 16):
        yield x[first : first + 16], y[first : first + 16]


def given(kind: Kind, rank: int) -> dict[str, Any]:
    """Arguments of `fit` that differ between workers as `kind` says."""
    x, y = columns(32, seed=rank)
    same_x, same_y = columns(32, seed=9)
    random = np.random.default_rng(rank)
    noisy = same_x + random.normal(size=same_x.shape).astype("float32")
    pairs = tf.data.Dataset.from_tensor_slices((x, y)).batch(16)
    same = {"x": same_x, "y": same_y}
    return {
        "arrays": {"x": x, "y": y},
        "arrays, only y": {"x": same_x, "y": y},
        "arrays, strided by rank": {"x": columns(64)[0][rank::2], "y": columns(64)[1][rank::2]},
        "dataset": {"x": pairs},
        "dataset, inputs only": {"x": tf.data.Dataset.from_tensor_slices((x, 0 * y)).batch(16)},
        "dataset, shard by rank": {
            "x": tf.data.Dataset.from_tensor_slices(columns(64)).shard(2, rank).batch(16)
        },
        "generator": {"x": generated(x, y)},
        "sequence": {"x": Pieces(seed=rank), "shuffle": False},
        "shuffled sequence": {"x": Pieces(seed=rank)},
        "validation arrays": {**same, "validation_data": (x, y)},
        "validation dataset": {**same, "validation_data": pairs},
        "validation sequence": {**same, "validation_data": Pieces(seed=rank)},
        "the same arrays": same,
        "the same dataset": {"x": tf.data.Dataset.from_tensor_slices((same_x, same_y)).batch(16)},
        "augmented dataset": {"x": tf.data.Dataset.from_tensor_slices((noisy, same_y)).batch(16)},
        "augmented generator": {"x": generated(noisy, same_y)},
        "left to TensorFlow": {"x": _off(pairs)},
    }[kind]


def _off(pairs: tf.data.Dataset) -> tf.data.Dataset:
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return pairs.with_options(options)


def warnings_of(strategy: Any, kinds: list[Kind]) -> dict[Kind, list[str]]:
    """What is warned of when a model is fitted twice on each kind of data.

    Except that the length of a generator is unknown, which concerns one worker as well.
    """
    found = {}
    for kind in kinds:
        model = compiled(strategy)
        with heard() as said:
            model.fit(**given(kind, strategy.rank), epochs=2, verbose=0)
            model.fit(**given(kind, strategy.rank), epochs=1, verbose=0)
        found[kind] = [text for text in said if not text.startswith("The length of the training data")]
    return found


def assert_worker_0_warns_once(pool: Pool, kinds: dict[Kind, str]) -> None:
    first, *others = pool.run(warnings_of, list(kinds))
    assert all(not said for other in others for said in other.values())
    for kind, expected in kinds.items():
        assert len(first[kind]) == 1, (kind, first[kind])
        assert expected in first[kind][0], kind
        assert "worker 0 and worker 1 differ" in first[kind][0], kind


def assert_nobody_warns(pool: Pool, kinds: list[Kind]) -> None:
    for found in pool.run(warnings_of, kinds):
        assert found == {kind: [] for kind in kinds}


def test_worker_0_warns_once_when_workers_are_given_different_data(pool2: Pool) -> None:
    assert_worker_0_warns_once(
        pool2,
        {
            "arrays": "training data (worker 0 and worker 1 differ in x, y of a sample of its rows)",
            "dataset": "training data (worker 0 and worker 1 differ in x, y of its first batch)",
        },
    )


def test_the_same_data_and_random_augmentation_cause_no_warning(pool2: Pool) -> None:
    assert_nobody_warns(pool2, ["the same arrays", "augmented dataset"])


def other_lengths(strategy: Any) -> list[str]:
    model, refused = compiled(strategy), []
    x, y = columns(30 - strategy.rank)
    pairs = tf.data.Dataset.from_tensor_slices((x, y)).batch(1)
    for data in ({"x": x, "y": y, "batch_size": 16}, {"x": pairs}):
        with pytest.raises(NotSupported) as error:
            model.fit(**data, verbose=0)
        refused.append(str(error.value))
    x, y = columns(32)
    model.fit(x, y, verbose=0)  # the job goes on
    return refused


def test_data_of_different_lengths_is_refused_on_all_workers_with_both_lengths(pool2: Pool) -> None:
    results = pool2.run(other_lengths)
    assert_equal_on_all(results)
    of_arrays, of_batches = results[0]
    assert "worker 0 has 30 rows, worker 1 has 29 rows" in of_arrays
    assert "worker 0 has 30 batches, worker 1 has 29 batches" in of_batches


def of_all_workers(rows: tf.Tensor) -> tf.Tensor:
    """The rows of all workers. Gradients flow back to the worker that a row is from."""
    context = tf.distribute.get_replica_context()
    return rows if context is None else context.all_gather(rows, axis=0)


class TwoTowers(keras.Model):
    """Each user's item is told from all items in the batch that have another id."""

    def __init__(self) -> None:
        super().__init__()
        # Without biases: that of the items has no gradient, and Adam would make steps of its rounding errors.
        self.of_user, self.of_item = (keras.layers.Dense(4, use_bias=False) for _ in range(2))

    def call(self, inputs: Any) -> Any:
        user, item = inputs
        return self.of_user(user), self.of_item(item)

    def compute_loss(
        self,
        x: Any = None,
        y: Any = None,
        y_pred: Any = None,
        sample_weight: Any = None,
        training: Any = True,
    ) -> Any:
        users, items = y_pred
        first = tf.distribute.get_replica_context().replica_id_in_sync_group * tf.shape(items)[0]
        own = first + tf.range(tf.shape(items)[0])
        logits = tf.matmul(users, of_all_workers(items), transpose_b=True)
        is_own = tf.equal(own[:, None], tf.range(tf.shape(logits)[1]))
        is_same = tf.equal(y[:, None], of_all_workers(y))  # ids as they come in the batch
        logits = tf.where(is_same & ~is_own, -1e9, logits)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(own, logits))


@same_as_plain_keras("pool2")
def test_negatives_and_their_ids_gathered_from_all_workers_train_as_on_the_whole_batch(strategy: Any) -> Any:
    random = np.random.default_rng(5)
    users, items = (random.normal(size=(48, 6)).astype("float32") for _ in range(2))
    data = (users, items), random.integers(0, 20, 48)
    pairs = tf.data.Dataset.from_tensor_slices(data).batch(16, drop_remainder=True)
    with strategy.scope():
        model = TwoTowers()
        model.compile(keras.optimizers.Adam(0.05))
    history = model.fit(pairs, epochs=3, validation_data=pairs, verbose=0).history
    return {"history": history, "weights": weights(model)}


@same_as_plain_keras("pool2")
def test_a_dataset_that_the_user_divided_trains_as_the_whole_does_in_plain_keras(
    strategy: Any,
) -> dict[str, Any]:
    """As Horovod's users write it: a shard for each worker, and batches of their share of 16 rows."""
    whole = tf.data.Dataset.from_tensor_slices(columns(70, 1))
    own = _off(whole.shard(strategy.size, strategy.rank).batch(16 // strategy.size))
    model = compiled(strategy)
    history = model.fit(own, epochs=2, verbose=0).history
    return {"history": history, "weights": weights(model)}


ROWS = 21
TABLE = np.random.default_rng(2).normal(size=(7, 6)).astype("float32")


class Lookup(keras.Model):
    """Weighs the rows of a table by attention; its edges join parts of the table."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = keras.layers.Dense(6), keras.layers.Dense(2)

    def call(self, inputs: Any) -> Any:
        table = inputs["table"] + tf.math.unsorted_segment_sum(
            tf.gather(inputs["table"], inputs["edges"][0, :, 0]), inputs["edges"][0, :, 1], 7
        )
        scores = tf.nn.softmax(tf.matmul(self.query(inputs["x"]), table, transpose_b=True))
        return inputs["scale"] * self.value(tf.matmul(scores, table))


def beside_rows(x: Any, y: Any) -> Any:
    """A batch with a table of 7 rows and a scalar for all of it, and edges that differ in number."""
    edges = np.array([[i % 7, (3 * i) % 7] for i in range(11)])
    some = tf.cast(tf.shape(x)[0], tf.int32) % 3 + 5
    return {"x": x, "table": TABLE, "edges": tf.constant(edges)[None, :some], "scale": 2.0}, y


def lookups(kind: str) -> Any:
    x, y = (part.astype("float32") for part in np.split(columns(ROWS, 3)[0], [2], axis=1))
    pairs = tf.data.Dataset.from_tensor_slices((x, y[:, :2])).batch(7, drop_remainder=kind == "fixed")
    if kind == "as many rows as the table":  # of which the last batch is not
        return pairs.skip(1).concatenate(tf.data.Dataset.from_tensors((x[:4], y[:4, :2]))).map(beside_rows)
    pairs = tf.data.Dataset.from_tensor_slices((x, y[:, :2])).batch(8, drop_remainder=kind == "fixed")
    whole = pairs.map(beside_rows)
    # Keras takes no scalars from a generator.
    scaled = (({**x, "scale": x["scale"].reshape(1)}, y) for x, y in whole.as_numpy_iterator())
    return scaled if kind == "generator" else whole


@same_as_plain_keras("pool2")
def test_a_worker_without_rows_adds_nothing_to_a_sum_of_losses(strategy: Any) -> Any:
    x, y = columns(17)
    y = y.reshape(17, -1)[:, :1].astype("float32")
    with strategy.scope():
        model = keras.Sequential([keras.Input(x.shape[1:]), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), keras.losses.MeanSquaredError(reduction="sum"))
    model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    return weights(model)


@same_as_plain_keras("pool2")
def test_the_logs_have_the_sum_of_losses_of_all_rows(strategy: Any) -> Any:
    """Of batches of 8, 8 and 5 rows: one output, two and a regularizer, and an array beside the rows."""
    x, y = (part.astype("float32") for part in np.split(columns(21, 3)[0], [2], axis=1))
    found = {}
    for kind in ("one", "two", "beside"):
        keras.utils.set_random_seed(6)
        total = keras.losses.MeanSquaredError(reduction="sum")
        with strategy.scope():
            if kind == "beside":
                model: keras.Model = Lookup()
                model.compile(keras.optimizers.SGD(0.001), total)
            else:
                given = keras.Input((2,))
                layers = [keras.layers.Dense(1, kernel_regularizer="l2", name=name) for name in "ab"]
                outputs = [layer(given) for layer in layers]
                model = keras.Model(given, outputs if kind == "two" else outputs[0])
                model.compile(keras.optimizers.SGD(0.001), [total, total] if kind == "two" else total)
        if kind == "beside":
            history = model.fit(lookups("of batches"), epochs=2, verbose=0).history
        else:
            labels = [y[:, :1], y[:, :1]] if kind == "two" else y[:, :1]
            history = model.fit(x, labels, batch_size=8, epochs=2, verbose=0, shuffle=False).history
            evaluated = model.evaluate(x, labels, batch_size=8, verbose=0, return_dict=True)
            history |= {f"evaluated {name}": value for name, value in evaluated.items()}
        found[kind] = {"history": history, "weights": weights(model)}
    return found


@same_as_plain_keras("pool2")
def test_an_array_of_a_batch_that_is_not_rows_is_given_whole_to_every_worker(strategy: Any) -> Any:
    """Batches of 8, 8 and 5 rows, and of 7, 7 and 4: some do not divide evenly, nor does a table of 7."""
    found = {}
    for kind in ("of batches", "fixed", "as many rows as the table", "generator"):
        keras.utils.set_random_seed(6)
        with strategy.scope():
            model = Lookup()
            model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
        options = {"epochs": 1, "steps_per_epoch": 3} if kind == "generator" else {"epochs": 2}
        history = model.fit(lookups(kind), verbose=0, **options).history
        found[kind] = {"history": history, "weights": weights(model)}
    return {**found, "predicted": model.predict(lookups("of batches"), verbose=0)}


def refused(strategy: Any) -> dict[str, str]:
    x, y = columns(16)

    def generated_without_rows() -> Any:
        for _ in range(2):
            yield {"x": x, "table": TABLE}, y[:3]

    cases = {
        "no y": tf.data.Dataset.from_tensor_slices(x).batch(8).map(lambda x: {"x": x, "table": TABLE}),
        "merged": tf.data.Dataset.from_tensors(((x, TABLE), y[:3])),
        "generator": generated_without_rows(),
        "late": tf.data.Dataset.from_generator(
            lambda: iter([((x[:8], x[:8]), y[:8]), ((x[:8], x[:6]), y[:8])]),
            output_signature=(
                (tf.TensorSpec((None, x.shape[1])), tf.TensorSpec((None, x.shape[1]))),
                tf.TensorSpec((None, *y.shape[1:]), y.dtype),
            ),
        ),
    }
    said = {}
    for name, given in cases.items():
        with strategy.scope():
            model = Dense(scalar=False)
            model.compile("sgd", "mse")
        with pytest.raises((NotSupported, tf.errors.InvalidArgumentError)) as error:
            model.predict(given, verbose=0) if name == "no y" else model.fit(given, verbose=0)
        said[name] = str(error.value)
    with strategy.scope():
        model = Dense(scalar=True)
    with pytest.raises(NotSupported) as error:
        model.predict(x, batch_size=8, verbose=0)
    said["predict"] = str(error.value)
    return said


class Dense(keras.Model):
    def __init__(self, scalar: bool) -> None:
        super().__init__()
        self.dense, self.scalar = keras.layers.Dense(1), scalar

    def call(self, x: Any) -> Any:
        outputs = self.dense(x["x"] if isinstance(x, dict) else tf.nest.flatten(x)[0])
        return tf.reduce_sum(outputs) if self.scalar else outputs


def test_a_batch_whose_rows_cannot_be_told_is_refused_with_its_shapes(pool2: Pool) -> None:
    for refusals in pool2.run(refused):
        said = {name: message.replace("\\'", "'") for name, message in refusals.items()}
        assert "x['table'] (7, 6), x['x'] (None," in said["no y"]
        assert "x[0] (16, " in said["merged"]
        assert "y (3," in said["merged"]
        assert "x['table'] (7, 6)" in said["generator"]
        assert "First dimensions of x[0], x[1], y in this batch" in said["late"]
        assert "[8] [6] [8]" in said["late"].replace("\n", " ")
        assert "output has the shape ()" in said["predict"]


def mixing(strategy: Any) -> list[str]:
    with heard() as said, strategy.scope():
        inputs = keras.Input((4,))
        outputs = {"a": keras.layers.Dense(2, name="a")(inputs), "b": keras.layers.Dense(2, name="b")(inputs)}
        model = keras.Model(inputs, outputs)
        for _ in range(2):  # warns once
            model.compile("sgd", {"a": keras.losses.Dice(axis=(1,)), "b": keras.losses.Tversky()})
        keras.Sequential([inputs, keras.layers.Dense(2)]).compile("sgd", "dice")
        keras.Sequential([inputs, keras.layers.Dense(2)]).compile("sgd", "mse")
    return said


def test_worker_0_warns_when_a_model_is_compiled_with_a_loss_that_mixes_rows(pool2: Pool) -> None:
    first, second = pool2.run(mixing)
    assert [said.split()[2] for said in first] == ["Tversky", "Dice"]
    assert "Tversky(axis=(1, 2, 3))" in first[0]
    assert second == []
