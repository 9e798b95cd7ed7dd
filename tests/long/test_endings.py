"""The faults of tests/faults on the worker that does not have them there."""

from __future__ import annotations

from pathlib import Path

from tests.faults import test_endings as endings
from tests.faults import test_updates as updates
from tests.faults.test_updates import undisturbed

__all__ = ["undisturbed"]  # the fixture


def test_worker_0_that_raised_is_named_and_all_end(tmp_path: Path) -> None:
    endings.test_the_worker_that_raised_is_named_and_all_end(tmp_path, 0)


def test_worker_1_that_has_fewer_batches_ends_all_with_the_reason(tmp_path: Path) -> None:
    endings.test_workers_with_different_numbers_of_batches_end_with_the_reason(tmp_path, 1)


def test_a_job_whose_worker_1_was_killed_comes_to_the_weights_of_an_undisturbed_one(
    tmp_path: Path, undisturbed: Path
) -> None:
    updates.test_a_job_that_was_killed_comes_to_the_weights_of_an_undisturbed_one(tmp_path, 1, undisturbed)
