"""Tests that are scripts: functions of a strategy, which run on the workers of a pool.

    @equal_on_all("pool2")
    def test_draws_are_the_same_on_all_workers(strategy: Any) -> Any:
        return drawn()

The function is sent to the workers, and what they return is checked. Its other arguments are fixtures and
parameters, as in any test. `tests/conftest.py` runs it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all

Script = Callable[..., Any]


def script(check: Callable[..., Any], *pools: str) -> Callable[[Script], Script]:
    """Marks a test that is a script: `check` gets the pools, the script and its other arguments."""

    def marked(test: Script) -> Script:
        used: Script = pytest.mark.usefixtures(*pools)(pytest.mark.script(check, *pools)(test))
        return used

    return marked


def equal_on_all(pool: str) -> Callable[[Script], Script]:
    """All workers of the pool must return the same."""

    def check(workers: Pool, test: Script, *given: Any) -> None:
        assert_equal_on_all(workers.run(test, *given))

    return script(check, pool)
