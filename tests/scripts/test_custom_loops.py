"""Custom training loops without `strategy.run`."""

from __future__ import annotations

import contextlib
from typing import Any

import keras
import pytest
import tensorflow as tf

from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all
from tests.scripts.compare import assert_same_as_plain_keras
from tests.scripts.models import data, values


def loop(strategy: Any, kind: str, rows: Any = None) -> Any:
    x, y = data(32, 3, 2)
    first = keras.layers.Dense(4, "tanh")
    if "embedding" in kind:
        x, first = (abs(x) * 2).astype("int32"), keras.layers.Embedding(8, 4)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), first, keras.layers.Flatten(), keras.layers.Dense(2)])
        optimizer = keras.optimizers.Adam(0.05, global_clipnorm=0.5)
        mean_loss = keras.metrics.Mean()

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = keras.losses.MeanSquaredError()(y, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
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


@pytest.mark.parametrize("kind", ["function", "eager in the scope", "function, embedding"])
def test_a_loop_without_run_trains_as_in_plain_keras(kind: str, pool2: Pool, plain: Pool) -> None:
    assert_same_as_plain_keras(pool2, plain, loop, kind)


def loop_over_own_rows(strategy: Any, kind: str) -> Any:
    return loop(strategy, kind, rows=slice(8 * strategy.rank, 8 * strategy.rank + 8))


def test_a_loop_without_run_keeps_the_replicas_equal_whatever_data_each_has(pool2: Pool) -> None:
    assert_equal_on_all(pool2.run(loop_over_own_rows, "eager"))
