"""Workers meet before TensorFlow connects them: with threads or plain processes as workers, over loopback."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from replicast.config import (
    HEARTBEAT_TIMEOUT,
    START_TIMEOUT,
    Cluster,
    heartbeat_timeout_secs,
    start_timeout_secs,
)
from replicast.errors import ClusterError
from replicast.rendezvous import meet
from tests.unit.clock import Clock

DEADLINE_SECS = 120.0


HELD = contextlib.ExitStack()
"""The ports of a test: no other program gets one of them before its worker listens there."""


def free_addresses(count: int) -> tuple[str, ...]:
    addresses = []
    for _ in range(count):
        held = HELD.enter_context(socket.socket())
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        addresses.append(f"127.0.0.1:{held.getsockname()[1]}")
    return tuple(addresses)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Waiting workers say at once and always whom they wait for; their time is up when a test says so."""
    made = Clock()
    monkeypatch.setattr("replicast.rendezvous.time", made)
    times = {"REPORT_SECS": 0.0, "REPEAT_SECS": 0.0, "_TELL_SECS": 0.1, "_ANSWER_SECS": 1e6}
    for name, secs in times.items():
        monkeypatch.setattr(f"replicast.rendezvous.{name}", secs)
    return made


class Meeting(threading.Thread):
    """One worker that comes to the meeting."""

    def __init__(
        self,
        addresses: tuple[str, ...],
        rank: int,
        timeout_secs: float = DEADLINE_SECS,
        heartbeat_secs: float = 10.0,
    ) -> None:
        super().__init__(daemon=True)
        self.lines: list[str] = []
        cluster = Cluster(addresses=addresses, rank=rank)
        self._arguments = (cluster, timeout_secs, self.lines.append, heartbeat_secs)
        self.heartbeat_secs = 0.0
        self.error: ClusterError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.heartbeat_secs = meet(*self._arguments)
        except ClusterError as error:
            self.error = error

    def has_met(self) -> bool:
        self.join(DEADLINE_SECS)
        return not self.is_alive() and self.error is None


@pytest.fixture(autouse=True)
def no_server_of_tensorflow(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test waits for it."""
    monkeypatch.setattr("replicast.rendezvous._SERVER_SECS", 0.0)
    with HELD:
        yield


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_all_workers_meet_in_whatever_order_they_come_with_the_heartbeat_timeout_of_worker_0(
    order: tuple[int, ...],
) -> None:
    addresses = free_addresses(3)
    workers = [Meeting(addresses, rank, heartbeat_secs=90.0 - rank) for rank in order]
    assert all(worker.has_met() for worker in workers)
    assert [worker.heartbeat_secs for worker in workers] == [90.0] * 3


@pytest.mark.parametrize("option", [socket.SO_REUSEADDR, socket.SO_REUSEPORT])
def test_a_port_that_is_reserved_for_worker_0_can_be_used(option: int) -> None:
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, option, 1)
        held.bind(("127.0.0.1", 0))
        addresses = (f"127.0.0.1:{held.getsockname()[1]}", "127.0.0.1:9")
        assert all(worker.has_met() for worker in (Meeting(addresses, 0), Meeting(addresses, 1)))


def test_waiting_workers_say_who_is_missing(clock: Clock) -> None:
    addresses = free_addresses(3)
    workers = Meeting(addresses, 0, timeout_secs=2000.0), Meeting(addresses, 1, timeout_secs=1000.0)
    for worker in workers:
        eventually_said(worker, f"for worker 2 ({addresses[2]}), which has not started")
    for worker, secs in ((workers[1], 1000), (workers[0], 2000)):  # worker 1 first: it hears of 2 from 0
        clock.added_secs = secs
        worker.join(DEADLINE_SECS)
        assert f"Not all workers started within {secs} s: " in str(worker.error)
        assert f"worker 2 ({addresses[2]})" in str(worker.error)
        assert START_TIMEOUT in str(worker.error)


def test_a_worker_says_when_worker_0_does_not_answer(clock: Clock) -> None:
    addresses = free_addresses(2)
    worker = Meeting(addresses, 1, timeout_secs=1000.0)
    eventually_said(worker, f"for worker 0 ({addresses[0]}), which does not answer")
    clock.added_secs = 1000.0
    worker.join(DEADLINE_SECS)
    assert "Not all workers started within 1000 s" in str(worker.error)


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Name servers that do not answer before this event; then "worker-0" is the loopback."""
    real, answers = socket.getaddrinfo, threading.Event()

    def getaddrinfo(host: str, *arguments: Any, **options: Any) -> Any:
        if host != "worker-0":
            return real(host, *arguments, **options)
        answers.wait()
        return real("127.0.0.1", *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield answers
    answers.set()


def named(addresses: tuple[str, ...]) -> tuple[str, ...]:
    return (addresses[0].replace("127.0.0.1", "worker-0"), *addresses[1:])


def test_a_worker_says_when_the_name_of_worker_0_is_not_resolved_and_gives_up_in_time(
    monkeypatch: pytest.MonkeyPatch, resolver: threading.Event
) -> None:
    monkeypatch.setattr("replicast.rendezvous.REPORT_SECS", 0.0)
    addresses = named(free_addresses(2))
    worker, impatient = Meeting(addresses, 1), Meeting(addresses, 1, timeout_secs=0.1)
    eventually_said(
        worker, f"worker 0 ({addresses[0]}), which has a name that no DNS server has resolved yet"
    )
    impatient.join(DEADLINE_SECS)
    assert "has a name that no DNS server has resolved yet" in str(impatient.error)
    resolver.set()
    assert all(one.has_met() for one in (Meeting(addresses, 0), worker))


def test_no_worker_looks_up_a_name_in_the_thread_that_must_end_in_time(
    monkeypatch: pytest.MonkeyPatch, resolver: threading.Event
) -> None:
    resolving, look_up = [], socket.getaddrinfo

    def getaddrinfo(host: str, *arguments: Any, **options: Any) -> Any:
        if host == "worker-0":
            resolving.append(threading.current_thread())
        return look_up(host, *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr("replicast.rendezvous._SERVER_SECS", 0.1)  # it waits for TensorFlow's server too
    resolver.set()
    addresses = named(free_addresses(2))
    workers = [Meeting(addresses, rank) for rank in range(2)]
    assert all(worker.has_met() for worker in workers)
    assert resolving
    assert not set(resolving) & set(workers)


def test_a_worker_says_when_the_name_of_worker_0_has_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(host: str, *arguments: Any, **options: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    port = free_addresses(1)[0].rpartition(":")[2]
    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    monkeypatch.setattr(
        "replicast.connections._LOOK_SECS", DEADLINE_SECS
    )  # it looks until the lookup has ended
    worker = Meeting((f"worker-0:{port}", "127.0.0.1:9"), 1, timeout_secs=0.1)
    worker.join(DEADLINE_SECS)
    assert f"worker 0 (worker-0:{port}) has no address (Name or service not known)" in str(worker.error)


@pytest.mark.parametrize("name", [f"{'a' * 70}.example", "worker..example"])
def test_a_worker_says_that_a_name_which_cannot_be_one_has_no_address(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicast.connections._LOOK_SECS", DEADLINE_SECS)  # as above
    worker = Meeting((f"{name}:2222", "127.0.0.1:9"), 1, timeout_secs=0.0)
    worker.join(DEADLINE_SECS)
    assert f"worker 0 ({name}:2222) has no address ('{name}' could not be looked up" in str(worker.error)


def test_a_worker_of_another_job_is_refused_and_told_why() -> None:
    addresses = free_addresses(2)
    host = Meeting(addresses, 0)
    stranger = Meeting((addresses[0], "127.0.0.1:9"), 1)
    stranger.join(DEADLINE_SECS)
    assert "TF_CONFIG differs between the workers" in str(stranger.error)
    assert addresses[1] in str(stranger.error)
    assert Meeting(addresses, 1).has_met()
    assert host.has_met()


def connected(address: str) -> socket.socket:
    """A connection to worker 0, as soon as it listens."""
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection(
                ("127.0.0.1", int(address.rpartition(":")[2])), timeout=DEADLINE_SECS
            )


@pytest.mark.parametrize(
    "said",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        b"[]\n",
        b'{"worker": true}\n',
        b"",
        pytest.param(b"[" * 100_000 + b"\n", id="nested"),
    ],
)
def test_a_program_that_does_not_speak_the_protocol_disturbs_nothing(said: bytes) -> None:
    addresses = free_addresses(2)
    host = Meeting(addresses, 0)
    with connected(addresses[0]) as visitor:
        visitor.sendall(said)
        assert Meeting(addresses, 1).has_met()
    assert host.has_met()


def test_a_stranger_that_sends_thousands_of_messages_and_reads_nothing_delays_nobody() -> None:
    addresses = free_addresses(2)
    host = Meeting(addresses, 0)
    with connected(addresses[0]) as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stranger.sendall(b"{}\n" * 15_000)
        worker = Meeting(addresses, 1)
        assert worker.has_met()
        assert host.has_met()
        refusals = stranger.makefile("rb").readlines()
    assert len(refusals) <= 1


def test_the_oldest_of_many_strangers_makes_way_and_a_worker_that_comes_again_replaces_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("replicast.rendezvous._ANSWER_SECS", 1000.0)  # none is closed for its silence
    monkeypatch.setattr("replicast.rendezvous._TELL_SECS", 0.1)
    addresses = free_addresses(3)
    host = Meeting(addresses, 0)
    hello = json.dumps({"worker": 1, "addresses": addresses}).encode() + b"\n"
    with contextlib.ExitStack() as stack:
        replaced = stack.enter_context(connected(addresses[0]))
        replaced.sendall(hello)
        assert b"missing" in replaced.recv(4096)
        again = stack.enter_context(connected(addresses[0]))
        again.sendall(hello)
        while replaced.recv(4096):
            pass
        strangers = [stack.enter_context(connected(addresses[0])) for _ in range(64 + 3 + 1)]
        assert strangers[0].recv(1) == b"", "worker 0 has closed the connection"
        assert Meeting(addresses, 2).has_met()
        assert host.has_met()


def test_a_program_that_connects_and_says_nothing_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicast.rendezvous._ANSWER_SECS", 0.3)
    addresses = free_addresses(3)
    host, worker = Meeting(addresses, 0), Meeting(addresses, 1)
    with connected(addresses[0]) as visitor:
        assert visitor.recv(1) == b"", "worker 0 has closed the connection"
    monkeypatch.setattr("replicast.rendezvous._ANSWER_SECS", DEADLINE_SECS)
    assert all(one.has_met() for one in (Meeting(addresses, 2), worker, host))


def test_workers_with_many_open_files_meet_too() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limits[1]), limits[1]))
    opened = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while opened[-1] < 1100:  # select.select() takes none above 1023
            opened.append(os.dup(opened[0]))
        addresses = free_addresses(2)
        assert all(worker.has_met() for worker in (Meeting(addresses, 0), Meeting(addresses, 1)))
    finally:
        for descriptor in opened:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_worker_that_died_while_it_waited_is_missing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicast.rendezvous.REPORT_SECS", 0.0)
    monkeypatch.setattr("replicast.rendezvous.REPEAT_SECS", 0.0)
    addresses = free_addresses(3)
    host = Meeting(addresses, 0)
    with process(addresses, 1) as dying:
        eventually_said(host, "for worker 2 (")
        dying.kill()
    said = len(host.lines)
    eventually_said(host, "for worker 1 (", since=said)
    assert all(worker.has_met() for worker in (Meeting(addresses, 1), Meeting(addresses, 2), host))


def eventually_said(worker: Meeting, text: str, since: int = 0) -> None:
    ends = threading.Event()
    for _ in range(int(DEADLINE_SECS / 0.02)):
        if any(text in line for line in worker.lines[since:]):
            return
        ends.wait(0.02)
    pytest.fail(f"{text!r} was not said: {worker.lines[-3:]}")


def process(addresses: tuple[str, ...], rank: int) -> subprocess.Popen[str]:
    program = (
        "import sys; from replicast import rendezvous; from replicast.config import Cluster\n"
        "rendezvous.REPORT_SECS = 0.0\n"
        f"rendezvous.meet(Cluster(addresses={addresses!r}, rank={rank}), 60.0, sys.stderr.write, 10.0)"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, env=os.environ
    )


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_worker_that_waits_for_the_others(rank: int, signum: signal.Signals) -> None:
    waiting = process(free_addresses(2), rank)
    assert waiting.stderr is not None
    with waiting:
        assert "has waited" in waiting.stderr.readline()
        waiting.send_signal(signum)
        assert waiting.wait(DEADLINE_SECS) == -signum


@pytest.mark.parametrize(
    ("failures", "problem"),
    [
        ([errno.EMFILE, errno.EMFILE, errno.ECONNABORTED], "too many open files; see ulimit -n"),
        ([errno.ENOBUFS, errno.ENOMEM], "No buffer space available"),
    ],
)
def test_worker_0_says_once_why_it_cannot_accept_for_now_and_meets_the_others_later(
    monkeypatch: pytest.MonkeyPatch, failures: list[int], problem: str
) -> None:
    accept, failures = socket.socket.accept, [*failures]

    def fails_first(listener: socket.socket) -> tuple[socket.socket, object]:
        if failures:
            raise OSError(failures[0], os.strerror(failures.pop(0)))
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", fails_first)
    addresses = free_addresses(2)
    host, worker = Meeting(addresses, 0), Meeting(addresses, 1)
    assert worker.has_met()
    assert host.has_met()
    assert failures == []
    assert host.lines == [f"replicast: worker 0 cannot accept connections at the moment: {problem}\n"]


@pytest.mark.parametrize(
    ("read", "name", "default", "wrong"),
    [
        (start_timeout_secs, START_TIMEOUT, 3600.0, "0"),
        (heartbeat_timeout_secs, HEARTBEAT_TIMEOUT, 10.0, "1.9"),
    ],
)
def test_a_timeout_comes_from_the_environment(
    read: Callable[[dict[str, str]], float], name: str, default: float, wrong: str
) -> None:
    assert (read({}), read({name: "90"})) == (default, 90.0)
    for value in (wrong, "soon", "-1", "inf", "nan"):
        with pytest.raises(ClusterError, match=f"{name} must be a .*number of seconds"):
            read({name: value})
