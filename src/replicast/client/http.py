"""Requests to a server of runs: one connection each, bounded in time and size; its errors are ours."""

from __future__ import annotations

import contextlib
import http.client
import json
import ssl
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

from replicast.client.notes import ticks
from replicast.config import TOKEN
from replicast.errors import NoAnswer, NotFound, ReplicastError, RequestFailed, UpdateRefused
from replicast.strictjson import parse_json

TOKEN_FILE = "REPLICAST_TOKEN_FILE"
_CALL_SECS = 30.0
_RETRY_SECS, _RETRY_EVERY_SECS = 10.0, 1.0
_PIECE_BYTES = 2**20
_MAX_ANSWER_BYTES = 2**30
_MAX_TOKEN_FILE_BYTES = 4096
_MEANINGS = {
    401: f"It asks for a token: set {TOKEN}, or name a file with it in {TOKEN_FILE}",
    403: "It does not allow this",
    413: "It does not take so much at once",
    421: "It is not known under this name",
    429: "It has had too many requests",
}


@dataclass(frozen=True, slots=True)
class Address:
    """Where a run is served."""

    scheme: str
    netloc: str
    prefix: str
    name: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.netloc}{self.prefix}/{quote(self.name)}".rstrip("/")

    @classmethod
    def parse(cls, text: str) -> Address:
        """The address that a person gives."""
        try:
            parts = urlsplit(text)
            is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_usable = False
        if not is_usable or parts.query or parts.fragment:
            raise RequestFailed(
                f"This is no address of a run, such as https://host:8080/first. Received: {text}"
            )
        if "@" in parts.netloc:
            raise RequestFailed(f"A token does not belong into an address, which is logged: set {TOKEN}")
        prefix, _, name = parts.path.rstrip("/").rpartition("/")
        return cls(parts.scheme, parts.netloc, prefix, name)


@dataclass(frozen=True, slots=True)
class _Call:
    method: str
    target: str
    wait_secs: float
    body: tuple[bytes | memoryview, ...] | None = None
    kind: str = "application/json"
    accept: str = "application/json"


@dataclass(frozen=True, slots=True)
class Server:
    """Answers requests about runs."""

    address: Address
    token: str | None = field(default=None, repr=False)

    def first(self, path: str) -> Any:
        """What is at a path. Asks once, so that a mistyped address fails quickly."""
        return self._answered(_Call("GET", self._target(path, {}), _CALL_SECS), 0.0)

    def get(self, path: str, wait_secs: float = _CALL_SECS, /, **query: object) -> Any:
        """What is at a path. Asks again for a few seconds where there is no answer: servers are restarted."""
        return self._answered(_Call("GET", self._target(path, query), wait_secs), _RETRY_SECS)

    def download(self, path: str, wait_secs: float, /, **query: object) -> bytes:
        """The file at a path, as `get` does."""
        call = _Call("GET", self._target(path, query), wait_secs, accept="application/octet-stream")
        content: bytes = self._answered(call, _RETRY_SECS)
        return content

    def post(self, path: str, content: Mapping[str, Any], wait_secs: float = _CALL_SECS) -> Any:
        """Asks for an action. Never twice: the caller must know whether it was done."""
        body = (json.dumps(content).encode(),)
        return self._answered(_Call("POST", self._target(path, {}), wait_secs, body), 0.0)

    def upload(self, path: str, chunks: Iterable[bytes | memoryview], **query: object) -> Any:
        """Sends a file piece by piece; again where the connection breaks, so that must be a no-op there."""
        target, kind = self._target(path, query), "application/octet-stream"
        return self._answered(_Call("POST", target, _CALL_SECS, tuple(chunks), kind), _RETRY_SECS)

    def _target(self, path: str, query: Mapping[str, object]) -> str:
        given = {name: _word(value) for name, value in query.items() if value is not None}
        return f"{self.address.prefix}{path}" + (f"?{urlencode(given)}" if given else "")

    def _answered(self, call: _Call, retry_secs: float) -> Any:
        where = f"{self.address.scheme}://{self.address.netloc}"
        for is_last in ticks(retry_secs, _RETRY_EVERY_SECS):
            try:
                return self._once(call)
            except ssl.SSLCertVerificationError as error:
                raise RequestFailed(
                    f"The certificate of {where} cannot be trusted ({error.verify_message}). "
                    "For one of your own, set SSL_CERT_FILE to its certificate authority"
                ) from error
            except (OSError, http.client.HTTPException) as error:
                if is_last:
                    raise RequestFailed(f"{where} cannot be reached ({_why(error)})") from error
        raise RequestFailed(f"{where} was not asked")  # Not reached: the last attempt returns or raises.

    def _once(self, call: _Call) -> Any:
        headers = {"Accept": call.accept}
        if self.token is not None:
            headers["Authorization"] = f"Bearer {self.token}"
        if call.body is not None:
            headers["Content-Type"] = call.kind
            headers["Content-Length"] = str(sum(memoryview(chunk).nbytes for chunk in call.body))
        with contextlib.closing(self._connection(call.wait_secs)) as connection:
            # A server may answer before it has everything, for example that it is too large.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                body = None if call.body is None else _pieces(call.body)
                connection.request(call.method, call.target, body, headers)
            answer = connection.getresponse()
            content = answer.read(_MAX_ANSWER_BYTES)
            if answer.status >= 300:
                raise _error_of(answer.status, content, self.address, answer.getheader("Retry-After"))
            return content if call.accept != "application/json" else _parsed(content, self.address)

    def _connection(self, wait_secs: float) -> http.client.HTTPConnection:
        if self.address.scheme == "http":
            return http.client.HTTPConnection(self.address.netloc, timeout=wait_secs)
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(self.address.netloc, timeout=wait_secs, context=context)


def read_token(token: str | None, token_file: Path | str | None, environ: Mapping[str, str]) -> str | None:
    """The token: as given, from the file that is given, or from the environment."""
    if token is None and token_file is None:
        token, token_file = environ.get(TOKEN) or None, environ.get(TOKEN_FILE) or None
    if token is None and token_file is not None:
        try:
            with Path(token_file).open("rb") as opened:
                token = opened.read(_MAX_TOKEN_FILE_BYTES).decode("ascii", "replace")
        except OSError as error:
            raise RequestFailed(f"The token file {token_file} cannot be read ({error.strerror})") from error
    token = None if token is None else token.strip()
    if token is not None and not (token.isascii() and token.isprintable()):
        raise RequestFailed("The token has characters that a header cannot carry")
    return token


def _why(error: OSError | http.client.HTTPException) -> str:
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    return getattr(error, "strerror", None) or str(error) or type(error).__name__


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _pieces(chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        for start in range(0, len(rest), _PIECE_BYTES):
            yield rest[start : start + _PIECE_BYTES]


def _parsed(content: bytes, address: Address) -> Any:
    try:
        return parse_json(content)
    except ValueError as error:
        raise RequestFailed(f"{address} is not a server of replicast: its answer is no JSON") from error


def _error_of(status: int, content: bytes, address: Address, retry_after: str | None) -> ReplicastError:
    """The error that a server's answer tells."""
    try:
        told = parse_json(content)["error"]
        problem = str(told["problem"])
    except (ValueError, TypeError, KeyError):
        told, problem = {}, ""
    if status in (409, 422) and problem:
        return UpdateRefused.from_json(told)
    if status == 404:
        return NotFound(problem if problem else f"There is nothing at {address}")
    if status == 504 and problem:
        return NoAnswer(problem)
    parts = [f"{address} has answered {status}", _MEANINGS.get(status, ""), problem]
    parts += [f"Expected: {told['expected']}"] if status in (400, 413) and "expected" in told else []
    parts += [f"Try again in {retry_after} s"] if retry_after else []
    return RequestFailed(". ".join(part for part in parts if part), status=status)
