"""More sums over the workers: while one freezes, which takes as long as its heartbeats, and in trainings."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.faults.test_all_reduce import assert_noticed
from tests.pool import Pool
from tests.workers.test_all_reduce import assert_same_by_tensorflow


def test_a_worker_that_freezes_in_an_all_reduce_is_noticed_and_it_is_named(tmp_path: Path) -> None:
    assert_noticed(tmp_path, signal.SIGSTOP)


def test_tensorflows_collectives_train_to_the_same_numbers(pool2: Pool, tmp_path: Path) -> None:
    names = ("adam_on_arrays", "custom_train_step", "batches_that_do_not_divide")
    assert_same_by_tensorflow(pool2, names, tmp_path)
