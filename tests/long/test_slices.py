"""The sums of tests/workers/test_slices.py for batches whose shape is not known while tracing."""

from __future__ import annotations

import pytest

from tests.pool import Pool
from tests.workers.test_slices import LENGTH, LOOKUPS, slices_found


@pytest.mark.parametrize("shape", [[None, LENGTH], [None, None]])
def test_a_sum_has_the_slices_that_one_process_would_have(shape: list[int | None], plain: Pool) -> None:
    assert plain.run(slices_found, shape)[0] == {name: expected for name, (_, expected) in LOOKUPS.items()}
