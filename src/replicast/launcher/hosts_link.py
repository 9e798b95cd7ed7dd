"""The connections between the launchers of a job, and what the main thread of a launcher asks of them.

    main thread ── begin, to_end, decide ──→ `Member` (and the `Leader`, in the first launcher) ←── threads
                ←──────────── wakes it ────────────────────────────────────────────────────────── of sockets

Every other launcher has one connection to the first one (`connections.py`), over which go JSON objects, one
per line: `Hello`, then reports one way and orders the other way. The kernel closes it when a process dies.

    First    `hosts-accept`, and `hosts-serve` for each other host: takes its reports    `__exit__` stops them
             `hosts`: repeats the order, and notices who is silent                       `__exit__` stops it
    Other    `hosts`: connects, again and again if need be, and takes orders             `__exit__` stops it

The state machines of `hosts_leader.py` are touched with the lock only. Nothing is sent that would block: who
does not read is disconnected. If a thread dies, the main thread ends its workers and raises.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Self

import msgspec
from msgspec.structs import replace

from replicast.config import JOB_SECRET
from replicast.connections import (
    HANDSHAKE_SECS,
    NAMES_SECS,
    Dialer,
    HostServer,
    WrongSecret,
    introduce,
    limit,
    look_up,
    shut,
)
from replicast.errors import ClusterError, LaunchRefused, ReplicastError, printable
from replicast.launcher.failure import GroupEnd, Hosts, LaunchOrder, Phase, WorkerExit, first_cause
from replicast.launcher.hosts_leader import (
    Hello,
    Leader,
    Member,
    Message,
    RefusedHost,
    Report,
    difference,
    sent_from,
)
from replicast.launcher.plan import JobPlan, shown_address
from replicast.launcher.screen import STOP_SIGNALS, Interruptions, Screen
from replicast.processes import Deadline

CONNECT_SECS = 2.0
TELL_AFTER_SECS, TELL_AGAIN_SECS = 10.0, 30.0  # when a launcher that waits says so
MAX_LINE = 256 * 1024
MAX_STRANGER_LINES = 6  # on a screen, of processes that do not know the secret
_OTHER_SECRET = f"it has a different job secret, or none. Set {JOB_SECRET} to the same text on all hosts"
_MAX_PROGRAM = 4096
_READ_BYTES = 65536
_PAUSE_SECS = 0.25
_LOOK_SECS = 0.25
_POLL_SECS = 1.0
_NAME_SECS, _NAME_PAUSE_SECS = 10.0, 0.5
# An error which means that the other host has closed the connection: its process has ended.
_CLOSED = (ConnectionResetError, BrokenPipeError, ConnectionAbortedError, ConnectionRefusedError)
_MESSAGES: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


class Lines:
    """A connection to another launcher, which has shown that it knows the secret: messages, one per line."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._buffer = b""

    def send(self, message: Message) -> None:
        """Sends a message, or raises: it does not wait for a side that does not read."""
        data = msgspec.json.encode(message) + b"\n"
        if self.connection.send(data, socket.MSG_DONTWAIT) < len(data):
            raise TimeoutError("the other side does not read")

    def receive(self) -> Message:
        """The next message. Raises `BlockingIOError` after the time set by `limit`."""
        while b"\n" not in self._buffer:
            if len(self._buffer) > MAX_LINE:
                raise ConnectionError("a line without an end")
            data = self.connection.recv(_READ_BYTES)
            if not data:
                raise ConnectionResetError("closed by the other side")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        try:
            return _MESSAGES.decode(line)
        except msgspec.MsgspecError as error:
            raise ConnectionError(f"not a message of a launcher ({error})") from None


def identity(job: JobPlan) -> dict[str, str]:
    """What must be the same on all hosts, by the words for it."""
    program, script = " ".join(job.argv[1:]), Path(job.argv[1])
    # Empty if it is not a file, as after `-m`.
    content = hashlib.sha256(script.read_bytes()).hexdigest()[:16] if script.is_file() else ""
    if len(program) > _MAX_PROGRAM:  # Replaced by its digest, so that it fits into a message.
        digest = hashlib.sha256(program.encode(errors="surrogateescape")).hexdigest()
        program = f"{job.argv[1][:200]} with {len(job.argv) - 2} arguments of the digest {digest}"
    return {
        "version of replicast": metadata.version("replicast"),
        "program, or its arguments": program,
        "content of the script (its SHA-256)": content,
        "number of workers (-n)": str(job.workers),
        "number of hosts": str(job.nodes),
        "--hosts": ",".join(job.hosts),
        "--port": str(job.port),
        "--max-restarts": str(job.max_restarts),
    }


# --- What both kinds of launchers do ---------------------------------------------------------------------


class Peers:
    """The launchers of the other hosts, with which this one decides. A context manager of the main thread."""

    def __init__(self, job: JobPlan, screen: Screen, interruptions: Interruptions) -> None:
        self._job, self._timeouts = job, job.host_timeouts
        self._session = secrets.token_hex(8)
        self._screen, self._interruptions = screen, interruptions
        self.member = Member(job.node_rank, job.max_restarts, self._timeouts, time.monotonic())
        # The addresses of the others are known when all have come.
        names = job.hosts or (job.endpoint[0], *(f"host {node}" for node in range(1, job.nodes)))
        self.hosts = Hosts(names, job.node_rank)
        self._lock = threading.Condition()
        self._wake_main = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stop = threading.Event()
        self._failed: ReplicastError | None = None
        self._stopped_by: signal.Signals | None = None
        self._said: set[str] = set()
        self._stranger_lines = 0
        self._sent: Report | LaunchOrder | None = None
        self._sent_at = 0.0
        self._thread = threading.Thread(target=self._guard, args=[self.serve], name="hosts", daemon=True)

    def serve(self) -> None:
        """What the thread `hosts` does until `_stop` is set."""
        raise NotImplementedError

    def share(self, now: float) -> None:
        """Sends what has changed, or is due. With the lock."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._stop.set()
        self._thread.join(self._timeouts.leave_secs + CONNECT_SECS)
        if not self._thread.is_alive():  # Else it may still write to it.
            os.close(self._wake_main)

    def fileno(self) -> int:
        """Readable when there may be something new to ask."""
        return self._wake_main

    def ask_run_name(self) -> LaunchOrder:
        """Waits for the first order, which has the name of the run directory."""
        member = self.member
        return self._wait(
            lambda now: member.to_start(now) or (member.order if member.order.session else None)
        )

    def ready(self, next_attempt: int) -> None:
        """The run directory is known, and which attempts are in it. Call it before `begin`."""
        with self._lock:
            self.member.on_ready(next_attempt)

    def begin(self) -> LaunchOrder:
        """Waits until all hosts are ready, at most the time to join; the job may be over before."""
        order = self._wait(self.member.to_start)
        if order.phase is Phase.RUN and not self._job.hosts:
            self.hosts = Hosts(order.hosts, self._job.node_rank)
        return order

    def to_end(self) -> LaunchOrder | None:
        """Why the group of this host must end because of another one, if it must. Does not block."""
        self._clear()
        with self._lock:
            now = time.monotonic()
            self.share(now)
            order = self.member.to_end(now)
            if self._failed is not None:  # It is raised when the group has ended.
                return LaunchOrder(phase=Phase.END)
        failed = None if order is None else order.failure
        is_own = failed and failed.worker is not None and failed.host == self._job.node_rank
        return order if order is not None and (order.signal is not None or not is_own) else None

    def decide(self, end: GroupEnd) -> LaunchOrder:
        """Waits until the workers of all hosts have exited."""
        node, first = self._job.node_rank, first_cause(end.exits)
        failure = None if first is None else sent_from(node, first)
        with self._lock:
            self.member.on_group_end(failure, left_behind=bool(end.left_behind))
        order = self._wait(self.member.after)
        if order.failure is None:
            order = replace(order, failure=failure)
        if end.interrupted_by is not None and order.signal is None:
            order = replace(order, signal=end.interrupted_by, stopped_on=node)
        return order

    def tell_failure(self, failure: WorkerExit) -> None:
        with self._lock:
            self.member.on_failure(sent_from(self._job.node_rank, failure))
            self.share(time.monotonic())

    def tell_signal(self, signum: signal.Signals) -> None:
        self._stopped_by = signum
        with self._lock:
            self.member.on_signal(signum)
            self.share(time.monotonic())

    def _wait(self, question: Callable[[float], LaunchOrder | None]) -> LaunchOrder:
        """Waits for an answer of the state machine; a second Ctrl-C does not wait."""
        began = time.monotonic()
        tell_at = began + TELL_AFTER_SECS
        with selectors.PollSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            selector.register(self._interruptions, selectors.EVENT_READ)
            while True:
                self._clear()
                with self._lock:
                    if self._failed is not None:
                        raise self._failed
                    now = time.monotonic()
                    self.share(now)
                    answer, (missing, why) = question(now), self.member.missing(now)
                if answer is not None:
                    return answer
                if now >= tell_at:
                    tell_at = now + TELL_AGAIN_SECS
                    self._screen.tell(f"replicast: {self._waits_for(now - began, missing, why)}")
                selector.select(_POLL_SECS)
                for signum in self._interruptions.take():
                    if signum is signal.SIGINT and self._stopped_by is not None:
                        over = LaunchOrder(phase=Phase.OVER, code=130, signal=2)
                        return replace(over, stopped_on=self._job.node_rank)
                    if signum in STOP_SIGNALS:
                        self.tell_signal(signum)

    def _waits_for(self, secs: float, missing: tuple[int, ...], why: str) -> str:
        if not missing:
            return f"waiting for the workers of the other hosts to exit, {secs:.0f} s so far"
        names = ", ".join(self.hosts.names[node] for node in missing)
        hint = why or "is the same command, with the same --hosts in the same order, running there?"
        launchers = f"the launcher{'s' if len(missing) > 1 else ''} on {names}"
        return f"waiting for {launchers}, {secs:.0f} s of at most {self._timeouts.join_secs:g} s ({hint})"

    def _say(self, text: str, *, of_stranger: bool = False) -> None:
        """Shows each line once, and few of those that anybody can cause."""
        text = printable(text[:1000])
        if text in self._said or (of_stranger and self._stranger_lines >= MAX_STRANGER_LINES):
            return
        self._said.add(text)
        self._stranger_lines += of_stranger
        self._screen.tell(f"replicast: {text}")

    def _wake(self) -> None:
        os.eventfd_write(self._wake_main, 1)

    def _clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_main)

    def _fail(self, error: ReplicastError) -> None:
        self._failed = error
        self._wake()

    def _guard(self, act: Callable[..., None], *arguments: object) -> None:
        try:
            act(*arguments)
        except BaseException as error:
            self._fail(ClusterError(f"The connection between the launchers has failed ({error!r})"))

    def _is_due(self, message: Report | LaunchOrder, now: float) -> bool:
        if message == self._sent and now - self._sent_at < self._timeouts.beat_secs:
            return False
        self._sent, self._sent_at = message, now
        return True


# --- The first launcher ----------------------------------------------------------------------------------


class First(Peers):
    """The first launcher: it accepts the others, takes their reports and tells them its order."""

    def __init__(
        self, job: JobPlan, screen: Screen, interruptions: Interruptions, listener: socket.socket
    ) -> None:
        super().__init__(job, screen, interruptions)
        now, run_name = time.monotonic(), "" if job.run_dir is None else job.run_dir.name
        names = job.hosts or (job.endpoint[0], *("" for _ in range(job.nodes - 1)))
        self.leader = Leader(names, self._session, job.max_restarts, self._timeouts, now, run_name)
        self.leader.on_joined(0, self._session, "", now)
        self._identity = identity(job)
        self._connections: dict[int, Lines] = {}  # by host
        self._server = HostServer(
            listener,
            job.secret,
            partial(self._guard, self._talk),
            name="hosts",
            max_peers=2 * job.nodes,  # A launcher may connect again before its old connection is closed.
            warn=lambda problem: self._say(f"cannot accept connections at the moment: {problem}"),
            refused=lambda host: self._refuse(host, _OTHER_SECRET, of_stranger=True),
        )

    def serve(self) -> None:
        while not self._stop.wait(_LOOK_SECS):
            with self._lock:
                self.share(time.monotonic())

    def share(self, now: float) -> None:
        if self.member.is_ready:
            self.leader.on_report(0, self.member.report, now)
        self.leader.on_time(now)
        order = self.leader.order
        if order != self.member.order:
            self._wake()
        self.member.on_order(order, now)
        if self._is_due(order, now):
            for lines in self._connections.values():
                try:
                    lines.send(order)
                except OSError:
                    shut(lines.connection)  # Its thread notices.

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits a moment until all others know that the job is over."""
        if kind is None and self.leader.order.phase is Phase.OVER:
            with self._lock:
                self._lock.wait_for(lambda: not self._connections, self._timeouts.leave_secs)
        self._server.close()
        super().__exit__(kind)

    def _talk(self, connection: socket.socket) -> None:
        """In a thread for each connection of a process that knows the secret."""
        lines, hello = Lines(connection), None
        try:
            host = str(connection.getpeername()[0])
            limit(connection, HANDSHAKE_SECS)
            hello = lines.receive()
            if isinstance(hello, Hello) and self._accept(hello, lines, host):
                limit(connection, self._timeouts.silent_secs)
                while True:
                    report = lines.receive()
                    with self._lock:
                        if self._connections.get(hello.node) is not lines:  # It has connected again.
                            return
                        if isinstance(report, Report):
                            self.leader.on_report(hello.node, report, time.monotonic())
                            self.share(time.monotonic())
        except OSError as error:
            with self._lock:
                if isinstance(hello, Hello) and self._connections.get(hello.node) is lines:
                    del self._connections[hello.node]
                    if isinstance(error, _CLOSED):
                        self.leader.on_closed(hello.node, hello.session, time.monotonic())
                    self._lock.notify_all()

    def _accept(self, hello: Hello, lines: Lines, host: str) -> bool:
        with self._lock:
            now = time.monotonic()
            # Only when it comes first: the script may be edited while the job runs.
            is_known = self.leader.has_joined(hello.node, hello.session)
            refusal = "" if is_known else difference(self._identity, hello.identity)
            refusal = refusal or self.leader.refusal(hello.node, hello.session, now)
            if refusal:
                self._refuse(host, refusal)
                lines.send(RefusedHost(why=refusal))
                return False
            if hello.node in self._connections:
                shut(self._connections[hello.node].connection)
            self._connections[hello.node] = lines
            self.leader.on_joined(hello.node, hello.session, hello.address, now)
            lines.send(self.leader.order)
            return True

    def _refuse(self, host: str, why: str, *, of_stranger: bool = False) -> None:
        with self._lock:
            self.leader.refused = f"A launcher at {host} was refused: {why}"
            self._say(f"refused a launcher at {host}: {why}", of_stranger=of_stranger)


def listen(endpoint: tuple[str, int], *, name_secs: float = 0.0) -> socket.socket:
    """A socket that listens at an address of this machine, and at no other."""
    (host, port), deadline, address = endpoint, Deadline(name_secs), ""
    while not address:  # A name that has none yet is looked up again.
        try:
            address = look_up(host).result(NAMES_SECS)[0]
        except OSError as error:
            if deadline.has_passed():
                late = isinstance(error, TimeoutError)
                problem = f"was not resolved within {NAMES_SECS:g} s" if late else "has no address"
                what = f"The name of the first host {problem}: {host}"
                raise ClusterError(what, remedy="Correct it, or the DNS") from None
            time.sleep(_NAME_PAUSE_SECS)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        return socket.create_server((address, port), family=family, backlog=1024)
    except OSError as error:
        why = os.strerror(error.errno or 0)  # Without what create_server adds to it.
        if error.errno == errno.EADDRINUSE:
            why = "another process uses this port, perhaps another job"
        what = f"This machine cannot listen at {shown_address(*endpoint)}, the address of the first launcher"
        raise ClusterError(
            f"{what}: {why}",
            remedy="Give each job a port of its own (--port, or --rdzv-endpoint HOST:PORT) and --node-rank 0 "
            "to the first host alone, by a name or address that is its own",
        ) from None


# --- Another launcher ------------------------------------------------------------------------------------


class Other(Peers):
    """Another launcher: it connects to the first one, again and again if need be."""

    _lines: Lines | None = None

    def serve(self) -> None:
        dialer, shown = Dialer(*self._job.endpoint), shown_address(*self._job.endpoint)
        while not self._stop.is_set():
            try:
                with dialer.connect(CONNECT_SECS) as connection:
                    introduce(connection, self._job.secret, Deadline(HANDSHAKE_SECS))
                    self._talk(Lines(connection))
            except OSError as error:
                is_other = isinstance(error, WrongSecret)
                why = "no answer" if isinstance(error, BlockingIOError) else error.strerror or str(error)
                with self._lock:
                    self.member.unreachable = f"{shown}: {_OTHER_SECRET if is_other else why}"
                    # No answer says nothing about the process; a closed or refused connection does.
                    if isinstance(error, _CLOSED):
                        self.member.on_closed(time.monotonic())
                self._wake()
                if is_other:  # It may be anybody: no reason to give up.
                    self._say(f"{shown}: {_OTHER_SECRET}; this launcher keeps trying", of_stranger=True)
            self._stop.wait(_PAUSE_SECS)

    def share(self, now: float) -> None:
        if self._lines is not None and self.member.is_ready and self._is_due(self.member.report, now):
            try:
                self._lines.send(self.member.report)
            except OSError:
                shut(self._lines.connection)  # Its thread notices.

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._lock:
            if self._lines is not None:
                shut(self._lines.connection)
        super().__exit__(kind)

    def _talk(self, lines: Lines) -> None:
        address, since = str(lines.connection.getsockname()[0]), time.monotonic()
        node, session = self._job.node_rank, self._session
        lines.send(Hello(node=node, session=session, address=address, identity=identity(self._job)))
        limit(lines.connection, self._timeouts.beat_secs)
        try:
            while not self._stop.is_set():
                message = None
                with contextlib.suppress(BlockingIOError):
                    message = lines.receive()
                with self._lock:
                    now = time.monotonic()
                    if isinstance(message, RefusedHost):
                        refused = f"The first launcher refused this host: {message.why}"
                        remedy = "Start the same command on all hosts; only --node-rank may differ"
                        self._fail(LaunchRefused(refused, remedy=remedy))
                        self._stop.set()
                    elif isinstance(message, LaunchOrder):
                        if self._lines is None:  # It is accepted.
                            self._lines, self._sent = lines, None
                        self.member.on_order(message, now)
                        self._wake()
                    self.share(now)
                    redial_secs = self._timeouts.redial_secs
                    if now - since >= redial_secs and self.member.should_redial(now):
                        raise TimeoutError(f"no message for {redial_secs:g} s")
        finally:
            with self._lock:
                self._lines = None


def make_peers(job: JobPlan, screen: Screen, interruptions: Interruptions) -> Peers:
    if job.node_rank == 0:
        return First(job, screen, interruptions, listen(job.endpoint, name_secs=_NAME_SECS))
    return Other(job, screen, interruptions)
