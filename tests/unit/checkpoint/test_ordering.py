"""Which checkpoint is the last one, and which are kept, after training has restarted from an earlier one."""

from __future__ import annotations

import errno
import logging
from pathlib import Path

import pytest

from replicast.storage.checkpoints import CheckpointStore, choose, with_unreadable
from tests.unit.checkpoint.samples import flip, written

BEST = ("loss", "min")


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """Training got worse after step 500."""
    made = CheckpointStore(tmp_path)
    for step, loss in ((500, 0.1), (1000, 0.5), (1500, 0.7), (2000, 0.9)):
        written(made, step, step, metrics={"loss": loss})
    return made


def saved(store: CheckpointStore, step: int, named: int | None = None, seed: int = 7) -> list[int]:
    """A checkpoint of a training that is at this step now; gives those that are there then."""
    written(store, step, seed, metrics={"loss": 0.2})
    store.prune(3, BEST, named)
    return [manifest.step for manifest in store.list()]


def chosen(store: CheckpointStore, damaged: dict[int, str] | None = None) -> int:
    reader = choose(store, None, {} if damaged is None else damaged)
    assert reader is not None
    with reader:
        return reader.manifest.step


def test_what_is_written_after_going_back_stays_and_is_the_last_one(store: CheckpointStore) -> None:
    for step, there in ((600, [500, 600, 2000]), (700, [500, 600, 700]), (800, [500, 600, 700, 800])):
        assert saved(store, step) == there
        last = store.last()
        assert last is not None
        assert last.step == chosen(store) == step


def test_a_training_that_continues_from_there_stays_on_its_line_when_it_passes_what_was_given_up(
    store: CheckpointStore,
) -> None:
    lines = [store.manifest(2000).line]
    for step in (600, 1000, 1900, 2000, 2100):
        saved(store, step)
        assert chosen(store) == step
        lines.append(store.manifest(step).line)
    assert lines == [0, 1, 1, 1, 1, 1]


def test_a_script_that_goes_back_at_every_start_continues_from_its_last_start(store: CheckpointStore) -> None:
    for start in (1, 2, 3):
        for step in (600, 700, 800)[: 4 - start]:
            saved(store, step, named=500, seed=start)
            assert chosen(store) == step
            assert store.manifest(step).line == start
    assert store.path(500).as_path().exists()


def test_the_one_that_was_asked_for_by_its_step_stays(store: CheckpointStore) -> None:
    for step in (1100, 1200, 1300, 1400):
        there = saved(store, step, named=1000)
    assert there == [500, 1000, 1200, 1300, 1400]


def test_the_same_bits_of_a_line_that_was_given_up_are_written_again(store: CheckpointStore) -> None:
    written(store, 1000, 1000, metrics={"loss": 0.5})
    assert chosen(store) == 1000
    inode = store.path(1000).stat().st_ino
    written(store, 1000, 1000, metrics={"loss": 0.5})
    assert store.path(1000).stat().st_ino == inode, "that one is the last: it is left as it is"


def test_should_the_last_one_be_damaged_what_it_came_from_is_taken(store: CheckpointStore) -> None:
    written(store, 600)
    assert store.steps() == [600, 500, 2000, 1500, 1000]
    assert chosen(store, {600: "worker 1 reads other bytes"}) == 500
    assert chosen(store, {600: "worker 1 reads other bytes", 500: "and here"}) == 2000


def test_an_unreadable_checkpoint_may_have_been_the_last(store: CheckpointStore) -> None:
    written(store, 600)
    flip(store.path(1500).as_path() / "manifest.json", 5)
    damaged: dict[int, str] = {}
    assert chosen(store, damaged) == 600
    assert list(damaged) == [1500]
    last, skipped = store.last_and_skipped()
    assert last == store.manifest(600)
    assert ["00001500" in str(problem) for problem in skipped] == [True]
    assert with_unreadable([], [3, 7]) == [7, 3]
    assert with_unreadable([6, 2, 8], [1, 5, 9]) == [9, 6, 5, 2, 8, 1]


def test_damaged_bytes_of_a_later_step_cost_no_whole_checkpoint(store: CheckpointStore) -> None:
    """That of step 2000 was found damaged, and training went on from 1500."""
    flip(store.path(2000).as_path() / "state.safetensors", -1)
    written(store, 1600)
    store.prune(1)
    assert [manifest.step for manifest in store.list()] == [1600]


def test_an_old_one_that_cannot_be_removed_is_reported_once_and_does_not_stop_pruning(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    remove = CheckpointStore.remove

    def refusing(self: CheckpointStore, step: int) -> None:
        if step == 1000:
            raise PermissionError(errno.EACCES, "Permission denied")
        if step == 500:  # somebody was quicker
            remove(self, step)
        remove(self, step)

    monkeypatch.setattr(CheckpointStore, "remove", refusing)
    with caplog.at_level(logging.WARNING, "replicast"):
        assert store.prune(1) == [1500]
        assert store.prune(1) == []
    assert [manifest.step for manifest in store.list()] == [1000, 2000]
    (said,) = caplog.messages
    assert str(store.path(1000).as_path()) in said
    assert "Permission denied" in said
