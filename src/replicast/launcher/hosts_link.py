"""The connections between the launchers of a job, and the thread `hosts` that serves them.

    main thread ── post ──→ thread `hosts`: `First` or `Other`, with their state machines ──→ other hosts
                ←─ events ──

The thread alone touches the state machines of `hosts_leader.py`. The main thread posts what happens on this
host and takes events from a queue, on whose descriptor it can select: a command of the state machine, a line
to show, or an exception to raise, also if the thread dies. Nothing in the thread blocks for long: sockets are
non-blocking, names are looked up elsewhere.

Lines are authenticated:

    both → both     {"replicast": "launchers 1", "nonce": "…", "secret": true}
    afterwards      HMAC-SHA256 of direction, number and text, in hexadecimal, and the text: a JSON object

The key of a connection follows from the secret of the job and both nonces, so that nothing that was sent over
one connection is accepted on another, twice, or in the other direction. Without a secret the key follows from
the nonces alone: then any process that can reach the port can pretend to be a launcher.
"""

from __future__ import annotations

import collections
import contextlib
import errno
import functools
import hashlib
import hmac
import json
import os
import queue
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Self, TypeVar

import msgspec
from msgspec.structs import replace

from replicast.config import JOB_SECRET
from replicast.errors import ClusterError, LaunchRefused, ReplicastError, printable
from replicast.launcher.failure import GroupEnd, Hosts, LaunchOrder, Phase, WorkerExit
from replicast.launcher.hosts_leader import (
    AskName,
    Command,
    End,
    FirstOf,
    Hello,
    HostTimeouts,
    Identity,
    Leader,
    Member,
    Message,
    Notices,
    RefusedHost,
    Report,
    Waiting,
    difference,
    read_message,
    sent_from,
    two_firsts,
)
from replicast.launcher.interruptions import STOP_SIGNALS, Interruptions
from replicast.launcher.plan import JobPlan, shown_address
from replicast.launcher.screen import Screen
from replicast.names import NAMES_SECS, Dialer, Lookups, addresses_of
from replicast.processes import accept_problem
from replicast.strictjson import parse_object

PROTOCOL = "launchers 1"
MAX_OPENING, MAX_LINE = 1024, 256 * 1024
SAME_SECRET = f"Set {JOB_SECRET}, or the content of --secret-file, to the same text on all hosts"
STEP_SECS = 5.0
CONNECT_SECS = 2.0
_ELSE = "Another program, or another version of replicast, uses the port of the launchers"
_MAX_PROGRAM = 4096
_MAX_UNSENT = 1 << 20
_READ_BYTES = 65536
_INTRODUCE_SECS = 5.0  # A connection over which nobody introduces itself within this time is closed.
_MAX_STRANGERS = 64
_DEAF_SECS = 1.0  # How long nothing is accepted after it has failed, for example for too many open files.
_PAUSE_SECS = 0.25
_LOOK_SECS = 0.25
_POLL_SECS = 1.0
_NAME_SECS, _NAME_PAUSE_SECS = 10.0, 0.5

Event = Command | str | ReplicastError


# --- Lines and connections -------------------------------------------------------------------------------


class NotAuthentic(ValueError):  # noqa: N818 - reads as a sentence
    """The other side does not know the secret of the job, or is not a launcher of this version."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


class Wire:
    """One end of a connection between launchers: lines in, lines out, each authenticated. Has no socket."""

    def __init__(self, secret: bytes, nonce: str, *, is_first: bool) -> None:
        self._secret = secret
        self._nonce = nonce
        self._is_first = is_first
        self._mine, self._theirs = (b"first", b"other") if is_first else (b"other", b"first")
        self._key = b""
        self._buffer = b""
        self._sent = self._received = 0

    @property
    def is_open(self) -> bool:
        return bool(self._key)

    def opening(self) -> bytes:
        fields = {"replicast": PROTOCOL, "nonce": self._nonce, "secret": bool(self._secret)}
        return json.dumps(fields).encode() + b"\n"

    def pack(self, message: object) -> bytes:
        text = json.dumps(msgspec.to_builtins(message), allow_nan=False).encode()
        seal = self._seal(self._mine, self._sent, text)
        self._sent += 1
        return seal + b" " + text + b"\n"

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        if len(self._buffer) > (MAX_LINE if self._key else MAX_OPENING):
            raise ValueError("a line without an end")
        messages = []
        for line in lines:
            if len(line) > MAX_LINE:
                raise ValueError("a line that is too long")
            if self._key:
                messages.append(self._unpack(line))
            else:
                self._open(line)
        return messages

    def _open(self, line: bytes) -> None:
        try:
            fields = parse_object(line) if len(line) <= MAX_OPENING else {}
        except ValueError:
            fields = {}
        theirs = fields.get("nonce")
        if fields.get("replicast") != PROTOCOL or not isinstance(theirs, str) or len(theirs) < 32:
            raise NotAuthentic("the other side is not a launcher of this version of replicast", _ELSE)
        if theirs == self._nonce:
            raise NotAuthentic("the other side repeats what it was sent", _ELSE)
        if fields.get("secret") is not bool(self._secret):
            has, lacks = ("this host", "the other") if self._secret else ("the other host", "this one")
            raise NotAuthentic(f"{has} has a job secret, {lacks} has none", SAME_SECRET)
        first, other = (self._nonce, theirs) if self._is_first else (theirs, self._nonce)
        both = f"{PROTOCOL}\n{first}\n{other}".encode()
        self._key = hmac.digest(self._secret or b"no secret", both, "sha256")

    def _unpack(self, line: bytes) -> dict[str, Any]:
        seal, _, text = line.partition(b" ")
        if not hmac.compare_digest(seal, self._seal(self._theirs, self._received, text)):
            raise NotAuthentic("the other host has a different job secret", SAME_SECRET)
        self._received += 1
        return parse_object(text)

    def _seal(self, who: bytes, number: int, text: bytes) -> bytes:
        return hmac.new(self._key, b"%s %d " % (who, number) + text, hashlib.sha256).hexdigest().encode()


_Kind = TypeVar("_Kind")


class Connection:
    """A connection to another launcher: messages in, messages out. Only `expect` blocks, with a deadline.

    `read` makes a message of the fields in a line. A connection that `blocks` is for `expect`.
    """

    def __init__(
        self,
        connection: socket.socket,
        secret: bytes,
        read: Callable[[dict[str, Any]], Any],
        *,
        is_first: bool,
        blocks: bool = False,
    ) -> None:
        connection.settimeout(STEP_SECS if blocks else 0.0)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.since = time.monotonic()
        self.host = "an unknown address"
        with contextlib.suppress(OSError):  # It is not connected yet, or no more.
            self.host = str(connection.getpeername()[0])  # without the port, which is another one each time
        self.hello: Hello | None = None  # The introduction of the other side, once it is accepted.
        self.is_refused = False
        self._wire = Wire(secret, secrets.token_hex(32), is_first=is_first)
        self._read = read
        self._unsent = self._wire.opening()
        self._waiting: list[object] = []
        self._arrived: list[Any] = []
        self._flush()

    def send(self, message: object) -> None:
        """Queues a message and sends what the socket takes."""
        if not self._wire.is_open:
            older = [one for one in self._waiting if not isinstance(one, type(message))]
            self._waiting = [*older, message]
            return
        self._unsent += self._wire.pack(message)
        if len(self._unsent) > _MAX_UNSENT:
            raise TimeoutError("the other side does not read")
        self._flush()

    def receive(self) -> list[Any]:
        """What has arrived; a ValueError for an authentic line that is not a valid message."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("closed by the other side")
        if self.is_refused:  # It may read why, and closes the connection then.
            return []
        messages: list[Any] = []
        for fields in self._wire.feed(data):
            try:
                messages.append(self._read(fields))
            except ValueError as error:
                messages.append(error)
        if self._wire.is_open and self._waiting:
            waiting, self._waiting = self._waiting, []
            for message in waiting:
                self.send(message)
        return messages

    def expect(self, kind: type[_Kind], secs: float) -> _Kind:
        """Waits for the next message, which must be of this kind."""
        until = time.monotonic() + secs
        while not self._arrived:
            self._wait(until)
        message = self._arrived.pop(0)
        if not isinstance(message, kind):
            raise ValueError(f"expected {kind.__name__}, received {type(message).__name__}")
        return message

    def wait_for_opening(self) -> None:
        until = time.monotonic() + STEP_SECS
        while not self._wire.is_open:
            self._wait(until)

    def close(self) -> None:
        self.socket.close()

    def _wait(self, until: float) -> None:
        self.socket.settimeout(max(0.01, until - time.monotonic()))
        self._arrived += self.receive()
        self.socket.settimeout(STEP_SECS)

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]


# An error which means that the other host has closed the connection: its process has ended.
_CLOSED = (ConnectionResetError, BrokenPipeError, ConnectionAbortedError)


def not_welcome(by: str, why: str, *, has_hosts: bool) -> LaunchRefused:
    """Another launcher has refused this one, which cannot be part of the job."""
    same = "--hosts in the same order" if has_hosts else "another --node-rank on each"
    remedy = f"Start the same command on all hosts, with {same}"
    return LaunchRefused(f"{by} refused this host: {why}", remedy=remedy)


# --- The first launcher ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    job: JobPlan
    identity: Identity | None  # None: it does not join, and only asks the first one for its order.
    secret: bytes
    timeouts: HostTimeouts
    next_attempt: int = 0
    run_name: str = ""
    session: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def endpoint(self) -> tuple[str, int]:
        if self.job.endpoint is None:
            raise ValueError("A job on several hosts has an endpoint")
        return self.job.endpoint

    def member(self) -> Member:
        max_restarts = 0 if self.identity is None else self.identity.max_restarts
        return Member(self.job.node_rank, self.next_attempt, max_restarts, self.timeouts, time.monotonic())


def identity_of(job: JobPlan, max_restarts: int) -> Identity:
    program, text = job.argv[1:], "\0".join(job.argv[1:])
    if len(text) > _MAX_PROGRAM:  # Replaced by its digest, so that it fits into a message.
        digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
        program = (program[0][:200], f"({len(program) - 1} arguments with the digest {digest})")
    return Identity(
        version=metadata.version("replicast"),
        program=program,
        workers=job.workers,
        nodes=job.nodes,
        hosts=job.hosts,
        port=job.port,
        max_restarts=max_restarts,
    )


def listen(endpoint: tuple[str, int], *, name_secs: float = 0.0) -> socket.socket:
    """A socket that listens at an address of this machine, and at no other."""
    host, port = endpoint
    shown = shown_address(host, port)
    address = _address_of(host, time.monotonic() + name_secs)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ClusterError(
                f"Another process listens at {shown}, the address of the first launcher: another job?",
                remedy="Give each job an address of its own: --rdzv-endpoint HOST:PORT, or another --port",
            ) from None
        why = os.strerror(error.errno or 0)  # Without what create_server adds to it.
        raise ClusterError(
            f"This machine cannot listen at {shown}, the address of the first host ({why})",
            remedy="Give --node-rank 0 on the first host alone, by a name or address that is its own",
        ) from None
    listener.setblocking(False)
    return listener


def _address_of(host: str, until: float) -> str:
    """The address of the first host. A name that has none is looked up again until then."""
    while True:
        lookup, problem = Lookups([host]), "has no address"
        with contextlib.suppress(OSError):
            if not lookup.wait(NAMES_SECS):
                problem = f"was not resolved within {NAMES_SECS:g} s"
            elif addresses := lookup.addresses(host):
                return addresses[0]
        if time.monotonic() >= until:
            what = f"The name of the first host {problem}: {host}"
            raise ClusterError(what, remedy="Correct it, or the DNS")
        time.sleep(_NAME_PAUSE_SECS)


class Rivals:
    """Whether a launcher on another host takes itself for the first one too: its `--hosts` differ in order.

    Each of the two would wait in vain for the other to connect. So a first launcher, once it listens,
    connects to its own port on each other host, where nothing should listen. Another first launcher that
    knows the secret, and needs the same ports on the same hosts, refuses it there. Of two such launchers at
    least the later one finds the other, because each listens before it looks. A thread for each host looks
    once: a name may take minutes, and a host may not answer. They are daemons, and nobody waits for them.
    """

    def __init__(self, hosts: Sequence[str], endpoint_port: int, worker_port: int, secret: bytes) -> None:
        self._port, self._secret = endpoint_port, secret
        self._question = FirstOf(hosts=tuple(hosts), port=worker_port)
        self._found: queue.SimpleQueue[tuple[str, RefusedHost | NotAuthentic]] = queue.SimpleQueue()
        for host in dict.fromkeys(hosts[1:]):
            with contextlib.suppress(RuntimeError):  # No more threads for now: this is a courtesy.
                threading.Thread(target=self._look, args=[host], name="rival", daemon=True).start()

    def poll(self, notices: Notices) -> list[str | ReplicastError]:
        """What was found; `notices` decides which lines are said of strangers."""
        events: list[str | ReplicastError] = []
        while not self._found.empty():
            address, found = self._found.get()
            if isinstance(found, RefusedHost):
                events.append(not_welcome(f"The launcher at {address}", found.why, has_hosts=True))
            else:
                events += notices.say(f"{address}: {found}. {found.remedy}", time.monotonic())
        return events

    def _look(self, host: str) -> None:
        with contextlib.suppress(OSError, ValueError, IndexError):  # Nothing listens there, as it should be.
            place = addresses_of(host, self._port, lambda: None)[0]
            with socket.create_connection(place, timeout=STEP_SECS) as connected:
                try:
                    read = functools.partial(msgspec.convert, type=RefusedHost)
                    asking = Connection(connected, self._secret, read, is_first=False, blocks=True)
                    asking.send(self._question)
                    found: RefusedHost | NotAuthentic = asking.expect(RefusedHost, STEP_SECS)
                except NotAuthentic as error:
                    found = error
            self._found.put((shown_address(host, self._port), found))


class First:
    """The first launcher's sockets: it accepts the others, hears their reports and tells them its order."""

    def __init__(self, part: Part, identity: Identity, listener: socket.socket) -> None:
        now, job = time.monotonic(), part.job
        names = job.hosts or (part.endpoint[0], *("" for _ in range(job.nodes - 1)))
        self.leader = Leader(names, part.session, identity.max_restarts, part.timeouts, now, part.run_name)
        self.member = part.member()
        self.timeouts = part.timeouts
        self._identity, self._secret = identity, part.secret
        self._read_message = functools.partial(read_message, nodes=identity.nodes)
        self._listener = listener
        # It listens already: of two launchers that take themselves for the first, one finds the other.
        self._rivals = Rivals(identity.hosts, listener.getsockname()[1], identity.port, part.secret)
        self._connections: list[Connection] = []
        self._sent: LaunchOrder | None = None
        self._sent_at = 0.0
        self._of_strangers, self._of_launchers = Notices(), Notices()
        self._deaf_until = 0.0
        self.leader.on_joined(0, part.session, "", now)

    def sockets(self) -> list[socket.socket]:
        listening = [] if time.monotonic() < self._deaf_until else [self._listener]
        return [*listening, *(one.socket for one in self._connections)]

    def poll(self, readable: list[socket.socket]) -> list[Event]:
        """Reads what has come, and sends what is due. Call it at least every second."""
        events: list[Event] = [*self._rivals.poll(self._of_strangers)]
        if self._listener in readable:
            events += self._accept()
        for connection in list(self._connections):
            if connection.socket in readable:
                events += self._read(connection)
        now = time.monotonic()
        for connection in list(self._connections):
            if connection.hello is None and now - connection.since >= _INTRODUCE_SECS:
                self._drop(connection)
        self.leader.on_report(0, self.member.report, now)
        self.leader.on_time(now)
        self._broadcast(now)
        events += self.member.on_order(self.leader.order, now)
        self.leader.on_report(0, self.member.report, now)
        return events

    def may_leave(self) -> bool:
        """Whether the thread may end: nobody waits to hear that the job is over."""
        return self.leader.order.phase is not Phase.OVER or self.leader.everybody_left()

    def close(self) -> None:
        self._listener.close()
        for connection in self._connections:
            connection.close()

    def _accept(self) -> list[Event]:
        now = time.monotonic()
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            if not (problem := accept_problem(error)):
                return []
            self._deaf_until = now + _DEAF_SECS
            return [*self._of_launchers.say(f"cannot accept other launchers for now: {problem}", now)]
        strangers = [one for one in self._connections if one.hello is None]
        if len(strangers) >= _MAX_STRANGERS:  # A launcher introduces itself at once: the oldest is none.
            self._drop(strangers[0])
        try:
            self._connections.append(Connection(accepted, self._secret, self._read_message, is_first=True))
        except OSError:
            accepted.close()
        return []

    def _read(self, connection: Connection) -> list[Event]:
        try:
            return [event for message in connection.receive() for event in self._take(connection, message)]
        except NotAuthentic as error:
            return self._refuse(connection, str(error), self._of_strangers, remedy=error.remedy)
        except OSError as error:
            self._drop(connection, error)
        except ValueError:
            self._drop(connection)
        return []

    def _take(self, connection: Connection, message: Message | ValueError) -> list[Event]:
        now = time.monotonic()
        if isinstance(message, Hello) and connection.hello is None:
            refusal = difference(self._identity, message.identity) or self.leader.refusal(
                message.node, message.session, now
            )
            if refusal:
                return self._refuse(connection, refusal, self._of_launchers, node=message.node)
            for older in [one for one in self._connections if one.hello and one.hello.node == message.node]:
                self._drop(older)
            connection.hello = message
            self.leader.on_joined(message.node, message.session, message.address, now)
            connection.send(self.leader.order)
        elif isinstance(message, AskName):
            connection.send(self.leader.order)
        elif isinstance(message, Report) and connection.hello is not None:
            self.leader.on_report(connection.hello.node, message, now)
        elif isinstance(message, FirstOf):
            ours = FirstOf(hosts=self._identity.hosts, port=self._identity.port)
            if refusal := two_firsts(ours, message):
                return self._refuse(connection, refusal, self._of_launchers)
        elif isinstance(message, ValueError):
            text = f"ignored an invalid message of the launcher at {connection.host}: {message}"
            return [*self._of_launchers.say(text, now)]
        return []

    def _broadcast(self, now: float) -> None:
        if self.leader.order == self._sent and now - self._sent_at < self.timeouts.beat_secs:
            return
        self._sent, self._sent_at = self.leader.order, now
        for connection in [one for one in self._connections if one.hello is not None]:
            try:
                connection.send(self._sent)
            except OSError as error:
                self._drop(connection, error)

    def _drop(self, connection: Connection, error: OSError | None = None) -> None:
        connection.close()
        if connection in self._connections:
            self._connections.remove(connection)
        if connection.hello is not None and isinstance(error, _CLOSED):
            self.leader.on_closed(connection.hello.node, connection.hello.session, time.monotonic())

    def _refuse(
        self, connection: Connection, why: str, notices: Notices, *, node: int | None = None, remedy: str = ""
    ) -> list[Event]:
        connection.is_refused = True
        if remedy != _ELSE:  # Else it is not a launcher, and nobody waits for it.
            self.leader.on_refused(node, f"A launcher at {connection.host} was refused: {printable(why)}")
        why = f"{why}. {remedy}" if remedy else why
        with contextlib.suppress(OSError):
            connection.send(RefusedHost(why=why))
        return [*notices.say(f"refused a launcher at {connection.host}: {why}", time.monotonic())]


# --- Another launcher ------------------------------------------------------------------------------------


class Other:
    """Another launcher's socket: it connects to the first one, again and again if need be."""

    def __init__(self, part: Part) -> None:
        self.member = part.member()
        self.timeouts = part.timeouts
        self._part = part
        self._dialer, self._shown = Dialer(*part.endpoint), shown_address(*part.endpoint)
        self._connection: Connection | None = None
        self._next_try = self._connected_at = 0.0
        self._sent: Report | None = None
        self._sent_at = 0.0
        self._of_strangers, self._of_first = Notices(), Notices()

    def sockets(self) -> list[socket.socket]:
        return [] if self._connection is None else [self._connection.socket]

    def poll(self, readable: list[socket.socket]) -> list[Event]:
        """Reads what has come, and sends what is due. Call it at least every second."""
        events: list[Event] = []
        now, redial_secs = time.monotonic(), self.timeouts.redial_secs
        fresh = now - self._connected_at < redial_secs
        if self._connection is not None and not fresh and self.member.should_redial(now):
            self.member.on_unreachable(f"{self._shown}: no message for {redial_secs:g} s")
            self._lost(is_closed=False)
        if self._connection is None and time.monotonic() >= self._next_try and not self.member.is_over:
            self._connect()
        if self._connection is not None and self._connection.socket in readable:
            events += self._read(self._connection)
        events += self.member.on_time(time.monotonic())
        self._send_report()
        return events

    def may_leave(self) -> bool:
        """Whether the thread may end: nobody waits to hear that the job is over."""
        return True

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _connect(self) -> None:
        try:
            connected = self._dialer.connect(CONNECT_SECS)
        except OSError as error:  # No answer says nothing about the process; a refused connection does.
            self.member.on_unreachable(f"{self._shown}: {error.strerror or error}")
            self._lost(is_closed=isinstance(error, ConnectionRefusedError))
            return
        try:
            part, address = self._part, str(connected.getsockname()[0])
            hello: Hello | AskName = AskName()
            if part.identity is not None:
                node, session, identity = part.job.node_rank, part.session, part.identity
                hello = Hello(node=node, session=session, address=address, identity=identity)
            read = functools.partial(read_message, nodes=part.job.nodes)
            self._connection = Connection(connected, part.secret, read, is_first=False)
            self._connection.send(hello)
            self._sent, self._connected_at = None, time.monotonic()
        except OSError as error:
            connected.close()
            self._lost(is_closed=isinstance(error, _CLOSED))

    def _read(self, connection: Connection) -> list[Event]:
        now = time.monotonic()
        try:
            events: list[Event] = []
            for message in connection.receive():
                if isinstance(message, RefusedHost):
                    has_hosts = bool(self._part.job.hosts)
                    return [not_welcome("The first launcher", message.why, has_hosts=has_hosts)]
                if isinstance(message, LaunchOrder):
                    is_member = self._part.identity is not None
                    events += self.member.on_order(message, now) if is_member else [message]
                if isinstance(message, ValueError):
                    events += self._of_first.say(f"{self._shown}: ignored an invalid message: {message}", now)
            return events
        except NotAuthentic as error:  # It may be anybody: no reason to give up.
            self._lost(is_closed=False)
            self.member.on_unreachable(f"{self._shown}: {error}")
            text = f"{self._shown}: {error}. {error.remedy}; this launcher keeps trying"
            return [*self._of_strangers.say(text, now)]
        except (OSError, ValueError) as error:
            self._lost(is_closed=isinstance(error, _CLOSED))
        return []

    def _send_report(self) -> None:
        now, report = time.monotonic(), self.member.report
        is_due = report != self._sent or now - self._sent_at >= self.timeouts.beat_secs
        if self._connection is None or not is_due:
            return
        try:
            self._connection.send(report)
            self._sent, self._sent_at = report, now
        except OSError as error:
            self._lost(is_closed=isinstance(error, _CLOSED))

    def _lost(self, *, is_closed: bool) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._next_try = time.monotonic() + _PAUSE_SECS
        if is_closed:
            self.member.on_closed(time.monotonic())


# --- The thread ------------------------------------------------------------------------------------------

Posted = Callable[[Member, float], list[Command] | None]


class Link:
    """The launcher's connection with those of the other hosts: its thread. A context manager."""

    def __init__(self, service: First | Other) -> None:
        self._service = service
        self._leave_secs = service.timeouts.leave_secs
        self._posted: queue.SimpleQueue[Posted] = queue.SimpleQueue()
        self._events: collections.deque[Event] = collections.deque()
        self._wake_thread, self._wake_main = (
            os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2)
        )
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        until = time.monotonic() + self._leave_secs
        while kind is None and not self._service.may_leave() and time.monotonic() < until:
            if not self._thread.is_alive():
                break
            time.sleep(0.02)
        self._closing.set()
        os.eventfd_write(self._wake_thread, 1)
        self._thread.join(self._leave_secs + CONNECT_SECS)
        if not self._thread.is_alive():  # Else it may still write to them.
            os.close(self._wake_thread)
            os.close(self._wake_main)

    def fileno(self) -> int:
        return self._wake_main

    def next_event(self) -> Event | None:
        if not self._events:  # Else the descriptor stays readable for what is left.
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._wake_main)
        return self._events.popleft() if self._events else None

    def post(self, event: Posted) -> None:
        """Has the thread call a function with the state machine of this launcher and the time."""
        self._posted.put(event)
        os.eventfd_write(self._wake_thread, 1)

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                self._once()
        except BaseException as error:
            self._put([ClusterError(f"The connection between the launchers has failed ({error!r})")])
        finally:
            self._service.close()

    def _once(self) -> None:
        with selectors.PollSelector() as selector:  # `epoll` would need a descriptor, each time.
            sources: list[int | socket.socket] = [self._wake_thread, *self._service.sockets()]
            for one in sources:
                selector.register(one, selectors.EVENT_READ, one)
            readable = [key.data for key, _ in selector.select(_LOOK_SECS)]
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_thread)
        while not self._posted.empty():
            self._put(self._posted.get()(self._service.member, time.monotonic()) or [])
        self._put(self._service.poll(readable))

    def _put(self, events: Sequence[Event]) -> None:
        self._events.extend(events)
        if events:
            os.eventfd_write(self._wake_main, 1)


def make_link(part: Part) -> Link:
    if part.job.node_rank == 0 and part.identity is not None:
        return Link(First(part, part.identity, listen(part.endpoint, name_secs=_NAME_SECS)))
    return Link(Other(part))


# --- The attempts of a job on several hosts, as the main thread of one launcher sees them -----------------


class HostsAttempts:
    """Decides together with the launchers of the other hosts. Only in the main thread."""

    def __init__(self, link: Link, job: JobPlan, screen: Screen, interruptions: Interruptions) -> None:
        self._link, self._job, self._screen, self._interruptions = link, job, screen, interruptions
        first = "" if job.endpoint is None else job.endpoint[0]
        # The addresses of the others are known when all have come.
        names = job.hosts or (first, *(f"host {node}" for node in range(1, job.nodes)))
        self.hosts = Hosts(names, job.node_rank)
        self._kept: collections.deque[Event] = collections.deque()  # not for the group
        self._stopped_by: signal.Signals | None = None

    def ask(self) -> LaunchOrder:
        """Waits until the first launcher has told its order, at most the time to join."""
        order = self._wait_for(*Phase)
        came = [one for one in self._interruptions.take() if one in STOP_SIGNALS]
        stopped_by = next(iter(came), self._stopped_by)  # At the same time: nobody will see it later.
        return order if stopped_by is None or order.phase is Phase.OVER else self._interrupted(stopped_by)

    def begin(self) -> LaunchOrder:
        """Waits until all hosts are ready, at most the time to join; the job may be over before."""
        order = self._wait_for(Phase.RUN)
        if order.phase is Phase.RUN and not self._job.hosts:
            self.hosts = Hosts(order.hosts, self._job.node_rank)
        return order

    def decide(self, end: GroupEnd) -> LaunchOrder:
        """Waits until the workers of all hosts have exited."""
        failure, left = self._from_here(end.first_failure), bool(end.left_behind)
        self._link.post(lambda member, now: member.on_group_end(failure, now, left_behind=left))
        order = self._wait_for(Phase.WAIT)
        if order.failure is None:
            order = replace(order, failure=failure)
        if end.interrupted_by is not None and order.signal is None:
            order = replace(order, signal=end.interrupted_by, stopped_on=self._job.node_rank)
        return order

    def fileno(self) -> int:
        return self._link.fileno()

    def take_ends(self) -> list[End]:
        """Why the group of this host must end, if it must. Does not block."""
        ends = []
        while (event := self._link.next_event()) is not None:
            if isinstance(event, End):
                failed = event.failure
                is_own = failed and failed.worker is not None and failed.host == self._job.node_rank
                if event.stopped_by is not None or not is_own:  # Else the group here ends already.
                    ends.append(event)
            elif isinstance(event, ReplicastError):  # It is raised when the group has ended.
                ends.append(End(WorkerExit(host=self._job.node_rank)))
                self._kept.append(event)
            elif isinstance(event, LaunchOrder):
                self._kept.append(event)
            else:
                self._tell(event)
        return ends

    def tell_failure(self, failure: WorkerExit) -> None:
        told = self._from_here(failure)
        self._link.post(lambda member, _: None if told is None else member.on_failure(told))

    def tell_signal(self, signum: signal.Signals) -> None:
        self._stopped_by = signum
        self._link.post(lambda member, _: member.on_signal(signum))

    def _from_here(self, failure: WorkerExit | None) -> WorkerExit | None:
        return None if failure is None else sent_from(self._job.node_rank, failure)

    def _wait_for(self, *phases: Phase) -> LaunchOrder:
        """Waits for such an order or the end of the job; a second Ctrl-C does not wait."""
        with selectors.PollSelector() as selector:
            selector.register(self._link, selectors.EVENT_READ)
            selector.register(self._interruptions, selectors.EVENT_READ)
            while True:
                while (event := self._kept.popleft() if self._kept else self._link.next_event()) is not None:
                    if isinstance(event, LaunchOrder) and event.phase in (*phases, Phase.OVER):
                        return event  # What follows, such as an `End`, is for the group that is started now.
                    if isinstance(event, ReplicastError):
                        raise event
                    self._tell(event)
                selector.select(_POLL_SECS)
                for signum in self._interruptions.take():
                    if signum is signal.SIGINT and self._stopped_by is not None:
                        return self._interrupted(signum)
                    if signum in STOP_SIGNALS:
                        self.tell_signal(signum)

    def _interrupted(self, signum: signal.Signals) -> LaunchOrder:
        order = LaunchOrder(phase=Phase.OVER, code=128 + signum, stopped_on=self._job.node_rank)
        return replace(order, signal=signum)

    def _tell(self, event: Event) -> None:
        if isinstance(event, Waiting) and event.missing:
            missing = ", ".join(self.hosts.names[node] for node in event.missing)
            whom = f"the launcher{'s' if len(event.missing) > 1 else ''} on {missing}"
            why = f" ({event.why})" if event.why else ""
            event = f"waiting for {whom}, {event.secs:.0f} s of at most {event.at_most_secs:g} s{why}"
        elif isinstance(event, Waiting):
            event = f"waiting for the workers of the other hosts to exit, {event.secs:.0f} s so far"
        if isinstance(event, str):
            self._screen.tell(f"replicast: {event}")
