"""What every worker says reaches all of them through worker 0, with threads as workers."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from replicast.coordination import MOST_NAMED, DirectExchange, MemoryCoordination
from replicast.errors import JobFailed
from tests.threads import DEADLINE_SECS, eventually
from tests.unit.slow_service import SlowService


class Counting(SlowService):
    """Counts the keys that are read; all share the counters."""

    def __init__(self, store: MemoryCoordination.Store, reads: Counter[str]) -> None:
        super().__init__(store)
        self._reads = reads
        self._lock = threading.Lock()

    def get(self, key: str, timeout_secs: float) -> str | None:
        with self._lock:
            self._reads[key] += 1
        return super().get(key, timeout_secs)


class Workers:
    """The exchanges of all workers, each of whose calls runs in a thread of its own."""

    def __init__(self, threads: ThreadPoolExecutor) -> None:
        self.store = MemoryCoordination.Store()
        self.left: set[int] = set()
        self._threads = threads

    def agree(self, rank: int, timeout_secs: float = DEADLINE_SECS, size: int = 4) -> Future[dict[int, str]]:
        exchange = DirectExchange(SlowService(self.store), "test", rank, size, self.left.__contains__)
        return self._threads.submit(exchange.agree, "plan", f"of {rank}", timeout_secs)


@pytest.fixture
def workers() -> Iterator[Workers]:
    with ThreadPoolExecutor() as threads:
        yield Workers(threads)


def failure_of(agreeing: Future[dict[int, str]]) -> JobFailed:
    error = agreeing.exception(DEADLINE_SECS)
    assert isinstance(error, JobFailed)
    return error


def test_every_worker_gets_what_all_say_in_whatever_order_they_come(workers: Workers) -> None:
    agreeing = [workers.agree(rank) for rank in (3, 1, 0, 2)]
    expected = {rank: f"of {rank}" for rank in range(4)}
    assert [one.result(DEADLINE_SECS) for one in agreeing] == [expected] * 4


def test_the_number_of_reads_grows_with_the_workers_and_not_with_their_square() -> None:
    store, size, reads = MemoryCoordination.Store(), 40, Counter[str]()
    with ThreadPoolExecutor(size) as threads:

        def start(rank: int) -> None:
            exchange = DirectExchange(Counting(store, reads), "test", rank, size)
            assert list(exchange.agree("plan", "mine", DEADLINE_SECS).values()) == ["mine"] * size

        list(threads.map(start, range(size)))
    values = sum(count for key, count in reads.items() if key.rpartition("/")[2].isdigit())
    assert values <= 2 * size, "worker 0 reads each value, and once more if it had to wait for one"
    # A read is counted again after each second without an answer.
    assert sum(reads.values()) - values <= 3 * size


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers hardly wait for what worker 0 has to say."""
    monkeypatch.setattr("replicast.coordination.LIST_SECS", 0.1)


@pytest.mark.usefixtures("impatient")
def test_worker_0_is_named_if_it_has_not_come(workers: Workers) -> None:
    assert failure_of(workers.agree(1, timeout_secs=0.01)).worker == 0


@pytest.mark.usefixtures("impatient")
def test_the_missing_worker_is_named_though_worker_0_came_later_and_still_waits(
    workers: Workers,
) -> None:
    late = workers.agree(0)
    eventually(lambda: workers.store.values)
    failure = failure_of(workers.agree(1, timeout_secs=0.01))
    assert failure.worker == 2
    assert "worker 1 waited 0 s for worker 2, which did not send its plan" in str(failure)
    for rank in (2, 3):
        workers.agree(rank)
    assert len(late.result(DEADLINE_SECS)) == 4


def test_the_missing_worker_is_named_on_every_worker_whoever_came_first(workers: Workers) -> None:
    # The time of worker 3 is up before that of worker 0, worker 1 would wait longer.
    waiting = [workers.agree(rank, timeout_secs=secs) for rank, secs in ((3, 0.01), (1, 60.0))]
    eventually(lambda: len(workers.store.values) == 2)
    waiting.append(workers.agree(0, timeout_secs=0.1))
    for failure in map(failure_of, waiting):
        assert failure.worker == 2
        assert "worker 0 waited 0 s for worker 2, which did not send its plan" in str(failure)


def test_the_failure_of_the_job_ends_the_wait_without_another_read() -> None:
    reads, failed = Counter[str](), JobFailed("worker 2 failed first: no such column", worker=2)

    def check(_: int) -> bool:
        raise failed

    exchange = DirectExchange(Counting(MemoryCoordination.Store(), reads), "test", 1, 40, check)
    with pytest.raises(JobFailed) as caught:
        exchange.agree("plan", "mine", DEADLINE_SECS)
    assert caught.value is failed
    assert reads == {"replicast/test/plan/all": 1}


def test_a_worker_that_comes_after_worker_0_has_given_up_is_told_that_it_is_the_one(workers: Workers) -> None:
    assert failure_of(workers.agree(0, timeout_secs=0.01, size=2)).worker == 1
    failure = failure_of(workers.agree(1, size=2))
    assert failure.worker == 1
    assert "worker 0 waited 0 s for worker 1, which did not send its plan" in str(failure)
    again = failure_of(workers.agree(0, size=2))
    assert (again.worker, str(again)) == (1, str(failure)), "worker 0 obeys what it has told the others"


def test_a_worker_that_has_left_is_named_on_every_worker(workers: Workers) -> None:
    workers.left.add(2)
    for failure in map(failure_of, [workers.agree(rank, size=3) for rank in (1, 0)]):
        assert failure.worker == 2
        assert "worker 2 reached the end of its script" in str(failure)


def test_nobody_waits_for_worker_0_when_it_has_left_but_what_all_said_is_heard(workers: Workers) -> None:
    agreeing = [workers.agree(0, size=2), workers.agree(1, size=2)]
    assert agreeing[0].result(DEADLINE_SECS) == agreeing[1].result(DEADLINE_SECS)
    workers.left.add(0)
    assert workers.agree(1, size=2).result(DEADLINE_SECS) == {0: "of 0", 1: "of 1"}


def test_all_missing_workers_are_named_to_those_who_have_come(workers: Workers) -> None:
    waiting = [workers.agree(2)]
    eventually(lambda: workers.store.values)
    waiting.append(workers.agree(0, timeout_secs=0.1))
    for failure in map(failure_of, waiting):
        assert failure.worker == 1
        assert "for workers 1, 3, which did not send their plan" in str(failure)


def test_an_error_about_many_workers_names_the_first_of_them(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicast.coordination.PEEK_SECS", 0.01)
    failure = failure_of(workers.agree(0, timeout_secs=0.01, size=1000))
    assert f", {MOST_NAMED} and perhaps more, which did not send" in str(failure)
