"""TCP connections between the hosts of a job: both sides show that they know its secret, without sending it.

A proof is HMAC-SHA256. Each side has chosen a nonce, so no proof can be used again, and the two directions
differ, so none can be sent back. What follows is neither encrypted nor signed.

```
 host that connects                                     host that listens
                        ◄── version, nonce of 32 bytes ──
             nonce, proof of both nonces ──►            closes the connection if the proof is wrong
                        ◄──────── proof, the other way ──
```
A process that does not know the secret gets a nonce and nothing else: a connection has `HANDSHAKE_SECS` to
show that it does, in 64 bytes, and of those that have not yet, only the newest `MAX_STRANGERS` stay.

Names are resolved in threads, because a lookup has no time limit and ignores signals. This module has no
numpy: the launchers use it too.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import math
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass

from replicast.errors import logger
from replicast.processes import Deadline

HANDSHAKE_SECS = 5.0  # All of it, however slowly the other side sends.
# Connections that have not shown that they know the secret. One more closes the oldest of them, which would
# be a host of the job if all hosts of a large one connect at once and fewer may stay.
MAX_STRANGERS = 64
# How long a launcher waits for names. The system's resolver asks silent servers for 10 to 30 s.
NAMES_SECS = 30.0
_CLOSE_SECS = 5.0
_NO_ACCEPT_SECS = 0.1
_LOOK_SECS = 0.2
_VERSION = b"replicast-hosts-3"
_NONCE = _PROOF = 32


class WrongSecret(ConnectionError):  # noqa: N818 - reads as a sentence
    """The two sides have different secrets."""


def look_up(host: str) -> Future[list[str]]:
    """The addresses of a name, later; an IP address is its own address at once.

    The thread is a daemon: it ends when the system's resolver gives up, which may take minutes, or with the
    process.
    """
    found: Future[list[str]] = Future()

    def run() -> None:
        try:
            answers = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
            found.set_result([str(address[0]) for *_, address in answers])
        except OSError as error:
            found.set_exception(error)
        except BaseException as error:  # Such as a text that cannot be encoded as a name.
            found.set_exception(socket.gaierror(None, f"{host!r} could not be looked up ({error})"))

    if is_address(host):
        found.set_result([host])
    else:
        try:
            threading.Thread(target=run, name="replicast-lookup", daemon=True).start()
        except RuntimeError:  # No more threads for now.
            found.set_exception(socket.gaierror(None, "no thread could be started to look up its name"))
    return found


class Dialer:
    """Connects to a host, in a bounded time however long its name takes.

    A lookup that takes longer goes on, and the next try takes its result: if the first of two DNS servers is
    down, each lookup takes some seconds.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._lookup: Future[list[str]] | None = None

    def connect(self, timeout_secs: float, waits: Callable[[], object] = lambda: None) -> socket.socket:
        """A connection; the name, for which it `waits`, and each of its addresses have this time."""
        if self._lookup is None:
            self._lookup = look_up(self._host)
        deadline = Deadline(timeout_secs)
        while wait([self._lookup], deadline.left(_LOOK_SECS)).not_done:
            waits()
            if deadline.has_passed():
                raise TimeoutError("no DNS server has resolved the name yet")
        found, self._lookup = self._lookup, None
        problem = OSError("it has no address")
        for address in found.result():
            try:
                return socket.create_connection((address, self._port), timeout=timeout_secs)
            except OSError as error:
                problem = error
        raise problem


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def limit(connection: socket.socket, secs: float) -> None:
    """Makes every later call raise `BlockingIOError` if no byte moves for this long.

    With Python's own timeouts, a call would return with the first bytes that are there, not with all.
    """
    connection.settimeout(None)
    secs = max(0.001, secs)  # 0 would be no limit
    timeout = struct.pack("ll", int(secs), int(secs % 1 * 1e6))
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeout)


def receive_into(
    connection: socket.socket,
    view: memoryview,
    deadline: Deadline | None = None,
    silent_secs: float = math.inf,
) -> None:
    """Fills the view; in time, and without a silence this long, if there is a deadline."""
    while view:
        if deadline is not None:
            if deadline.has_passed():
                raise TimeoutError("the time is over")
            limit(connection, deadline.left(silent_secs))
        count = connection.recv_into(view, 0, socket.MSG_WAITALL)
        if count == 0:
            raise ConnectionError("closed by the other side")
        view = view[count:]


def receive_bytes(connection: socket.socket, count: int, deadline: Deadline | None = None) -> bytes:
    found = bytearray(count)
    receive_into(connection, memoryview(found), deadline)
    return bytes(found)


def introduce(connection: socket.socket, secret: bytes, deadline: Deadline) -> None:
    """The handshake, on the side that connects."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    greeting = receive_bytes(connection, len(_VERSION) + _NONCE, deadline)
    if not greeting.startswith(_VERSION):
        raise ConnectionError("another program, or another version of replicast, listens there")
    theirs, mine = greeting[len(_VERSION) :], secrets.token_bytes(_NONCE)
    connection.sendall(mine + _proof(secret, b"connects", theirs, mine))
    try:
        answer = receive_bytes(connection, _PROOF, deadline)
    except ConnectionError:
        raise WrongSecret("it does not accept this host's secret") from None
    if not hmac.compare_digest(answer, _proof(secret, b"listens", theirs, mine)):
        raise WrongSecret("it does not know the secret of this job")


def admit(connection: socket.socket, secret: bytes) -> None:
    """The handshake, on the side that listens."""
    deadline = Deadline(HANDSHAKE_SECS)
    mine = secrets.token_bytes(_NONCE)
    limit(connection, HANDSHAKE_SECS)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.sendall(_VERSION + mine)
    said = receive_bytes(connection, _NONCE + _PROOF, deadline)
    theirs, proof = said[:_NONCE], said[_NONCE:]
    if not hmac.compare_digest(proof, _proof(secret, b"connects", mine, theirs)):
        raise WrongSecret("it does not know the secret of this job")
    connection.sendall(_proof(secret, b"listens", mine, theirs))


def _proof(secret: bytes, role: bytes, listener: bytes, caller: bytes) -> bytes:
    return hmac.digest(secret, role + listener + caller, "sha256")


def shut(connection: socket.socket) -> None:
    """Wakes the thread of a connection, which closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def accept_problem(error: OSError) -> str:
    """Why `accept` fails for now, and would again at once; empty if only this connection is gone."""
    if error.errno in (errno.ECONNABORTED, errno.EAGAIN):
        return ""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return "too many open files; see ulimit -n"
    return error.strerror or str(error)


@dataclass(eq=False, repr=False)
class HostServer:
    """Serves the hosts that show that they know the secret, until `close`.

    `serve` talks with such a host, until it returns or raises an `OSError`. `warn` is told once if
    no connection can be accepted for now, and `refused` each address at which a process has another secret.

    Threads: `NAME-accept`, and one `NAME-serve` for each connection. `close` ends them.
    """

    listener: socket.socket
    secret: bytes
    serve: Callable[[socket.socket], None]
    name: str
    max_peers: int
    warn: Callable[[str], None]
    refused: Callable[[str], None] = lambda _: None

    def __post_init__(self) -> None:
        self._strangers: dict[socket.socket, threading.Thread] = {}
        self._peers: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self.closing = threading.Event()
        self.port: int = self.listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, name=f"{self.name}-accept", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Closes all connections and ends all threads; waits at most 5 s. A second call does nothing."""
        self.closing.set()
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        deadline = Deadline(_CLOSE_SECS)
        self._accepting.join(_CLOSE_SECS)
        with self._lock:
            threads = {**self._strangers, **self._peers}
            for connection in threads:
                shut(connection)
        for thread in threads.values():
            thread.join(deadline.left())

    def _accept(self) -> None:
        has_warned = False
        with self.listener:
            while not self.closing.is_set():
                try:
                    connection, (host, *_) = self.listener.accept()
                except OSError as error:  # the listener is closed, or can accept nothing for now
                    problem = "" if self.closing.is_set() else accept_problem(error)
                    if problem and not has_warned:
                        has_warned = True
                        self.warn(problem)
                    self.closing.wait(_NO_ACCEPT_SECS)
                    continue
                self._begin(connection, str(host))

    def _begin(self, connection: socket.socket, host: str) -> None:
        thread = threading.Thread(
            target=self._run, args=(connection, host), name=f"{self.name}-serve", daemon=True
        )
        with self._lock:
            if len(self._strangers) >= MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                shut(oldest)
            self._strangers[connection] = thread
        try:
            thread.start()
        except RuntimeError:  # no more threads for now: the other side tries again
            with self._lock, connection:
                self._strangers.pop(connection, None)

    def _run(self, connection: socket.socket, host: str) -> None:
        try:
            with connection:
                admit(connection, self.secret)
                with self._lock:
                    thread = self._strangers.pop(connection, None)
                    if thread is None or len(self._peers) >= self.max_peers:
                        return
                    self._peers[connection] = thread
                self.serve(connection)
        except WrongSecret:
            self.refused(host)
        except OSError as error:
            logger.debug("a connection has ended: %s", error)
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
                self._peers.pop(connection, None)
