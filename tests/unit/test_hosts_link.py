"""The launchers of several hosts over real sockets: who is let in, what is said, what they decide."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import select
import signal
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from replicast.connections import admit, introduce
from replicast.errors import ClusterError, LaunchRefused
from replicast.launcher import hosts_link
from replicast.launcher.failure import GroupEnd, LaunchOrder, Phase, WorkerExit
from replicast.launcher.hosts_leader import (
    Hello,
    HostTimeouts,
    Message,
    RefusedHost,
    Report,
    difference,
    sent_from,
)
from replicast.launcher.hosts_link import MAX_LINE, First, Lines, Other, Peers, identity, listen
from replicast.launcher.launcher import supervise
from replicast.launcher.plan import JobPlan, own_node
from replicast.launcher.screen import Interruptions, make_screen
from replicast.processes import Deadline
from tests.threads import eventually

SECS = 120.0
JOB = JobPlan(
    argv=("python", "train.py"),
    nnodes=2,
    endpoint=("127.0.0.1", 1),
    run_dir=Path("the-run"),
    secret=b"secret",
    host_timeouts=HostTimeouts(leave_secs=0.0),
)


class Launcher(contextlib.ExitStack):
    """One launcher without workers: its peers, and what it shows."""

    def __init__(self, peers: Peers, shown: io.StringIO) -> None:
        super().__init__()
        self.peers, self._shown = peers, shown
        self.enter_context(peers)

    @property
    def lines(self) -> list[str]:
        return self._shown.getvalue().splitlines()


def of(kind: type[Peers], job: JobPlan, *listener: socket.socket) -> Launcher:
    shown = io.StringIO()
    screen = make_screen(shown, shown, tee=frozenset(), environ={})
    launcher = Launcher(kind(job, screen, Interruptions(), *listener), shown)
    launcher.peers.ready(0)
    return launcher


def first(listener: socket.socket, **changes: Any) -> Launcher:
    return of(First, dataclasses.replace(JOB, **changes), listener)


def other(endpoint: tuple[str, int], **changes: Any) -> Launcher:
    return of(Other, dataclasses.replace(JOB, node_rank=1, endpoint=endpoint, **changes))


@pytest.fixture
def listener() -> socket.socket:
    """Where a first launcher listens, which closes it."""
    return listen(("127.0.0.1", 0))


def hello_of(**changes: Any) -> Hello:
    job = dataclasses.replace(JOB, node_rank=1, **changes)
    return Hello(node=1, session="theirs", address="127.0.0.1", identity=identity(job))


@contextlib.contextmanager
def connected_to(endpoint: tuple[str, int], secret: bytes = b"secret", at: str = "") -> Iterator[Lines]:
    source = (at, 0) if at else None
    with socket.create_connection(endpoint, source_address=source) as connection:
        introduce(connection, secret, Deadline(SECS))
        yield Lines(connection)


def is_answered(endpoint: tuple[str, int]) -> bool:
    with connected_to(endpoint) as lines:
        lines.send(hello_of())
        return isinstance(lines.receive(), LaunchOrder)


def test_two_launchers_run_an_attempt_and_end_it_because_of_the_other_one(listener: socket.socket) -> None:
    with first(listener) as one, other(listener.getsockname()[:2]) as two, ThreadPoolExecutor(2) as pool:
        began = [pool.submit(launcher.peers.begin) for launcher in (one, two)]
        assert [run.result(SECS).phase for run in began] == [Phase.RUN, Phase.RUN]
        assert (one.peers.to_end(), two.peers.to_end()) == (None, None)
        died = WorkerExit(worker=1, code=4)
        two.peers.tell_failure(died)
        assert select.select([one.peers], [], [], SECS)[0], "the group waits for this descriptor"
        eventually(lambda: one.peers.to_end() is not None)
        assert two.peers.to_end() is None, "its group ends already"
        ends = {one: GroupEnd(), two: GroupEnd(exits=(died,))}
        decided = [pool.submit(launcher.peers.decide, end) for launcher, end in ends.items()]
        assert [order.result(SECS).code for order in decided] == [4, 4]


def test_strangers_who_say_nothing_or_nonsense_keep_no_launcher_out(listener: socket.socket) -> None:
    endpoint = listener.getsockname()[:2]
    with contextlib.ExitStack() as stack, first(listener):
        for text in [b"", b"GET / HTTP/1.1\r\n\r\n", b"x" * 5000, b"[" * 900 + b"\n"] * 20:
            with contextlib.suppress(ConnectionError):
                stack.enter_context(socket.create_connection(endpoint)).sendall(text)
        assert is_answered(endpoint)


@pytest.mark.parametrize(
    "said",
    [
        b"{}\n",
        b"[1]\n",
        b'{"type": "report", "next_attempt": -1}\n',
        b'{"type": "report", "next_attempt": 0, "signal": 9999}\n',
        b'{"type": "order", "phase": "fly"}\n',
        b"x" * (MAX_LINE + 1),
    ],
)
def test_what_is_not_a_message_of_a_launcher_closes_its_connection_and_the_job_goes_on(
    listener: socket.socket, said: bytes
) -> None:
    endpoint = listener.getsockname()[:2]
    with first(listener):
        with connected_to(endpoint) as lines:
            lines.send(hello_of())
            assert isinstance(lines.receive(), LaunchOrder)
            lines.connection.sendall(said)
            with pytest.raises(ConnectionError):
                list(iter(lines.receive, None))
        assert is_answered(endpoint)


def test_a_launcher_that_is_killed_as_soon_as_it_is_let_in_ends_no_job(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    endpoint = listener.getsockname()[:2]

    def admit_late(connection: socket.socket, secret: bytes) -> None:
        admit(connection, secret)
        ended = select.poll()
        ended.register(connection, 0)
        assert ended.poll(SECS * 1000)

    monkeypatch.setattr("replicast.connections.admit", admit_late)
    with first(listener) as one:
        with connected_to(endpoint) as killed:
            killed.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        eventually(lambda: "hosts-serve" not in {thread.name for thread in threading.enumerate()})
        monkeypatch.undo()
        with other(endpoint) as two, ThreadPoolExecutor(2) as pool:
            began = [pool.submit(launcher.peers.begin) for launcher in (one, two)]
            assert [run.result(SECS).phase for run in began] == [Phase.RUN, Phase.RUN]


def test_a_failure_fits_into_a_line_whatever_its_log_holds() -> None:
    wild = WorkerExit(worker=0, code=1, lines=("\x1b[31m" * 20_000, "😀" * 1000) * 50, why="😀" * 1000)
    assert len(msgspec.json.encode(Report(next_attempt=0, failure=sent_from(1, wild)))) < MAX_LINE


@pytest.mark.parametrize("theirs", [b"another", b""])
def test_with_another_secret_both_sides_say_at_once_what_to_do_and_go_on(
    listener: socket.socket, theirs: bytes
) -> None:
    endpoint = listener.getsockname()[:2]
    problem = "it has a different job secret, or none. Set REPLICAST_JOB_SECRET"
    with first(listener, host_timeouts=HostTimeouts(join_secs=1.0, leave_secs=0.0)) as launcher:
        with other(endpoint, secret=theirs, host_timeouts=HostTimeouts(join_secs=1.0)) as asking:
            over = asking.peers.begin()
        assert over.failure is not None
        assert over.failure.why.startswith(f"it did not join within 1 s (127.0.0.1:{endpoint[1]}: {problem}")
        (told,) = asking.lines
        assert told.startswith(f"replicast: 127.0.0.1:{endpoint[1]}: {problem}")
        assert told.endswith("; this launcher keeps trying")
        assert [line[:70] for line in launcher.lines] == [
            f"replicast: refused a launcher at 127.0.0.1: {problem}"[:70]
        ]
        over = launcher.peers.begin()
        assert over.failure is not None
        assert (
            f"it did not join within 1 s. A launcher at 127.0.0.1 was refused: {problem}" in over.failure.why
        )


def test_a_launcher_of_another_command_is_refused_and_both_sides_say_why(listener: socket.socket) -> None:
    why = "a different number of workers (-n): 1 on the first host, 2 on the other"
    endpoint = listener.getsockname()[:2]
    with first(listener) as launcher:
        with (
            other(endpoint, workers=2) as refused,
            pytest.raises(LaunchRefused, match="first host, 2"),
        ):
            refused.peers.begin()
        assert launcher.lines == [f"replicast: refused a launcher at 127.0.0.1: {why}"]
        assert is_answered(endpoint)


def test_a_launcher_of_a_script_with_another_content_differs(tmp_path: Path) -> None:
    script, found = tmp_path / "train.py", []
    for content in ("print(1)", "print(2)"):
        script.write_text(content)
        found.append(identity(JobPlan(argv=("python", str(script)))))
    assert "a different content of the script" in difference(*found)


def test_a_script_that_is_edited_while_the_job_runs_keeps_no_launcher_from_connecting_again(
    listener: socket.socket,
) -> None:
    hello, content = hello_of(), "content of the script (its SHA-256)"
    edited = replace(hello, identity=hello.identity | {content: "another"})
    with first(listener):
        for said, kind in (
            (hello, LaunchOrder),
            (edited, LaunchOrder),
            (replace(edited, session="of a second launcher"), RefusedHost),
        ):
            with connected_to(listener.getsockname()[:2]) as lines:
                lines.send(said)
                assert isinstance(lines.receive(), kind)


def test_a_launcher_of_another_version_is_recognised_by_what_it_says_first(listener: socket.socket) -> None:
    hello = hello_of()
    hello = replace(hello, identity=hello.identity | {"version of replicast": "0.0"})
    with first(listener), connected_to(listener.getsockname()[:2]) as lines:
        fields = msgspec.to_builtins(hello) | {"something": "new"}
        lines.connection.sendall(msgspec.json.encode(fields) + b"\n")
        answer: Message = lines.receive()
        assert isinstance(answer, RefusedHost)
        assert answer.why.startswith("a different version of replicast: ")


def test_strangers_get_few_lines_on_a_screen_and_hide_no_refusal_of_a_launcher(
    listener: socket.socket,
) -> None:
    endpoint = listener.getsockname()[:2]
    with first(listener) as launcher:
        for number in range(2, 12):
            with pytest.raises(ConnectionError), connected_to(endpoint, b"guessed", f"127.0.0.{number}"):
                pass
        with connected_to(endpoint) as lines:
            lines.send(hello_of(port=1))
            assert isinstance(lines.receive(), RefusedHost)
        eventually(lambda: any("a different --port" in line for line in launcher.lines))
        assert len([line for line in launcher.lines if "secret" in line]) == 6


def test_a_thread_that_dies_ends_the_wait_of_the_main_thread_with_the_reason(
    listener: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    with first(listener) as launcher:
        monkeypatch.setattr(First, "_accept", lambda *_: 1 / 0)
        with connected_to(listener.getsockname()[:2]) as lines:
            lines.send(hello_of())
            with pytest.raises(ClusterError, match="between the launchers has failed"):
                launcher.peers.begin()


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


def test_another_launcher_finds_the_first_one_when_a_slow_dns_server_has_answered(
    monkeypatch: pytest.MonkeyPatch, listener: socket.socket, resolver: threading.Event
) -> None:
    monkeypatch.setattr(hosts_link, "CONNECT_SECS", 0.1)
    monkeypatch.setattr(hosts_link, "TELL_AFTER_SECS", 0.3)
    with first(listener), other(("gpu1", listener.getsockname()[1])) as late, ThreadPoolExecutor(1) as pool:
        began = pool.submit(late.peers.begin)
        eventually(lambda: any("no DNS server has resolved the name yet" in line for line in late.lines))
        resolver.set()
        assert began.result(SECS).phase is Phase.RUN


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


def asked(endpoint: tuple[str, int], timeouts: HostTimeouts) -> int:
    """The exit code of a launcher without `--run-dir`, which waits for its name."""
    asking = {"hosts": ("a", "b"), "node_rank": 1, "run_dir": None}
    return supervise(dataclasses.replace(JOB, endpoint=endpoint, host_timeouts=timeouts, **asking), {})


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
    assert capsys.readouterr().err == f"replicast: stopped by {name}; the workers on this host have exited\n"


def test_a_launcher_that_asks_for_the_run_s_name_waits_for_the_first_one_as_any_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hosts_link, "TELL_AFTER_SECS", 0.0)
    with socket.socket() as held:  # It does not listen, and nobody else gets its port.
        held.bind(("127.0.0.1", 0))
        endpoint = held.getsockname()[:2]
        assert asked(endpoint, HostTimeouts(join_secs=1.0)) == 75
    why = f"(127.0.0.1:{endpoint[1]}: Connection refused)"
    waits, lost = capsys.readouterr().err.splitlines()
    assert waits.startswith("replicast: waiting for the launcher on a, 0 s of at most 1 s (")
    assert lost == f"replicast: host a was lost: it did not join within 1 s {why}"


def test_an_address_in_use_is_refused_in_sentences_that_end_once() -> None:
    refused = pytest.raises(
        ClusterError,
        match=r"first launcher: another process uses this port, perhaps another job\. Give each job a port",
    )
    with listen(("127.0.0.1", 0)) as taken, refused:
        listen(taken.getsockname()[:2])


def test_a_command_of_any_length_fits_into_a_message() -> None:
    def program(*files: str) -> str:
        return identity(JobPlan(argv=("python", "train.py", *files)))["program, or its arguments"]

    files = tuple(f"data/part-{number:05}.tfrecord" for number in range(20_000))
    assert len(program(*files)) < 4096
    assert program(*files).startswith("train.py with 20000 arguments of the digest ")
    assert program(*files) != program(*files[:-1], "other")
