"""Stock Keras 3 trainings on real workers: equal replicas, and the numbers of one process."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all, state
from tests.pool.scripts import equal_on_all
from tests.workers.recipes import NOISY, trained

# What differs from these in a layer, an option of the optimizer or a way to give the data is in tests/long.
ON_TWO = (
    "adam_on_arrays",
    "batches_that_do_not_divide",
    "tf_data",
    "infinite_dataset",
    "dict_inputs_and_several_outputs",
    "several_steps_per_execution",
    "gradient_accumulation",
    "exponential_moving_average",
    "plain_train_step",
    "convolution_and_residuals_on_fewer_rows_than_workers",
    "custom_train_step",
    "metrics_with_state",
    "early_stopping",
    "evaluate_and_predict",
)
# Where a third worker could make a difference; tests/long has all of them.
ON_THREE = ("batches_that_do_not_divide", "a_last_batch_smaller_than_the_job", "embedding")
NOISY_ON_THREE = ("mixed_float16_that_overflows_on_one_worker_only",)


@pytest.fixture(scope="session")
def one_process(pool1: Pool) -> Any:
    """What each recipe gives in a job of one, run once."""
    known: dict[str, Any] = {}

    def result(name: str) -> Any:
        if name not in known:
            known[name] = pool1.run(trained, name)[0]
        return known[name]

    return result


def assert_same_numbers(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["history"].keys() == expected["history"].keys()
    for name, values in expected["history"].items():
        np.testing.assert_allclose(found["history"][name], values, rtol=2e-4, atol=2e-5, err_msg=name)
    assert list(found["state"]) == list(expected["state"])
    for name, value in expected["state"].items():
        np.testing.assert_allclose(found["state"][name], value, rtol=1e-3, atol=1e-5, err_msg=name)


def assert_replicas_equal(results: list[dict[str, Any]]) -> None:
    assert_equal_on_all([{"digest": r["digest"], "history": r["history"]} for r in results])


@pytest.mark.parametrize("name", ON_TWO)
def test_two_workers_train_to_the_numbers_of_one_process(name: str, pool2: Pool, one_process: Any) -> None:
    results = pool2.run(trained, name)
    assert_replicas_equal(results)
    assert_same_numbers(results[0], one_process(name))


@pytest.mark.parametrize("name", ON_THREE)
def test_three_workers_train_to_the_numbers_of_one_process(name: str, pool3: Pool, one_process: Any) -> None:
    results = pool3.run(trained, name)
    assert_replicas_equal(results)
    assert_same_numbers(results[0], one_process(name))


@pytest.mark.parametrize("name", NOISY)
def test_two_workers_stay_equal(name: str, pool2: Pool) -> None:
    assert_replicas_equal(pool2.run(trained, name))


@pytest.mark.parametrize("name", NOISY_ON_THREE)
def test_three_workers_stay_equal(name: str, pool3: Pool) -> None:
    assert_replicas_equal(pool3.run(trained, name))


def lists_of_arrays(strategy: Any, columns: int, steps_per_execution: int) -> dict[str, Any]:
    """Two inputs and two targets as lists; only the rows of the short last batch have a loss, of 100."""
    x, y = np.ones((80, columns), np.float32), np.zeros((80, 1), np.float32)
    y[64:] = 10.0
    with strategy.scope():
        inputs = [keras.Input((columns,)), keras.Input((columns,))]
        both = keras.layers.Concatenate()(inputs)
        outputs = {name: keras.layers.Dense(1, kernel_initializer="zeros", name=name)(both) for name in "ab"}
        model = keras.Model(inputs, list(outputs.values()))
        model.compile(keras.optimizers.SGD(0.0), ["mse", "mse"], steps_per_execution=steps_per_execution)
    history = model.fit([x, x], [y, y], batch_size=32, shuffle=False, verbose=0).history
    scores = model.evaluate([x, x], [y, y], batch_size=32, verbose=0, return_dict=True)
    assert [p.shape for p in model.predict([x, x], batch_size=32, verbose=0)] == [(80, 1), (80, 1)]
    return {name: (values[0], scores[name]) for name, values in history.items()}


@pytest.mark.parametrize(
    ("workers", "columns", "steps_per_execution"), [(1, 2, 1), (2, 2, 3), (2, 20_000, 1)]
)
def test_lists_of_arrays_train_and_every_batch_counts_alike_in_the_losses_of_outputs(
    pool1: Pool, pool2: Pool, workers: int, columns: int, steps_per_execution: int
) -> None:
    """The numbers of plain Keras: it gives the loss of an output as the mean of the batches' losses."""
    for found in (pool1 if workers == 1 else pool2).run(lists_of_arrays, columns, steps_per_execution):
        assert found["loss"] == pytest.approx((40.0, 40.0))
        assert found["a_loss"] == found["b_loss"] == pytest.approx((100 / 3, 100 / 3))


# Moving statistics, which each worker computes from its own rows: their mean over the workers counts.


def normalized(strategy: Any, rows: int = 45) -> dict[str, Any]:
    random = np.random.default_rng(3)
    x = random.normal(2.0, 3.0, size=(rows, 5)).astype("float32")
    with strategy.scope():
        frozen = keras.layers.Dense(5, trainable=False)
        layers = [frozen, keras.layers.BatchNormalization(momentum=0.5), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5,)), *layers])
        model.compile("sgd", "mse")
    before = frozen.kernel.numpy()
    model.fit(x, x[:, :1], batch_size=15, epochs=2, shuffle=False, verbose=0)
    assert np.array_equal(before, frozen.kernel.numpy()), "a frozen weight is not a statistic"
    return {"state": state(model), "rows": frozen(x).numpy()}


def moving_means(results: list[dict[str, Any]]) -> list[np.ndarray]:
    return [next(v for name, v in r["state"].items() if "moving_mean" in name) for r in results]


def test_statistics_are_the_mean_over_the_workers(pool3: Pool) -> None:
    results = pool3.run(normalized)
    assert_equal_on_all([r["state"] for r in results])
    expected = np.zeros(5)
    for batch in [*results[0]["rows"].reshape(3, 15, 5)] * 2:  # the workers' rows are equally many
        expected = 0.5 * expected + 0.5 * batch.mean(axis=0)
    np.testing.assert_allclose(moving_means(results)[0], expected, rtol=1e-4)


def test_a_worker_without_rows_does_not_spoil_the_statistics(pool3: Pool) -> None:
    """The last batch has one row: two of three workers normalize nothing, and their mean is NaN."""
    results = pool3.run(normalized, 31)
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
