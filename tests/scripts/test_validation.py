"""Validation and `steps` use the same data as in plain Keras."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.pool import Pool
from tests.scripts.compare import heard, in_plain_keras, same_as_plain_keras

ROWS, FEATURES = 60, 5


def columns(rows: int = ROWS, seed: int = 7) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(rows, FEATURES)).astype("float32"), random.integers(0, 3, rows).astype("int32")


def rows_of(seed: int, rows: int = 40) -> tf.data.Dataset:
    """Without the prefetch that TensorFlow adds to a pipeline.

    What it has read when a pass ends depends on timing, and decides the next order of a repeated shuffle: two
    runs of plain Keras validate with different rows.
    """
    options = tf.data.Options()
    options.experimental_optimization.inject_prefetch = False
    return tf.data.Dataset.from_tensor_slices(columns(rows, seed)).with_options(options)


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


@same_as_plain_keras("pool2")
def test_validation_steps_see_the_batches_that_they_see_in_plain_keras(strategy: Any) -> Any:
    """Also where they end near the end of a repetition: that does not draw the next order."""
    found = {}
    for steps in (3, 4):  # of the 5 batches of a repetition
        model = compiled(strategy)
        repeated = rows_of(3).shuffle(40, seed=5).repeat().batch(8)
        options = {"validation_data": repeated, "validation_steps": steps, "shuffle": False, "verbose": 0}
        history = model.fit(*columns(), epochs=4, **options).history
        found[str(steps)] = {"history": history}
    return {**found, "evaluated": [model.evaluate(repeated, steps=3, verbose=0) for _ in range(2)]}


def warned_of_orders(strategy: Any) -> dict[str, list[str]]:
    rows = tf.data.Dataset.from_tensor_slices(columns())
    found, model = {}, compiled(strategy)
    for kind, data in {
        "shuffled, repeated": rows.shuffle(60, seed=1).repeat().batch(8),
        "shuffled, repeated, prefetched": rows.shuffle(60, seed=1).repeat().batch(8).prefetch(2),
        "shuffled once, repeated": rows.shuffle(60, 1, reshuffle_each_iteration=False).repeat().batch(8),
        "repeated, shuffled": rows.repeat().shuffle(60, seed=1).batch(8),
    }.items():
        with heard() as said:
            model.fit(data, steps_per_epoch=3, epochs=2, verbose=0)  # one pass
            assert said == [], said
            for _ in range(2):
                model.fit(data, steps_per_epoch=3, verbose=0)
        found[kind] = list(said)
    return found


def test_worker_0_warns_at_a_second_pass_whose_order_depends_on_timing_in_one_process(pool2: Pool) -> None:
    first, second = pool2.run(warned_of_orders)
    assert not any(second.values())
    assert [kind for kind, said in first.items() if said] == [
        "shuffled, repeated",
        "shuffled, repeated, prefetched",
    ]
    for (warning,) in filter(None, first.values()):
        assert warning.startswith("The training data is shuffled, then repeated, and a second pass over it")


def warned_of_length(strategy: Any) -> dict[str, tuple[int, list[str]]]:
    unknown = rows_of(2).batch(8).filter(lambda x, y: True)
    known = unknown.apply(tf.data.experimental.assert_cardinality(5))
    found = {}
    for kind, data, options in (
        ("unknown", unknown, {}),
        ("known", known, {}),
        ("eager", unknown, {"run_eagerly": True}),
        ("several steps", unknown, {"steps_per_execution": 2}),
    ):
        model = compiled(strategy, **options)
        with heard() as said:
            for _ in range(2):
                model.fit(data, verbose=0)
        found[kind] = int(keras.ops.convert_to_numpy(model.optimizer.iterations)), list(said)
    return found


def test_worker_0_warns_where_one_process_counts_steps_that_it_does_not_train(
    pool2: Pool, plain: Pool
) -> None:
    first, second = pool2.run(warned_of_length)
    (one_process,) = plain.run(in_plain_keras, warned_of_length)
    differing = [kind for kind in first if first[kind][0] != one_process[kind][0]]
    assert differing == ["unknown"]
    assert [kind for kind, (_, said) in first.items() if said] == differing
    (said,) = first["unknown"][1]
    assert said.startswith("The length of the training data is unknown.")
    assert not any(said for _, said in second.values())


def evaluated_to_an_unknown_end(strategy: Any) -> tuple[list[float], list[str]]:
    model = compiled(strategy)
    with heard() as said:
        data = rows_of(2).batch(8, drop_remainder=True)
        known = model.evaluate(data, verbose=0)[0]
        unknown = model.evaluate(data.filter(lambda x, y: True), verbose=0)[0]
    return [known, unknown], list(said)


def test_worker_0_warns_where_one_process_counts_a_missing_batch_in_the_loss(
    pool2: Pool, plain: Pool
) -> None:
    (first, said), (_, others) = pool2.run(evaluated_to_an_unknown_end)
    ((in_one_process, _),) = plain.run(in_plain_keras, evaluated_to_an_unknown_end)
    np.testing.assert_allclose(first, [in_one_process[0]] * 2, rtol=1e-4)
    assert in_one_process[1] < 0.9 * in_one_process[0]
    (warning,) = said
    assert warning.startswith("The length of the data for evaluate is unknown.")
    assert "as a batch of zeros in the reported loss and metrics" in warning
    assert others == []
