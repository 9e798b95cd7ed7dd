"""Custom training loops without `strategy.run`."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import replicast
from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all
from tests.scripts.compare import assert_same_as_plain_keras, heard
from tests.scripts.models import data, values


def loop(strategy: Any, kind: str, rows: Any = None) -> Any:
    x, y = data(32, 3, 2)
    first = keras.layers.Dense(4, "tanh")
    if "embedding" in kind:
        x, first = (abs(x) * 2).astype("int32"), keras.layers.Embedding(8, 4)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), first, keras.layers.Flatten(), keras.layers.Dense(2)])
        optimizer = keras.optimizers.Adam(0.05, global_clipnorm=0.5)
        if "scaled" in kind:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, 8.0, dynamic_growth_steps=2)
        mean_loss = keras.metrics.Mean()

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = keras.losses.MeanSquaredError()(y, model(x, training=True))
            scaled = optimizer.scale_loss(loss)
        gradients = tape.gradient(scaled, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        mean_loss.update_state(loss)
        return loss

    function = tf.function(step) if "function" in kind else step
    with strategy.scope() if "scope" in kind else contextlib.nullcontext():
        batches = [slice(start, start + 8) if rows is None else rows for start in range(0, 32, 8)]
        losses = [float(function(tf.constant(x[part]), tf.constant(y[part]))) for part in batches]
    return {
        "losses": losses if rows is None else None,
        "mean": float(mean_loss.result()) if rows is None else None,
        "values": values(model.variables, optimizer.variables),
    }


KINDS = [
    "function",
    "eager in the scope",
    "function, embedding",
    "eager in the scope, scaled",
    "function in the scope, scaled",
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_without_run_trains_as_in_plain_keras(kind: str, pool2: Pool, plain: Pool) -> None:
    assert_same_as_plain_keras(pool2, plain, loop, kind)


def loop_over_own_rows(strategy: Any, kind: str) -> Any:
    return loop(strategy, kind, rows=slice(8 * strategy.rank, 8 * strategy.rank + 8))


def test_a_loop_without_run_keeps_the_replicas_equal_whatever_data_each_has(pool2: Pool) -> None:
    assert_equal_on_all(pool2.run(loop_over_own_rows, "eager"))


def warnings_of_a_loop(strategy: Any) -> list[str]:
    strategy.extended._warned = False  # the pool has one strategy for all tests
    with heard() as said:
        loop(strategy, "eager")
    return said


def test_worker_0_warns_once_of_a_loop_without_run(pool2: Pool) -> None:
    first, second = pool2.run(warnings_of_a_loop)
    assert len([text for text in first if "used outside of strategy.run()" in text]) == 1
    assert second == []


def overflow_on_one_worker(strategy: Any, in_scope: bool) -> Any:
    with strategy.scope():
        weight = keras.Variable([1.0, 2.0])
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.5), 8.0)
    with strategy.scope() if in_scope else contextlib.nullcontext():
        for largest in (8.0, np.inf, 8.0):
            gradient = largest if strategy.rank == 1 else 8.0
            optimizer.apply([tf.constant([gradient, 8.0])], [weight])
    return {"weight": weight.numpy(), "scale": optimizer.dynamic_scale.numpy()}


def test_a_gradient_that_overflows_on_one_worker_makes_all_skip_the_step_of_a_loop(pool2: Pool) -> None:
    for in_scope in (True, False):
        results = pool2.run(overflow_on_one_worker, in_scope)
        assert_equal_on_all(results)
        assert results[0]["scale"] == 4.0
        assert results[0]["weight"].tolist() == [
            -0.5,
            0.5,
        ]  # two steps: of 0.5 each, then 1.0 as the scale halved


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)

    def call(self, x: Any) -> Any:
        return self.last(self.first(x))


def lazily_built(strategy: Any, optimizer: str, *, graph: bool, called: bool) -> Any:
    x, y = data(8, 3, 2)
    with strategy.scope():
        model, chosen = Subclassed(), keras.optimizers.get(optimizer)
        if called:
            model(x)

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        chosen.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    run = tf.function(step) if graph else step
    try:
        return [float(run()) for _ in range(3)]
    except replicast.NotSupported as error:
        return str(error)
    except Exception as error:  # TensorFlow derives its own type from that of an error while it traces
        return str(error) if "NotSupported" in str(error) else repr(error)


def lazily_built_in_all_ways(strategy: Any, called: bool) -> Any:
    ways = [("sgd", False), ("adam", False), ("sgd", True), ("adam", True)]
    return [lazily_built(strategy, name, graph=graph, called=called) for name, graph in ways]


def test_a_loop_over_a_model_that_is_built_outside_the_scope_is_refused_and_the_remedy_works(
    pool2: Pool, plain: Pool
) -> None:
    for said in pool2.run(lazily_built_in_all_ways, False)[0]:
        assert "kernel, which was created outside strategy.scope()," in said
        assert "call it once on a batch inside 'with strategy.scope():'" in said
    assert_same_as_plain_keras(pool2, plain, lazily_built_in_all_ways, True)


def horovods_loop(strategy: Any, text: str) -> Any:
    x, y = data(32, 3, 2)
    given = {"x": x, "y": y, "keras": keras, "tf": tf, "replicast": replicast}
    with mock.patch.object(replicast, "Strategy", return_value=strategy):
        exec(text, given)
    return values(given["model"].variables)


def test_the_loop_that_migrating_md_shows_for_horovod_runs(pool2: Pool) -> None:
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    (text,) = [block for block in page.split("```python\n")[1:] if "hvd.DistributedGradientTape" in block]
    assert_equal_on_all(pool2.run(horovods_loop, text.partition("```")[0]))
