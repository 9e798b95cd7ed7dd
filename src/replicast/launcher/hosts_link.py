"""The connections between the launchers of a job, and the thread `hosts` that serves them.

    main thread ── post ──→ thread `hosts`: `First` or `Other`, with their state machines ──→ other hosts
                ←─ events ──

The thread alone touches the state machines of `hosts_leader.py`. The main thread posts what happens on this
host and takes events from a queue, on whose descriptor it can select: a command of the state machine, a line
to show, or an exception to raise, also if the thread dies. Nothing in the thread blocks for long: sockets are
non-blocking, names are looked up elsewhere. It is a thread because the main one may block for long: it writes
the logs of the workers, perhaps to a file system that does not answer for a minute.

Lines are authenticated:

    both → both     {"replicast": "launchers 2", "nonce": "…", "secret": true}
    afterwards      HMAC-SHA256 of direction, number and text, in hexadecimal, and the text: a JSON object

The key of a connection follows from the secret of the job and both nonces, so that nothing that was sent over
one connection is accepted on another, twice, or in the other direction. Without a secret the key follows from
the nonces alone: then any process that can reach the port can pretend to be a launcher.
"""

from __future__ import annotations

import collections
import contextlib
import errno
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
from functools import partial
from importlib import metadata
from typing import Any, Self

import msgspec
from msgspec.structs import replace

from replicast.config import JOB_SECRET
from replicast.errors import ClusterError, LaunchRefused, ReplicastError, printable
from replicast.launcher.failure import GroupEnd, Hosts, LaunchOrder, Phase, WorkerExit
from replicast.launcher.hosts_leader import (
    Command,
    Hello,
    HostTimeouts,
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
from replicast.names import NAMES_SECS, Dialer, Lookups
from replicast.processes import accept_problem
from replicast.strictjson import parse_object

PROTOCOL = "launchers 2"
MAX_OPENING, MAX_LINE = 1024, 256 * 1024
CONNECT_SECS = 2.0
_SAME_SECRET = f"Set {JOB_SECRET}, or the content of --secret-file, to the same text on all hosts"
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
            raise NotAuthentic(f"{has} has a job secret, {lacks} has none", _SAME_SECRET)
        first, other = (self._nonce, theirs) if self._is_first else (theirs, self._nonce)
        both = f"{PROTOCOL}\n{first}\n{other}".encode()
        self._key = hmac.digest(self._secret or b"no secret", both, "sha256")

    def _unpack(self, line: bytes) -> dict[str, Any]:
        seal, _, text = line.partition(b" ")
        if not hmac.compare_digest(seal, self._seal(self._theirs, self._received, text)):
            raise NotAuthentic("the other host has a different job secret", _SAME_SECRET)
        self._received += 1
        return parse_object(text)

    def _seal(self, who: bytes, number: int, text: bytes) -> bytes:
        return hmac.new(self._key, b"%s %d " % (who, number) + text, hashlib.sha256).hexdigest().encode()


class Connection(Wire):
    """A connection to another launcher: messages in, messages out. Never blocks.

    The side that has connected says `hello` as soon as both sides have said their openings. Nothing else can
    be sent before.
    """

    def __init__(
        self, connection: socket.socket, secret: bytes, nodes: int, hello: Hello | None = None
    ) -> None:
        super().__init__(secret, secrets.token_hex(32), is_first=hello is None)
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.since = time.monotonic()
        self.host = str(connection.getpeername()[0])  # without the port, which is another one each time
        self.accepted: Hello | None = None  # The introduction of the other side.
        self.is_refused, self.is_asking = False, hello is not None
        self._hello, self._nodes = hello, nodes
        self._unsent = self.opening()
        self._flush()

    def send(self, message: Message) -> None:
        """Queues a message and sends what the socket takes."""
        self._unsent += self.pack(message)
        if len(self._unsent) > _MAX_UNSENT:
            raise TimeoutError("the other side does not read")
        self._flush()

    def receive(self) -> list[Message | ValueError]:
        """What has arrived; a ValueError for an authentic line that is not a valid message."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("closed by the other side")
        if self.is_refused:  # It may read why, and closes the connection then.
            return []
        messages: list[Message | ValueError] = []
        for fields in self.feed(data):
            try:
                messages.append(read_message(fields, self._nodes))
            except ValueError as error:
                messages.append(error)
        if self._hello is not None and self.is_open:
            hello, self._hello = self._hello, None
            self.send(hello)
        return messages

    def _flush(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]


# An error which means that the other host has closed the connection: its process has ended.
_CLOSED = (ConnectionResetError, BrokenPipeError, ConnectionAbortedError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What a launcher knows of a job on several hosts when it goes to meet the others."""

    job: JobPlan
    endpoint: tuple[str, int]
    secret: bytes
    timeouts: HostTimeouts
    max_restarts: int = 0
    next_attempt: int | None = None  # None: the name of the run directory must come from the first launcher.
    run_name: str = ""
    session: str = field(default_factory=lambda: secrets.token_hex(8))

    def member(self) -> Member:
        node, now = self.job.node_rank, time.monotonic()
        return Member(node, self.next_attempt, self.max_restarts, self.timeouts, now)

    def identity(self) -> dict[str, str]:
        job, program = self.job, " ".join(self.job.argv[1:])
        if len(program) > _MAX_PROGRAM:  # Replaced by its digest, so that it fits into a message.
            digest = hashlib.sha256(program.encode(errors="surrogateescape")).hexdigest()
            program = f"{job.argv[1][:200]} with {len(job.argv) - 2} arguments of the digest {digest}"
        return {
            "version of replicast": metadata.version("replicast"),
            "program, or its arguments": program,
            "number of workers (-n)": str(job.workers),
            "number of hosts": str(job.nodes),
            "--hosts": ",".join(job.hosts),
            "--port": str(job.port),
            "--max-restarts": str(self.max_restarts),
        }

    def hello(self, address: str = "") -> Hello:
        return Hello(node=self.job.node_rank, session=self.session, address=address, identity=self.identity())


# --- The thread ------------------------------------------------------------------------------------------

Posted = Callable[[Member, float], list[Command] | None]


class Link:
    """A launcher's connection with those of the other hosts: its thread. A context manager.

    `First` and `Other` have the sockets. What they define is called in the thread only.
    """

    def __init__(self, part: Part) -> None:
        self.member = part.member()
        self._part, self._timeouts = part, part.timeouts
        self._of_strangers, self._of_launchers = Notices(), Notices()
        self._sent: Report | LaunchOrder | None = None
        self._sent_at = 0.0
        self._posted: queue.SimpleQueue[Posted] = queue.SimpleQueue()
        self._events: collections.deque[Event] = collections.deque()
        self._wake_thread, self._wake_main = (
            os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2)
        )
        self._leave_by: float | None = None
        self._thread = threading.Thread(target=self._run, name="hosts", daemon=True)

    def sockets(self) -> list[socket.socket]:
        """What to wait for."""
        raise NotImplementedError

    def poll(self, readable: list[socket.socket]) -> list[Event]:
        """Reads what has come, and sends what is due. Is called at least every second."""
        raise NotImplementedError

    def may_leave(self) -> bool:
        """Whether the thread may end: nobody waits to hear that the job is over."""
        return True

    def close(self) -> None:
        for one in self.sockets():
            one.close()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        leave_secs = self._timeouts.leave_secs
        self._leave_by = time.monotonic() + (leave_secs if kind is None else 0.0)
        os.eventfd_write(self._wake_thread, 1)
        self._thread.join(leave_secs + CONNECT_SECS)
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

    def _is_due(self, message: Report | LaunchOrder, now: float) -> bool:
        return message != self._sent or now - self._sent_at >= self._timeouts.beat_secs

    def _run(self) -> None:
        try:
            while self._leave_by is None or not (self.may_leave() or time.monotonic() >= self._leave_by):
                self._once()
        except BaseException as error:
            self._put([ClusterError(f"The connection between the launchers has failed ({error!r})")])
        finally:
            self.close()

    def _once(self) -> None:
        with selectors.PollSelector() as selector:  # `epoll` would need a descriptor, each time.
            sources: list[int | socket.socket] = [self._wake_thread, *self.sockets()]
            for one in sources:
                selector.register(one, selectors.EVENT_READ, one)
            readable = [key.data for key, _ in selector.select(_LOOK_SECS)]
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_thread)
        while not self._posted.empty():
            self._put(self._posted.get()(self.member, time.monotonic()) or [])
        self._put(self.poll(readable))

    def _put(self, events: Sequence[Event]) -> None:
        self._events.extend(events)
        if events:
            os.eventfd_write(self._wake_main, 1)


# --- The first launcher ----------------------------------------------------------------------------------


def listen(endpoint: tuple[str, int], *, name_secs: float = 0.0) -> socket.socket:
    """A socket that listens at an address of this machine, and at no other."""
    host, port = endpoint
    shown = shown_address(host, port)
    address = _address_of(host, time.monotonic() + name_secs)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family, backlog=1024)
    except OSError as error:
        why = os.strerror(error.errno or 0)  # Without what create_server adds to it.
        if error.errno == errno.EADDRINUSE:
            why = "another process does: another job?"
        raise ClusterError(
            f"This machine cannot listen at {shown}, the address of the first launcher: {why}",
            remedy="Give each job a port of its own (--port, or --rdzv-endpoint HOST:PORT) and --node-rank 0 "
            "to the first host alone, by a name or address that is its own",
        ) from None
    listener.setblocking(False)
    return listener


def _address_of(host: str, until: float) -> str:
    """The address of the first host. A name that has none is looked up again until then."""
    while True:
        lookup, problem = Lookups([host]), "has no address"
        if not lookup.wait(NAMES_SECS):
            problem = f"was not resolved within {NAMES_SECS:g} s"
        with contextlib.suppress(OSError):
            if addresses := lookup.addresses(host):
                return addresses[0]
        if time.monotonic() >= until:
            what = f"The name of the first host {problem}: {host}"
            raise ClusterError(what, remedy="Correct it, or the DNS")
        time.sleep(_NAME_PAUSE_SECS)


class First(Link):
    """The first launcher's sockets: it accepts the others, hears their reports and tells them its order.

    A launcher on another host may take itself for the first one too, if its `--hosts` differ in order; then
    each of the two would wait in vain for the other to connect. So a first launcher, once it listens,
    connects to its own port on each other host, where nothing should listen, and says hello. Another first
    launcher that knows the secret, and needs the same ports on the same hosts, refuses it there. Of two such
    launchers at least the later one finds the other, because each listens before it looks. A thread for each
    host connects once: a name may take minutes. They are daemons, and nobody waits for them.
    """

    def __init__(self, part: Part, listener: socket.socket) -> None:
        super().__init__(part)
        now, job = time.monotonic(), part.job
        names = job.hosts or (part.endpoint[0], *("" for _ in range(job.nodes - 1)))
        self.leader = Leader(names, part.session, part.max_restarts, part.timeouts, now, part.run_name)
        self._identity, self._listener = part.identity(), listener
        self._connections: list[Connection] = []
        self._deaf_until = 0.0
        self.leader.on_joined(0, part.session, "", now)
        self._rivals: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        for host in job.hosts[1:]:
            with contextlib.suppress(RuntimeError):  # No more threads for now: this is a courtesy.
                threading.Thread(target=self._look, args=[host], name="rival", daemon=True).start()

    def sockets(self) -> list[socket.socket]:
        listening = [] if time.monotonic() < self._deaf_until else [self._listener]
        return [*listening, *(one.socket for one in self._connections)]

    def poll(self, readable: list[socket.socket]) -> list[Event]:
        events: list[Event] = []
        while not self._rivals.empty():
            self._add(self._rivals.get(), self._part.hello())
        if self._listener in readable:
            events += self._accept()
        for connection in list(self._connections):
            if connection.socket in readable:
                events += self._read(connection)
        now = time.monotonic()
        for connection in list(self._connections):
            if connection.accepted is None and now - connection.since >= _INTRODUCE_SECS:
                self._drop(connection)
        self.leader.on_report(0, self.member.report, now)
        self.leader.on_time(now)
        self._broadcast(now)
        events += self.member.on_order(self.leader.order, now)
        self.leader.on_report(0, self.member.report, now)
        return events

    def may_leave(self) -> bool:
        return self.leader.order.phase is not Phase.OVER or self.leader.everybody_left()

    def close(self) -> None:
        self._listener.close()  # Also when nothing is accepted for now.
        super().close()
        self._close_rivals()

    def _look(self, host: str) -> None:
        with contextlib.suppress(OSError):  # Nothing listens there, as it should be.
            self._rivals.put(Dialer(host, self._listener.getsockname()[1]).connect(NAMES_SECS))
            if self._listener.fileno() < 0:  # Nobody takes it any more.
                self._close_rivals()

    def _close_rivals(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                self._rivals.get_nowait().close()

    def _accept(self) -> list[Event]:
        now = time.monotonic()
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            if not (problem := accept_problem(error)):
                return []
            self._deaf_until = now + _DEAF_SECS
            return [*self._of_launchers.say(f"cannot accept other launchers for now: {problem}", now)]
        strangers = [one for one in self._connections if one.accepted is None]
        if len(strangers) >= _MAX_STRANGERS:  # A launcher introduces itself at once: the oldest is none.
            self._drop(strangers[0])
        self._add(accepted)
        return []

    def _add(self, connected: socket.socket, hello: Hello | None = None) -> None:
        try:
            connection = Connection(connected, self._part.secret, self._part.job.nodes, hello)
            self._connections.append(connection)
        except OSError:
            connected.close()

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
        match message:
            case Hello(node=0, identity=identity):
                if refusal := two_firsts(self._identity, identity):
                    return self._refuse(connection, refusal, self._of_launchers)
            case Hello(node=node, session=session) if connection.accepted is None:
                refusal = difference(self._identity, message.identity)
                if refusal := refusal or self.leader.refusal(node, session, now):
                    return self._refuse(connection, refusal, self._of_launchers, node=node)
                for older in [one for one in self._connections if one.accepted and one.accepted.node == node]:
                    self._drop(older)
                connection.accepted = message
                self.leader.on_joined(node, session, message.address, now)
                connection.send(self.leader.order)
            case Report() if connection.accepted is not None:
                self.leader.on_report(connection.accepted.node, message, now)
            case RefusedHost(why=why) if connection.is_asking:
                return [_not_welcome(f"The launcher at {connection.host}", why, self._part.job)]
            case ValueError():
                text = f"ignored an invalid message of the launcher at {connection.host}: {message}"
                return [*self._of_launchers.say(text, now)]
        return []

    def _broadcast(self, now: float) -> None:
        order = self.leader.order
        if not self._is_due(order, now):
            return
        self._sent, self._sent_at = order, now
        for connection in [one for one in self._connections if one.accepted is not None]:
            try:
                connection.send(order)
            except OSError as error:
                self._drop(connection, error)

    def _drop(self, connection: Connection, error: OSError | None = None) -> None:
        connection.socket.close()
        if connection in self._connections:
            self._connections.remove(connection)
        if connection.accepted is not None and isinstance(error, _CLOSED):
            hello = connection.accepted
            self.leader.on_closed(hello.node, hello.session, time.monotonic())

    def _refuse(
        self, connection: Connection, why: str, notices: Notices, *, node: int | None = None, remedy: str = ""
    ) -> list[Event]:
        connection.is_refused = True
        if remedy != _ELSE:  # Else it is not a launcher, and nobody waits for it.
            self.leader.on_refused(node, f"A launcher at {connection.host} was refused: {printable(why)}")
        why = f"{why}. {remedy}" if remedy else why
        with contextlib.suppress(OSError):
            if connection.is_open:
                connection.send(RefusedHost(why=why))
        return [*notices.say(f"refused a launcher at {connection.host}: {why}", time.monotonic())]


def _not_welcome(by: str, why: str, job: JobPlan) -> LaunchRefused:
    """Another launcher has refused this one, which cannot be part of the job."""
    same = "--hosts in the same order" if job.hosts else "another --node-rank on each"
    remedy = f"Start the same command on all hosts, with {same}"
    return LaunchRefused(f"{by} refused this host: {why}", remedy=remedy)


# --- Another launcher ------------------------------------------------------------------------------------


class Other(Link):
    """Another launcher's socket: it connects to the first one, again and again if need be."""

    def __init__(self, part: Part) -> None:
        super().__init__(part)
        self._dialer, self._shown = Dialer(*part.endpoint), shown_address(*part.endpoint)
        self._connection: Connection | None = None
        self._next_try = 0.0

    def sockets(self) -> list[socket.socket]:
        return [] if self._connection is None else [self._connection.socket]

    def poll(self, readable: list[socket.socket]) -> list[Event]:
        now, redial_secs = time.monotonic(), self._timeouts.redial_secs
        is_old = self._connection is not None and now - self._connection.since >= redial_secs
        if is_old and self.member.should_redial(now):
            self._lost(f"no message for {redial_secs:g} s")
        if self._connection is None and now >= self._next_try and not self.member.is_over:
            self._connect()
        events: list[Event] = []
        if self._connection is not None and self._connection.socket in readable:
            events += self._read(self._connection)
        events += self.member.on_time(time.monotonic())
        self._send_report()
        return events

    def _connect(self) -> None:
        try:
            connected = self._dialer.connect(CONNECT_SECS)
        except OSError as error:  # No answer says nothing about the process; a refused connection does.
            self._lost(error.strerror or str(error), is_closed=isinstance(error, ConnectionRefusedError))
            return
        try:
            hello = self._part.hello(address=str(connected.getsockname()[0]))
            self._connection = Connection(connected, self._part.secret, self._part.job.nodes, hello)
            self._sent = None
        except OSError as error:
            connected.close()
            self._lost(is_closed=isinstance(error, _CLOSED))

    def _read(self, connection: Connection) -> list[Event]:
        now = time.monotonic()
        events: list[Event] = []
        try:
            for message in connection.receive():
                if isinstance(message, RefusedHost):
                    return [_not_welcome("The first launcher", message.why, self._part.job)]
                if isinstance(message, LaunchOrder):
                    events += self.member.on_order(message, now)
                if isinstance(message, ValueError):
                    events += self._of_launchers.say(
                        f"{self._shown}: ignored an invalid message: {message}", now
                    )
        except NotAuthentic as error:  # It may be anybody: no reason to give up.
            self._lost(str(error))
            text = f"{self._shown}: {error}. {error.remedy}; this launcher keeps trying"
            events += self._of_strangers.say(text, now)
        except (OSError, ValueError) as error:
            self._lost(is_closed=isinstance(error, _CLOSED))
        return events

    def _send_report(self) -> None:
        now, report = time.monotonic(), self.member.report
        if self._connection is None or not (self._connection.is_open and self.member.is_ready):
            return
        if not self._is_due(report, now):
            return
        try:
            self._connection.send(report)
            self._sent, self._sent_at = report, now
        except OSError as error:
            self._lost(is_closed=isinstance(error, _CLOSED))

    def _lost(self, why: str = "", *, is_closed: bool = False) -> None:
        if self._connection is not None:
            self._connection.socket.close()
            self._connection = None
        self._next_try = time.monotonic() + _PAUSE_SECS
        if why:
            self.member.on_unreachable(f"{self._shown}: {why}")
        if is_closed:
            self.member.on_closed(time.monotonic())


def make_link(part: Part) -> Link:
    if part.job.node_rank == 0:
        return First(part, listen(part.endpoint, name_secs=_NAME_SECS))
    return Other(part)


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

    def ask_run_name(self) -> LaunchOrder:
        """Waits for the first order, which has the name of the run directory; `ready` must follow."""
        order = self._wait_for(Phase.WAIT)
        came = [one for one in self._interruptions.take() if one in STOP_SIGNALS]
        stopped_by = next(iter(came), self._stopped_by)  # At the same time: nobody will see it later.
        return order if stopped_by is None or order.phase is Phase.OVER else self._interrupted(stopped_by)

    def ready(self, next_attempt: int) -> None:
        self._link.post(lambda member, _: member.on_ready(next_attempt))

    def begin(self) -> LaunchOrder:
        """Waits until all hosts are ready, at most the time to join; the job may be over before."""
        order = self._wait_for(Phase.RUN)
        if order.phase is Phase.RUN and not self._job.hosts:
            self.hosts = Hosts(order.hosts, self._job.node_rank)
        return order

    def decide(self, end: GroupEnd, progress: tuple[int, int] | None = None) -> LaunchOrder:
        """Waits until the workers of all hosts have exited."""
        first, left = end.first_failure, bool(end.left_behind)
        failure = None if first is None else sent_from(self._job.node_rank, first)
        told = partial(Member.on_group_end, left_behind=left, progress=progress)
        self._link.post(lambda member, now: told(member, failure, now))
        order = self._wait_for(Phase.WAIT)
        if order.failure is None:
            order = replace(order, failure=failure)
        if end.interrupted_by is not None and order.signal is None:
            order = replace(order, signal=end.interrupted_by, stopped_on=self._job.node_rank)
        return order

    def fileno(self) -> int:
        return self._link.fileno()

    def take_ends(self) -> list[LaunchOrder]:
        """Why the group of this host must end, if it must. Does not block."""
        ends = []
        while (event := self._link.next_event()) is not None:
            if isinstance(event, LaunchOrder) and event.phase is Phase.END:
                failed = event.failure
                is_own = failed and failed.worker is not None and failed.host == self._job.node_rank
                if event.signal is not None or not is_own:  # Else the group here ends already.
                    ends.append(event)
            elif isinstance(event, ReplicastError):  # It is raised when the group has ended.
                ends.append(LaunchOrder(phase=Phase.END))
                self._kept.append(event)
            elif isinstance(event, LaunchOrder):
                self._kept.append(event)
            else:
                self._tell(event)
        return ends

    def tell_failure(self, failure: WorkerExit) -> None:
        told = sent_from(self._job.node_rank, failure)
        self._link.post(lambda member, _: member.on_failure(told))

    def tell_signal(self, signum: signal.Signals) -> None:
        self._stopped_by = signum
        self._link.post(lambda member, _: member.on_signal(signum))

    def _wait_for(self, phase: Phase) -> LaunchOrder:
        """Waits for such an order or the end of the job; a second Ctrl-C does not wait."""
        with selectors.PollSelector() as selector:
            selector.register(self._link, selectors.EVENT_READ)
            selector.register(self._interruptions, selectors.EVENT_READ)
            while True:
                while (event := self._kept.popleft() if self._kept else self._link.next_event()) is not None:
                    if isinstance(event, LaunchOrder) and event.phase in (phase, Phase.OVER):
                        return event  # What follows, such as an END, is for the group that is started now.
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
