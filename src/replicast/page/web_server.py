"""The server below the application: errors as answers, settings and limits, uvicorn, threads, uploads.

An error of this package is `{"error": {"type", "problem", …its other fields, "message"}}`: `errors.py` makes
the same error from it in the client. Its status follows from its type. What the server itself refuses (a
token, a limit, a wrong parameter) has no type: `{"error": {"problem", "expected", "received", "remedy"}}`.

uvicorn has no limit on the time until a request is complete, nor on the time in which an answer is read, and
counts a connection that sends nothing like any other: a thousand of them would lock everybody out. So each
connection here has a deadline for the next head of a request, and one for each pause of its reader; one
peer has a limited number of connections; and where there is no room for a new one, the connection that has
waited longest for a request makes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
import secrets
import signal
import socket
import stat
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import uvicorn
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from replicast import errors
from replicast.codec import json_value, parse_integer
from replicast.config import TOKEN, is_loopback
from replicast.errors import ServeRefused, logger
from replicast.files import TEMPORARY, RunDir, RunPath, below, make_durably, write_all

_T = TypeVar("_T")
_STATUS: dict[type[Exception], int] = {
    errors.UpdateIdInUse: 409,
    errors.UpdateRefused: 422,
    errors.RequestRefused: 422,
    errors.CheckpointError: 422,
    errors.NotFound: 404,
    errors.NoAnswer: 504,
    errors.FileDamaged: 503,
    errors.RequestFailed: 503,
    errors.ReplicastError: 409,
}
_MAX_TEXT = 2000


def dumped(value: Any) -> str:
    """JSON that every browser reads: in one line, without NaN and infinity, which become text."""
    try:
        return json.dumps(value, allow_nan=False, separators=(",", ":"))
    except ValueError:
        return json.dumps(json_value(value), allow_nan=False, separators=(",", ":"))


class HttpError(Exception):
    """Answers a request with an error, each of whose fields has a bounded length."""

    def __init__(
        self, status: int, problem: str, /, *, headers: dict[str, str] | None = None, **fields: Any
    ) -> None:
        super().__init__(problem)
        self.fields = {
            name: value if isinstance(value, int | dict) else str(value)[:_MAX_TEXT]
            for name, value in {"problem": problem, **fields}.items()
            if value is not None
        }
        self.response = Response(dumped({"error": self.fields}), status, headers, "application/json")


def http_error(error: Exception) -> HttpError:
    """The answer to an error; one that is a defect is logged."""
    if isinstance(error, HttpError):
        return error
    if isinstance(error, TimeoutError):
        error = errors.NoAnswer(str(error) or "The job did not answer in time")
    elif isinstance(error, OSError):
        error = errors.RequestFailed(
            f"The run directory cannot be used ({error.strerror or error})", status=503
        )
    if not isinstance(error, errors.ReplicastError):
        logger.error("A request failed: this is a defect", exc_info=error)
        return HttpError(500, "Internal server error", remedy="See the log of the server")
    status = next(_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS)
    fields = error.to_json() | {"message": str(error)}
    if isinstance(error, errors.FileDamaged) and error.remedy is None:
        fields["remedy"] = "replicast status shows what is wrong with the run"
    return HttpError(status, error.problem, **fields)


# How a page is served: address, token, limits. Checked before anything listens.

MIN_TOKEN_LENGTH = 16
MAX_UPLOAD_BYTES = 4 * 2**30
MAX_BODY_BYTES = 64 * 1024
MAX_HEADER_BYTES = 16 * 1024
MAX_STREAMS = 256
MAX_FILES = 2
ACTIONS_PER_MINUTE = 60
FAILED_TOKENS_PER_MINUTE = 10
_MAX_TOKEN_FILE_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSettings:
    host: str = "127.0.0.1"
    port: int = 8080
    token: str | None = None
    private: bool = False
    allowed_hosts: tuple[str, ...] = ()
    trusted_proxies: tuple[str, ...] = ()
    certfile: Path | None = None
    keyfile: Path | None = None
    max_upload_bytes: int = MAX_UPLOAD_BYTES

    def __post_init__(self) -> None:
        token = self.token
        if token is None and not is_loopback(self.host):
            remedy = f"Give a token, by --token-file or {TOKEN}, or listen on 127.0.0.1"
            raise ServeRefused(f"{self.host} can be reached from other machines", remedy=remedy)
        if token is None and self.private:
            raise ServeRefused("--private needs a token", remedy=f"Give one by --token-file or {TOKEN}")
        if token is not None and len(token) < MIN_TOKEN_LENGTH:
            remedy = f"Use at least {MIN_TOKEN_LENGTH} random ones; --token-file makes a file of them"
            raise ServeRefused(f"The token has {len(token)} characters", remedy=remedy)
        if token is not None and not (token.isascii() and token.isprintable()):
            remedy = "Use letters and digits; --token-file makes a new file by itself"
            raise ServeRefused("The token has characters that a header cannot carry", remedy=remedy)
        for proxy in self.trusted_proxies:
            try:
                ipaddress.ip_network(proxy)
            except ValueError as error:
                raise ServeRefused(
                    f"--trusted-proxy expects an address or a network ({error})",
                    remedy="For example: 127.0.0.1, or 10.0.0.0/24",
                ) from error
        if (self.certfile is None) != (self.keyfile is None):
            raise ServeRefused("TLS needs a certificate and its key", remedy="Give --certfile and --keyfile")
        for path in (self.certfile, self.keyfile):
            if path is not None and not os.access(path, os.R_OK):
                raise ServeRefused(f"{path} cannot be read", remedy="Check the path and its permissions")

    def is_proxy(self, peer: str) -> bool:
        """Whether requests of this peer come from a proxy that was named."""
        try:
            address = ipaddress.ip_address(peer)
        except ValueError:
            return False
        # A server that listens on :: sees IPv4 peers as ::ffff:1.2.3.4.
        address = getattr(address, "ipv4_mapped", None) or address
        return any(address in ipaddress.ip_network(proxy) for proxy in self.trusted_proxies)


def read_token(token_file: Path | None, environ: Mapping[str, str]) -> str | None:
    """The token: from a file, which is made when it does not exist, or from the environment."""
    if token_file is None:
        return environ.get(TOKEN, "").strip() or None
    try:
        if not token_file.exists():
            descriptor = os.open(token_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(descriptor, "w") as made:
                made.write(secrets.token_urlsafe(32) + "\n")
        if stat.S_IMODE(token_file.stat().st_mode) & 0o077:
            raise ServeRefused(f"Other users may read {token_file}", remedy=f"Run: chmod 600 {token_file}")
        with token_file.open("rb") as file:
            text = file.read(_MAX_TOKEN_FILE_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise ServeRefused(
            f"{token_file} cannot be used as a token file ({error.strerror})",
            remedy="Check the path and its permissions",
        ) from error
    if not text:
        raise ServeRefused(f"{token_file} is empty", remedy="Remove it, and a new one is made")
    return text


# Connections.

_SHUTDOWN_SECS = 3
MAX_CONNECTIONS = 800  # Below the 1,024 descriptors that a process usually may have: it also reads files.
MAX_CONNECTIONS_PER_PEER = 128
HEAD_SECS = 10.0  # For the head of a request, from the beginning of the connection or the last answer.
READ_SECS, MIN_READ_BYTES = 30.0, 16 * 1024  # So much of a waiting answer must be read in so long.
_TOO_MANY = b"HTTP/1.1 503 Too many connections\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"


class HttpConnection(H11Protocol):
    """One connection, with its deadlines, which `PageServer` checks. Only the event loop calls it."""

    page: PageSettings  # of the server: `configured` sets it
    _idle_since: float | None = None  # Set while no request is in progress.
    _unread: tuple[int, float] = 0, 0.0  # What the peer had not read when it last made progress, and when.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(cast(asyncio.Transport, transport))
        self._idle_since = self.loop.time()
        others = [one for one in self.connections if isinstance(one, HttpConnection) and one is not self]
        peer = self.client[0] if self.client else ""
        mine = sum(one.client is not None and one.client[0] == peer for one in others)
        # Not of this machine or of a proxy: many people may call from such an address.
        if mine >= MAX_CONNECTIONS_PER_PEER and not (is_loopback(peer) or self.page.is_proxy(peer)):
            self.transport.write(_TOO_MANY)
            self.transport.close()
        elif len(others) >= MAX_CONNECTIONS - 1:
            idle = min((one for one in others if one._idle_since is not None), key=_order, default=None)
            if idle is not None:  # Otherwise uvicorn answers 503.
                self.connections.discard(idle)  # Now: `connection_lost` is called later.
                idle.transport.abort()

    def handle_events(self) -> None:
        """Called when data has arrived, or was kept back during the last answer."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._idle_since = None

    def on_response_complete(self) -> None:
        """Called at the end of an answer: the next request is waited for."""
        self._idle_since = self.loop.time()
        super().on_response_complete()

    def check(self) -> None:
        """Closes a connection whose request or whose reader is late."""
        now, size, (left, since) = self.loop.time(), self.transport.get_write_buffer_size(), self._unread
        if size > left or size <= max(0, left - MIN_READ_BYTES):  # More is written once enough was read.
            self._unread = size, now
        elif now - since >= READ_SECS:
            self.transport.abort()
        if self._idle_since is not None and now - self._idle_since >= HEAD_SECS:
            self.transport.close()  # What the peer has not read yet of the last answer still reaches it.


def _order(one: HttpConnection) -> tuple[bool, float]:
    """Which connection without a request is closed first: one to which nothing is being sent, the oldest."""
    return one.transport.get_write_buffer_size() > 0, one._idle_since or 0.0


class PageServer(uvicorn.Server):
    """Checks its connections once a second. Ends the streams of an application before it waits for them."""

    def __init__(self, config: uvicorn.Config, end_streams: Callable[[], None]) -> None:
        super().__init__(config)
        self._end_streams = end_streams

    async def on_tick(self, counter: int) -> bool:
        if counter % 10 == 0:
            for one in [one for one in self.server_state.connections if isinstance(one, HttpConnection)]:
                one.check()
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._end_streams()
        await super().shutdown(sockets)


def listen(settings: PageSettings) -> socket.socket:
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


def address_of(settings: PageSettings, listener: socket.socket) -> str:
    scheme = "http" if settings.certfile is None else "https"
    host = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(settings.host, settings.host)
    host = f"[{host}]" if ":" in host and not host.startswith("[") else host
    return f"{scheme}://{host}:{listener.getsockname()[1]}/"


def configured(app: ASGIApp, settings: PageSettings) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        http=type("Served", (HttpConnection,), {"page": settings}),
        ws="none",
        lifespan="off",
        log_config=None,  # uvicorn's closes every handler of the process, and absl's then closes stderr
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


def run(app: Any, settings: PageSettings, listener: socket.socket) -> None:
    """Serves until SIGINT or SIGTERM. Only in the main thread."""
    server = PageServer(configured(app, settings), app.stop)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # uvicorn raises it again when all is ended
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(server.serve(sockets=[listener]))


# Blocking calls in daemon threads: one that waits for a job does not keep the server from ending.


class Threads:
    """Runs blocking calls, at most so many at a time; further ones wait."""

    def __init__(self, most: int) -> None:
        self._slots = asyncio.Semaphore(most)

    async def call(self, act: Callable[[], _T]) -> _T:
        """Runs `act` in a thread, and returns or raises what it does."""
        future: Future[_T] = Future()
        future.set_running_or_notify_cancel()  # From here on nobody cancels it: the thread sets its result.

        def run() -> None:
            try:
                future.set_result(act())
            except BaseException as error:
                future.set_exception(error)

        async with self._slots:
            threading.Thread(target=run, name="page-call", daemon=True).start()
            return await asyncio.wrap_future(future)


# A file on its way in: straight to disk beside the inbox, piece by piece, never whole in memory.

STALL_SECS = 30.0  # An upload that makes no progress for so long is given up.


@asynccontextmanager
async def uploaded(request: Request, run: RunDir, threads: Threads, max_bytes: int) -> AsyncIterator[RunPath]:
    """The body of a request in a file, which is gone afterwards; if it is left behind, the job removes it."""
    temporary = below(run) / "inbox" / f"{TEMPORARY}upload-{secrets.token_hex(8)}"

    def create() -> int:
        make_durably(temporary.parent)
        return temporary.open(os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    chunks = pieces(request, max_bytes)
    descriptor = await threads.call(create)
    try:
        try:
            async for chunk in chunks:
                await threads.call(partial(write_all, descriptor, chunk))
        finally:
            await threads.call(partial(os.close, descriptor))
        yield temporary
    finally:  # Removing gigabytes takes time.
        await threads.call(partial(temporary.unlink, missing_ok=True))


async def small_body(request: Request) -> bytes:
    return b"".join([chunk async for chunk in pieces(request, MAX_BODY_BYTES)])


def pieces(request: Request, max_bytes: int) -> AsyncIterator[bytes]:
    """The pieces of a body, each within its time, up to a size. Checks at once what the head says."""
    too_large = HttpError(413, "The body is too large", expected=f"at most {max_bytes} bytes")
    try:
        length = parse_integer(request.headers.get("content-length", "0"))
    except ValueError as error:
        raise HttpError(400, f"Content-Length cannot be used: {error}") from error
    if not 0 <= length <= max_bytes:
        raise too_large

    async def arriving() -> AsyncIterator[bytes]:
        stream, received = request.stream(), 0
        while True:
            try:
                chunk = await asyncio.wait_for(anext(stream, None), STALL_SECS)
            except TimeoutError:
                raise HttpError(408, f"Nothing has arrived for {STALL_SECS:g} s") from None
            except ClientDisconnect:
                raise HttpError(400, "The connection was closed before all had arrived") from None
            if chunk is None:
                return
            received += len(chunk)
            if received > max_bytes:
                raise too_large
            if chunk:
                yield chunk

    return arriving()
