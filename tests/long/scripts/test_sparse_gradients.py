"""Row-sparse gradients with every optimizer of Keras, and with every option that uses gradients."""

from __future__ import annotations

from typing import Any

import keras
import pytest

from tests.pool import Pool
from tests.scripts import test_rows as rows
from tests.scripts.compare import assert_same_as_plain_keras, same_as_plain_keras
from tests.scripts.test_sparse_gradients import OPTIMIZERS, lookups, sparse_inputs

OPTIONS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "clipnorm": {"clipnorm": 0.05},
    "global_clipnorm": {"global_clipnorm": 0.05},
    "clipvalue": {"clipvalue": 0.01},
    "gradient_accumulation_steps": {"gradient_accumulation_steps": 2},
    "use_ema": {"use_ema": True, "ema_momentum": 0.8, "ema_overwrite_frequency": 3},
    "weight_decay": {"weight_decay": 0.01},
}


def test_every_optimizer_that_keras_ships_is_compared() -> None:
    shipped = {
        name
        for name in dir(keras.optimizers)
        if isinstance(getattr(keras.optimizers, name), type)
        and issubclass(getattr(keras.optimizers, name), keras.optimizers.Optimizer)
    }
    assert shipped - {"Optimizer", "LossScaleOptimizer"} == set(OPTIMIZERS)  # the latter: mixed precision


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_lookups_train_as_in_plain_keras_with_every_optimizer(name: str, pool2: Pool, plain: Pool) -> None:
    assert_same_as_plain_keras(pool2, plain, lookups, name, {})


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sparse_inputs_train_as_in_plain_keras_with_every_optimizer(
    name: str, pool2: Pool, plain: Pool
) -> None:
    assert_same_as_plain_keras(pool2, plain, sparse_inputs, name)


@pytest.mark.parametrize("name", ["Adam", "RMSprop"])
@pytest.mark.parametrize("option", [name for name in OPTIONS if name != "as it is"])
def test_lookups_train_as_in_plain_keras_with_every_option(
    name: str, option: str, pool2: Pool, plain: Pool
) -> None:
    assert_same_as_plain_keras(pool2, plain, lookups, name, OPTIONS[option])


# SGD where bfloat16 rounds: how depends on the CPU, and Adam makes a whole step of a gradient near zero.
@pytest.mark.parametrize(("policy", "name"), [("mixed_bfloat16", "SGD"), ("mixed_float16", "Adam")])
def test_lookups_train_as_in_plain_keras_in_mixed_precision(
    policy: str, name: str, pool2: Pool, plain: Pool
) -> None:
    assert_same_as_plain_keras(pool2, plain, lookups, name, {}, policy, rtol=0.02, atol=0.002)


def test_lookups_train_as_in_plain_keras_on_three_workers(pool3: Pool, plain: Pool) -> None:
    assert_same_as_plain_keras(pool3, plain, lookups, "Adam", {})


@same_as_plain_keras("pool2")
def test_lookups_train_as_in_plain_keras_with_several_steps_per_execution(strategy: Any) -> Any:
    return lookups(strategy, "Adam", {}, steps_per_execution=3)


@pytest.mark.parametrize("case", rows.IN_LONG)
def test_an_optimizer_on_a_table_has_the_numbers_of_plain_keras(case: str, pool2: Pool, plain: Pool) -> None:
    assert_same_as_plain_keras(pool2, plain, rows.fitted, *rows.OPTIONS[case])
