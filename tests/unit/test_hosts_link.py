"""The main thread of a launcher and its thread `hosts`; the sockets of the first launcher."""

from __future__ import annotations

import contextlib
import io
import select
import signal
import socket
from pathlib import Path

from replicast.supervisor.attempts import Begin
from replicast.supervisor.hosts.attempts import HostsAttempts
from replicast.supervisor.hosts.events import Event
from replicast.supervisor.hosts.first import First
from replicast.supervisor.hosts.leader import Leader
from replicast.supervisor.hosts.link import Link
from replicast.supervisor.hosts.member import End, Member, Start
from replicast.supervisor.hosts.messages import Failure, Order, Phase
from replicast.supervisor.hosts.setup import identity_of, listen
from replicast.supervisor.hosts.talk import ask_run_name
from replicast.supervisor.hosts.timeouts import HostTimeouts
from replicast.supervisor.interruptions import Interruptions
from replicast.supervisor.plan import Job
from replicast.supervisor.screen import make_screen

SECS = 10.0
JOB = Job(argv=("python", "train.py"), hosts=("a", "b"), node_rank=1, endpoint=("127.0.0.1", 1))
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
    timeouts = HostTimeouts()
    member = Member(0, 0, 0, timeouts, 0.0)
    leader = Leader(("a", "b"), "s", 0, timeouts, 0.0)
    first = First(leader, member, "s", identity_of(JOB, 0), b"secret", timeouts, listener, "the-run")
    with contextlib.ExitStack() as stack, Link(member, first, 0.0):
        for _ in range(80):
            stack.enter_context(socket.create_connection(endpoint))
        name = ask_run_name(endpoint, 1, b"secret", timeout_secs=3.0, report=lambda _: None)
    assert name == "the-run"


def test_a_command_of_any_length_fits_into_a_message() -> None:
    files = tuple(f"data/part-{number:05}.tfrecord" for number in range(20_000))
    long = identity_of(Job(argv=("python", "train.py", *files)), 0)
    assert sum(map(len, long.program)) < 4096
    assert long.program[0] == "train.py"
    other = identity_of(Job(argv=("python", "train.py", *files[:-1], str(Path("other")))), 0)
    assert long.program != other.program
