"""The data that validation and `steps` use: more cases than tests/scripts/test_validation.py."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all
from tests.scripts.compare import assert_close, assert_same_as_plain_keras, same_as_plain_keras, weights
from tests.scripts.test_validation import Pieces, columns, compiled, rows_of


def endless(seed: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for index in itertools.count():
        rows = np.arange(index * 9, index * 9 + 9) % 40
        x, y = columns(40, seed)
        yield x[rows], y[rows]


def seeded(seed: int = 3) -> tf.data.Dataset:
    return rows_of(seed).shuffle(40, seed=5)


def steps(data: Any, count: int, **more: Any) -> dict[str, Any]:
    return {"validation_data": data, "validation_steps": count, **more}


X, Y = columns(45, 3)
WEIGHT = np.linspace(0.1, 2.0, 45).astype("float32")
# The arguments of `fit` that concern validation, made on the worker.
VALIDATIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffled, repeated, a whole pass": lambda: steps(seeded().repeat().batch(8), 5),
    "shuffled, repeated, part of a pass": lambda: steps(seeded().repeat().batch(8), 3),
    "shuffled, repeated, all but one batch": lambda: steps(seeded().repeat().batch(8), 4),
    "shuffled, repeated, more than a pass": lambda: steps(seeded().repeat().batch(8), 7),
    "repeated, shuffled": lambda: steps(rows_of(3).repeat().shuffle(40, seed=5).batch(8), 5),
    "shuffled after batches, repeated": lambda: steps(rows_of(3).batch(9).shuffle(5, seed=5).repeat(), 5),
    "shuffled, repeated twice, part": lambda: steps(seeded().repeat(2).batch(8), 5),
    "shuffled, unknown length, part": lambda: steps(seeded().repeat().batch(8).filter(lambda x, y: True), 5),
    "shuffled, whole": lambda: {"validation_data": seeded().batch(9)},
    "shuffled, part": lambda: steps(seeded().batch(9), 3),
    "in order, part": lambda: steps(rows_of(3).batch(9), 3),
    "in order, more than there is": lambda: steps(rows_of(3).batch(9), 8),
    "dropped remainder": lambda: {"validation_data": rows_of(3).batch(9, drop_remainder=True)},
    "sequence": lambda: {"validation_data": Pieces(3)},
    "sequence, part": lambda: steps(Pieces(3), 2),
    "turning sequence": lambda: {"validation_data": Pieces(3, turning=True)},
    "arrays": lambda: {"validation_data": (X, Y)},
    "arrays, part": lambda: steps((X, Y), 2),
    "arrays, batch size": lambda: {"validation_data": (X, Y), "validation_batch_size": 7},
    "arrays, weighted": lambda: {"validation_data": (X, Y, WEIGHT)},
    "split": lambda: {"validation_split": 0.3},
    "split, weighted": lambda: {"validation_split": 0.3, "sample_weight": np.linspace(0.1, 2.0, 60)},
    "some epochs": lambda: steps(seeded().repeat().batch(8), 5, validation_freq=[1, 3, 4]),
    "every other epoch": lambda: steps(seeded().repeat().batch(8), 5, validation_freq=2),
    "class weights": lambda: {"validation_data": (X, Y), "class_weight": {0: 1.0, 1: 3.0, 2: 0.2}},
}


def validated(strategy: Any, kind: str) -> Any:
    model = compiled(strategy)
    history = model.fit(
        *columns(), batch_size=16, epochs=4, shuffle=False, verbose=0, **VALIDATIONS[kind]()
    ).history
    return {"history": history, "weights": weights(model)}


@pytest.mark.parametrize("kind", VALIDATIONS)
def test_validation_sees_what_it_sees_in_plain_keras(kind: str, pool2: Pool, plain: Pool) -> None:
    assert_same_as_plain_keras(pool2, plain, validated, kind)


@same_as_plain_keras("pool2")
def test_several_steps_per_execution_see_what_they_see_in_plain_keras(strategy: Any) -> Any:
    model = compiled(strategy, steps_per_execution=3)
    history = model.fit(
        rows_of(2).shuffle(40, seed=1).repeat().batch(8),
        steps_per_epoch=6,
        epochs=3,
        verbose=0,
        validation_data=rows_of(3).shuffle(40, seed=5).repeat().batch(8),
        validation_steps=6,
    ).history
    return {"history": history, "weights": weights(model)}


TRAININGS: dict[str, Callable[[], dict[str, Any]]] = {
    "shuffled, repeated": lambda: {"x": seeded(2).repeat().batch(8), "steps_per_epoch": 5},
    "shuffled, repeated, 3 steps": lambda: {"x": seeded(2).repeat().batch(8), "steps_per_epoch": 3},
    "shuffled, part": lambda: {"x": seeded(2).batch(8), "steps_per_epoch": 3},
    "shuffled": lambda: {"x": seeded(2).batch(9)},
    "unknown length, steps": lambda: {
        "x": seeded(2).repeat().batch(9).filter(lambda x, y: True),
        "steps_per_epoch": 5,
    },
    "dropped remainder": lambda: {"x": seeded(2).batch(9, drop_remainder=True)},
    "class weights": lambda: {"x": seeded(2).batch(9), "class_weight": {0: 1.0, 1: 3.0, 2: 0.2}},
    "sequence": lambda: {"x": Pieces(2), "shuffle": False},
    "shuffled sequence": lambda: {"x": Pieces(2)},
    "turning sequence": lambda: {"x": Pieces(2, turning=True), "shuffle": False},
    "part of a sequence": lambda: {"x": Pieces(2), "shuffle": False, "steps_per_epoch": 2},
}


def fitted_three_times(strategy: Any, kind: str) -> Any:
    model = compiled(strategy)
    data = TRAININGS[kind]()
    histories = [model.fit(**data, epochs=2, verbose=0).history for _ in range(3)]
    return {"histories": histories, "weights": weights(model)}


@pytest.mark.parametrize("kind", TRAININGS)
def test_several_fits_see_what_they_see_in_plain_keras(kind: str, pool2: Pool, plain: Pool) -> None:
    assert_same_as_plain_keras(pool2, plain, fitted_three_times, kind)


@same_as_plain_keras("pool2")
def test_evaluate_and_predict_see_what_they_see_in_plain_keras(strategy: Any) -> Any:
    model = compiled(strategy)
    x, y = columns()
    model.fit(x, y, shuffle=False, verbose=0)
    repeated = rows_of(3).shuffle(40, seed=5).repeat().batch(8)
    inputs = rows_of(3).map(lambda x, y: x).shuffle(40, seed=5).repeat().batch(9)
    return {
        "evaluated": [model.evaluate(repeated, steps=5, verbose=0) for _ in range(3)],
        "evaluated in part": [model.evaluate(rows_of(3).batch(9), steps=2, verbose=0) for _ in range(2)],
        "evaluated arrays": [model.evaluate(x, y, batch_size=8, steps=3, verbose=0)],
        "evaluated generator": model.evaluate(endless(3), steps=3, verbose=0),
        "predicted": [model.predict(inputs, steps=5, verbose=0) for _ in range(3)],
        "predicted generator": model.predict(((x,) for x, y in endless(3)), steps=3, verbose=0),
        "predicted sequence": model.predict(Pieces(3), verbose=0),
    }


@same_as_plain_keras("pool2")
def test_batches_of_changing_width_come_in_the_order_of_plain_keras(strategy: Any) -> Any:
    random = np.random.default_rng(3)
    texts = [random.integers(1, 20, random.integers(2, 9)).astype("int32") for _ in range(40)]
    pairs = [(text, np.int32(text.sum() % 3)) for text in texts]
    signature = (tf.TensorSpec((None,), tf.int32), tf.TensorSpec((), tf.int32))
    data = tf.data.Dataset.from_generator(lambda: iter(pairs), output_signature=signature)
    data = data.shuffle(40, seed=2).padded_batch(8)
    with strategy.scope():
        model = keras.Sequential(
            [keras.layers.Embedding(20, 4), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(3)]
        )
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))

    history = [model.fit(data, validation_data=data, epochs=2, verbose=0).history for _ in range(2)]
    # Not the optimizer's iterations: plain Keras counts the step that finds no data left.
    return {"history": history, "weights": model.get_weights()}


def validated_by_generator(strategy: Any) -> Any:
    model = compiled(strategy)
    x, y = columns()
    read = []

    def noted() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for number, batch in enumerate(endless(3)):
            read.append(number)
            yield batch

    model.fit(x, y, epochs=3, shuffle=False, verbose=0, validation_data=noted(), validation_steps=4)
    return len(read)


def test_a_generator_for_validation_loses_no_batch_between_epochs(pool2: Pool) -> None:
    # Keras reads two batches for their shapes and begins each pass with them: 2 + 3 * (4 - 2).
    assert pool2.run(validated_by_generator) == [8, 8]


@same_as_plain_keras("pool2")
def test_a_generator_with_steps_trains_as_in_plain_keras(strategy: Any) -> Any:
    model = compiled(strategy)
    history = model.fit(endless(2), steps_per_epoch=4, epochs=3, verbose=0).history
    return {"history": history, "weights": weights(model)}


def of_unknown_length(strategy: Any) -> Any:
    model = compiled(strategy)
    model.optimizer.learning_rate = 0.01
    data = rows_of(2).shuffle(40, seed=5).batch(9).filter(lambda x, y: True)
    histories = [model.fit(data, epochs=2, verbose=0).history for _ in range(2)]
    return {"histories": histories, "steps": int(keras.ops.convert_to_numpy(model.optimizer.iterations))}


def test_data_of_unknown_length_is_counted_as_often_as_it_is_used(pool1: Pool, pool2: Pool) -> None:
    """Plain Keras counts the step that finds no data left, too: one more per pass."""
    results = pool2.run(of_unknown_length)
    assert_equal_on_all(results)
    assert results[0]["steps"] == 20
    assert_close(results[0], pool1.run(of_unknown_length)[0], rtol=1e-4, atol=1e-6)
