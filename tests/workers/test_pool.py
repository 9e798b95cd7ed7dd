"""The pool itself, on real processes: order, failures, hangs and deaths."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from tests.pool import Pool, WorkerFailed


@pytest.fixture(scope="module")
def bare_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    """Two workers without TensorFlow, for tests that end them."""
    with Pool(2, tmp_path_factory.mktemp("bare"), strategy=False, grace_secs=0.5) as pool:
        yield pool


def own_rank(strategy: None, factor: int = 1) -> int:
    time.sleep(0.1 * (1 - int(os.environ["RANK"])))  # worker 0 answers last
    return int(os.environ["RANK"]) * factor


def add(strategy: None, left: int, right: int) -> int:
    return left + right


def raise_on_the_last_worker(strategy: None) -> None:
    print("a line for the log")
    if os.environ["RANK"] == "1":
        raise RuntimeError("the last worker cannot")


def wait_for_nothing(strategy: None, *, raising: str | None = None) -> None:
    if os.environ["RANK"] == raising:
        raise RuntimeError("one leaves, the other waits")
    threading.Event().wait()


def die_on_the_last_worker(strategy: None) -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()


def return_what_cannot_travel(strategy: None) -> object:
    return threading.Lock()


def process_id(strategy: None) -> int:
    return os.getpid()


def test_results_come_back_in_the_order_of_the_ranks(bare_pool: Pool) -> None:
    assert bare_pool.run(own_rank) == [0, 1]
    assert bare_pool.run(own_rank, factor=10) == [0, 10]


def test_each_worker_can_have_its_own_arguments(bare_pool: Pool) -> None:
    assert bare_pool.run_each(add, [(1, 2), (10, 20)]) == [3, 30]
    with pytest.raises(ValueError, match="Received: 1"):
        bare_pool.run_each(add, [(1, 2)])


def test_the_processes_stay_from_one_call_to_the_next(bare_pool: Pool) -> None:
    assert bare_pool.run(process_id) == bare_pool.run(process_id)


def test_a_failure_shows_the_traceback_and_the_log_of_the_worker_that_raised(bare_pool: Pool) -> None:
    with pytest.raises(WorkerFailed) as failure:
        bare_pool.run(raise_on_the_last_worker)
    message = str(failure.value)
    assert "worker 0 returned" in message
    assert "worker 1 raised" in message
    assert "in raise_on_the_last_worker" in message
    assert "RuntimeError: the last worker cannot" in message
    assert "a line for the log" in message
    assert bare_pool.run(own_rank) == [0, 1]


def test_a_result_that_cannot_be_pickled_is_a_failure(bare_pool: Pool) -> None:
    with pytest.raises(WorkerFailed, match="The result cannot be sent"):
        bare_pool.run(return_what_cannot_travel)


def test_a_hang_ends_at_the_deadline_and_says_where_each_worker_stood(bare_pool: Pool) -> None:
    with pytest.raises(WorkerFailed) as failure:
        bare_pool.run(wait_for_nothing, deadline_secs=1)
    message = str(failure.value)
    assert message.count("was still running") == 2
    assert message.count("in wait_for_nothing") == 2
    assert bare_pool.run(own_rank) == [0, 1]


def test_a_worker_left_waiting_by_one_that_raised_is_ended_after_the_grace(bare_pool: Pool) -> None:
    with pytest.raises(WorkerFailed) as failure:
        bare_pool.run(wait_for_nothing, raising="0")
    message = str(failure.value)
    assert "RuntimeError: one leaves, the other waits" in message
    assert "worker 1 was still running" in message
    assert bare_pool.run(own_rank) == [0, 1]


def test_a_death_is_reported_with_its_signal(bare_pool: Pool) -> None:
    with pytest.raises(WorkerFailed, match="worker 1 died of SIGKILL"):
        bare_pool.run(die_on_the_last_worker)
    assert bare_pool.run(own_rank) == [0, 1]
