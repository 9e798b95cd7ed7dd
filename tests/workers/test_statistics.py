"""Moving statistics, which each worker computes from its own rows: averaged by default, local on request."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all, state
from tests.pool.scripts import equal_on_all


def normalized(strategy: Any, statistics: str, rows: int = 45) -> dict[str, Any]:
    strategy.statistics = statistics  # the pool has one strategy for all tests; people pass it to Strategy()
    random = np.random.default_rng(3)
    x = random.normal(2.0, 3.0, size=(rows, 5)).astype("float32")
    with strategy.scope():
        frozen = keras.layers.Dense(5, trainable=False)
        layers = [frozen, keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5,)), *layers])
        model.compile("sgd", "mse")
    before = frozen.kernel.numpy()
    try:
        model.fit(x, x[:, :1], batch_size=15, epochs=2, shuffle=False, verbose=0)
    finally:
        strategy.statistics = "mean"
    assert np.array_equal(before, frozen.kernel.numpy()), "a frozen weight is not a statistic"
    return {"state": state(model), "batch": frozen(x[-15:]).numpy()}


def moving_means(results: list[dict[str, Any]]) -> list[np.ndarray]:
    return [next(v for name, v in r["state"].items() if "moving_mean" in name) for r in results]


def test_statistics_are_the_mean_over_the_workers(pool3: Pool) -> None:
    results = pool3.run(normalized, "mean")
    assert_equal_on_all([r["state"] for r in results])
    local = moving_means(pool3.run(normalized, "local"))
    np.testing.assert_allclose(moving_means(results)[0], np.mean(local, axis=0), rtol=1e-4)


def test_statistics_stay_with_their_worker_on_request(pool2: Pool) -> None:
    of_first, of_second = moving_means(pool2.run(normalized, "local"))
    assert not np.array_equal(of_first, of_second)


def test_a_worker_without_rows_does_not_spoil_the_statistics(pool3: Pool) -> None:
    """The last batch has one row: two of three workers normalize nothing, and their mean is NaN."""
    results = pool3.run(normalized, "mean", 31)
    assert_equal_on_all([r["state"] for r in results])
    assert all(np.isfinite(value).all() for value in results[0]["state"].values())


@equal_on_all("pool2")
def test_statistics_of_few_bits_do_not_drift(strategy: Any) -> None:
    """With a momentum of one, a step writes the statistics as they were."""
    x = np.random.default_rng(3).normal(size=(370, 5)).astype("float32")
    with strategy.scope():
        layer = keras.layers.BatchNormalization(
            momentum=1.0, moving_variance_initializer=keras.initializers.Constant(0.3), dtype="bfloat16"
        )
        model = keras.Sequential([keras.Input((5,)), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    before = layer.moving_variance.numpy().astype("float32")
    model.fit(x, x[:, :1], batch_size=37, epochs=3, verbose=0)
    assert np.array_equal(layer.moving_variance.numpy().astype("float32"), before)
