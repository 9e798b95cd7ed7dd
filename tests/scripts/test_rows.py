"""Large tables: lookups, optimizers, the exchange and audits touch rows, with the numbers of plain Keras."""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

import replicast
from replicast.training import Source, TensorFlowState, collectives, rows
from replicast.update.audit_report import SLICE_BYTES
from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all
from tests.scripts.compare import (
    PlainKeras,
    assert_close,
    assert_same_as_plain_keras,
    in_plain_keras_and_on,
    weights,
)
from tests.workers.test_updates import quietly

ROWS, IDS, WIDTH = 50, 6, 4


def batch(rows: int = 48) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    ids = random.integers(0, ROWS, (rows, IDS)).astype("int32")
    return ids, random.normal(size=(rows, 1)).astype("float32")


def optimizer_of(name: str, **options: Any) -> keras.optimizers.Optimizer:
    found = getattr(replicast.optimizers, name, None) or getattr(keras.optimizers, name)
    return found(learning_rate=0.05, **options)


class Lookup(keras.layers.Layer):
    """Looks up ids in a table of its own, in one of the ways of Keras and TensorFlow."""

    def __init__(self, how: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.how = how
        self.graphs: list[Any] = []

    def build(self, shape: Any) -> None:
        self.table = self.add_weight(shape=(ROWS, WIDTH), name="table")

    def call(self, ids: Any, training: bool = False) -> Any:
        if training:
            self.graphs.append(tf.compat.v1.get_default_graph())
        match self.how:
            case "ops.take":
                return ops.take(self.table, ids, axis=0)
            case "ops.take, negative ids":
                return ops.take(self.table, ids - ROWS, axis=0)
            case "tf.gather":
                return tf.gather(self.table, ids)
            case "tf.gather of TensorFlow's variable":
                return tf.gather(self.table._value, ids)  # `value` is a copy in mixed precision
            case "ragged":
                ragged = tf.RaggedTensor.from_tensor(ids, padding=0)
                return ops.take(self.table, ragged, axis=0).to_tensor(shape=[None, IDS, WIDTH])
            case "weighted and reduced":  # as EmbedReduce of keras_rs
                weights = ops.cast(ids % 3, "float32")
                summed = ops.sum(ops.take(self.table, ids, axis=0) * weights[..., None], axis=-2)
                return ops.divide_no_nan(summed, ops.sqrt(ops.sum(ops.square(weights), 1, keepdims=True)))
            case "ragged, reduced":
                ragged = tf.RaggedTensor.from_tensor(ids, padding=0)
                ones = ops.ones_like(ragged, dtype="float32")[..., None]
                summed = ops.sum(ops.take(self.table, ragged, axis=0) * ones, axis=-2)
                return ops.divide_no_nan(summed, ops.sum(ones, axis=-2))
            case "sparse ids":
                sparse = tf.sparse.from_dense(ids)
                sparse.set_shape([None, IDS])
                return ops.take(self.table, sparse, axis=0)
            case "tf.gather, ragged ids":
                return tf.gather(self.table, tf.RaggedTensor.from_tensor(ids)).to_tensor()
            case "tf.gather_nd":
                return tf.gather_nd(self.table, ids[..., None])
            case "tf.map_fn":
                rows = tf.TensorSpec((IDS, WIDTH))
                return tf.map_fn(lambda row: tf.gather(self.table, row), ids, fn_output_signature=rows)
            case "tf.recompute_grad":
                return tf.recompute_grad(lambda ids: ops.take(self.table, ids, axis=0))(ids)
            case "tf.nn.embedding_lookup_sparse":
                return tf.nn.embedding_lookup_sparse(self.table.value, tf.sparse.from_dense(ids), None)
            case "tf.vectorized_map":
                return tf.vectorized_map(lambda row: ops.take(self.table, row, axis=0), ids)
            case "two lookups":
                return ops.take(self.table, ids, axis=0) + ops.take(self.table, ids[:, ::-1], axis=0)
        raise ValueError(self.how)


WAYS = (
    *("ops.take", "ops.take, negative ids", "tf.gather", "tf.gather of TensorFlow's variable"),
    *("ragged", "two lookups", "weighted and reduced", "ragged, reduced"),
)
MIXED = ("ops.take", "tf.gather of TensorFlow's variable", "ragged")
"""Where a table that is cast, a variable that is not, and what is neither could differ."""
READING = (
    *("tf.vectorized_map", "tf.nn.embedding_lookup_sparse", "tf.gather, ragged ids", "tf.gather_nd"),
    *("tf.map_fn", "tf.recompute_grad", "sparse ids"),
)


def uses_of(graph: Any, variable: Any) -> set[str]:
    """The kinds of operations of a graph that use a variable."""
    inner = {id(outer): inner for outer, inner in graph.captures}[id(variable.value.values[0].handle)]
    return {operation.type for operation in inner.consumers()}


def trained_with(strategy: Any, ways: tuple[str, ...], optimizer: str, policy: str) -> dict[str, Any]:
    """Trains a model with a table for each way to look up ids."""
    keras.config.set_dtype_policy(policy)
    with strategy.scope():
        lookups = [Lookup(how) for how in ways]
        inputs = keras.Input((IDS,), dtype="int32")
        each = [keras.layers.Dense(1)(keras.layers.Flatten()(lookup(inputs))) for lookup in lookups]
        model = keras.Model(inputs, keras.layers.Add()(each))
        model.compile(optimizer_of(optimizer), "mse")
    ids, y = batch()
    model.fit(ids, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    for lookup in lookups if strategy.size > 1 else ():
        assert lookup.graphs, "no step was traced"
        for graph in lookup.graphs:
            uses = uses_of(graph, lookup.table)
            assert (uses == {"ResourceGather", "ResourceScatterNdSub"}) == (lookup.how not in READING), (
                f"{lookup.how}: {uses}"
            )
    return weights(model)


def test_lookups_in_fit_read_no_table_and_have_the_numbers_of_plain_keras(pool2: Pool, plain: Pool) -> None:
    assert_same_as_plain_keras(pool2, plain, trained_with, WAYS, "SGD", "float32")


def test_lookups_in_mixed_precision_read_no_table_and_are_close_to_plain_keras(
    pool2: Pool, plain: Pool
) -> None:
    loose = {"rtol": 0.05, "atol": 0.01}
    assert_same_as_plain_keras(pool2, plain, trained_with, MIXED, "SGD", "mixed_bfloat16", **loose)


def test_lookups_that_read_the_table_have_the_slices_of_plain_keras(pool2: Pool, plain: Pool) -> None:
    assert_same_as_plain_keras(pool2, plain, trained_with, READING, "Adagrad", "float32")


def looked_up_by_int16(strategy: Any) -> list[np.ndarray]:
    ids = tf.constant(batch()[0], tf.int16)
    with strategy.scope():
        table = keras.Variable(np.arange(ROWS * WIDTH, dtype="float32").reshape(ROWS, WIDTH))
    return [np.asarray(ops.take(table, ids - 1, axis=0)), np.asarray(tf.gather(table, ids))]


def test_int16_ids_look_rows_up_as_in_plain_keras(pool1: Pool, plain: Pool) -> None:
    assert_same_as_plain_keras(pool1, plain, looked_up_by_int16)


def embedding_model(strategy: Any, optimizer: Any, **compiled: Any) -> keras.Model:
    with strategy.scope():
        inputs = keras.Input((IDS,), dtype="int32")
        x = keras.layers.Embedding(ROWS, WIDTH, mask_zero=True, name="table")(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(x)))
        model.compile(optimizer, "mse", **compiled)
        model.optimizer.build(model.trainable_variables)
    return model


def fitted(strategy: Any, name: str, options: dict[str, Any], compiled: dict[str, Any]) -> dict[str, Any]:
    with strategy.scope():
        optimizer = optimizer_of(name, **options)
    model = embedding_model(strategy, optimizer, **compiled)
    ids, y = batch()
    history = model.fit(ids, y, batch_size=16, epochs=3, shuffle=False, verbose=0).history
    return {"history": history, "weights": weights(model)}


OPTIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "SGD": ("SGD", {}, {}),
    "Adagrad": ("Adagrad", {}, {}),
    "LazyAdam": ("LazyAdam", {}, {}),
    "RowWiseAdagrad": ("RowWiseAdagrad", {}, {}),
    "Adagrad, clipnorm": ("Adagrad", {"clipnorm": 0.1}, {}),
    "Adagrad, accumulation": ("Adagrad", {"gradient_accumulation_steps": 2}, {}),
    "LazyAdam, weight decay": ("LazyAdam", {"weight_decay": 0.01}, {}),
    "RowWiseAdagrad, EMA": ("RowWiseAdagrad", {"use_ema": True, "ema_overwrite_frequency": 3}, {}),
    "Adagrad, steps_per_execution": ("Adagrad", {}, {"steps_per_execution": 3}),
    "SGD, global_clipnorm": ("SGD", {"global_clipnorm": 0.1}, {}),
    "LazyAdam, clipvalue": ("LazyAdam", {"clipvalue": 0.01}, {}),
    "LazyAdam, amsgrad": ("LazyAdam", {"amsgrad": True}, {}),
    "Adam": ("Adam", {}, {}),
    "AdamW, decay, EMA": ("AdamW", {"weight_decay": 0.01, "use_ema": True}, {}),
    "Adam, amsgrad": ("Adam", {"amsgrad": True}, {}),
    "SGD, momentum": ("SGD", {"momentum": 0.9}, {}),
}


IN_LONG = (
    *("Adagrad, steps_per_execution", "SGD, global_clipnorm", "LazyAdam, clipvalue", "SGD, momentum"),
    "Adam, amsgrad",
)
"""What differs from the others in an option that Keras computes, and not an optimizer of rows: tests/long."""
ALSO_ON_ONE = (
    "SGD",
    "Adagrad",
    "Adagrad, clipnorm",
    "LazyAdam",
    "RowWiseAdagrad",
    "Adam",
    "AdamW, decay, EMA",
)


@pytest.mark.parametrize("case", [case for case in OPTIONS if case not in IN_LONG])
def test_an_optimizer_on_a_table_has_the_numbers_of_plain_keras_and_on_one_worker_its_bits(
    case: str, pool1: Pool, pool2: Pool, plain: Pool
) -> None:
    expected, results = in_plain_keras_and_on(pool2, plain, fitted, *OPTIONS[case])
    assert_equal_on_all(results)
    assert_close(results[0], expected, rtol=1e-4, atol=1e-6)
    if case in ALSO_ON_ONE:
        assert_equal_on_all([expected["weights"], pool1.run(fitted, *OPTIONS[case])[0]["weights"]])


BLOCK_ROWS = 16
BORDERS = [0, BLOCK_ROWS - 1, BLOCK_ROWS, 2 * BLOCK_ROWS, 3 * BLOCK_ROWS - 1, ROWS - 1]
TOUCHED = [BORDERS, [7, 7, 16, 7, 49, 16], [], [3], list(range(ROWS)), [48, 49]]
"""The rows of each step: at the borders of blocks, repeated, none, one, all, after the last whole block."""


def adam_in_blocks(
    strategy: Any, name: str, shape: tuple[int, ...], dtype: str, how: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Trains a table by Adam, and tells which operations use it, and whether all was written in place."""
    random, run = np.random.default_rng(1), getattr(strategy, "run", lambda fn, args: fn(*args))
    with strategy.scope():
        table = keras.Variable(random.normal(size=shape), dtype=dtype)
        optimizer = optimizer_of(name, **options)
        optimizer.build([table])
    graphs = []

    def step(ids: tf.Tensor, values: tf.Tensor) -> None:
        def update() -> bool:
            graphs.append(tf.compat.v1.get_default_graph())
            optimizer.apply([tf.IndexedSlices(values, ids, shape)], [table])
            return True

        if how == "loop":
            tf.while_loop(lambda i: i < 2, lambda i: i + tf.cast(update(), tf.int32), [tf.constant(0)])
        elif how == "branch":
            tf.cond(tf.size(ids) < 2, lambda: False, update)
        else:
            update()

    def addresses() -> list[int]:
        every = [table, *optimizer._momentums, *optimizer._velocities]
        return [np.asarray(tf.convert_to_tensor(one)).ctypes.data for one in every]

    specs = [tf.TensorSpec([None], tf.int32), tf.TensorSpec([None, *shape[1:]], dtype)]
    traced = tf.function(lambda ids, values: run(step, args=(ids, values)), input_signature=specs)
    row_bytes, places = int(np.prod(shape[1:])) * tf.as_dtype(dtype).size, []
    with mock.patch.object(rows, "BLOCK_BYTES", BLOCK_ROWS * row_bytes):
        for ids in TOUCHED:
            values = random.normal(size=(len(ids), *shape[1:]))
            traced(tf.constant(ids, tf.int32), tf.constant(values, dtype))
            places.append(addresses())
    if not isinstance(strategy, PlainKeras):
        has_blocks = "While" in uses_of(graphs[-1], table)
        assert has_blocks == (row_bytes >= 32)
        # A copy would be another buffer, until the next one; the initial value may be in use elsewhere.
        assert not has_blocks or all(place == places[0] for place in places), places
    return {"values": [np.asarray(v.numpy(), "float64") for v in (table, *optimizer.variables)]}


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "how", "options"),
    [
        ("Adam", (ROWS, 8), "float32", "", {}),
        ("Adam", (ROWS, 5, 3), "float32", "", {}),
        ("Adam", (ROWS, 33), "bfloat16", "", {}),
        ("Adam", (ROWS, 16), "float16", "", {"epsilon": 1e-3}),
        ("Adam", (ROWS, 8), "float64", "loop", {}),
        ("Adam", (ROWS, 9), "float32", "branch", {"clipnorm": 1.0}),
        ("AdamW", (ROWS, 8), "float32", "", {"weight_decay": 0.01, "use_ema": True}),
        ("Adam", (ROWS, 8), "float32", "", {"beta_1": 0.0, "beta_2": 1.0}),
        ("Adam", (ROWS, 2), "float32", "", {"beta_1": 0.0, "beta_2": 0.0}),
        ("Adam", (ROWS, 2), "float32", "", {}),
        ("Adam", (ROWS,), "float32", "", {}),
    ],
)
def test_adam_in_blocks_has_the_bits_of_plain_keras_and_copies_no_table(
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    how: str,
    options: dict[str, Any],
    pool1: Pool,
    plain: Pool,
) -> None:
    arguments = name, shape, dtype, how, options
    expected, results = in_plain_keras_and_on(pool1, plain, adam_in_blocks, *arguments)
    assert_equal_on_all([expected, *results])


def touched_and_others(strategy: Any, name: str) -> dict[str, Any]:
    with strategy.scope():
        optimizer = optimizer_of(name)
    model = embedding_model(strategy, optimizer)
    table = model.get_layer("table").embeddings
    ids, y = batch(16)
    model.fit(ids, y, batch_size=16, verbose=0)
    first = {"table": table.numpy(), "optimizer": [v.numpy() for v in optimizer.variables]}
    few = np.full_like(ids, 7)
    model.fit(few, y, batch_size=16, verbose=0)
    second = {"table": table.numpy(), "optimizer": [v.numpy() for v in optimizer.variables]}
    return {"first": first, "second": second}


@pytest.mark.parametrize("name", ["LazyAdam", "RowWiseAdagrad"])
def test_rows_that_a_step_does_not_look_up_keep_their_bits(name: str, pool2: Pool) -> None:
    found = pool2.run(touched_and_others, name)[0]
    for before, after in zip(
        [found["first"]["table"], *found["first"]["optimizer"]],
        [found["second"]["table"], *found["second"]["optimizer"]],
        strict=True,
    ):
        if before.shape[:1] == (ROWS,):
            changed = np.flatnonzero((before != after).reshape(ROWS, -1).any(1))
            assert changed.tolist() == [7]


class Stepping(keras.Model):
    """A model with a custom `train_step`, which may do more with its gradients than apply them."""

    how = "custom step"

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        logs = {"loss": loss}
        match self.how:
            case "custom step, norm in the logs":
                logs["norm"] = tf.linalg.global_norm(gradients)
            case "custom step, clipped":
                gradients, _ = tf.clip_by_global_norm(gradients, 0.01)
            case "custom step, applied in a branch":
                tf.cond(loss > -1.0, lambda: self.applied(gradients), lambda: False)
                return logs
        self.applied(gradients)
        return logs

    def applied(self, gradients: list[Any]) -> bool:
        self.optimizer.apply(gradients, self.trainable_variables)
        return True


def train(strategy: Any, how: str, name: str, ids: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    """Trains a table in `fit`, with a stock step or a custom one, or in a custom training loop."""
    with strategy.scope():
        optimizer = optimizer_of(name)
        model = embedding_model(strategy, optimizer)
        if how.startswith("custom step"):
            model = Stepping(model.inputs, model.outputs)
            model.how = how
            model.compile(optimizer, "mse")

    def step(x: Any, target: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(x, training=True) - target) ** 2) / 16
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    if not how.startswith("loop"):
        history = model.fit(ids, y, batch_size=16, epochs=2, shuffle=False, verbose=0).history
        return {"history": history, "weights": weights(model)}
    run, places = getattr(strategy, "run", lambda fn, args: fn(*args)), (strategy.rank, strategy.size)
    if how == "loop without run":
        run, places = (lambda fn, args: fn(*args)), (0, 1)
    stepped = tf.function(lambda x, target: run(step, args=(x, target)))
    for start in range(0, len(ids), 16):
        own = slice(start + places[0], start + 16, places[1])
        stepped(tf.constant(ids[own]), tf.constant(y[own]))
    return {"weights": weights(model)}


@pytest.mark.parametrize("how", ["fit", "custom step"])
def test_a_worker_without_rows_touches_no_row_of_a_table(how: str, pool2: Pool, plain: Pool) -> None:
    # The last batch has one row: the other worker computes a row of zeros, whose ids are 0.
    assert_same_as_plain_keras(pool2, plain, train, how, "LazyAdam", *batch(33))


def train_and_watch(
    strategy: Any, how: str, name: str, *data: np.ndarray
) -> tuple[dict[str, Any], list[list[int]]]:
    """As `train`, and the lengths of all tensors that this worker sends."""
    exchange = strategy.extended.shared.exchange
    combine, lengths = exchange.combine, []

    def watched(plan: Any, weight: float, arrays: list[Any]) -> Any:
        lengths.append([len(array) for array in arrays if array.ndim])
        return combine(plan, weight, arrays)

    exchange.combine = watched
    try:
        return train(strategy, how, name, *data), lengths
    finally:
        exchange.combine = combine


@pytest.mark.parametrize(
    ("how", "name", "once"),
    [
        *((how, "LazyAdam", True) for how in ("fit", "custom step", "loop", "loop without run")),
        *((how, "SGD", True) for how in ("fit", "custom step", "loop")),
        *((how, "Adagrad", False) for how in ("fit", "custom step", "loop")),
        ("custom step", "RowWiseAdagrad", True),
        *((f"custom step, {what}", "SGD", False) for what in ("norm in the logs", "clipped")),
        ("custom step, applied in a branch", "SGD", False),
    ],
)
def test_training_on_a_table_has_the_numbers_of_plain_keras_and_sends_each_row_once_or_as_single_slices(
    how: str, name: str, once: bool, pool2: Pool, plain: Pool
) -> None:
    ids, y = batch()
    ids = np.concatenate([np.full((48, 1), 4), 5 + ids[:, 1:] % 10], axis=1)  # 11 different ones on a worker
    expected, results = in_plain_keras_and_on(
        pool2, plain, train, how, name, ids, y, eagerly=True, on_workers=train_and_watch
    )
    assert_equal_on_all([trained for trained, _ in results])
    assert_close(results[0][0], expected, rtol=1e-4, atol=1e-6)
    slices = 16 * IDS if how == "loop without run" else 8 * IDS  # there, each worker computes the batch
    for _, lengths in results:
        wanted, other = (11, slices) if once else (slices, 11)
        assert sum(one.count(wanted) for one in lengths) >= 2, lengths  # the values and their indices
        assert not any(other in one for one in lengths), lengths


def decisions_that_outlive_their_model(strategy: Any) -> tuple[int, int]:
    """How many variables that a custom step reads there are with its model, and without."""
    made, make = [], rows.ResourceVariable

    def noting(*args: Any, **kwargs: Any) -> Any:
        variable = make(*args, **kwargs)
        made.append(weakref.ref(variable))
        return variable

    with mock.patch.object(rows, "ResourceVariable", noting):
        train(strategy, "custom step", "SGD", *batch(16))
    keras.backend.clear_session()
    gc.collect()
    return len(made), sum(one() is not None for one in made)


def test_what_a_custom_step_decides_goes_with_its_model(pool2: Pool) -> None:
    for made, left in pool2.run(decisions_that_outlive_their_model):
        assert made
        assert not left


def uses_of_tables(strategy: Any, name: str, options: dict[str, Any]) -> set[str]:
    """The kinds of operations of a step that use a table, or a variable of the optimizer of the same size."""
    with strategy.scope():
        optimizer = optimizer_of(name, **options)
    model = embedding_model(strategy, optimizer)
    ids, y = batch(16)
    graphs, update_step = [], optimizer.update_step

    def noted(*args: Any) -> None:
        graphs.append(tf.compat.v1.get_default_graph())
        update_step(*args)

    optimizer.update_step = noted
    model.fit(ids, y, batch_size=16, verbose=0)
    tables = [v for v in (*model.weights, *optimizer.variables) if tuple(v.shape) == (ROWS, WIDTH)]
    return set().union(*(uses_of(graphs[0], table) for table in tables))


@pytest.mark.parametrize(
    ("name", "options", "writes"),
    [
        ("SGD", {"clipnorm": 1.0}, {"ResourceScatterNdSub"}),
        ("Adagrad", {}, {"ResourceScatterNdAdd", "ResourceScatterNdSub"}),
    ],
)
def test_the_slices_of_a_repeated_row_are_added_in_one_order_by_all_workers(
    name: str, options: dict[str, Any], writes: set[str], pool2: Pool
) -> None:
    # `ResourceScatterAdd` adds more than 1024 slices in several threads, in any order. The workers of the
    # pool have one thread.
    for found in pool2.run(uses_of_tables, name, options):
        assert found == {"ResourceGather", *writes}


def saved_and_loaded(_: None, path: str, name: str) -> tuple[dict[str, Any], dict[str, Any], str]:
    class Alone:
        scope = staticmethod(tf.init_scope)

    model = embedding_model(Alone, optimizer_of(name))
    ids, y = batch()
    model.fit(ids, y, batch_size=16, verbose=0)
    model.save(path)
    again = keras.models.load_model(path)
    for one in (model, again):
        one.fit(ids, y, batch_size=16, shuffle=False, verbose=0)
    return weights(model), weights(again), type(again.optimizer).__name__


@pytest.mark.parametrize("name", ["LazyAdam", "RowWiseAdagrad"])
def test_a_model_with_an_optimizer_of_rows_is_saved_and_loaded_in_plain_keras(
    name: str, plain: Pool, tmp_path: Path
) -> None:
    before, after, kind = plain.run(saved_and_loaded, str(tmp_path / "model.keras"), name)[0]
    assert kind == name
    for first, second in zip(before.values(), after.values(), strict=True):
        np.testing.assert_array_equal(first, second)


def test_a_process_that_has_made_no_optimizer_of_rows_loads_a_model_that_has_one(
    plain: Pool, tmp_path: Path
) -> None:
    plain.run(saved_and_loaded, str(tmp_path / "model.keras"), "LazyAdam")
    script = """import keras, replicast; replicast.Strategy()
print(type(keras.models.load_model("model.keras").optimizer).__name__)"""
    printed = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, stdout=subprocess.PIPE)
    assert printed.stdout.split() == [b"LazyAdam"]


def by_hand(name: str) -> tuple[np.ndarray, np.ndarray]:
    """What an optimizer of rows and its formula in numpy make of two steps on one table."""
    table = keras.Variable(np.ones((4, 2), "float32"))
    optimizer = optimizer_of(name)
    optimizer.build([table])
    expected, m, v, rows = np.ones((4, 2)), np.zeros((4, 2)), np.zeros((4, 2)), np.zeros(4)
    for step, (ids, values) in enumerate([([1, 3, 1], [[1, 2], [3, 4], [5, 6]]), ([3], [[-1, 1]])], 1):
        slices = tf.IndexedSlices(tf.constant(values, tf.float32), tf.constant(ids), tf.constant([4, 2]))
        optimizer.apply([slices])
        gradient = np.zeros((4, 2))
        np.add.at(gradient, ids, values)
        touched = sorted(set(ids))
        g = gradient[touched]
        if name == "LazyAdam":
            m[touched] += (g - m[touched]) * 0.1
            v[touched] += (g**2 - v[touched]) * 0.001
            rate = 0.05 * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
            expected[touched] -= rate * m[touched] / (np.sqrt(v[touched]) + 1e-7)
        else:
            rows[touched] += (g**2).mean(1)
            expected[touched] -= 0.05 * g / (np.sqrt(rows[touched])[:, None] + 1e-8)
    return table.numpy(), expected


@pytest.mark.parametrize("name", ["LazyAdam", "RowWiseAdagrad"])
def test_an_optimizer_of_rows_follows_its_formula(name: str) -> None:
    found, expected = by_hand(name)
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_row_wise_adagrad_survives_small_gradients_in_half_precision(dtype: str) -> None:
    table = keras.Variable(np.ones((3, 2)), dtype=dtype)
    optimizer = optimizer_of("RowWiseAdagrad")
    optimizer.build([table])
    values = tf.cast(tf.constant([[0.0, 0.0], [1e-5, 1e-5]]), dtype)  # a masked id has a gradient of 0
    optimizer.apply([tf.IndexedSlices(values, tf.constant([0, 1]), tf.constant([3, 2]))])
    np.testing.assert_allclose(table.numpy().astype("float32")[:, 0], [1, 0.95, 1], rtol=4e-3)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_the_many_gradients_of_one_row_are_added_up_in_float32(dtype: str) -> None:
    many = tf.IndexedSlices(tf.cast(tf.fill([4000, 2], 0.01), dtype), tf.zeros(4000, tf.int32), [3, 2])
    states = {}
    for name in ("LazyAdam", "RowWiseAdagrad"):
        table = keras.Variable(np.zeros((3, 2)), dtype=dtype)
        optimizer = optimizer_of(name)
        optimizer.build([table])
        optimizer.apply([many])
        states[name] = float(np.ravel(optimizer.variables[2].numpy())[0])
    assert states == pytest.approx({"LazyAdam": 40 * 0.1, "RowWiseAdagrad": 40**2}, rel=0.01)


def half_precision(strategy: Any, name: str) -> list[np.ndarray]:
    """One step in which every id of every row is the same."""
    keras.config.set_dtype_policy("bfloat16")
    with strategy.scope():
        optimizer = optimizer_of(name)
    model = embedding_model(strategy, optimizer)
    ids, y = np.full((4096, IDS), 7, "int32"), np.ones((4096, 1), "float32")
    model.get_layer("table").embeddings.assign(np.zeros((ROWS, WIDTH)))
    model.layers[-1].kernel.assign(np.ones(model.layers[-1].kernel.shape))
    model.fit(ids, y, batch_size=4096, shuffle=False, verbose=0)
    table = (ROWS, WIDTH), (ROWS,)
    tables = [v for v in (*model.weights, *optimizer.variables) if tuple(v.shape) in table]
    return [np.asarray(v.numpy(), "float32")[7] for v in tables]


@pytest.mark.parametrize("name", ["SGD", "LazyAdam", "RowWiseAdagrad"])
def test_a_row_that_is_looked_up_often_moves_in_half_precision(name: str, pool2: Pool) -> None:
    # The gradient of the loss is -2; each of the 6 ids of a row of the batch adds it, by a kernel of 1.
    gradient = -2.0 * IDS
    expected = {
        "SGD": [-0.05 * gradient],
        "LazyAdam": [0.05, 0.1 * gradient, 0.001 * gradient**2],
        "RowWiseAdagrad": [0.05, gradient**2],
    }[name]
    for found in pool2.run(half_precision, name):
        for value, wanted in zip(found, expected, strict=True):
            np.testing.assert_allclose(value, np.full_like(value, wanted), rtol=0.02)


@pytest.mark.parametrize(
    ("options", "problem"), [({"epsilon": 0.0}, "epsilon"), ({"initial_accumulator_value": -1.0}, "negative")]
)
def test_impossible_options_are_refused(options: dict[str, float], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        replicast.optimizers.RowWiseAdagrad(**options)


TABLE_ROWS = 5 * SLICE_BYTES // (4 * 64) // 2  # two and a half slices


def flipped(strategy: Any, run_dir: str, policy: str) -> dict[str, Any]:
    """One bit of one row that no step touches changes on worker 1, in the middle of a training."""
    with strategy.scope():
        inputs = keras.Input((IDS,), dtype="int32")
        x = keras.layers.Embedding(TABLE_ROWS, 64, name="table")(inputs)
        model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Flatten()(x)))
        model.compile(keras.optimizers.SGD(0.05), "mse")
    replicas = replicast.Replicas(model, run_dir=run_dir)
    table = model.get_layer("table").embeddings.value.values[0]

    class Flip(keras.callbacks.Callback):
        def on_train_batch_end(self, step: int, logs: Any = None) -> None:
            if step == 4 and strategy.rank == 1:
                row = table.sparse_read([TABLE_ROWS - 1]).numpy()
                row.view(np.int32)[0, 3] ^= 1
                table.scatter_update(tf.IndexedSlices(tf.constant(row), tf.constant([TABLE_ROWS - 1])))

    ids = np.random.default_rng(0).integers(0, 100, (160, IDS)).astype("int32")
    callbacks = [Flip(), replicas.callback(audit_every=1, on_divergence=policy)]
    model.fit(ids, np.zeros((160, 1), "float32"), batch_size=16, verbose=0, callbacks=callbacks)
    report = replicas.audit(on_divergence="warn")
    reports = list(replicas.audits)
    replicas.close()
    return {
        "reports": [(one.step, one.equal, one.outcome, one.since, str(one), one.partly) for one in reports],
        "places": [str(d.differing[1]) for one in reports for d in one.differences],
        "names": [d.variable for one in reports for d in one.differences],
        "equal": report.equal,
        "partly": report.partly,
        "digest": table.sparse_read([TABLE_ROWS - 1]).numpy().tobytes(),
    }


def test_a_flipped_bit_in_a_row_that_nobody_touches_is_found_in_its_turn_and_healed(
    pool2: Pool, tmp_path: Path
) -> None:
    found = pool2.run(flipped, str(tmp_path), "heal")
    first = found[0]
    assert first["names"] == ["table/embeddings"]
    assert "1 of" in first["places"][0]
    assert f"[{TABLE_ROWS - 1}, 3]" in first["places"][0]
    assert first["equal"]
    assert not first["partly"], "an audit that was asked for compares everything"
    assert first["digest"] == found[1]["digest"]
    healed = [one for one in first["reports"] if one[2] == "healed"]
    assert len(healed) == 1
    assert 5 <= healed[0][0] <= 9  # three slices, and the boundary at which all stop
    assert "or before" in healed[0][3]  # nobody knows since when: the table was never compared as a whole
    assert not first["reports"][-2][5], "at its end, fit compares everything"
    in_turn = [one for one in first["reports"] if one[5]]
    assert in_turn, "no audit compared a slice"
    assert {rows.rows for one in in_turn for rows in one[5]} == {TABLE_ROWS}
    assert {rows.audits for one in in_turn for rows in one[5]} == {3}
    assert "some rows were compared" in in_turn[0][4]


def changed_by_rows(strategy: Any, run_dir: str) -> dict[str, Any]:
    """Rows are added, assigned with their moments, reverted, read and saved; the table is trained by rows."""
    with strategy.scope():
        optimizer = optimizer_of("LazyAdam")
    model = embedding_model(strategy, optimizer)
    ids, y = batch()
    model.fit(ids[:16], y[:16], batch_size=16, verbose=0)  # now the table is known to be written by rows
    replicas = replicast.Replicas(model, run_dir=run_dir)
    table, read = model.get_layer("table").embeddings, []
    before = table.numpy()
    stock = TensorFlowState._value
    rows = np.full((2, WIDTH), 0.5, "float32")
    added = replicast.Update().add_rows("table/embeddings", [3, 8], rows)
    assigned = replicast.Update(reset_slots=True).assign_rows("table/embeddings", [5, 6], rows)

    def noted(state: Any, name: str, *place: int) -> Any:
        read.append(name)
        return stock(state, name, *place)

    def act(step: int) -> None:
        if replicas.rank == 1 and step in (2, 4):
            replicas.propose(added if step == 2 else assigned)

    def undo(step: int) -> None:
        if replicas.rank == 1 and step == 2:
            replicas.revert(2)

    with mock.patch.object(TensorFlowState, "_value", noted):
        quietly(replicas, act, lambda: len(replicas.history) == 2)
        quietly(replicas, undo, lambda: len(replicas.history) == 3)
        state = TensorFlowState(*Source(model).variables())
        pulled = state.read_rows("table/embeddings", np.array([3, 5, 6]))
        state.digests(["table/embeddings"])
        state.snapshot(saved := {})
    replicas.close()
    np.testing.assert_array_equal(saved["table/embeddings"], table.numpy())
    return {"read": read, "before": before, "after": table.numpy(), "pulled": pulled}


def reset_by_rows(strategy: Any, run_dir: str) -> tuple[np.ndarray, np.ndarray]:
    """The accumulators before and after an update of two rows that resets their slots."""
    with strategy.scope():
        optimizer = optimizer_of("RowWiseAdagrad", initial_accumulator_value=0.5)
    model = embedding_model(strategy, optimizer)
    ids, y = batch()
    model.fit(ids, y, batch_size=16, verbose=0)
    before = optimizer._accumulators[0].numpy()
    replicas = replicast.Replicas(model, run_dir=run_dir)
    rows = np.zeros((2, WIDTH), "float32")
    update = replicast.Update(reset_slots=True).assign_rows("table/embeddings", [3, 8], rows)

    def act(step: int) -> None:
        if replicas.rank == 1 and step == 2:
            replicas.propose(update)

    quietly(replicas, act, lambda: len(replicas.history) == 1)
    replicas.close()
    return before, optimizer._accumulators[0].numpy()


def test_one_accumulator_for_each_row_is_reset_for_the_changed_rows_only(pool2: Pool, tmp_path: Path) -> None:
    for before, after in pool2.run(reset_by_rows, str(tmp_path)):
        before[[3, 8]] = 0.5
        np.testing.assert_array_equal(after, before)


def test_updates_of_rows_digests_and_checkpoints_read_no_table_as_a_whole(
    pool2: Pool, tmp_path: Path
) -> None:
    for found in pool2.run(changed_by_rows, str(tmp_path)):
        expected = found["before"]
        expected[[3, 8]] += 0.5
        np.testing.assert_array_equal(found["after"], expected)
        assert not [name for name in found["read"] if "table" in name], found["read"]
        assert found["read"], "nothing was noted: other variables are read as a whole"
        np.testing.assert_array_equal(found["pulled"], expected[[3, 5, 6]])


def created_in_parts(strategy: Any, dtype: str) -> np.ndarray:
    """A table whose initial value, another one on each worker, goes to the others in parts."""
    own = np.random.default_rng(strategy.rank).normal(size=(ROWS, WIDTH)).astype("float32")
    # TensorFlow's own limit is 2 GiB: a table of 10,000,000 × 64 could not be created.
    with mock.patch.object(collectives, "BROADCAST_BYTES", 100), strategy.scope():
        table = keras.Variable(tf.cast(own, dtype), dtype=dtype)
    reads = [np.asarray(tf.convert_to_tensor(table)) for _ in range(2)]
    assert np.shares_memory(*reads), "every read copies the table"
    return np.asarray(table.numpy(), "float32")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_initial_value_of_a_table_beyond_one_transfer_is_that_of_worker_0(
    dtype: str, pool2: Pool
) -> None:
    expected = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype("float32")
    for found in pool2.run(created_in_parts, dtype):
        np.testing.assert_array_equal(found, np.asarray(tf.cast(tf.cast(expected, dtype), "float32")))


DRAWN = {
    "uniform": keras.initializers.RandomUniform,
    "normal": keras.initializers.RandomNormal,
    "truncated": keras.initializers.TruncatedNormal,
    "glorot": keras.initializers.GlorotUniform,
    "he": keras.initializers.HeNormal,
    "constant": lambda seed: keras.initializers.Constant(seed / 10),
}


class Halved(keras.initializers.RandomNormal):  # type: ignore[misc]  # Keras has no types
    """Computes on what it has drawn: it is drawn as a whole."""

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        return super().__call__(shape, dtype=dtype)[::-1] / 2


WHOLE = {
    "halved": Halved,
    "array": lambda seed: keras.initializers.Constant(np.random.default_rng(seed).random((ROWS, WIDTH))),
}


def drawn_in_parts(strategy: Any, of: str) -> tuple[np.ndarray, list[int]]:
    """A table with a random initial value, and how many rows were drawn at a time."""
    initializer, counts = (DRAWN | WHOLE)[of](seed=7 + strategy.rank), list[int]()
    draw = rows.InitialRows.rows

    def noting(self: rows.InitialRows, part: slice) -> tf.Tensor:
        drawn = draw(self, part)
        counts.append(drawn.shape[0])
        return drawn

    with (
        mock.patch.object(collectives, "BROADCAST_BYTES", 400),
        mock.patch.object(rows.InitialRows, "rows", noting),
        strategy.scope(),
    ):
        table = keras.layers.Embedding(ROWS, WIDTH, embeddings_initializer=initializer)
        table.build(None)
    return np.asarray(table.embeddings.numpy()), counts


def test_rows_that_two_threads_draw_at_the_same_time_are_those_of_each_and_later_draws_are_as_before() -> (
    None
):
    meet, found = threading.Barrier(2), dict[int, np.ndarray]()

    class Meets(keras.initializers.RandomUniform):  # type: ignore[misc]  # Keras has no types
        def __call__(self, shape: Any, dtype: Any = None) -> Any:
            with contextlib.suppress(threading.BrokenBarrierError):
                if meet.wait(0.2):
                    time.sleep(0.2)  # whoever came last also ends last
            return super().__call__(shape, dtype=dtype)

    def draw(seed: int) -> None:
        found[seed] = rows.InitialRows(Meets(seed=seed), (ROWS, WIDTH)).rows(slice(8, ROWS)).numpy()

    stock = rows.random_ops.stateless_random_uniform_v2
    threads = [threading.Thread(target=draw, args=(seed,)) for seed in (1, 2)]
    with mock.patch.object(rows.random_ops, "stateless_random_uniform_v2", stock):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert rows.random_ops.stateless_random_uniform_v2 is stock
    for seed in (1, 2):
        expected = keras.initializers.RandomUniform(seed=seed)((ROWS, WIDTH)).numpy()
        np.testing.assert_array_equal(found[seed], expected[8:])


def sent_in_parts(strategy: Any) -> list[list[int]]:
    """The lengths of the parts of tables with rows as large as a transfer."""
    found, stock = [], collectives.write_rows

    def noting(handles: Any, indices: tf.Tensor, values: Any) -> None:
        parts.append(len(indices))
        stock(handles, indices, values)

    uniform = keras.initializers.RandomUniform(seed=1)
    for initializer, width in [
        (uniform, 100),
        (uniform, 101),
        (lambda *args, **kw: uniform(*args, **kw), 101),
    ]:
        parts = list[int]()
        with (
            mock.patch.object(collectives, "BROADCAST_BYTES", 400),
            mock.patch.object(collectives, "write_rows", noting),
            strategy.scope(),
        ):
            layer = keras.layers.Embedding(10, width, embeddings_initializer=initializer)
            layer.build(None)
        np.testing.assert_array_equal(layer.embeddings.numpy(), uniform((10, width)).numpy())
        found.append(parts)
    return found


def test_the_parts_of_a_table_are_single_rows_if_these_are_large(pool2: Pool) -> None:
    assert pool2.run(sent_in_parts)[1] == [[1] * 10, [4, 4, 2], [1] * 10]


@pytest.mark.parametrize("of", [*DRAWN, *WHOLE])
def test_an_initial_value_that_is_drawn_part_by_part_has_the_bits_of_keras(of: str, pool2: Pool) -> None:
    expected = (DRAWN | WHOLE)[of](seed=7)((ROWS, WIDTH), dtype="float32").numpy()
    found = pool2.run(drawn_in_parts, of)
    for table, _ in found:
        np.testing.assert_array_equal(table, expected)
    assert len(found[0][1]) > 1 if of in DRAWN else found[0][1] == []
    assert found[1][1] == [], "worker 1 draws nothing"
