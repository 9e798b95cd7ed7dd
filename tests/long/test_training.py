"""The trainings of tests/workers/recipes.py that are not run there, on two or three workers."""

from __future__ import annotations

from typing import Any

import pytest

from tests.pool import Pool
from tests.workers.recipes import NOISY, RECIPES, trained
from tests.workers.test_training import (
    NOISY_ON_THREE,
    ON_THREE,
    ON_TWO,
    assert_replicas_equal,
    assert_same_numbers,
    one_process,
)

__all__ = ["one_process"]  # the fixture


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ON_TWO])
def test_two_workers_train_to_the_numbers_of_one_process(name: str, pool2: Pool, one_process: Any) -> None:
    results = pool2.run(trained, name)
    assert_replicas_equal(results)
    assert_same_numbers(results[0], one_process(name))


@pytest.mark.parametrize("name", [name for name in RECIPES if name not in ON_THREE])
def test_three_workers_train_to_the_numbers_of_one_process(name: str, pool3: Pool, one_process: Any) -> None:
    results = pool3.run(trained, name)
    assert_replicas_equal(results)
    assert_same_numbers(results[0], one_process(name))


@pytest.mark.parametrize("name", [name for name in NOISY if name not in NOISY_ON_THREE])
def test_three_workers_stay_equal(name: str, pool3: Pool) -> None:
    assert_replicas_equal(pool3.run(trained, name))
