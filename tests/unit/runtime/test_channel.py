"""Messages arrive in order, and those in the coordination service are removed once they are read."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from replicast.coordination import DirectExchange, MemoryCoordination
from replicast.core.messages import Release, Request
from replicast.errors import JobFailed
from replicast.replicas.channel import Channel, open_sockets
from replicast.replicas.proposals import Ticket
from tests.threads import DEADLINE_SECS, Job, Worker, eventually
from tests.unit.runtime.playing import bias


def channels(store: MemoryCoordination.Store, size: int) -> list[Channel]:
    return [Channel(MemoryCoordination(store), "test", rank, size) for rank in range(size)]


@contextmanager
def connected(*hosts: str) -> Iterator[list[Channel]]:
    """The channels of workers on these hosts, as they open them at the start."""
    store, size = MemoryCoordination.Store(), len(hosts)

    def opened(rank: int) -> Channel:
        coordination = MemoryCoordination(store)
        sockets = open_sockets(DirectExchange(coordination, "start", rank, size), hosts[rank], DEADLINE_SECS)
        return Channel(coordination, "test", rank, size, sockets)

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(opened, range(size)))
    try:
        yield found
    finally:
        for channel in found:
            channel.close()


@pytest.mark.parametrize("hosts", ["aaa", "aab", "abb", "abc"])
def test_every_worker_hears_everything_in_order_and_is_heard_in_order(hosts: str) -> None:
    with connected(*hosts) as (coordinator, *workers):
        check_all_is_heard(coordinator, workers)


def check_all_is_heard(coordinator: Channel, workers: list[Channel]) -> None:
    said = [[Release(number) for number in range(count)] for count in (1, 3, 2)]
    for messages in said:
        coordinator.broadcast(messages)
        for worker in workers:
            worker.send([Request("save", (f"{worker.rank}",))] * len(messages))
    for messages in said:
        for worker in workers:
            assert worker.receive() == messages
            heard = coordinator.receive_from(worker.rank)
            assert heard == [Request("save", (f"{worker.rank}",))] * len(messages)


def test_workers_of_one_host_do_not_use_the_service() -> None:
    with connected("a", "a", "a") as (coordinator, *workers):
        for channel in (coordinator, *workers):
            channel.coordination.put = unexpected  # type: ignore[method-assign]
            channel.coordination.get = unexpected  # type: ignore[method-assign]
        check_all_is_heard(coordinator, workers)


def unexpected(*_: object) -> Any:
    raise AssertionError("the coordination service is used")


def test_if_one_worker_cannot_connect_all_use_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicast.replicas.channel.HANDSHAKE_SECS", 0.05)
    monkeypatch.setattr("replicast.replicas.channel._is_of_this_user", lambda _: False)
    with connected("a", "a", "a") as (coordinator, *workers):
        assert not any(channel.sockets for channel in (coordinator, *workers))
        check_all_is_heard(coordinator, workers)


def test_strangers_who_come_all_the_time_do_not_hold_up_worker_0(monkeypatch: pytest.MonkeyPatch) -> None:
    strangers, many = list[socket.socket](), 50_000

    def followed_by_another(connection: socket.socket) -> bool:
        listens_at = connection.getsockname()
        if listens_at and len(strangers) < many:
            if strangers:
                strangers[-1].close()
            strangers.append(socket.socket(socket.AF_UNIX))
            strangers[-1].connect(listens_at)
        return False

    monkeypatch.setattr("replicast.replicas.channel.HANDSHAKE_SECS", 0.05)
    monkeypatch.setattr("replicast.replicas.channel._is_of_this_user", followed_by_another)
    with connected("a", "a") as (coordinator, worker):
        check_all_is_heard(coordinator, [worker])
    assert 0 < len(strangers) < many
    strangers[-1].close()


def test_a_worker_that_is_not_let_in_waits_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicast.replicas.channel.HANDSHAKE_SECS", 0.05)
    store, name = MemoryCoordination.Store(), "\0replicast-" + uuid.uuid4().hex
    first, second = (DirectExchange(MemoryCoordination(store), "start", rank, 2) for rank in range(2))
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as stranger:
        listener.bind(name)
        listener.listen(0)
        stranger.connect(name)  # And nobody accepts it: the queue is full.
        with ThreadPoolExecutor(1) as threads:
            opening = threads.submit(open_sockets, second, "a", DEADLINE_SECS)
            first.agree("host of messages", json.dumps(["a", name]), DEADLINE_SECS)
            try:
                assert first.agree("messages", "", DEADLINE_SECS)[1].startswith("worker 1: ")
            finally:
                listener.close()
            assert opening.result(DEADLINE_SECS) == {}


def test_who_waits_for_a_worker_that_has_ended_learns_from_the_service_which_one_was_lost() -> None:
    with connected("a", "a") as (coordinator, worker):
        worker.send([Request("save", ())])
        worker.close()
        assert coordinator.receive_from(1) == [Request("save", ())]
        coordinator.broadcast([Release(1)])
        assert coordinator.receive_from(1) == []

        def lost(key: str, timeout_secs: float) -> str | None:
            raise JobFailed("worker 1 was lost", worker=1)

        coordinator.coordination.get = lost  # type: ignore[method-assign]
        with pytest.raises(JobFailed, match="worker 1 was lost"):
            coordinator.receive_from(1)


_CLOSED = """
import signal, socket
from replicast.coordination import MemoryCoordination
from replicast.replicas.channel import Channel

signal.signal(signal.SIGPIPE, signal.SIG_DFL)
mine, theirs = socket.socketpair()
theirs.close()
Channel(MemoryCoordination(MemoryCoordination.Store()), "test", 0, 2, {1: mine}).broadcast([])
"""


def test_a_message_to_a_worker_that_has_ended_does_not_kill_a_script_with_the_default_sigpipe() -> None:
    assert subprocess.run([sys.executable, "-c", _CLOSED], timeout=DEADLINE_SECS).returncode == 0


def test_a_worker_that_takes_no_messages_is_named_and_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicast.replicas.channel.FROZEN_SECS", 0.05)
    many = [Release(number) for number in range(100_000)]
    with (
        connected("a", "a") as (coordinator, _),
        pytest.raises(JobFailed, match="Worker 1 has not") as failure,
    ):
        coordinator.broadcast(many)
    assert failure.value.worker == 1


class BrokenOnce(MemoryCoordination):
    """The connection to the service breaks once, after the service has stored a message."""

    broken = False

    def put(self, key: str, value: str) -> bool:
        written = super().put(key, value)
        if not self.broken:
            self.broken = True
            raise JobFailed("The coordination service does not answer", worker=0)
        return written


@pytest.mark.parametrize("rank", [0, 1])
def test_no_message_is_lost_in_silence_after_one_that_failed(rank: int) -> None:
    channel = Channel(BrokenOnce(MemoryCoordination.Store()), "test", rank, 2)
    say = channel.send if rank else channel.broadcast
    with pytest.raises(JobFailed, match="does not answer"):
        say([Release(1)])
    with pytest.raises(JobFailed, match=f"Worker {rank} cannot send a message"):
        say([Release(2)])


def test_a_note_that_cannot_be_sent_ends_the_job_as_any_message() -> None:
    with Job(2) as job:
        worker = job.workers[1]

        def broken(key: str, value: str) -> bool:
            raise JobFailed("The coordination service does not answer", worker=0)

        worker.coordination.put = broken  # type: ignore[method-assign]
        worker.session.send_note("{}")
        eventually(worker.session.threads.stopping.is_set)
        with pytest.raises(JobFailed, match="does not answer"):
            worker.session.check()


def test_what_was_read_by_all_is_deleted_and_what_one_has_not_read_stays() -> None:
    store = MemoryCoordination.Store()
    coordinator, quick, slow = channels(store, 3)
    for number in range(100):
        coordinator.broadcast([Release(number)])
        quick.receive()
        quick.send([])
        coordinator.receive_from(1)
    assert len(store.values) == 100
    for _ in range(100):
        slow.receive()
    slow.send([])
    coordinator.receive_from(2)
    coordinator.broadcast([Release(100)])
    assert len(store.values) == 1


def test_a_thousand_updates_leave_nothing_in_the_service_and_never_pile_up() -> None:
    with Job(2) as job:
        tickets: list[Ticket] = []
        most = [0]

        def propose(worker: Worker, step: int) -> None:
            if worker.rank == 1:
                tickets.extend(worker.propose(bias(1.0)) for _ in range(10))
                most[0] = max(most[0], len(job.store.values))

        job.train(100, propose)
        receipts = [ticket.result(DEADLINE_SECS) for ticket in tickets]
        assert [receipt.sequence for receipt in receipts] == list(range(1, 1001))
        assert most[0] <= 500, "of many thousand messages"
        for _ in range(2):  # every worker says how far it has read
            job.on_all(lambda worker: worker.session.rest("close"))
        eventually(lambda: len(job.store.values) <= 3)


def test_what_worker_0_says_to_itself_does_not_go_through_the_service() -> None:
    with Job(2) as job:
        put, keys = job.workers[0].coordination.put, list[str]()

        def noting(key: str, value: str) -> bool:
            keys.append(key)
            return put(key, value)

        job.workers[0].coordination.put = noting  # type: ignore[method-assign]
        ticket = job.workers[0].propose(bias(1.0))
        job.train(2)
        assert ticket.result(DEADLINE_SECS).sequence == 1
        assert keys
        assert all("/down/" in key for key in keys)


def test_a_job_of_one_needs_no_service() -> None:
    with Job(1) as job:
        ticket = job.workers[0].propose(bias(1.0))
        job.train(2)
        assert ticket.result(DEADLINE_SECS).sequence == 1
        assert job.store.values == {}


# What training threads tell each other directly.


def exchanges(size: int, left: set[int]) -> list[DirectExchange]:
    store = MemoryCoordination.Store()
    return [
        DirectExchange(MemoryCoordination(store), "test", rank, size, has_left=left.__contains__)
        for rank in range(size)
    ]


def test_who_waits_for_one_that_has_left_is_told_and_what_that_one_said_before_is_heard() -> None:
    left: set[int] = set()
    first, second = exchanges(2, left)
    second.tell("plan", "said before it left")
    left.add(1)
    assert first.hear("plan", DEADLINE_SECS, worker=1) == "said before it left"
    with pytest.raises(JobFailed, match="worker 1 reached the end of its script") as failure:
        first.agree("another plan", "mine", DEADLINE_SECS)
    assert failure.value.worker == 1


def test_what_all_have_agreed_on_can_be_forgotten() -> None:
    store = MemoryCoordination.Store()
    workers = [DirectExchange(MemoryCoordination(store), "test", rank, 2) for rank in range(2)]
    workers[1].tell("greeting", "hello")
    with ThreadPoolExecutor() as threads:
        agreeing = [threads.submit(worker.agree, "plan", "mine", DEADLINE_SECS) for worker in workers]
        assert [one.result() for one in agreeing] == [{0: "mine", 1: "mine"}] * 2
    for worker in workers:
        worker.forget_agreed("plan")
    assert list(store.values.values()) == ["hello"]
