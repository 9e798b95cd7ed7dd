"""The main thread of a launcher and its thread `hosts`; the sockets of the first launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import io
import os
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from replicast.errors import ClusterError, LaunchRefused
from replicast.launcher.failure import LaunchOrder, Phase, WorkerExit
from replicast.launcher.hosts_leader import (
    Hello,
    HostTimeouts,
    Message,
    Notices,
    RefusedHost,
    Report,
    Waiting,
    read_message,
    sent_from,
)
from replicast.launcher.hosts_link import (
    MAX_LINE,
    Connection,
    Event,
    First,
    HostsAttempts,
    Link,
    NotAuthentic,
    Other,
    Part,
    Wire,
    listen,
)
from replicast.launcher.interruptions import Interruptions
from replicast.launcher.launcher import Settings, supervise
from replicast.launcher.plan import JobPlan, own_node
from replicast.launcher.screen import make_screen
from replicast.names import Dialer
from tests.threads import eventually
from tests.unit.clock import Clock

SECS = 120.0
E = TypeVar("E", bound=Event)
JOB = JobPlan(argv=("python", "train.py"), hosts=("a", "b"), node_rank=1, endpoint=("127.0.0.1", 1))
PART = Part(
    job=dataclasses.replace(JOB, hosts=(), nnodes=2, node_rank=0),
    endpoint=("127.0.0.1", 1),
    secret=b"secret",
    timeouts=HostTimeouts(leave_secs=0.0),
    next_attempt=0,
    run_name="the-run",
)
ORDER = LaunchOrder(session="s", phase=Phase.RUN, attempt=0, restarts=0, max_restarts=0, hosts=("a", "b"))


ONE, OTHER = "1" * 64, "2" * 64


def pair(secret: bytes = b"s", theirs: bytes = b"s") -> tuple[Wire, Wire]:
    first, other = Wire(secret, ONE, is_first=True), Wire(theirs, OTHER, is_first=False)
    assert first.feed(other.opening()) == other.feed(first.opening()) == []
    return first, other


@pytest.mark.parametrize("secret", [b"s", b""])
def test_what_one_packs_the_other_unpacks(secret: bytes) -> None:
    first, other = pair(secret, secret)
    assert other.feed(first.pack({"a": 1}) + first.pack({"b": 2})) == [{"a": 1}, {"b": 2}]
    line = other.pack({"c": [3]})
    assert first.feed(line[:10]) == []
    assert first.feed(line[10:]) == [{"c": [3]}]


def test_a_host_without_a_secret_is_told_so() -> None:
    first, other = Wire(b"s", ONE, is_first=True), Wire(b"", OTHER, is_first=False)
    with pytest.raises(NotAuthentic, match="this host has a job secret, the other has none"):
        first.feed(other.opening())
    with pytest.raises(NotAuthentic, match="the other host has a job secret, this one has none"):
        other.feed(first.opening())


def test_a_line_counts_unchanged_and_once_on_its_connection_in_its_direction_and_with_its_secret_only() -> (
    None
):
    first, other = pair(b"s", b"t")
    with pytest.raises(NotAuthentic, match="a different job secret"):
        first.feed(other.pack({"a": 1}))
    first, other = pair()
    with pytest.raises(NotAuthentic):
        first.feed(other.pack({"code": 0}).replace(b"0}", b"1}"))
    first, other = pair()
    line = other.pack({"a": 1})
    assert first.feed(line) == [{"a": 1}]
    with pytest.raises(NotAuthentic):
        first.feed(line)
    with pytest.raises(NotAuthentic):
        pair()[1].feed(line)
    later = Wire(b"s", "3" * 64, is_first=True)
    later.feed(Wire(b"s", OTHER, is_first=False).opening())
    with pytest.raises(NotAuthentic):
        later.feed(line)


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"x" * 5000,
        b"[1]\n",
        b'{"replicast": "launchers 3"}\n',
        b"\n",
        b"[" * 900 + b"\n",
        Wire(b"s", ONE, is_first=True).opening(),
    ],
)
def test_something_else_is_not_a_launcher(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"is not a launcher|without an end|repeats"):
        Wire(b"s", ONE, is_first=True).feed(data)


def test_a_failure_fits_into_a_line_whatever_its_log_holds() -> None:
    first, other = pair()
    wild = WorkerExit(worker=0, code=1, lines=("\x1b[31m" * 20_000, "😀" * 1000) * 50, why="😀" * 1000)
    line = other.pack(Report(next_attempt=0, failure=sent_from(1, wild)))
    assert len(line) < MAX_LINE
    (fields,) = first.feed(line)
    assert isinstance(read_message(fields, 2), Report)


def test_a_line_without_an_end_takes_bounded_memory() -> None:
    first, _ = pair()
    assert first.feed(b"x" * MAX_LINE) == []
    with pytest.raises(ValueError, match="without an end"):
        first.feed(b"x")


class Told(Link):
    """Says some things at once."""

    def __init__(self, *said: Event) -> None:
        super().__init__(PART)
        self._said = list(said)

    def sockets(self) -> list[socket.socket]:
        return []

    def poll(self, readable: list[socket.socket]) -> list[Event]:
        said, self._said = self._said, []
        return said


def test_a_group_that_must_end_as_soon_as_it_is_started_is_told_so() -> None:
    failure = WorkerExit(host=0, worker=0, code=3)
    end = replace(ORDER, phase=Phase.END, failure=failure, signal=signal.SIGTERM)
    with (
        Interruptions() as interruptions,
        contextlib.closing(make_screen(io.StringIO(), io.StringIO(), tee=frozenset(), environ={})) as screen,
        Told(ORDER, end) as link,
    ):
        attempts = HostsAttempts(link, JOB, screen, interruptions)
        assert attempts.begin() == ORDER
        assert select.select([attempts], [], [], SECS)[0], "the group waits for this descriptor"
        assert attempts.take_ends() == [end]


def hello_of(hosts: tuple[str, ...] = (), node: int = 1, **changes: Any) -> Hello:
    """What a launcher of a job on these hosts says first."""
    job = dataclasses.replace(PART.job, hosts=hosts, node_rank=node, **changes)
    return dataclasses.replace(PART, job=job).hello("127.0.0.1")


def test_strangers_who_say_nothing_keep_no_launcher_out(listener: socket.socket) -> None:
    endpoint = listener.getsockname()[:2]
    with contextlib.ExitStack() as stack, first_of(listener):
        for _ in range(80):
            stack.enter_context(socket.create_connection(endpoint))
        assert is_answered(endpoint)


def first_of(listener: socket.socket, hosts: tuple[str, ...] = (), secret: bytes = b"secret") -> Link:
    """The link of a first launcher; without `--hosts` it looks for no other one."""
    return service_of(listener, hosts, secret)


def service_of(
    listener: socket.socket, hosts: tuple[str, ...] = (), secret: bytes = b"secret", **changes: Any
) -> First:
    job = dataclasses.replace(PART.job, hosts=hosts)
    return First(dataclasses.replace(PART, job=job, secret=secret, **changes), listener)


def other(endpoint: tuple[str, int], timeouts: HostTimeouts, secret: bytes = b"secret") -> Link:
    """The link of another launcher."""
    job = dataclasses.replace(PART.job, node_rank=1)
    return Other(dataclasses.replace(PART, job=job, endpoint=endpoint, secret=secret, timeouts=timeouts))


def next_events(link: Link) -> list[Event]:
    assert select.select([link], [], [], SECS)[0], "nothing happened"
    return list(iter(link.next_event, None))


def next_of(link: Link, kind: type[E]) -> E:
    """The next event of a kind; others, such as that it still waits, may come before."""
    while True:
        for event in next_events(link):
            if isinstance(event, kind):
                return event


@contextlib.contextmanager
def connected_to(endpoint: tuple[str, int], hello: Hello, secret: bytes = b"secret") -> Iterator[Connection]:
    with socket.create_connection(endpoint) as connected:
        yield Connection(connected, secret, 2, hello)


def answer_to(endpoint: tuple[str, int], hello: Hello, *messages: Message) -> Message | ValueError:
    """The first answer to what a launcher with the secret sends."""
    with connected_to(endpoint, hello) as connection:
        answers: list[Message | ValueError] = []
        while not answers:
            assert select.select([connection.socket], [], [], SECS)[0], "no answer"
            answers += connection.receive()
            if connection.is_open:
                for message in messages:
                    connection.send(message)
                messages = ()
        return answers[0]


def is_answered(endpoint: tuple[str, int]) -> bool:
    return isinstance(answer_to(endpoint, hello_of()), LaunchOrder)


def test_a_report_with_impossible_values_is_left_out_and_the_launchers_go_on(listener: socket.socket) -> None:
    endpoint = listener.getsockname()[:2]
    with first_of(listener) as link, connected_to(endpoint, hello_of()) as sender:
        while not sender.is_open:
            assert select.select([sender.socket], [], [], SECS)[0], "no opening"
            sender.receive()
        sender.send(replace(Report(next_attempt=0), signal=9999))
        told = next_of(link, str)
        assert "ignored an invalid message of the launcher at 127.0.0.1: Invalid enum value 9999" in told
        sender.send(Report(next_attempt=7))
        run = next_of(link, LaunchOrder)
        assert (run.phase, run.attempt) == (Phase.RUN, 7), "the rest of what it sends is heard"


def test_of_two_launchers_that_take_themselves_for_the_first_the_later_one_is_refused_and_both_say_why() -> (
    None
):
    early, late = "127.0.0.1", "127.0.0.2"
    listener = listen((early, 0))
    port = listener.getsockname()[1]
    with (
        first_of(listener, (early, late)) as first,
        first_of(listen((late, port)), (late, early)) as second,
    ):
        lists = f"one with --hosts {early},{late}, the other with --hosts {late},{early}"
        why = f"both act as the launcher of the first host, {lists}"
        refused = next_of(second, LaunchRefused)
        assert str(refused).startswith(f"The launcher at {early} refused this host: {why}")
        assert next_of(first, str) == f"refused a launcher at 127.0.0.1: {why}"


def test_two_launchers_that_take_themselves_for_the_first_at_the_same_moment_refuse_each_other() -> None:
    one, other = "127.0.0.1", "127.0.0.2"
    listener = listen((one, 0))
    listeners = (listener, listen((other, listener.getsockname()[1])))
    links = [first_of(own, hosts) for hosts, own in zip(((one, other), (other, one)), listeners, strict=True)]
    with links[0], links[1]:
        for link in links:
            next_of(link, LaunchRefused)


def test_a_stranger_at_one_host_does_not_hide_another_first_launcher_at_the_next_one() -> None:
    here, stranger, rival = "127.0.0.1", "127.0.0.2", "127.0.0.3"
    listener = listen((here, 0))
    port = listener.getsockname()[1]
    late = listen((rival, port))  # It lets the question in, and answers when it is served.
    with (
        first_of(listen((stranger, port)), (), b"another"),
        first_of(listener, (here, stranger, rival)) as first,
    ):
        told = next_of(first, str)
        assert told.startswith(f"refused a launcher at {stranger}: the other host has a different job secret")
        with first_of(late, (rival, stranger, here)):
            assert f"The launcher at {rival}" in str(next_of(first, LaunchRefused))


@pytest.fixture
def listener() -> socket.socket:
    """Where a first launcher listens, which closes it."""
    return listen(("127.0.0.1", 0))


@pytest.fixture
def resolver(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Name servers that do not answer before this event; then "gpu1" is the loopback."""
    real, answers = socket.getaddrinfo, threading.Event()

    def getaddrinfo(host: str, *arguments: Any, **options: Any) -> Any:
        if host != "gpu1":
            return real(host, *arguments, **options)
        assert threading.current_thread().name == "replicast-lookup", "nothing else waits for it"
        answers.wait()
        return real("127.0.0.1", *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield answers
    answers.set()


def test_a_first_launcher_accepts_the_others_while_no_dns_server_answers(
    listener: socket.socket, resolver: threading.Event
) -> None:
    hosts = ("127.0.0.1", "gpu1")
    with first_of(listener, hosts):
        assert isinstance(answer_to(listener.getsockname()[:2], hello_of(hosts)), LaunchOrder)
    assert not resolver.is_set()


def test_another_launcher_finds_the_first_one_when_a_slow_dns_server_has_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], resolver: threading.Event
) -> None:
    monkeypatch.setattr("replicast.launcher.hosts_link.CONNECT_SECS", 0.1)
    assert asked(("gpu1", 1), HostTimeouts(join_secs=0.5)) == 75
    assert "within 0.5 s (gpu1:1: no DNS server has resolved the name yet)" in capsys.readouterr().err
    listener = listen(("127.0.0.1", 0))
    endpoint = ("gpu1", listener.getsockname()[1])
    timeouts = HostTimeouts(leave_secs=0.0, tell_after_secs=0.3)
    with (
        first_of(listener),
        other(endpoint, timeouts) as late,
    ):
        waiting = next_of(late, Waiting)
        assert "no DNS server has resolved the name yet" in waiting.why
        resolver.set()
        assert next_of(late, LaunchOrder).phase is Phase.RUN


def test_a_launcher_says_when_no_dns_server_answers(
    monkeypatch: pytest.MonkeyPatch, resolver: threading.Event
) -> None:
    for module in ("plan", "hosts_link"):
        monkeypatch.setattr(f"replicast.launcher.{module}.NAMES_SECS", 0.1)
    assert own_node(("gpu1", "127.0.0.1")) == 1
    with pytest.raises(ClusterError, match=r"not all names were resolved within 0\.1 s"):
        own_node(("gpu1", "198.51.100.1"))
    with pytest.raises(ClusterError, match=r"name of the first host was not resolved within 0\.1 s: gpu1"):
        listen(("gpu1", 0))
    resolver.set()
    assert own_node(("gpu1", "198.51.100.1")) == 0
    listen(("gpu1", 0)).close()


@pytest.mark.parametrize(
    "theirs",
    [
        pytest.param(
            hello_of(("127.0.0.2", "127.0.0.1"), 0, port=PART.job.port + 1), id="a job on other ports"
        ),
        pytest.param(hello_of(("127.0.0.3", "127.0.0.4"), 0), id="a job on other hosts"),
        pytest.param(hello_of(("127.0.0.1", "127.0.0.2"), 0), id="its own, passed on"),
        pytest.param(hello_of((), 0), id="nonsense"),
    ],
)
def test_the_first_launcher_of_another_job_is_not_refused_and_no_stranger_can_have_it_refused(
    theirs: Hello,
) -> None:
    listener, hosts = listen(("127.0.0.1", 0)), ("127.0.0.1", "127.0.0.2")
    with first_of(listener, hosts):
        answer = answer_to(listener.getsockname()[:2], theirs, hello_of(hosts))
        assert isinstance(answer, LaunchOrder)


def test_with_another_secret_both_sides_say_at_once_what_to_do_and_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, connect, tries = Clock(), Dialer.connect, list[float]()

    def counted(dialer: Dialer, timeout_secs: float) -> socket.socket:
        tries.append(timeout_secs)
        return connect(dialer, timeout_secs)

    monkeypatch.setattr(Dialer, "connect", counted)
    monkeypatch.setattr("replicast.launcher.hosts_link.time", clock)
    monkeypatch.setattr("replicast.launcher.hosts_link._PAUSE_SECS", 0.0)
    listener = listen(("127.0.0.1", 0))
    endpoint = listener.getsockname()[:2]
    timeouts = HostTimeouts(join_secs=100.0, redial_secs=1000.0)
    with first_of(listener) as link:
        with other(endpoint, timeouts, b"another") as asking:
            said: list[Event] = [next_of(asking, str)]
            eventually(lambda: len(tries) >= 3)
            clock.added_secs = timeouts.join_secs
            while not isinstance(said[-1], LaunchOrder):
                said += [event for event in next_events(asking) if not isinstance(event, Waiting)]
        problem = "the other host has a different job secret. Set REPLICAST_JOB_SECRET"
        line, over = said
        assert isinstance(line, str)
        assert line.startswith(f"127.0.0.1:{endpoint[1]}: {problem}")
        assert line.endswith("; this launcher keeps trying")
        assert isinstance(over, LaunchOrder)
        assert over.failure is not None
        assert over.failure.why.startswith("it did not join within 100 s (127.0.0.1:")
        assert over.failure.why.endswith("the other host has a different job secret)")
        told = [event for event in next_events(link) if isinstance(event, str)]
        assert len(told) == 1, "however often it came"
        assert told[0].startswith(f"refused a launcher at 127.0.0.1: {problem}")
        assert is_answered(endpoint)


@pytest.mark.parametrize(
    ("secret", "hello", "why"),
    [
        (
            b"secret",
            hello_of(("a", "b"), workers=2),
            "a different number of workers (-n): 1 on the first host, 2 on the other",
        ),
        (b"secret", hello_of(("b", "a"), 0), "one with --hosts a,b, the other with --hosts b,a"),
        (b"another", hello_of(("a", "b")), "the other host has a different job secret"),
    ],
)
def test_the_last_line_of_the_first_launcher_says_why_it_refused_the_host_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, secret: bytes, hello: Hello, why: str
) -> None:
    monkeypatch.setattr(First, "_look", lambda first, host: None)
    listener, now = listen(("127.0.0.1", 0)), time.monotonic()
    first = service_of(listener, ("a", "b"), timeouts=HostTimeouts())
    leader = first.leader
    with contextlib.closing(first), connected_to(listener.getsockname()[:2], hello, secret) as sender:
        events: list[Event] = []
        while not any(isinstance(event, str) for event in events):
            readable, _, _ = select.select([*first.sockets(), sender.socket], [], [], SECS)
            assert readable, "nothing happened"
            if sender.socket in readable:
                sender.receive()
            events += first.poll([one for one in readable if one is not sender.socket])
        leader.on_time(now + 2 * HostTimeouts().join_secs)  # `now + 600.0 - now` may be less than 600.0
    assert leader.order.failure is not None
    assert leader.order.failure.why.startswith(
        "it did not join within 600 s. A launcher at 127.0.0.1 was refu"
    )
    assert leader.order.failure.why.endswith(why)


def asked(endpoint: tuple[str, int], timeouts: HostTimeouts) -> int:
    """The exit code of a launcher without `--run-dir`, which waits for its name."""
    job = dataclasses.replace(JOB, endpoint=endpoint)
    settings = Settings(run_dir=None, log_dir=None, tee=frozenset(), secret=b"secret", host_timeouts=timeouts)
    return supervise(job, settings, {})


@pytest.mark.parametrize(
    ("signum", "code", "name"), [(signal.SIGINT, 130, "Ctrl-C"), (signal.SIGTERM, 143, "SIGTERM")]
)
def test_a_launcher_that_asks_for_the_run_s_name_is_stopped_by_a_signal_as_any_other(
    signum: signal.Signals, code: int, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute, ThreadPoolExecutor(1) as pool:

        def stops() -> None:
            with mute.accept()[0]:
                os.kill(os.getpid(), signum)

        mute.settimeout(SECS)
        stopping = pool.submit(stops)
        assert asked(mute.getsockname()[:2], HostTimeouts(join_secs=SECS)) == code
        stopping.result()
    assert capsys.readouterr().err == f"replicast: stopped by {name}; all workers have exited\n"


def test_a_launcher_that_asks_for_the_run_s_name_waits_for_the_first_one_as_any_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    timeouts = HostTimeouts(join_secs=1.0, tell_after_secs=0.0)
    with socket.socket() as held:  # It does not listen, and nobody else gets its port.
        held.bind(("127.0.0.1", 0))
        endpoint = held.getsockname()[:2]
        assert asked(endpoint, timeouts) == 75
    why = f"(127.0.0.1:{endpoint[1]}: Connection refused)"
    waits, lost = capsys.readouterr().err.splitlines()
    assert waits == f"replicast: waiting for the launcher on a, 0 s of at most 1 s {why}"
    assert lost == f"replicast: host a was lost: it did not join within 1 s {why}"


def test_a_stranger_cannot_fill_the_screen_and_what_is_wrong_is_said_again_later() -> None:
    notices = Notices()
    texts = [f"\x1b[2J{number % 50}" for number in range(1000)]
    said = [line for number, text in enumerate(texts) for line in notices.say(text, 0.01 * number)]
    assert len(said) == 6
    assert said[0] == "\\x1b[2J0"
    assert said[-1].endswith("(more lines like this are not shown for 5 min)")
    assert notices.say("no secret", 299.0) == []
    assert notices.say("no secret", 310.0) == ["no secret"]
    assert notices.say("no secret", 311.0) == []
    (long,) = notices.say("x" * 300_000, 312.0)
    assert len(long) <= 1001


def test_strangers_do_not_hide_the_refusal_of_a_launcher_that_knows_the_secret(
    listener: socket.socket,
) -> None:
    port = listener.getsockname()[1]
    hello = hello_of(port=PART.job.port + 1)
    with first_of(listener) as link:
        for number in range(2, 10):
            with socket.create_connection(
                ("127.0.0.1", port), source_address=(f"127.0.0.{number}", 0)
            ) as connected:
                stranger = Connection(connected, b"another", 2, hello)
                with contextlib.suppress(NotAuthentic):
                    while select.select([connected], [], [], SECS)[0]:
                        stranger.receive()
        refused = answer_to(("127.0.0.1", port), hello)
        assert isinstance(refused, RefusedHost)
        said: list[str] = []
        while not any("a different --port" in text for text in said):
            said += [event for event in next_events(link) if isinstance(event, str)]
        assert len([text for text in said if "secret" in text]) == 6


@pytest.mark.parametrize(
    ("number", "problem"),
    [(errno.EMFILE, "too many open files; see ulimit -n"), (errno.ENOBUFS, "No buffer space available")],
)
def test_a_first_launcher_that_cannot_accept_for_now_says_so_once_and_does_not_spin(
    monkeypatch: pytest.MonkeyPatch, number: int, problem: str
) -> None:
    def fails(listener: socket.socket) -> None:
        raise OSError(number, os.strerror(number))

    listener = listen(("127.0.0.1", 0))
    first = service_of(listener)
    with contextlib.closing(first), monkeypatch.context() as patched:
        patched.setattr(socket.socket, "accept", fails)
        assert listener in first.sockets()
        (told,) = (event for event in first.poll([listener]) if isinstance(event, str))
        assert told == f"cannot accept other launchers for now: {problem}"
        assert listener not in first.sockets(), "for a moment"
        assert not any(isinstance(event, str) for event in first.poll([listener]))


def test_an_address_in_use_is_refused_in_sentences_that_end_once() -> None:
    refused = pytest.raises(
        ClusterError, match=r"first launcher: another process does: another job\? Give each job a port"
    )
    with listen(("127.0.0.1", 0)) as taken, refused:
        listen(taken.getsockname()[:2])


def test_a_command_of_any_length_fits_into_a_message() -> None:
    def program(*files: str) -> str:
        job = JobPlan(argv=("python", "train.py", *files))
        return dataclasses.replace(PART, job=job).identity()["program, or its arguments"]

    files = tuple(f"data/part-{number:05}.tfrecord" for number in range(20_000))
    assert len(program(*files)) < 4096
    assert program(*files).startswith("train.py with 20000 arguments of the digest ")
    assert program(*files) != program(*files[:-1], "other")
