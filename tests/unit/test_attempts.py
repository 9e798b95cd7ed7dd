"""The number of an attempt, where a launcher counts and where none does."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from replicast.coordination import DirectExchange, MemoryCoordination
from replicast.replicas.joined_worker import attempt_of
from replicast.storage.claims import Fence

SECS = 120.0


def attempts(
    run_dir: Path | None, environ: dict[str, str], of_second: Path | None = Path("/not-here")
) -> list[int]:
    """What each of two workers is told; the second one cannot see the run directory."""
    store = MemoryCoordination.Store()
    exchanges = [
        DirectExchange(MemoryCoordination(store), "job", rank, 2, has_left=lambda worker: False)
        for rank in (0, 1)
    ]
    places = (run_dir, of_second)
    with mock.patch.dict(os.environ, environ), ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda rank: attempt_of(places[rank], exchanges[rank], SECS), (0, 1)))


def test_without_a_launcher_every_start_in_a_run_directory_is_the_next_attempt_on_all_workers(
    tmp_path: Path,
) -> None:
    assert attempts(tmp_path, {}) == [0, 0]
    Fence(tmp_path, attempt=0).release()
    assert attempts(tmp_path, {}) == [1, 1]
    Fence(tmp_path, attempt=1).release()
    assert attempts(tmp_path, {}) == [2, 2]


@pytest.mark.parametrize("counted", [0, 7])
def test_a_launcher_s_number_counts(tmp_path: Path, counted: int) -> None:
    Fence(tmp_path, attempt=3).release()
    assert attempts(tmp_path, {"REPLICAST_ATTEMPT": str(counted)}) == [counted, counted]


def test_workers_of_which_only_some_have_a_run_directory_are_in_the_same_attempt(tmp_path: Path) -> None:
    Fence(tmp_path, attempt=0).release()
    assert attempts(tmp_path, {}, None) == [1, 1]
    assert attempts(None, {}, tmp_path) == [0, 0]
    assert attempts(None, {}, None) == [0, 0]
