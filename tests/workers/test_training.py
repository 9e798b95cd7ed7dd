"""Stock Keras 3 trainings on real workers: equal replicas, and the numbers of one process."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all
from tests.workers.recipes import NOISY, trained

# What differs from these in a layer, an option of the optimizer or a way to give the data is in tests/long.
ON_TWO = (
    "adam_on_arrays",
    "batches_that_do_not_divide",
    "tf_data",
    "infinite_dataset",
    "py_dataset",
    "dict_inputs_and_several_outputs",
    "sample_weights",
    "several_steps_per_execution",
    "gradient_accumulation",
    "exponential_moving_average",
    "plain_train_step",
    "convolution_and_residuals_on_fewer_rows_than_workers",
    "custom_train_step",
    "two_optimizers",
    "metrics_with_state",
    "early_stopping",
    "evaluate_and_predict",
)
# Where a third worker could make a difference; tests/long has all of them.
ON_THREE = (
    "adam_on_arrays",
    "batches_that_do_not_divide",
    "a_last_batch_smaller_than_the_job",
    "embedding",
)
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


@pytest.mark.parametrize(("columns", "steps_per_execution"), [(2, 1), (2, 3), (20_000, 1)])
@pytest.mark.parametrize("pool", ["pool1", "pool2"])
def test_lists_of_arrays_train_and_every_batch_counts_alike_in_the_losses_of_outputs(
    request: pytest.FixtureRequest, pool: str, columns: int, steps_per_execution: int
) -> None:
    """The numbers of plain Keras: it gives the loss of an output as the mean of the batches' losses."""
    for found in request.getfixturevalue(pool).run(lists_of_arrays, columns, steps_per_execution):
        assert found["loss"] == pytest.approx((40.0, 40.0))
        assert found["a_loss"] == found["b_loss"] == pytest.approx((100 / 3, 100 / 3))
