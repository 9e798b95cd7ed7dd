"""Files that one worker writes for all, with threads as workers and an in-memory coordination service."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from replicast.coordination import MemoryCoordination
from replicast.errors import JobFailed, ReplicastError
from replicast.lifetime import Lifetime
from replicast.training.writing import Writing

DEADLINE_SECS = 120.0


class Worker:
    """A worker whose transfers are counted by hand."""

    def __init__(self, store: MemoryCoordination.Store, rank: int) -> None:
        self.transfers = 0
        coordination = MemoryCoordination(store)
        self.lifetime = Lifetime(coordination, rank, 2, lambda: self.transfers, lambda _: None)
        self.lifetime.watch()
        self.writing = Writing(self.lifetime)


@pytest.fixture
def store() -> MemoryCoordination.Store:
    return MemoryCoordination.Store()


@pytest.fixture
def workers(store: MemoryCoordination.Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Worker]]:
    monkeypatch.setattr("replicast.lifetime.POLL_SECS", 0.02)
    workers = [Worker(store, rank) for rank in range(2)]
    yield workers
    for worker in workers:
        worker.lifetime.failed(KeyboardInterrupt())  # nobody is waited for
        worker.lifetime.leave()


def on_all(workers: list[Worker], act: Callable[[Worker], object]) -> None:
    threads = [threading.Thread(target=act, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECS)
    assert not any(thread.is_alive() for thread in threads)


def test_keys_of_saves_in_one_endless_pass_do_not_pile_up(
    workers: list[Worker], store: MemoryCoordination.Store, tmp_path: Path
) -> None:
    counts = []

    def save(worker: Worker) -> None:
        worker.writing.once(tmp_path / "model", (tmp_path / "model").touch)
        worker.transfers += 1

    for _ in range(20):
        on_all(workers, save)
        counts.append(len([key for key in store.values if "/write/" in key]))
    assert max(counts[10:]) == max(counts[:10])


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError(2, "no such file"), FileNotFoundError),
        (PermissionError(13, "not yours"), PermissionError),
        (OSError("no number"), OSError),
        (ValueError("no such ending"), ValueError),
        (UnicodeDecodeError("utf-8", b"", 0, 1, "bad"), ReplicastError),
        (MemoryError(), MemoryError),
        (Exception("anything"), ReplicastError),
        (SystemExit(3), JobFailed),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_write_that_fails_raises_the_same_kind_of_error_on_all(
    workers: list[Worker], tmp_path: Path, error: BaseException, kind: type[Exception]
) -> None:
    raised: dict[Worker, BaseException] = {}

    def fail() -> None:
        raise error

    def save(worker: Worker) -> None:
        try:
            worker.writing.once(tmp_path / "model", fail)
        except BaseException as caught:
            raised[worker] = caught

    on_all(workers, save)
    assert raised[workers[0]] is error
    assert type(raised[workers[1]]) is kind
    assert "worker 0 could not write" in str(raised[workers[1]])


def test_a_save_while_another_thread_saves_has_one_writer(workers: list[Worker], tmp_path: Path) -> None:
    written = []
    saves, saved = threading.Event(), threading.Event()

    def slow() -> None:
        saves.set()
        saved.wait(DEADLINE_SECS)

    other = threading.Thread(target=workers[0].writing.once, args=(tmp_path / "slow", slow))
    other.start()
    assert saves.wait(DEADLINE_SECS)
    on_all(workers, lambda worker: worker.writing.once(tmp_path / "model", lambda: written.append(worker)))
    saved.set()
    other.join(DEADLINE_SECS)
    assert written == [workers[0]]
