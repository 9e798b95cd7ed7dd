"""The connections of a host to the host before it on the chain, used again for the next parcel."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from replicast.errors import UpdateRefused
from replicast.transport.handshake import HANDSHAKE_SECS, introduce
from replicast.transport.wire import SILENT_SECS, limit

KEPT_SECS = 20.0  # An idle connection is used again within this time: less than `chain_server.IDLE_SECS`.


class ChainLink:
    """One host's. All methods may be called from any thread; it has no thread of its own."""

    def __init__(self, host: str, port: int, secret: bytes, rank: int) -> None:
        self._address = host, port
        self._secret = secret
        self._rank = rank
        self._idle: list[tuple[float, socket.socket]] = []
        self._open: set[socket.socket] = set()
        self._closed = False
        self._lock = threading.Lock()

    def take(self, timeout_secs: float = HANDSHAKE_SECS) -> socket.socket:
        """A connection on which nothing is under way. Blocks at most that long, and at most 5 s."""
        with self._lock:
            while self._idle:
                since, connection = self._idle.pop()
                if time.monotonic() - since < KEPT_SECS:
                    return connection
                self._open.discard(connection)
                connection.close()
        return self._connected(min(timeout_secs, HANDSHAKE_SECS))

    def give_back(self, connection: socket.socket) -> None:
        """Nothing is under way on it any more: the next one may take it."""
        with self._lock:
            if not self._closed:
                self._idle.append((time.monotonic(), connection))
                return
        self.drop(connection)

    def drop(self, connection: socket.socket) -> None:
        """Closes a connection that broke, or on which something is still under way."""
        with self._lock:
            self._open.discard(connection)
        connection.close()

    def close(self) -> None:
        """Closes all connections; threads that use one get an `OSError`. A second call does nothing."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            for connection in self._open:
                with contextlib.suppress(OSError):
                    connection.shutdown(socket.SHUT_RDWR)
        for _, connection in idle:
            self.drop(connection)

    def _connected(self, timeout_secs: float) -> socket.socket:
        ends = time.monotonic() + timeout_secs
        connection = socket.create_connection(self._address, timeout=timeout_secs)
        try:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                if self._closed:
                    raise UpdateRefused(f"Worker {self._rank} has closed its connections", worker=self._rank)
                self._open.add(connection)
            introduce(connection, self._secret, self._rank, ends - time.monotonic())
            limit(connection, SILENT_SECS)
        except BaseException:
            self.drop(connection)
            raise
        return connection
