"""More training loops without `strategy.run`."""

from __future__ import annotations

import pytest

from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all
from tests.scripts.compare import assert_same_as_plain_keras
from tests.scripts.test_custom_loops import loop, loop_over_own_rows

KINDS = ["eager", "function", "eager in the scope", "function in the scope", "eager, embedding"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", ["pool1", "pool2", "pool3"])
def test_a_loop_without_run_trains_as_in_plain_keras(
    kind: str, workers: str, plain: Pool, request: pytest.FixtureRequest
) -> None:
    assert_same_as_plain_keras(request.getfixturevalue(workers), plain, loop, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_without_run_keeps_the_replicas_equal_whatever_data_each_has(kind: str, pool3: Pool) -> None:
    assert_equal_on_all(pool3.run(loop_over_own_rows, kind))
