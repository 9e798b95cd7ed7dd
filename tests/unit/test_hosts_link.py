"""The main thread of a launcher and its thread `hosts`; the sockets of the first launcher."""

from __future__ import annotations

import contextlib
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
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from replicast.errors import ClusterError
from replicast.launcher.attempts import Begin
from replicast.launcher.hosts.attempts import HostsAttempts
from replicast.launcher.hosts.connection import Connection, Malformed
from replicast.launcher.hosts.events import Event, NotWelcome, Tell
from replicast.launcher.hosts.first import First
from replicast.launcher.hosts.leader import Leader
from replicast.launcher.hosts.link import Link, asking_link, first_link, other_link
from replicast.launcher.hosts.member import End, Member, Over, Start, Waiting
from replicast.launcher.hosts.messages import (
    Ask,
    Failure,
    FirstOf,
    Hello,
    Identity,
    Message,
    Order,
    Phase,
    Refused,
    Report,
    Told,
)
from replicast.launcher.hosts.notices import Notices
from replicast.launcher.hosts.rivals import Rivals
from replicast.launcher.hosts.setup import identity_of, listen, own_node
from replicast.launcher.hosts.timeouts import HostTimeouts
from replicast.launcher.hosts.wire import NotAuthentic
from replicast.launcher.interruptions import Interruptions
from replicast.launcher.plan import Job
from replicast.launcher.run_name import ask_run_name
from replicast.launcher.screen import make_screen
from replicast.names import Dialer
from replicast.testing.job import eventually
from tests.unit.clock import Clock

SECS = 120.0
E = TypeVar("E", bound=Event)
JOB = Job(argv=("python", "train.py"), hosts=("a", "b"), node_rank=1, endpoint=("127.0.0.1", 1))
IDENTITY = identity_of(replace(JOB, hosts=(), nnodes=2), 0)
ORDER = Order(session="s", phase=Phase.RUN, attempt=0, restarts=0, max_restarts=0, hosts=("a", "b"))


class Service:
    """Says some things at once."""

    def __init__(self, *said: Event) -> None:
        self._said = list(said)

    def sockets(self) -> list[socket.socket]:
        return []

    def poll(self, readable: list[socket.socket]) -> list[Event]:
        said, self._said = self._said, []
        return said

    def may_leave(self) -> bool:
        return True

    def close(self) -> None:
        pass


def test_a_group_that_must_end_as_soon_as_it_is_started_is_told_so() -> None:
    end = End(Failure(host=0, worker=0, code=3), stopped_by=signal.SIGTERM)
    service = Service(Start(ORDER), end)
    member = Member(1, 0, 0, HostTimeouts(), 0.0)
    with (
        Interruptions() as interruptions,
        contextlib.closing(make_screen(io.StringIO(), io.StringIO(), tee=frozenset(), environ={})) as screen,
        Link(member, service, 1.0) as link,  # type: ignore[arg-type]
    ):
        attempts = HostsAttempts(link, JOB, screen, interruptions)
        assert isinstance(attempts.begin(), Begin)
        assert select.select([attempts], [], [], SECS)[0], "the group waits for this descriptor"
        assert attempts.take_ends() == [end]


def test_strangers_who_say_nothing_keep_no_launcher_out() -> None:
    listener = listen(("127.0.0.1", 0))
    endpoint = listener.getsockname()[:2]
    with contextlib.ExitStack() as stack, first_of(IDENTITY, listener):
        for _ in range(80):
            stack.enter_context(socket.create_connection(endpoint))
        assert run_name(endpoint) == "the-run"


def first_of(identity: Identity, listener: socket.socket, secret: bytes = b"secret") -> Link:
    """The link of a first launcher; without `--hosts` it looks for no other one."""
    return first_link(
        names=identity.hosts or ("a", "b"),
        identity=identity,
        secret=secret,
        next_attempt=0,
        timeouts=HostTimeouts(leave_secs=0.0),
        listener=listener,
        run_name="the-run",
    )


def run_name(endpoint: tuple[str, int]) -> str:
    """What the first launcher answers: it is alive."""
    told = ask_run_name(replace(JOB, endpoint=endpoint), b"secret", HostTimeouts(join_secs=SECS), {})
    assert isinstance(told, str)
    return told


def next_events(link: Link) -> list[Event]:
    assert select.select([link], [], [], SECS)[0], "nothing happened"
    return link.take()


def next_of(link: Link, kind: type[E]) -> E:
    """The next event of a kind; others, such as that it still waits, may come before."""
    while True:
        for event in next_events(link):
            if isinstance(event, kind):
                return event


def answer_to(endpoint: tuple[str, int], *messages: Message) -> Message | Malformed:
    """The first answer to what a launcher with the secret sends."""
    with socket.create_connection(endpoint) as connected:
        connection = Connection(connected, b"secret", is_first=False, nodes=2)
        for message in messages:
            connection.send(message)
        answers: list[Message | Malformed] = []
        while not answers:
            assert select.select([connected], [], [], SECS)[0], "no answer"
            answers += connection.receive()
        return answers[0]


def test_a_report_with_impossible_values_is_left_out_and_the_launchers_go_on() -> None:
    listener = listen(("127.0.0.1", 0))
    endpoint = listener.getsockname()[:2]
    hello = Hello(node=1, session="s", address="127.0.0.1", identity=IDENTITY)
    with first_of(IDENTITY, listener) as link:
        answer = answer_to(endpoint, hello, Report(next_attempt=0, signal=9999), Ask(1))
        assert isinstance(answer, Order), "the rest of what it sends is heard"
        told = next_of(link, Tell)
        assert "a line of the launcher at 127.0.0.1 is left out: no launcher sends a report with" in told.text
        assert run_name(endpoint) == "the-run"


def test_of_two_launchers_that_take_themselves_for_the_first_the_later_one_is_refused_and_both_say_why() -> (
    None
):
    early, late = "127.0.0.1", "127.0.0.2"
    listener = listen((early, 0))
    port = listener.getsockname()[1]
    with (
        first_of(replace(IDENTITY, hosts=(early, late)), listener) as first,
        first_of(replace(IDENTITY, hosts=(late, early)), listen((late, port))) as second,
    ):
        refused = next_of(second, NotWelcome)
        assert refused.by == f"The launcher at {early}:{port}"
        lists = f"one with --hosts {early},{late}, the other with --hosts {late},{early}"
        assert refused.why == f"both take themselves for the launcher of the first host, {lists}"
        told = next_of(first, Tell)
        assert told.text == f"refused a launcher at 127.0.0.1: {refused.why}"


def test_two_launchers_that_take_themselves_for_the_first_at_the_same_moment_refuse_each_other() -> None:
    one, other = "127.0.0.1", "127.0.0.2"
    listener = listen((one, 0))
    listeners = (listener, listen((other, listener.getsockname()[1])))
    links = [
        first_of(replace(IDENTITY, hosts=hosts), own)
        for hosts, own in zip(((one, other), (other, one)), listeners, strict=True)
    ]
    with links[0], links[1]:
        for link in links:
            next_of(link, NotWelcome)


def test_a_stranger_at_one_host_does_not_hide_another_first_launcher_at_the_next_one() -> None:
    here, stranger, rival = "127.0.0.1", "127.0.0.2", "127.0.0.3"
    listener = listen((here, 0))
    port = listener.getsockname()[1]
    late = listen((rival, port))  # It lets the question in, and answers when it is served.
    with (
        first_of(replace(IDENTITY, hosts=()), listen((stranger, port)), b"another"),
        first_of(replace(IDENTITY, hosts=(here, stranger, rival)), listener) as first,
    ):
        told = next_of(first, Tell)
        assert told.text.startswith(f"{stranger}:{port}: the other host has another secret")
        with first_of(replace(IDENTITY, hosts=(rival, stranger, here)), late):
            assert next_of(first, NotWelcome).by == f"The launcher at {rival}:{port}"


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


def test_a_first_launcher_accepts_the_others_while_no_dns_server_answers(resolver: threading.Event) -> None:
    listener = listen(("127.0.0.1", 0))
    with first_of(replace(IDENTITY, hosts=("127.0.0.1", "gpu1")), listener):
        assert run_name(listener.getsockname()[:2]) == "the-run"
    assert not resolver.is_set()


def test_another_launcher_finds_the_first_one_when_a_slow_dns_server_has_answered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], resolver: threading.Event
) -> None:
    monkeypatch.setattr("replicast.launcher.hosts.other.CONNECT_SECS", 0.1)
    asking = replace(JOB, endpoint=("gpu1", 1))
    assert ask_run_name(asking, b"secret", HostTimeouts(join_secs=0.5), {}) == 75
    assert "within 0.5 s (gpu1:1: no DNS server has resolved the name yet)" in capsys.readouterr().err
    listener = listen(("127.0.0.1", 0))
    endpoint = ("gpu1", listener.getsockname()[1])
    timeouts = HostTimeouts(leave_secs=0.0, tell_after_secs=0.3)
    with (
        first_of(IDENTITY, listener),
        other_link(
            node=1, identity=IDENTITY, secret=b"secret", next_attempt=0, timeouts=timeouts, endpoint=endpoint
        ) as other,
    ):
        waiting = next_of(other, Waiting)
        assert "no DNS server has resolved the name yet" in waiting.why
        resolver.set()
        next_of(other, Start)


def test_a_launcher_says_when_no_dns_server_answers(
    monkeypatch: pytest.MonkeyPatch, resolver: threading.Event
) -> None:
    monkeypatch.setattr("replicast.launcher.hosts.setup.NAMES_SECS", 0.1)
    assert own_node(("gpu1", "127.0.0.1")) == 1
    with pytest.raises(ClusterError, match=r"not all names were resolved within 0\.1 s"):
        own_node(("gpu1", "198.51.100.1"))
    with pytest.raises(ClusterError, match=r"name of the first host was not resolved within 0\.1 s: gpu1"):
        listen(("gpu1", 0))
    resolver.set()
    assert own_node(("gpu1", "198.51.100.1")) == 0
    listen(("gpu1", 0)).close()


@pytest.mark.parametrize(
    "question",
    [
        pytest.param(FirstOf(("127.0.0.2", "127.0.0.1"), IDENTITY.port + 1), id="a job on other ports"),
        pytest.param(FirstOf(("127.0.0.3", "127.0.0.4"), IDENTITY.port), id="a job on other hosts"),
        pytest.param(FirstOf(("127.0.0.1", "127.0.0.2"), IDENTITY.port), id="its own, passed on"),
        pytest.param(FirstOf((), IDENTITY.port), id="nonsense"),
    ],
)
def test_the_first_launcher_of_another_job_is_not_refused_and_no_stranger_can_have_it_refused(
    question: FirstOf,
) -> None:
    listener = listen(("127.0.0.1", 0))
    with first_of(replace(IDENTITY, hosts=("127.0.0.1", "127.0.0.2")), listener):
        assert isinstance(answer_to(listener.getsockname()[:2], question, Ask(1)), Told)


def test_with_another_secret_both_sides_say_at_once_what_to_do_and_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, connect, tries = Clock(), Dialer.connect, list[float]()

    def counted(dialer: Dialer, timeout_secs: float) -> socket.socket:
        tries.append(timeout_secs)
        return connect(dialer, timeout_secs)

    monkeypatch.setattr(Dialer, "connect", counted)
    monkeypatch.setattr("replicast.launcher.hosts.other.time", clock)
    monkeypatch.setattr("replicast.launcher.hosts.other._PAUSE_SECS", 0.0)
    listener = listen(("127.0.0.1", 0))
    endpoint = listener.getsockname()[:2]
    timeouts = HostTimeouts(join_secs=100.0, redial_secs=1000.0)
    with first_of(IDENTITY, listener) as link:
        with asking_link(node=1, nodes=2, secret=b"another", timeouts=timeouts, endpoint=endpoint) as other:
            said: list[Event] = [next_of(other, Tell)]
            eventually(lambda: len(tries) >= 3)
            clock.added_secs = timeouts.join_secs
            while not isinstance(said[-1], Over):
                said += [event for event in next_events(other) if not isinstance(event, Waiting)]
        problem = "the other host has another secret of the job. Set REPLICAST_JOB_SECRET"
        line, over = said
        assert isinstance(line, Tell)
        assert line.text.startswith(f"127.0.0.1:{endpoint[1]}: {problem}")
        assert line.text.endswith("; this launcher keeps trying")
        assert isinstance(over, Over)
        assert over.order.failure is not None
        assert over.order.failure.why.startswith("it did not come within 100 s (127.0.0.1:")
        assert over.order.failure.why.endswith("the other host has another secret of the job)")
        told = [event.text for event in next_events(link) if isinstance(event, Tell)]
        assert len(told) == 1, "however often it came"
        assert told[0].startswith(f"refused a launcher at 127.0.0.1: {problem}")
        assert run_name(endpoint) == "the-run"


@pytest.mark.parametrize(
    ("secret", "message", "why"),
    [
        (
            b"secret",
            Hello(node=1, session="s", address="", identity=replace(IDENTITY, hosts=("a", "b"), workers=2)),
            "another number of workers (-n): 1 on the first host, 2 on the other",
        ),
        (b"secret", FirstOf(("b", "a"), IDENTITY.port), "one with --hosts a,b, the other with --hosts b,a"),
        (b"another", Ask(1), "the other host has another secret of the job"),
    ],
)
def test_the_last_line_of_the_first_launcher_says_why_it_refused_the_host_that_is_missing(
    secret: bytes, message: Message, why: str
) -> None:
    timeouts, listener = HostTimeouts(), listen(("127.0.0.1", 0))
    now = time.monotonic()
    leader, member = Leader(("a", "b"), "s", 0, timeouts, now), Member(0, 0, 0, timeouts, now)
    identity, nobody = replace(IDENTITY, hosts=("a", "b")), Rivals((), 0, 0, b"")
    first = First(leader, member, "s", identity, b"secret", timeouts, listener, "the-run", nobody)
    with contextlib.closing(first), socket.create_connection(listener.getsockname()[:2]) as connected:
        other = Connection(connected, secret, is_first=False, nodes=2)
        other.send(message)
        events: list[Event] = []
        while not any(isinstance(event, Tell) for event in events):
            readable, _, _ = select.select([*first.sockets(), connected], [], [], SECS)
            assert readable, "nothing happened"
            if connected in readable:
                other.receive()
            events += first.poll([one for one in readable if one is not connected])
        leader.on_time(now + 2 * timeouts.join_secs)  # `now + 600.0 - now` may be less than 600.0
    assert leader.order.failure is not None
    assert leader.order.failure.why.startswith(
        "it did not come within 600 s. A launcher at 127.0.0.1 was refu"
    )
    assert leader.order.failure.why.endswith(why)


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
        asking = replace(JOB, endpoint=mute.getsockname()[:2])
        assert ask_run_name(asking, b"secret", HostTimeouts(join_secs=SECS), {}) == code
        stopping.result()
    assert capsys.readouterr().err == f"replicast: stopped by {name}; all workers have exited\n"


def test_a_launcher_that_asks_for_the_run_s_name_waits_for_the_first_one_as_any_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    timeouts = HostTimeouts(join_secs=1.0, tell_after_secs=0.0)
    with socket.socket() as held:  # It does not listen, and nobody else gets its port.
        held.bind(("127.0.0.1", 0))
        endpoint = held.getsockname()[:2]
        assert ask_run_name(replace(JOB, endpoint=endpoint), b"secret", timeouts, {}) == 75
    why = f"(127.0.0.1:{endpoint[1]}: Connection refused)"
    waits, lost = capsys.readouterr().err.splitlines()
    assert waits == f"replicast: waiting for the launcher of a, 0 s of at most 1 s {why}"
    assert lost == f"replicast: host a was lost: it did not come within 1 s {why}"


def test_a_stranger_cannot_fill_the_screen_and_what_is_wrong_is_said_again_later() -> None:
    notices = Notices()
    texts = [f"\x1b[2J{number % 50}" for number in range(1000)]
    said = [tell.text for number, text in enumerate(texts) for tell in notices.say(text, 0.01 * number)]
    assert len(said) == 6
    assert said[0] == "\\x1b[2J0"
    assert said[-1].endswith("(more lines like this are not shown for 5 min)")
    assert notices.say("no secret", 299.0) == []
    assert notices.say("no secret", 310.0) == [Tell("no secret")]
    assert notices.say("no secret", 311.0) == []
    (long,) = notices.say("x" * 300_000, 312.0)
    assert len(long.text) <= 1001


def test_strangers_do_not_hide_the_refusal_of_a_launcher_that_knows_the_secret() -> None:
    listener = listen(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    hello = Hello(node=1, session="s", address="a", identity=replace(IDENTITY, port=IDENTITY.port + 1))
    with first_of(IDENTITY, listener) as link:
        for number in range(2, 10):
            with socket.create_connection(
                ("127.0.0.1", port), source_address=(f"127.0.0.{number}", 0)
            ) as connected:
                stranger = Connection(connected, b"another", is_first=False, nodes=2)
                stranger.send(Ask(1))
                with contextlib.suppress(NotAuthentic):
                    while select.select([connected], [], [], SECS)[0]:
                        stranger.receive()
        refused = answer_to(("127.0.0.1", port), hello)
        assert isinstance(refused, Refused)
        said: list[str] = []
        while not any("another --port" in text for text in said):
            said += [event.text for event in next_events(link) if isinstance(event, Tell)]
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

    timeouts, listener = HostTimeouts(), listen(("127.0.0.1", 0))
    leader, member = Leader(("a", "b"), "s", 0, timeouts, 0.0), Member(0, 0, 0, timeouts, 0.0)
    nobody = Rivals((), 0, 0, b"")
    first = First(leader, member, "s", IDENTITY, b"secret", timeouts, listener, "the-run", nobody)
    with contextlib.closing(first), monkeypatch.context() as patched:
        patched.setattr(socket.socket, "accept", fails)
        assert listener in first.sockets()
        (told,) = (event for event in first.poll([listener]) if isinstance(event, Tell))
        assert told.text == f"cannot accept other launchers for now: {problem}"
        assert listener not in first.sockets(), "for a moment"
        assert not any(isinstance(event, Tell) for event in first.poll([listener]))


def test_an_address_in_use_is_refused_in_sentences_that_end_once() -> None:
    refused = pytest.raises(ClusterError, match=r"must: another job\? Give each job an address of its own")
    with listen(("127.0.0.1", 0)) as taken, refused:
        listen(taken.getsockname()[:2])


def test_a_command_of_any_length_fits_into_a_message() -> None:
    files = tuple(f"data/part-{number:05}.tfrecord" for number in range(20_000))
    long = identity_of(Job(argv=("python", "train.py", *files)), 0)
    assert sum(map(len, long.program)) < 4096
    assert long.program[0] == "train.py"
    other = identity_of(Job(argv=("python", "train.py", *files[:-1], str(Path("other")))), 0)
    assert long.program != other.program
