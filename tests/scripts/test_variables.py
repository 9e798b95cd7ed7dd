"""Reading and assigning the variables of a job in a script."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import replicast
from tests.pool import Pool
from tests.pool.scripts import equal_on_all
from tests.scripts.compare import same_as_plain_keras
from tests.scripts.models import data, values
from tests.scripts.test_data import heard


def regression(strategy: Any) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.125, momentum=0.5), "mse", metrics=["mae"])
    return model


def read(model: keras.Model) -> dict[str, Any]:
    rate, steps, kernel = model.optimizer.learning_rate, model.optimizer.iterations, model.layers[0].kernel
    return {
        "float": float(rate),
        "float of the value": float(rate.value),
        "int": int(steps),
        "int of the value": int(steps.value),
        "complex": complex(rate.value).real,
        "formatted": f"{float(rate):.3f} {rate.numpy():.3f} {int(steps)}",
        "shown": str(rate),
        "numpy": kernel.numpy(),
        "numpy of the value": kernel.value.numpy(),
        "array": np.array(kernel),
        "array of the value": np.array(kernel.value),
        "array of another type": np.asarray(kernel.value, "float64"),
        "array of a scalar": np.asarray(steps),
        "converted": keras.ops.convert_to_numpy(kernel),
        "value converted": keras.ops.convert_to_numpy(kernel.value),
        "used by numpy": np.sum(kernel, axis=0),
        "calculated": float(rate * 2 + 1),
        "compared": bool(steps == 3),
        "tensor": tf.convert_to_tensor(kernel).numpy(),
        "element": float(kernel[0, 0]),
        "loss": float(model.metrics[0].result()),
        "states": [float(variable) for variable in model.metrics_variables],
    }


@same_as_plain_keras("pool2")
def test_variables_are_read_as_in_plain_keras(strategy: Any) -> Any:
    model = regression(strategy)
    found = {"before": read(model)}
    model.fit(*data(12, 3, 2), batch_size=4, shuffle=False, verbose=0)
    found["after"] = read(model)
    with strategy.scope():
        found["in the scope"] = read(model)
    return found


@equal_on_all("pool2")
def test_one_worker_alone_reads_variables_and_metrics(strategy: Any) -> Any:
    model = regression(strategy)
    if strategy.rank == 1:
        read(model)
    model.fit(*data(12, 3, 2), batch_size=4, shuffle=False, verbose=0)
    if strategy.rank == 0:
        read(model)
        with strategy.scope():
            read(model)
    return model.evaluate(*data(12, 3, 2), batch_size=4, verbose=0)


@same_as_plain_keras("pool2")
def test_variables_are_assigned_as_in_plain_keras(strategy: Any) -> Any:
    model = regression(strategy)
    with strategy.scope():
        counter = tf.Variable(1.0)
    kernel = model.layers[0].kernel
    kernel.assign(kernel * 2.0)
    kernel.value.assign_add(tf.ones_like(kernel))
    model.optimizer.learning_rate = 0.25
    model.optimizer.learning_rate.assign(model.optimizer.learning_rate / 2.0)
    counter.assign_add(2.0)
    with strategy.scope():
        kernel.assign(kernel + 1.0)
        counter.assign_sub(0.5)
    return [kernel.numpy(), float(model.optimizer.learning_rate), float(counter), model.get_weights()]


@same_as_plain_keras("pool2")
def test_metrics_that_a_script_updates_itself_count_as_in_plain_keras(strategy: Any) -> Any:
    with strategy.scope():
        metrics = [keras.metrics.Sum(), keras.metrics.Mean(), keras.metrics.AUC(num_thresholds=5)]
    found = [[float(metric.result()) for metric in metrics]]
    for _ in range(2):
        metrics[0].update_state([1.0, 2.0])
        metrics[1].update_state([1.0, 2.0], sample_weight=[1.0, 3.0])
        metrics[2].update_state([0, 1, 1, 0], [0.1, 0.9, 0.4, 0.6])
        found.append([float(metric.result()) for metric in metrics])
    with strategy.scope():
        metrics[0].update_state(5.0)
        found.append([float(metric.result()) for metric in metrics])
    for metric in metrics:
        metric.reset_state()
    return [*found, [float(metric.result()) for metric in metrics]]


class Counting(keras.Model):
    """Counts rows in a metric that custom steps use too."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(2)
        self.seen = keras.metrics.Sum(name="seen")

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, batch: Any) -> Any:
        self.seen.update_state(tf.ones((tf.shape(batch[0])[0],)))
        return {**super().train_step(batch), "seen": self.seen.result()}


def metric_of_custom_and_keras_steps(strategy: Any, eager: bool = False) -> dict[str, float]:
    with strategy.scope():
        model = Counting()
        model.compile("sgd", "mse", run_eagerly=eager)

    @tf.function
    def custom() -> None:
        strategy.run(lambda: model.seen.update_state(1.0 + strategy.rank))

    @tf.function
    def in_a_graph() -> tf.Tensor:
        return model.seen.result()

    @tf.function
    def add_in_a_graph() -> None:
        model.seen.update_state(100.0)

    found: dict[str, float] = {}

    def note(what: str) -> None:
        found[what] = float(model.seen.result())
        assert float(in_a_graph()) == found[what]

    x, y = data(6, 3, 2)
    for call in ("first", "cached"):
        model.fit(x, y, batch_size=3, verbose=0)
        note(f"{call} fit")
        custom()
        note(f"{call} custom step on what fit counted")
        between = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: custom())
        history = model.fit(x, y, batch_size=3, verbose=0, callbacks=[between]).history
        found[f"{call} fit with custom steps in between"] = history["seen"][0]
        note(f"{call} after it")
        model.evaluate(x, y, batch_size=3, verbose=0)
        custom()
        note(f"{call} custom step after evaluate")
        model.seen.update_state(10.0)
        add_in_a_graph()
        note(f"{call} update between steps")
        model.seen.reset_state()
        add_in_a_graph()
        custom()
        note(f"{call} custom step after a reset")
    found["variables"] = len(model.variables)
    return found


def counted_by_custom_and_keras_steps() -> dict[str, float]:
    expected: dict[str, float] = {}
    for call in ("first", "cached"):
        expected |= {
            f"{call} fit": 6,
            f"{call} custom step on what fit counted": 9,
            f"{call} fit with custom steps in between": 12,
            f"{call} after it": 12,
            f"{call} custom step after evaluate": 3,
            f"{call} update between steps": 113,
            f"{call} custom step after a reset": 103,
        }
    expected["variables"] = 2
    return expected


def test_custom_steps_and_keras_steps_count_in_the_same_metric(pool2: Pool) -> None:
    assert pool2.run(metric_of_custom_and_keras_steps) == [counted_by_custom_and_keras_steps()] * 2


@same_as_plain_keras("pool2")
def test_a_result_function_that_a_script_sets_on_a_metric_is_used_and_stays(strategy: Any) -> Any:
    with strategy.scope():
        model = Counting()
        model.compile("sgd", "mse")
    stock = model.seen.result
    model.seen.result = lambda: stock() + 100.0
    history = model.fit(*data(12, 3, 2), batch_size=4, shuffle=False, verbose=0).history
    return [history["seen"], float(model.seen.result())]


class Noisy(keras.Model):
    """Draws without a seed, as 29 examples of keras.io do: in `call`, `compute_loss` or `train_step`."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.dense = keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.dense(x + keras.random.normal((1, 3)) if self.where == "call" else x)

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss * keras.random.uniform(()) if self.where == "compute_loss" else loss

    def train_step(self, data: Any) -> Any:
        x, y = data
        return super().train_step((x + keras.random.normal((1, 3)) if self.where == "train_step" else x, y))


@pytest.mark.parametrize("where", ["call", "compute_loss", "train_step"])
@same_as_plain_keras("pool2")
def test_draws_without_a_seed_are_those_of_plain_keras(strategy: Any, where: str) -> Any:
    x, y = data(12, 3, 2)
    before = drawn() if where == "train_step" else None  # the generator exists outside
    with strategy.scope():
        model = Noisy(where)
        model.compile(keras.optimizers.SGD(0.1), "mse")
    # The last batch is short: the step is traced twice, and draws on from the same generator.
    history = model.fit(x, y, batch_size=8, epochs=2, shuffle=False, verbose=0).history
    return {"before": before, "losses": history, "values": values(model.variables), "after": drawn()}


def drawn() -> Any:
    return keras.ops.convert_to_numpy(keras.random.uniform((2,)))


@equal_on_all("pool2")
def test_draws_without_a_seed_are_the_same_on_all_workers_whoever_drew_before(strategy: Any) -> Any:
    random.seed(strategy.rank)  # a script that sets no seed: every worker has another one
    if strategy.rank == 1:
        drawn()
    with strategy.scope():
        model = Noisy("train_step")
        model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(*data(12, 3, 2), batch_size=4, verbose=0)
    return drawn()


@equal_on_all("pool2")
def test_a_custom_step_with_run_draws_without_a_seed(strategy: Any) -> Any:
    with strategy.scope():
        total = tf.Variable(tf.zeros(2))

    def step(x: Any) -> None:
        if tf.reduce_sum(x) > 0.0:  # AutoGraph converts it
            total.assign_add(keras.random.uniform((2,)))

    run = tf.function(lambda x: strategy.run(step, args=(x,)))
    for rows in (1, 2, 1):  # two traces
        run(tf.ones((rows,)))
    return total.numpy()


def covered_by_replicas(strategy: Any, where: str) -> tuple[list[str], list[str]]:
    with strategy.scope():
        model = Noisy(where)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model(np.zeros((1, 3), "float32"))
    with heard() as said, contextlib.closing(replicast.Replicas(model)) as replicas:
        model.fit(*data(12, 3, 2), batch_size=4, verbose=0, callbacks=[replicas.callback()])
        assert replicas.audit().equal
        return [variable.name for variable in replicas.schema if "keras_random" in variable.name], said


def test_the_state_of_unseeded_draws_is_part_of_replicas_or_a_warning_says_that_it_is_not(
    pool2: Pool,
) -> None:
    covered, _ = pool2.run(covered_by_replicas, "call")
    assert covered == (["keras_random/seed_generator_state"], [])
    (names, said), _ = pool2.run(covered_by_replicas, "train_step")
    assert names == []
    assert [line for line in said if "Make a keras.random.SeedGenerator an attribute" in line]
