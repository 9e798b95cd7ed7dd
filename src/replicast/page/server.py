"""Serves an application with uvicorn until SIGINT or SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket

import uvicorn

from replicast.errors import ServeRefused
from replicast.page.app import App
from replicast.page.settings import MAX_HEADER_BYTES, Settings

_SHUTDOWN_SECS = 3
_MAX_CONNECTIONS = 1000


class Server(uvicorn.Server):
    """Ends the streams of an application before it waits for its connections.

    Args:
        config: Of uvicorn.
        app: The application.
    """

    def __init__(self, config: uvicorn.Config, app: App) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Called when the server is told to end."""
        self._app.stop()
        await super().shutdown(sockets)


def listen(settings: Settings) -> socket.socket:
    """A socket at the address of the settings.

    Raises:
        ServeRefused: The address cannot be used.
    """
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
    return uvicorn.Config(
        app,
        http="h11",
        ws="none",
        lifespan="on",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        limit_concurrency=_MAX_CONNECTIONS,
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
