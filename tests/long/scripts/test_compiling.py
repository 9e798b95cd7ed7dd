"""More ways to compile a model outside the scope in which it was created."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from tests.pool import Pool
from tests.scripts.compare import assert_same_as_plain_keras, weights
from tests.scripts.models import data, values


def fitted(model: keras.Model) -> Any:
    history = model.fit(*data(44, 3, 2), batch_size=16, epochs=2, shuffle=False, verbose=0).history
    return {"history": history, "weights": weights(model)}


def regression(strategy: Any) -> keras.Model:
    with strategy.scope():
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(2)])


def and_trained_on_a_batch(strategy: Any) -> Any:
    x, y = data(8, 3, 2)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"])
    rows = slice(8 * strategy.rank // strategy.size, 8 * (strategy.rank + 1) // strategy.size)
    logs = [model.train_on_batch(x[rows], y[rows], return_dict=True) for _ in range(2)]
    return {"logs": logs, "weights": weights(model)}


def with_a_schedule(strategy: Any) -> Any:
    model = regression(strategy)
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
    model.compile(keras.optimizers.SGD(schedule, momentum=0.9), "mse")
    return fitted(model)


def with_accumulation_and_averages(strategy: Any) -> Any:
    model = regression(strategy)
    model.compile(keras.optimizers.Adam(0.05, gradient_accumulation_steps=2, use_ema=True), "mse")
    return fitted(model)


def with_metrics_that_have_state(strategy: Any) -> Any:
    model = regression(strategy)
    metrics = [keras.metrics.RootMeanSquaredError(), keras.metrics.R2Score()]
    model.compile("rmsprop", "mse", metrics=metrics, weighted_metrics=[keras.metrics.MeanAbsoluteError()])
    return fitted(model)


def several_times(strategy: Any) -> Any:
    model = regression(strategy)
    found = []
    for rate in (0.1, 0.01):
        model.compile(keras.optimizers.Adam(rate), "mse", metrics=["mae"])
        found.append(fitted(model))
    return found


def with_a_rate_that_was_changed(strategy: Any) -> Any:
    model = regression(strategy)
    model.compile("sgd", "mse")
    model.optimizer.learning_rate = 0.5
    return {**fitted(model), "rate": float(model.optimizer.learning_rate)}


@pytest.mark.parametrize(
    "script",
    [
        and_trained_on_a_batch,
        with_a_schedule,
        with_accumulation_and_averages,
        with_metrics_that_have_state,
        several_times,
        with_a_rate_that_was_changed,
    ],
    ids=lambda script: script.__name__,
)
def test_a_model_that_is_compiled_outside_the_scope_trains_as_in_plain_keras(
    script: Any, pool2: Pool, plain: Pool
) -> None:
    assert_same_as_plain_keras(pool2, plain, script)


def in_float16(strategy: Any) -> Any:
    keras.config.set_dtype_policy("mixed_float16")
    model = regression(strategy)
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    history = fitted(model)["history"]
    return {"history": history, "values": values(model.trainable_variables)}


def test_a_float16_model_that_is_compiled_outside_the_scope_trains(pool2: Pool, plain: Pool) -> None:
    assert_same_as_plain_keras(pool2, plain, in_float16, rtol=2e-2, atol=2e-3)
