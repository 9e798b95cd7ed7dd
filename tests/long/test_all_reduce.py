"""As tests/faults/test_all_reduce.py, with a worker that freezes: that takes as long as its heartbeats."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.faults.test_all_reduce import assert_noticed


def test_a_worker_that_freezes_in_an_all_reduce_is_noticed_and_it_is_named(tmp_path: Path) -> None:
    assert_noticed(tmp_path, signal.SIGSTOP)
