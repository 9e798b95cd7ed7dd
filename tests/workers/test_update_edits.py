"""Edits of real variables: the bits that `update/edits.py` defines, and the names of variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

from replicast.training import Source, TensorFlowState
from replicast.training.tensorflow_state import as_tensor
from replicast.training.variables import component
from replicast.update.edits import DTYPES, FLOAT_DTYPES, Edit, apply_edit
from replicast.update.schema import Schema, planned
from replicast.update.update import Update
from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all, digest
from tests.pool.scripts import equal_on_all
from tests.workers.recipes import FEATURES, arrays, perceptron
from tests.workers.test_updates import adam, quietly, replicas_of, train

ROWS, COLUMNS = 37, 11
"""No multiple of what a processor computes at a time."""


class Everything(keras.layers.Layer):
    """A variable of each dtype."""

    def build(self, shape: Any) -> None:
        for dtype in sorted(DTYPES):
            self.add_weight(
                shape=(ROWS, COLUMNS), dtype=dtype, name=dtype, trainable=False, initializer="zeros"
            )

    def call(self, x: Any) -> Any:
        return x


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def values_of(name: str, seed: int, rows: int = ROWS, columns: int = COLUMNS) -> np.ndarray:
    """Numbers of all sizes: denormal ones, both zeros, the smallest and the largest among them."""
    random, dtype = np.random.default_rng(seed), numpy_dtype(name)
    if name not in FLOAT_DTYPES:
        bits = random.integers(0, 256, (rows, columns * dtype.itemsize), np.uint8)
        return (bits > 127) if name == "bool" else bits.view(dtype)
    info = ml_dtypes.finfo(dtype)
    exponents = random.integers(int(info.minexp) - int(info.nmant), int(info.maxexp) // 2, (rows, columns))
    made = np.ldexp(random.uniform(-1, 1, (rows, columns)), exponents).astype(dtype)
    special = [
        0.0,
        -0.0,
        info.tiny,
        -info.tiny,
        info.smallest_subnormal,
        -info.smallest_subnormal,
        info.max,
        1.0,
    ]
    made.reshape(-1)[: 2 * len(special)] = random.permutation(np.array(special * 2, dtype))
    return made


def aligned(array: np.ndarray, offset: int = 0) -> np.ndarray:
    """A copy that TensorFlow can take over."""
    memory = np.zeros(array.nbytes + 128, np.uint8)
    start = -memory.ctypes.data % 64 + offset
    copy = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def unaligned(array: np.ndarray) -> np.ndarray:
    """A copy that TensorFlow has to copy."""
    return aligned(array, max(8, array.dtype.itemsize))


def updates_of(name: str, place: Callable[[np.ndarray], np.ndarray], seed: int) -> Iterator[Update]:
    """One update for each operation that a variable of this dtype takes."""
    rows = np.random.default_rng(seed).permutation(ROWS)[:9]

    def values(offset: int, *shape: int) -> np.ndarray:
        array = place(values_of(name, seed + offset, *shape))
        array.flags.writeable = False  # kept as they are, without a copy
        return array

    yield Update().assign(name, values(1))
    yield Update().assign_rows(name, rows, values(2, 9))
    if name == "bool":
        return
    yield Update().add(name, values(3))
    yield Update().add_rows(name, rows, values(4, 9))
    yield Update().add_low_rank(name, values(5, ROWS, 3), values(6, 3, COLUMNS))
    if name in FLOAT_DTYPES:
        yield Update().scale(name, 0.7)
        yield Update().scale(name, -0.0)
        yield Update().blend(name, values(7), 0.3)


def state_of_everything(strategy: Any) -> TensorFlowState:
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), Everything(name="all")])
        model.compile("sgd", "mse")
    return TensorFlowState(*Source(model).variables())


def edits_of(state: TensorFlowState, place: Callable[[np.ndarray], np.ndarray]) -> Iterator[tuple[str, Edit]]:
    """Every edit of every dtype; its variable has values of all sizes."""
    for dtype in sorted(DTYPES):
        for seed, update in enumerate(updates_of(dtype, place, 100)):
            (edit,) = planned(Update(allow_nonfinite=True).replaced(update.edits), state.schema).edits
            for array in edit.arrays.values():
                array.flags.writeable = True  # as what comes out of a transport
            state._components[edit.variable][0].assign(tf.constant(values_of(dtype, seed)))
            yield dtype, edit


@equal_on_all("pool1")
def test_every_edit_of_a_real_variable_gives_the_bits_of_its_definition(strategy: Any) -> None:
    state, compared = state_of_everything(strategy), 0
    for place in (aligned, unaligned):
        for dtype, edit in edits_of(state, place):
            name = edit.variable
            expected = apply_edit(edit, state.read([name])[name])
            state.apply([edit])
            found = state.read([name])[name]
            assert found.tobytes() == expected.tobytes(), (dtype, edit.operation, place.__name__)
            compared += 1
    assert compared == 2 * (4 * 8 + 8 * 5 + 2)


def is_taken_over(array: np.ndarray) -> bool:
    """Whether TensorFlow has taken the memory over."""
    return bool(np.asarray(memoryview(as_tensor(array))).ctypes.data == array.ctypes.data)


def test_memory_is_taken_over_where_tensorflow_can_use_it_and_copied_elsewhere() -> None:
    for dtype in ("float32", "float64", "int32", "int64", "uint32"):
        assert is_taken_over(aligned(values_of(dtype, 1)))
        assert not is_taken_over(unaligned(values_of(dtype, 1)))


@equal_on_all("pool3")
def test_what_was_assigned_belongs_to_each_worker_alone_and_training_continues(
    strategy: Any,
) -> dict[str, Any]:
    with strategy.scope():
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(4096), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.01), "mse")
    value = np.random.default_rng(5).standard_normal((FEATURES, 4096)).astype(np.float32)
    kernel = component(model.layers[0].kernel)
    with replicas_of(model) as replicas:
        if strategy.rank == 1:
            replicas.propose(Update().assign("dense/kernel", value))
        quietly(replicas, lambda step: None, lambda: bool(replicas.history))
        kernel.assign_add(tf.fill(kernel.shape, float(strategy.rank)))  # in place, on this worker only
        np.testing.assert_array_equal(kernel.numpy(), value + np.float32(strategy.rank))
        quietly(replicas, lambda step: None, lambda: True)  # all have changed theirs
        np.testing.assert_array_equal(kernel.numpy(), value + np.float32(strategy.rank))
        replicas.sync(source=2)
        np.testing.assert_array_equal(kernel.numpy(), value + np.float32(2))
        x, y = arrays(30)
        model.fit(x, y.astype("float32"), batch_size=15, verbose=0, callbacks=[replicas.callback()])
        assert not np.array_equal(kernel.numpy(), value + np.float32(2)), "nothing was trained"
    return digest(model)


@equal_on_all("pool1")
def test_values_that_are_held_for_a_revert_stay_what_they_were_whatever_changes_it(strategy: Any) -> None:
    state, rows = state_of_everything(strategy), np.array([3, 0, 30])
    for dtype, edit in edits_of(state, aligned):
        name = edit.variable
        before = state.read([name])[name]
        held = state.hold([name], {name: rows})
        state.apply([edit])
        if dtype != "bool":
            variable = state._components[name][0]
            variable.assign_add(tf.cast(tf.ones(variable.shape), variable.dtype))  # as training does
        whole, parts = held()
        assert whole[name].tobytes() == before.tobytes(), (dtype, edit.operation)
        assert parts[name].tobytes() == before[rows].tobytes(), (dtype, edit.operation)
        assert state.read_rows(name, rows).tobytes() == state.read([name])[name][rows].tobytes()


# Names, and what is reset with a weight.


def schema_of(strategy: Any, make: Callable[[], keras.Model]) -> Schema:
    with strategy.scope():
        model = make()
    with replicas_of(model) as replicas:
        return replicas.schema


def dense_model(optimizer: Any) -> keras.Model:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, name="only")])
    model.compile(optimizer, "mse")
    return model


def nested() -> keras.Model:
    block = keras.Sequential([keras.Input((3,)), keras.layers.Dense(3, name="same")], name="block")
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(3, name="same")(block(inputs)), name="outer")
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


@equal_on_all("pool1")
def test_a_loss_scale_has_names_of_its_own_beside_the_inner_optimizer(strategy: Any) -> None:
    scaled = keras.optimizers.LossScaleOptimizer
    found = schema_of(strategy, lambda: dense_model(scaled(keras.optimizers.Adam())))
    assert found.resolve("optimizer/learning_rate").kind == "optimizer"
    assert found.resolve("loss_scale/dynamic_scale").dtype == "float32"
    assert [slot for slot, _ in found.resolve("only/kernel").slots] == [
        "optimizer/sequential_only_kernel_momentum",
        "optimizer/sequential_only_kernel_velocity",
    ]


@equal_on_all("pool1")
def test_variables_that_keras_gives_one_name_are_numbered(strategy: Any) -> None:
    made = schema_of(strategy, lambda: dense_model(keras.optimizers.Adafactor()))
    found = [variable.name for variable in made]
    assert len(set(found)) == len(found)
    assert any(name.endswith("#2") for name in found)


@equal_on_all("pool1")
def test_layers_of_one_name_in_nested_models_are_told_apart_by_their_paths(strategy: Any) -> None:
    found = schema_of(strategy, nested)
    inner, outer = found.resolve("block/same/kernel"), found.resolve("same/kernel")
    assert (inner.name, outer.name) == ("block/same/kernel", "same/kernel")
    assert len(inner.slots) == len(outer.slots) == 1
    assert inner.slots != outer.slots


def reset(strategy: Any, make: Callable[[], Any]) -> dict[str, Any]:
    """The optimizer's variables of both layers before and after an update of the first with reset_slots."""
    model = perceptron(strategy, make)
    with replicas_of(model) as replicas:
        train(replicas, "fit", lambda step: None, lambda: True)
        slots = [variable.name for variable in replicas.schema if variable.kind == "optimizer"]
        before = replicas.read(slots)
        if strategy.rank == 0:
            replicas.propose(Update(id="keeps").scale("dense_1/kernel", 0.5))
            replicas.propose(Update(id="resets", reset_slots=True).scale("dense/kernel", 0.5))
        quietly(replicas, lambda step: None, lambda: len(replicas.history) == 2)
        after = replicas.read(slots)
        changed = {name: after[name] for name in slots if before[name].tobytes() != after[name].tobytes()}
        unchanged = {name: before[name] for name in slots if name not in changed}
    return {"changed": changed, "unchanged": unchanged, "digest": digest(model)}


def reset_rows(strategy: Any) -> dict[str, Any]:
    """The moments of a kernel before and after an update of two of its rows with reset_slots."""
    model = perceptron(strategy, adam)
    with replicas_of(model) as replicas:
        train(replicas, "fit", lambda step: None, lambda: True)
        slots = [f"optimizer/sequential_dense_kernel_{ending}" for ending in ("momentum", "velocity")]
        before = replicas.read(slots)
        width = before[slots[0]].shape[1]
        if strategy.rank == 1:
            rows = np.zeros((2, width), np.float32)
            replicas.propose(Update(reset_slots=True).assign_rows("dense/kernel", [2, 0], rows))
        quietly(replicas, lambda step: None, lambda: len(replicas.history) == 1)
        return {"before": before, "after": replicas.read(slots), "digest": digest(model)}


def test_where_rows_are_touched_the_moments_of_the_other_rows_are_kept(pool2: Pool) -> None:
    results = pool2.run(reset_rows)
    assert_equal_on_all(results)
    for name, before in results[0]["before"].items():
        after = results[0]["after"][name]
        assert not after[[0, 2]].any()
        kept = [row for row in range(len(before)) if row not in (0, 2)]
        assert before[kept].any()
        assert before[kept].tobytes() == after[kept].tobytes()


def averaging() -> Any:
    return keras.optimizers.SGD(0.1, momentum=0.9, use_ema=True, ema_momentum=0.5)


def adagrad() -> Any:
    return keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.25)


@pytest.mark.parametrize(
    ("make", "endings", "fill"),
    [(adam, ["momentum", "velocity"], 0.0), (averaging, ["momentum"], 0.0), (adagrad, ["accumulator"], 0.25)],
    ids=["adam", "averaging", "adagrad"],
)
def test_what_the_optimizer_remembers_of_a_touched_weight_is_reset_on_request_only(
    pool2: Pool, make: Callable[[], Any], endings: list[str], fill: float
) -> None:
    results = pool2.run(reset, make)
    assert_equal_on_all(results)
    changed, unchanged = results[0]["changed"], results[0]["unchanged"]
    assert sorted(changed) == [f"optimizer/sequential_dense_kernel_{ending}" for ending in endings]
    assert all((value == fill).all() for value in changed.values())
    assert all(np.any(value) for name, value in unchanged.items() if "dense_1_kernel" in name)
    averages = [value for name, value in unchanged.items() if name.endswith("kernel_average")]
    assert len(averages) == (2 if make is averaging else 0), "averaged weights are weights"
