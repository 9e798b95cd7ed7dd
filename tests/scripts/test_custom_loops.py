"""Custom training loops without `strategy.run`: as in plain Keras in a job of one worker, else refused."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import pytest
import tensorflow as tf

import replicast
from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all
from tests.scripts.compare import assert_same_as_plain_keras
from tests.scripts.models import data, values


def loop(strategy: Any, kind: str) -> Any:
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
        batches = [slice(start, start + 8) for start in range(0, 32, 8)]
        losses = [float(function(tf.constant(x[part]), tf.constant(y[part]))) for part in batches]
    return {
        "losses": losses,
        "mean": float(mean_loss.result()),
        "values": values(model.variables, optimizer.variables),
    }


@pytest.mark.parametrize(
    "kind", ["function", "eager in the scope", "function in the scope, embedding", "function, scaled"]
)
def test_a_loop_without_run_in_a_job_of_one_worker_trains_as_in_plain_keras(
    kind: str, pool1: Pool, plain: Pool
) -> None:
    assert_same_as_plain_keras(pool1, plain, loop, kind)


def error_of_loop(strategy: Any, kind: str) -> str:
    try:
        loop(strategy, kind)
    except Exception as error:  # TensorFlow derives its own type from that of an error while it traces
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize(
    "kind",
    [
        "eager",
        "function",
        "eager in the scope",
        "function in the scope",
        "function, embedding",
        "function, scaled",
    ],
)
def test_a_loop_without_run_is_refused_on_several_workers(kind: str, pool2: Pool) -> None:
    for said in pool2.run(error_of_loop, kind):
        assert "NotSupported" in said
        assert "An optimizer outside of strategy.run()" in said
        assert "Call the step with strategy.run() in a tf.function" in said


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
    pool1: Pool, pool2: Pool, plain: Pool
) -> None:
    for said in pool2.run(lazily_built_in_all_ways, False)[0]:
        assert "kernel, which was created outside strategy.scope()," in said
        assert "call it once on a batch inside 'with strategy.scope():'" in said
    assert_same_as_plain_keras(pool1, plain, lazily_built_in_all_ways, True)


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
