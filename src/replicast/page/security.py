"""Who may do what: Host, Origin and token are checked before a request reaches anything else.

Reading is free for programs and browsers of this machine; from elsewhere it needs the token. Every action
needs the token, and there are none without one. The token comes in a header that no other site can make a
browser send; there are no cookies. A browser that was lured here under another name (DNS rebinding) is
refused by its Host, and a page of another site by its Origin.
"""

from __future__ import annotations

import re
import secrets
import socket
import time
from collections import OrderedDict
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from replicast.client.run import OPERATIONS
from replicast.config import TOKEN, is_loopback
from replicast.connections import is_address
from replicast.page.web_server import ACTIONS_PER_MINUTE, FAILED_TOKENS_PER_MINUTE, HttpError, PageSettings

# The hash of nothing: plotly adds an empty style element and fills it by script, which is allowed.
EMPTY_STYLE = "'sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU='"
_POLICY = (
    f"default-src 'none'; script-src 'self'; style-src 'self' {EMPTY_STYLE}; img-src 'self' data: blob:; "
    "connect-src 'self'; form-action 'none'; base-uri 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
}
_FORWARDED = ("forwarded", "via", "x-forwarded-for", "x-real-ip")
_MAX_PEERS = 1000
_WITHOUT_DATA = ("/healthz", "/openapi.json")
_STOPPING = "|".join(row.path.partition("{")[0] for row in OPERATIONS.values() if row.stops_workers)
_STOPS_WORKERS = re.compile(f"/api/runs/[^/]+({_STOPPING})")  # Only reads; needs the token as actions do.


class Bucket:
    """So many events a minute, and as many at once."""

    def __init__(self, per_minute: float) -> None:
        self._per_minute = per_minute
        self._left = per_minute
        self._at = time.monotonic()

    def take(self) -> float:
        """Counts one event; returns how many seconds too early it is, 0 if it is not."""
        now = time.monotonic()
        self._left = min(self._per_minute, self._left + (now - self._at) * self._per_minute / 60)
        self._at = now
        if self._left < 1:
            return (1 - self._left) * 60 / self._per_minute
        self._left -= 1
        return 0.0


class SecurityMiddleware:
    """Checks every request, and sets the security headers of every answer."""

    def __init__(self, app: ASGIApp, settings: PageSettings) -> None:
        self._app = app
        self._settings = settings
        machine = (socket.gethostname(), socket.getfqdn(), "localhost")
        self._names = {name.lower() for name in (*machine, settings.host, *settings.allowed_hosts)}
        self._actions = Bucket(ACTIONS_PER_MINUTE)
        self._failures: OrderedDict[str, Bucket] = OrderedDict()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        headers = Headers(scope=scope)
        peer, port = scope.get("client") or ("", 0)
        caller = self.caller(headers, peer)
        scope["client"] = (caller, port) if peer else None
        try:
            self.check(scope["method"], scope["path"], headers, caller)
        except HttpError as error:
            await error.response(scope, receive, send_with_headers)
            return
        await self._app(scope, receive, send_with_headers)

    def check(self, method: str, path: str, headers: Headers, peer: str) -> None:
        hosts = headers.getlist("host")
        host = _host_of(hosts[0]) if len(hosts) == 1 else ""
        if host not in self._names and not is_address(host):
            remedy = "Use its address, or start `replicast serve` with --allow-host NAME"
            raise HttpError(421, "Unknown host name", received=host, remedy=remedy)
        acts = method not in ("GET", "HEAD") or _STOPS_WORKERS.match(path) is not None
        if acts:
            origin = headers.get("origin")
            if origin is not None and origin.partition("://")[2].lower() != headers["host"].lower():
                raise HttpError(403, "Another site may not act here", received=origin)
            if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
                raise HttpError(403, "Another site may not act here")
        if path in _WITHOUT_DATA or not (acts or path.startswith("/api/") or path == "/metrics"):
            return  # The page itself holds no data.
        settings, has_token = self._settings, self._has_token(headers, peer)
        if acts and settings.token is None:
            remedy = f"Start `replicast serve` with --token-file or {TOKEN} to allow them"
            raise HttpError(403, "Actions are off", remedy=remedy)
        # Whether it comes from this machine: a proxy on it speaks for others.
        forwarded = any(name in headers for name in _FORWARDED) or settings.is_proxy(peer)
        reads_freely = is_loopback(peer) and is_loopback(host) and not forwarded and not settings.private
        if not has_token and (acts or not reads_freely):
            raise _unauthorized("A token is required")
        if acts and (wait := self._actions.take()):
            raise _too_many("Too many actions", wait)

    def caller(self, headers: Headers, peer: str) -> str:
        """Who sends a request: the peer, or the machine for which a proxy that was named says it speaks.

        Each proxy appends the address of its own peer. So the last one that is no proxy of ours is true, and
        what stands before it is what that machine claims.
        """
        if not self._settings.is_proxy(peer):
            return peer
        told = ",".join(headers.getlist("x-forwarded-for")).split(",")
        for one in (address.strip() for address in reversed(told)):
            if not is_address(one):
                break
            if not self._settings.is_proxy(one):
                return one
        return peer

    def _has_token(self, headers: Headers, peer: str) -> bool:
        given = headers.get("authorization")
        if given is None:
            return False
        scheme, _, token = given.partition(" ")
        wanted = self._settings.token or secrets.token_urlsafe()  # as long a comparison without a token
        # Compared as bytes, since a header may hold any.
        right = secrets.compare_digest(token.strip().encode("latin-1", "replace"), wanted.encode())
        # Before anything is counted: whatever others have sent from the same address, such as that of a
        # proxy, the right token passes. Its length is what protects it; the limit is for who mistypes it.
        if scheme.lower() == "bearer" and right and self._settings.token is not None:
            return True
        failures = self._failures.setdefault(peer, Bucket(FAILED_TOKENS_PER_MINUTE))
        self._failures.move_to_end(peer)
        while len(self._failures) > _MAX_PEERS:
            self._failures.popitem(last=False)
        if wait := failures.take():
            raise _too_many("Too many wrong tokens", wait)
        raise _unauthorized("The token is wrong")


def _host_of(header: str) -> str:
    try:
        return (urlsplit(f"//{header}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _unauthorized(problem: str) -> HttpError:
    return HttpError(
        401,
        problem,
        expected="the header Authorization: Bearer TOKEN",
        remedy="See the file given to --token-file",
        headers={"WWW-Authenticate": 'Bearer realm="replicast"'},
    )


def _too_many(problem: str, wait_secs: float) -> HttpError:
    seconds = int(wait_secs) + 1
    return HttpError(429, problem, remedy=f"Try again in {seconds} s", headers={"Retry-After": str(seconds)})
