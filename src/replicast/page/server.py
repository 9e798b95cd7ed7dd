"""Serves an application with uvicorn until SIGINT or SIGTERM.

uvicorn has no limit on the time until a request is complete, nor on the time in which an answer is read, and
counts a connection that sends nothing like any other: a thousand of them would lock everybody out. So each
connection here has a deadline for the next head of a request, and one for each pause of its reader; one
peer has a limited number of connections; and where there is no room for a new one, the connection that has
waited longest for a request makes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import signal
import socket
from typing import cast

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from replicast.errors import ServeRefused
from replicast.page.app import App
from replicast.page.settings import MAX_HEADER_BYTES, Settings, is_loopback

_SHUTDOWN_SECS = 3
MAX_CONNECTIONS = 800
"""Below the 1,024 descriptors that a process usually may have: it also reads files."""
MAX_CONNECTIONS_PER_PEER = 128
HEAD_SECS = 10.0
"""How long a connection may take for the head of a request, from its beginning or the last answer."""
READ_SECS, MIN_READ_BYTES = 30.0, 16 * 1024
"""How much of a waiting answer the peer must read in which time."""
_TOO_MANY = b"HTTP/1.1 503 Too many connections\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class Connection(H11Protocol):
    """One connection, with its deadlines. Only the event loop calls it."""

    _head: asyncio.TimerHandle | None = None
    """Set while no request is in progress."""
    _reader: asyncio.TimerHandle | None = None

    def is_shared(self, peer: str) -> bool:
        """Whether many people may call from this address, so that its connections are not counted."""
        return is_loopback(peer)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Accepts the connection, or refuses it if its peer has too many."""
        super().connection_made(cast(asyncio.Transport, transport))
        self._await_head()
        others = [one for one in self.connections if isinstance(one, Connection) and one is not self]
        peer = self.client[0] if self.client else ""
        mine = sum(one.client is not None and one.client[0] == peer for one in others)
        if mine >= MAX_CONNECTIONS_PER_PEER and not self.is_shared(peer):
            self.transport.write(_TOO_MANY)
            self.transport.close()
        elif len(others) >= MAX_CONNECTIONS - 1:
            idle = min((one for one in others if one._head is not None), key=_order, default=None)
            if idle is not None:  # Otherwise uvicorn answers 503.
                self.connections.discard(idle)  # Now: `connection_lost` is called later.
                idle.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Called when the connection has ended, on either side."""
        self._head_came()
        self._reader_reads()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Called when data has arrived, or was kept back during the last answer."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._head_came()

    def on_response_complete(self) -> None:
        """Called at the end of an answer: the next request is waited for."""
        self._await_head()
        super().on_response_complete()

    def pause_writing(self) -> None:
        """Called when the peer reads more slowly than the answer is made."""
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        """Called when the peer has read most of it."""
        if not self.transport.is_closing():  # Otherwise the rest must be read in time as well.
            self._reader_reads()
        super().resume_writing()

    def _await_head(self) -> None:
        def late() -> None:
            self.transport.close()  # What the peer has not read yet of the last answer still reaches it.
            self._await_reader()

        self._head_came()
        self._head = self.loop.call_later(HEAD_SECS, late)

    def _head_came(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _await_reader(self) -> None:
        left = self.transport.get_write_buffer_size()

        def look() -> None:
            if self.transport.get_write_buffer_size() > max(0, left - MIN_READ_BYTES):
                self.transport.abort()
            else:
                self._await_reader()

        self._reader_reads()
        self._reader = self.loop.call_later(READ_SECS, look)

    def _reader_reads(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            self._reader = None


def _order(one: Connection) -> tuple[bool, float]:
    """Which connection without a request is closed first: one to which nothing is being sent, the oldest."""
    when = one._head.when() if one._head is not None else math.inf
    return one.transport.get_write_buffer_size() > 0, when


class Server(uvicorn.Server):
    """Ends the streams of an application before it waits for its connections."""

    def __init__(self, config: uvicorn.Config, app: App) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called when the server is told to end."""
        self._app.stop()
        await super().shutdown(sockets)


def listen(settings: Settings) -> socket.socket:
    """A socket at the address of the settings."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.host.strip("[]"), settings.port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise ServeRefused(
            f"{settings.host}:{settings.port} cannot be used ({error.strerror or error})",
            remedy="Choose another port with --port, or 0 for any free one",
        ) from error
    return listener


def address_of(settings: Settings, listener: socket.socket) -> str:
    """The address to type into a browser."""
    scheme = "http" if settings.certfile is None else "https"
    host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(settings.host, settings.host)
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{scheme}://{host}:{listener.getsockname()[1]}/"


def configured(app: App, settings: Settings) -> uvicorn.Config:
    """How uvicorn serves an application."""

    class Served(Connection):
        def is_shared(self, peer: str) -> bool:
            return super().is_shared(peer) or settings.is_proxy(peer)

    return uvicorn.Config(
        app,
        http=Served,
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_keep_alive=10,
        timeout_graceful_shutdown=_SHUTDOWN_SECS,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ssl_certfile=settings.certfile,
        ssl_keyfile=settings.keyfile,
    )


def run(app: App, settings: Settings, listener: socket.socket) -> None:
    """Serves until SIGINT or SIGTERM. Only in the main thread."""
    server = Server(configured(app, settings), app)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn raises it again when all is ended
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(server.serve(sockets=[listener]))
