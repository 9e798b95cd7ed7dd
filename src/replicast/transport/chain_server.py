"""Sends segments of parcels to the host that comes next, which asks for them. One thread per connection.

A process that does not know the secret of the job gets a nonce and nothing else: a connection has
`HANDSHAKE_SECS` to show that it does, in 68 bytes, and of those that have not yet, only the newest
`MAX_STRANGERS` stay.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
import time

from replicast.processes import is_out_of_files
from replicast.transport import wire
from replicast.transport.handshake import admit
from replicast.transport.holdings import Holdings, SegmentReady, SegmentRefused
from replicast.transport.segments import Segment
from replicast.transport.wire import BEAT_SECS, Kind, receive_request, send_answer, send_refusal

logger = logging.getLogger("replicast")

# Connections that have not shown that they know the secret. One more closes the oldest of them.
MAX_STRANGERS = 16
MAX_PEERS = 64  # Connections that have. One more is closed: the other side tries again.
IDLE_SECS = 60.0  # A connection over which nothing is asked for this long is closed.
SEGMENT_SECS = 60.0  # A segment that is not taken within this time is given up, and its connection closed.
_CLOSE_SECS = 5.0
_NO_DESCRIPTORS_SECS = 0.1


class Server:
    """Listens at one address of this host until `close`.

    Threads: `replicast-chain-accept`, and one `replicast-chain-send` for each connection. `close` ends them.
    If one that sends fails, its connection is closed and the other side connects again. If the one that
    accepts fails, the port is closed: updates that the next host needs are refused, and training goes on.
    """

    def __init__(self, host: str, secret: bytes, holdings: Holdings) -> None:
        self._secret = secret
        self._holdings = holdings
        self._strangers: dict[socket.socket, threading.Thread] = {}
        self._peers: dict[socket.socket, threading.Thread] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._has_warned = False
        self._listener = _listening(host)
        self.port: int = self._listener.getsockname()[1]
        self._accepting = threading.Thread(target=self._accept, name="replicast-chain-accept", daemon=True)
        self._accepting.start()

    def close(self) -> None:
        """Closes all connections and ends all threads; waits at most 5 s. A second call does nothing."""
        self._closing.set()
        self._holdings.stop_waiting()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        ends = time.monotonic() + _CLOSE_SECS
        self._accepting.join(_CLOSE_SECS)
        with self._lock:
            threads = {**self._strangers, **self._peers}
            for connection in threads:
                _shut(connection)
        for thread in threads.values():
            thread.join(max(0.0, ends - time.monotonic()))

    def _accept(self) -> None:
        with self._listener:
            while not self._closing.is_set():
                try:
                    connection, _ = self._listener.accept()
                except OSError as error:
                    self._pause(error)
                    continue
                self._begin(connection)

    def _pause(self, error: OSError) -> None:
        """No connection could be accepted: the listener is closed, or too many files are open for now."""
        if is_out_of_files(error) and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Too many open files to let the next host connect, which waits for updates; see ulimit -n"
            )
        self._closing.wait(_NO_DESCRIPTORS_SECS)

    def _begin(self, connection: socket.socket) -> None:
        thread = threading.Thread(
            target=self._serve, args=(connection,), name="replicast-chain-send", daemon=True
        )
        with self._lock:
            if len(self._strangers) >= MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                _shut(oldest)
            self._strangers[connection] = thread
        try:
            thread.start()
        except RuntimeError:  # no more threads for now: the other side tries again
            with self._lock, connection:
                self._strangers.pop(connection, None)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                rank = admit(connection, self._secret)
                if self._becomes_peer(connection):
                    logger.debug("worker %d takes segments from here", rank)
                    self._answer(connection)
        except OSError as error:
            logger.debug("a connection has ended: %s", error)
        finally:
            with self._lock:
                self._strangers.pop(connection, None)
                self._peers.pop(connection, None)

    def _becomes_peer(self, connection: socket.socket) -> bool:
        with self._lock:
            thread = self._strangers.pop(connection, None)
            if thread is None or len(self._peers) >= MAX_PEERS:
                return False
            self._peers[connection] = thread
            return True

    def _answer(self, connection: socket.socket) -> None:
        while not self._closing.is_set():
            connection.settimeout(IDLE_SECS)
            parcel_id, number = receive_request(connection)
            connection.settimeout(wire.SILENT_SECS)
            found = self._holdings.find(parcel_id, number, BEAT_SECS)
            while not isinstance(found, SegmentReady | SegmentRefused):
                if self._closing.is_set():
                    return
                send_answer(connection, Kind.WAITING, found.worker)
                found = self._holdings.find(parcel_id, number, BEAT_SECS)
            if isinstance(found, SegmentRefused):
                send_refusal(connection, found.refusal)
                continue
            try:
                _send(connection, found.descriptor, found.segment)
            finally:
                os.close(found.descriptor)


def _send(connection: socket.socket, descriptor: int, segment: Segment) -> None:
    """Sends a segment from its file. The socket does not block: a slow reader is noticed in any case."""
    ends = time.monotonic() + SEGMENT_SECS
    send_answer(connection, Kind.SEGMENT, segment.stop - segment.start, more=True)
    writable = select.poll()
    writable.register(connection, select.POLLOUT)
    at = segment.start
    while at < segment.stop:
        left_secs = min(wire.SILENT_SECS, ends - time.monotonic())
        if left_secs <= 0 or not writable.poll(left_secs * 1000):
            raise TimeoutError("the other side takes too long")
        with contextlib.suppress(BlockingIOError):
            sent = os.sendfile(connection.fileno(), descriptor, at, segment.stop - at)
            if sent == 0:
                raise ConnectionError("the file has ended")
            at += sent


def _listening(host: str) -> socket.socket:
    """A socket that listens at this address only."""
    problem = OSError("the name has no address")
    for family, _, _, _, address in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
        try:
            listener = socket.create_server(address[:2], family=family, backlog=128)
        except OSError as error:
            problem = error
            continue
        if listener.getsockname()[0] in ("0.0.0.0", "::"):
            listener.close()
            raise OSError(f"{host} means all addresses of a host, not one")
        return listener
    raise problem


def _shut(connection: socket.socket) -> None:
    """Wakes the thread of a connection, which closes it."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
