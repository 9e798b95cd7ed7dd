"""The checkpoint from which a job continues."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from replicast.errors import CheckpointError
from replicast.storage.checkpoints import CheckpointStore, choose
from tests.unit.checkpoint.samples import flip, written


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    made = CheckpointStore(tmp_path)
    for step in (5, 10, 15):
        written(made, step)
    return made


def chosen(store: CheckpointStore, step: int | None = None, damaged: dict[int, str] | None = None) -> int:
    reader = choose(store, step, {} if damaged is None else damaged)
    assert reader is not None
    with reader:
        return reader.manifest.step


def test_the_last_one_or_the_one_that_was_asked_for_is_chosen(store: CheckpointStore, tmp_path: Path) -> None:
    assert chosen(store) == 15
    assert chosen(store, 5) == 5
    assert choose(CheckpointStore(tmp_path / "nothing yet"), None, {}) is None


@pytest.mark.parametrize("file", ["manifest.json", "COMMITTED", "state.safetensors"])
def test_one_that_is_seen_to_be_damaged_is_passed_over_and_remembered(
    store: CheckpointStore, file: str
) -> None:
    flip(store.path(15).as_path() / file, 5)
    damaged: dict[int, str] = {}
    assert chosen(store, None, damaged) == 10
    assert list(damaged) == [15]
    assert "is damaged" in damaged[15]


def test_one_that_a_worker_found_damaged_is_passed_over(store: CheckpointStore) -> None:
    assert chosen(store, None, {15: "worker 1 reads other bytes"}) == 10


def test_an_uncommitted_checkpoint_is_skipped_with_a_warning(
    store: CheckpointStore, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (5, 10, 15):
        (store.path(step).as_path() / "COMMITTED").unlink()
    with caplog.at_level(logging.WARNING):
        assert choose(store, None, {}) is None
    assert [f"step {step} is skipped" in caplog.text for step in (5, 10, 15)] == [True] * 3


def test_a_damaged_one_that_was_asked_for_is_refused_with_one_that_is_whole(store: CheckpointStore) -> None:
    flip(store.path(10).as_path() / "state.safetensors", -1)
    with pytest.raises(CheckpointError) as refused:
        choose(store, 15, {15: "worker 1 reads other bytes."})
    assert str(refused.value).startswith("The checkpoint of step 15 is damaged: worker 1 reads other bytes. ")
    assert str(refused.value).endswith("restore(step=5) is intact."), "that of step 10 is damaged too"
    assert (refused.value.step, refused.value.path) == (15, store.path(15).as_path())


@pytest.mark.parametrize("step", [None, 15])
def test_a_start_without_an_undamaged_checkpoint_is_refused(store: CheckpointStore, step: int | None) -> None:
    for each in (5, 10, 15):
        flip(store.path(each).as_path() / "manifest.json", 5)
    with pytest.raises(
        CheckpointError, match=r"manifest.json is damaged.*remove .* to start from scratch\.$"
    ):
        choose(store, step, {})
