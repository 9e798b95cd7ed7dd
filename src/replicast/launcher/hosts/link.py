"""The thread `hosts` of a launcher, which serves the connections with the launchers of the other hosts.

The thread alone touches the state machines. The main thread posts what happens on this host and takes events
from a queue, on whose descriptor it can select. If the thread dies, the main thread takes a `Broken` from the
queue and ends the job. `close` stops the thread.
"""

from __future__ import annotations

import collections
import contextlib
import queue
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from replicast.launcher.hosts.events import Broken, Event
from replicast.launcher.hosts.first import First
from replicast.launcher.hosts.leader import Leader
from replicast.launcher.hosts.member import Command, Member
from replicast.launcher.hosts.messages import Ask, Hello, Identity
from replicast.launcher.hosts.other import CONNECT_SECS, Other
from replicast.launcher.hosts.rivals import Rivals
from replicast.launcher.hosts.timeouts import HostTimeouts

_LOOK_SECS = 0.25
Posted = Callable[[Member, float], list[Command] | None]
"""Called with the state machine of this launcher and the time."""


class Link:
    """The launcher's connection with those of the other hosts. A context manager."""

    def __init__(self, member: Member, service: First | Other, leave_secs: float) -> None:
        self._member, self._service = member, service
        self._leave_secs = leave_secs
        self._posted: queue.SimpleQueue[Posted] = queue.SimpleQueue()
        self._events: collections.deque[Event] = collections.deque()
        self._wake_thread, self._thread_end = _pair()
        self._wake_main, self._main_end = _pair()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        until = time.monotonic() + self._leave_secs
        while kind is None and not self._service.may_leave() and time.monotonic() < until:
            if not self._thread.is_alive():
                break
            time.sleep(0.02)
        self._closing.set()
        _wake(self._wake_thread)
        self._thread.join(self._leave_secs + CONNECT_SECS)
        for one in (self._wake_thread, self._thread_end, self._wake_main, self._main_end):
            one.close()

    def fileno(self) -> int:
        """A descriptor that is readable when there is an event to take."""
        return self._main_end.fileno()

    def take(self) -> list[Event]:
        """Takes the events that have come, in order. Does not block."""
        with contextlib.suppress(BlockingIOError):
            self._main_end.recv(4096)
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def put_back(self, events: Sequence[Event]) -> None:
        """Returns events that were taken too early: they are the next ones to take."""
        self._events.extendleft(reversed(events))
        if events:
            _wake(self._wake_main)

    def post(self, event: Posted) -> None:
        """Has the thread call a function with the state machine of this launcher and the time."""
        self._posted.put(event)
        _wake(self._wake_thread)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._once()
        except BaseException as error:
            self._put([Broken(error)])
        finally:
            self._service.close()

    def _once(self) -> None:
        with selectors.PollSelector() as selector:  # `epoll` would need a descriptor, each time.
            for one in (self._thread_end, *self._service.sockets()):
                selector.register(one, selectors.EVENT_READ, one)
            readable = [key.data for key, _ in selector.select(_LOOK_SECS)]
        with contextlib.suppress(BlockingIOError):
            self._thread_end.recv(4096)
        while not self._posted.empty():
            self._put(self._posted.get()(self._member, time.monotonic()) or [])
        self._put(self._service.poll(readable))

    def _put(self, events: Sequence[Event]) -> None:
        self._events.extend(events)
        if events:
            _wake(self._wake_main)


def first_link(
    *,
    names: tuple[str, ...],
    identity: Identity,
    secret: bytes,
    next_attempt: int,
    timeouts: HostTimeouts,
    listener: socket.socket,
    run_name: str,
) -> Link:
    """The link of the first launcher, which decides."""
    now, session = time.monotonic(), secrets.token_hex(8)
    leader = Leader(names, session, identity.max_restarts, timeouts, now)
    member = Member(0, next_attempt, identity.max_restarts, timeouts, now)
    # It listens already: of two launchers that take themselves for the first, one finds the other.
    rivals = Rivals(identity.hosts, listener.getsockname()[1], identity.port, secret)
    service = First(leader, member, session, identity, secret, timeouts, listener, run_name, rivals)
    return Link(member, service, timeouts.leave_secs)


def other_link(
    *,
    node: int,
    identity: Identity,
    secret: bytes,
    next_attempt: int,
    timeouts: HostTimeouts,
    endpoint: tuple[str, int],
) -> Link:
    """The link of another launcher, which follows the first one."""
    session = secrets.token_hex(8)
    member = Member(node, next_attempt, identity.max_restarts, timeouts, time.monotonic())

    def hello(address: str) -> Hello:
        return Hello(node=node, session=session, address=address, identity=identity)

    other = Other(member, hello, secret, timeouts, endpoint, identity.nodes)
    return Link(member, other, timeouts.leave_secs)


def asking_link(
    *, node: int, nodes: int, secret: bytes, timeouts: HostTimeouts, endpoint: tuple[str, int]
) -> Link:
    """The link of another launcher that does not join yet: it asks for the name of the run directory."""
    member = Member(node, 0, 0, timeouts, time.monotonic())
    return Link(
        member, Other(member, lambda _: Ask(node), secret, timeouts, endpoint, nodes), timeouts.leave_secs
    )


def _pair() -> tuple[socket.socket, socket.socket]:
    one, other = socket.socketpair()
    one.setblocking(False)
    other.setblocking(False)
    return one, other


def _wake(end: socket.socket) -> None:
    with contextlib.suppress(BlockingIOError):
        end.send(b"w")
