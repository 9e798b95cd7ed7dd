"""`replicast.connect`: from what a person gives to the run that is meant, in a directory or at an address.

`ServedRun` sends any row of the table (run.py) over HTTP: one connection for each request, bounded in time
and size. Reading is tried again for a few seconds, since servers are restarted; an action never, but for a
push, whose id makes the second one a no-op. An error that the server tells is raised here as the same type.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import ssl
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import msgspec
from msgspec.structs import replace

from replicast.client.directory import DirectoryRun, is_run, this_user
from replicast.client.run import (
    PULLED,
    Brief,
    Overview,
    Pulled,
    Pushed,
    Run,
    RunOperation,
    TrialOptions,
    ticks,
)
from replicast.codec import parse_json, parse_object
from replicast.config import TOKEN
from replicast.errors import FileDamaged, NotFound, ReplicastError, RequestFailed, RequestRefused
from replicast.files import RunDir, below
from replicast.update.guard import Examination
from replicast.update.tensorfiles import parse_tensors

TOKEN_FILE = "REPLICAST_TOKEN_FILE"
_CALL_SECS = 30.0  # For an answer, beside the time that the job may take.
_RETRY_SECS, _RETRY_EVERY_SECS = 10.0, 1.0
_JSON, _FILE = "application/json", "application/octet-stream"
_PIECE_BYTES = 2**20
_MAX_ANSWER_BYTES = 2**30
_MAX_TOKEN_FILE_BYTES = 4096
_MEANINGS = {
    403: "Not allowed",
    413: "The request is too large",
    421: "It does not accept this host name",
    429: "Too many requests",
}


class ServedRun(Run):
    """A run at an address: every row of the table, over HTTP."""

    poll_secs = 0.5

    def __init__(self, address: str, token: str | None = None) -> None:
        try:
            parts = urlsplit(address)
            is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            is_usable = False
        if not is_usable or parts.query or parts.fragment:
            raise RequestFailed(
                f"Expected the address of a run, such as https://host:8080/first. Received: {address}"
            )
        if "@" in parts.netloc:
            raise RequestFailed(f"Do not put a token into the address, which is logged: set {TOKEN}")
        self._scheme, self._netloc, self._token = parts.scheme, parts.netloc, token
        self._prefix, _, name = parts.path.rstrip("/").rpartition("/")
        server = f"{parts.scheme}://{parts.netloc}{self._prefix}"
        self.where = f"{server}/{quote(name)}".rstrip("/")
        if not name:
            names = [str(one.get("name")) for one in self._ask("GET", "/api/runs") if isinstance(one, dict)]
            if len(names) != 1:
                example = f" Name one: {server}/{names[0]}, for example." if names else ""
                raise NotFound(f"{server} serves {len(names) or 'no'} runs.{example}")
            name = names[0]
            self.where = f"{server}/{quote(name)}"
        self._path = f"/api/runs/{quote(name, safe='')}"
        with _understood():  # Asks once, so that a mistyped address fails quickly.
            Brief.from_json(self._ask("GET", self._path))

    def perform(self, operation: RunOperation, arguments: dict[str, Any]) -> Any:
        if "author" in arguments:
            arguments["author"] = arguments["author"] or this_user()
        sent, target = operation.content(arguments), self._path + operation.target(arguments)
        wait_secs = sent.get("timeout", operation.takes_secs) + _CALL_SECS
        if operation.name == "pull":
            return self._pull(target, sent, wait_secs, arguments["max_bytes"])
        if operation.takes_file:
            query = _query(sent | TrialOptions.of(arguments["trial"]))
            # The arrays are sent as they are in memory, without a copy of the whole.
            body = tuple(arguments["update"].signed(this_user()).file_chunks())
            answer = self._ask("POST", target + query, wait_secs, body, kind=_FILE, retry_secs=_RETRY_SECS)
        elif operation.method == "GET":
            answer = self._ask("GET", target + _query(sent), wait_secs, retry_secs=_RETRY_SECS)
        else:
            answer = self._ask("POST", target, wait_secs, (json.dumps(sent).encode(),))
        with _understood():
            if operation.proposes and "edits" in answer:
                return Examination.from_json(answer)
            if operation.proposes:
                number = answer["number"]
                number = None if number is None else int(number)
                return Pushed(self, str(answer["id"]), number, str(answer["warning"]))
            result = operation.decoded(answer)
        return replace(result, run=self.where) if isinstance(result, Brief | Overview) else result

    def _pull(self, target: str, sent: dict[str, Any], wait_secs: float, max_bytes: int | None) -> Pulled:
        """The server has a limit of its own."""
        target += _query(sent | {"format": "safetensors"})
        content = self._ask("GET", target, wait_secs, accept=_FILE, retry_secs=_RETRY_SECS)
        with _understood():
            file = parse_tensors(memoryview(content), "the answer", max_tensors=2)
            told = parse_object(file.metadata[PULLED])
            told["array"] = file.tensors[told["name"]]
            pulled = msgspec.convert(told, Pulled, str_keys=True, dec_hook=lambda _, array: array)
        if max_bytes is not None and pulled.array.nbytes > max_bytes:
            raise RequestRefused(f"Expected: at most {max_bytes} bytes. Received: {pulled.array.nbytes}")
        return pulled

    def _ask(
        self,
        method: str,
        target: str,
        wait_secs: float = _CALL_SECS,
        body: tuple[bytes | memoryview, ...] | None = None,
        *,
        kind: str = _JSON,
        accept: str = _JSON,
        retry_secs: float = 0.0,
    ) -> Any:
        """What the server answers; asks again for `retry_secs` where there is no answer."""
        where = f"{self._scheme}://{self._netloc}"
        headers = {"Accept": accept}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        if body is not None:
            headers["Content-Type"] = kind
            headers["Content-Length"] = str(sum(memoryview(chunk).nbytes for chunk in body))
        for is_last in ticks(retry_secs, _RETRY_EVERY_SECS):
            try:
                with contextlib.closing(self._connection(wait_secs)) as connection:
                    # A server may answer before it has everything, for example that it is too large.
                    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                        pieces = None if body is None else _pieces(body)
                        connection.request(method, f"{self._prefix}{target}", pieces, headers)
                    answer = connection.getresponse()
                    content = answer.read(_MAX_ANSWER_BYTES)
                if answer.status >= 300:
                    raise _error_of(answer, content, self.where, self._token is not None)
                return parse_json(content) if accept == _JSON else content
            except ssl.SSLCertVerificationError as error:
                raise RequestFailed(
                    f"The certificate of {where} cannot be trusted ({error.verify_message}). "
                    "For one of your own, set SSL_CERT_FILE to its certificate authority"
                ) from error
            except (OSError, http.client.HTTPException) as error:
                if is_last:
                    why = getattr(error, "strerror", None) or str(error) or type(error).__name__
                    why = "it did not answer in time" if isinstance(error, TimeoutError) else why
                    raise RequestFailed(f"{where} cannot be reached ({why})") from error
            except ValueError as error:
                raise RequestFailed(
                    f"{self.where} is not a server of replicast: its answer is not JSON"
                ) from error
        raise RequestFailed(f"{where} was not asked")  # Not reached: the last attempt returns or raises.

    def _connection(self, wait_secs: float) -> http.client.HTTPConnection:
        if self._scheme == "http":
            return http.client.HTTPConnection(self._netloc, timeout=wait_secs)
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(self._netloc, timeout=wait_secs, context=context)


def connect(run: RunDir, *, token: str | None = None, token_file: Path | str | None = None) -> Run:
    """The run in a directory, or at the address at which it is served.

    Args:
        run: The --run-dir of the job, or an address such as "https://host:8080/first".
        token: For an address: what the server asks for.
        token_file: A file with the token. Default: the environment's REPLICAST_TOKEN, or the file that
            REPLICAST_TOKEN_FILE names.

    Raises:
        NotFound: There is no such run, or its job has not begun yet; names those near it.
        RequestFailed: The address cannot be used, its server cannot be reached, or does not accept the token.
    """
    if is_address(run):
        return ServedRun(str(run), read_token(token, token_file, os.environ))
    if is_run(run):
        return DirectoryRun(run)
    path = below(run)
    if not path.is_dir():
        raise NotFound(f"There is no directory {path}. Give the --run-dir of the job.")
    try:
        children = sorted(path.iterdir())
    except OSError as error:
        raise NotFound(f"The directory {path} cannot be read ({error.strerror}).") from error
    near = [str(child) for child in (*children, below(path.as_path().parent)) if is_run(child)][-5:]
    if near:
        raise NotFound(f"{path} is not a run directory. Perhaps: {', '.join(near)}.")
    if (path / "launcher-0.lock").exists():
        raise NotFound(f"No job has begun in {path} yet. If it is starting, try again in a moment.")
    if path.glob("launcher-*.lock"):
        raise NotFound(f"{path} has only logs here: it is not shared with the first host. Run this there.")
    raise NotFound(f"{path} is not a run directory. Give the --run-dir of the job: replicast list finds it.")


def is_address(run: RunDir) -> bool:
    return isinstance(run, str) and run.startswith(("http://", "https://"))


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


def _query(given: Mapping[str, object]) -> str:
    words = {name: str(one).lower() if isinstance(one, bool) else one for name, one in given.items()}
    return f"?{urlencode(words)}" if words else ""


def _pieces(chunks: Iterable[bytes | memoryview]) -> Iterator[memoryview]:
    for chunk in chunks:
        rest = memoryview(chunk).cast("B")
        for start in range(0, len(rest), _PIECE_BYTES):
            yield rest[start : start + _PIECE_BYTES]


@contextlib.contextmanager
def _understood() -> Iterator[None]:
    try:
        yield
    except (AttributeError, FileDamaged, KeyError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise RequestFailed(
            f"The server's answer cannot be used; it may have another version ({error})"
        ) from error


def _error_of(
    answer: http.client.HTTPResponse, content: bytes, address: str, has_token: bool
) -> ReplicastError:
    """The error that a server's answer tells: one of ours by its type, or else what HTTP says."""
    status, retry_after = answer.status, answer.getheader("Retry-After")
    try:
        told = parse_json(content)["error"]
        problem = str(told["problem"])
    except (ValueError, TypeError, KeyError):
        told, problem = {}, ""
    if "type" in told:
        return ReplicastError.from_json(told)
    if status == 404:
        return NotFound(problem if problem else f"Nothing is served at {address}")
    if status == 401:
        needs = "does not accept this token" if has_token else "requires a token"
        how = f"set {TOKEN}, or name a file with it in {TOKEN_FILE}"
        return RequestFailed(f"{address} {needs}: {how}", status=status)
    parts = [f"{address} answered {status}", _MEANINGS.get(status, ""), problem]
    parts += [f"Expected: {told['expected']}"] if status in (400, 413) and "expected" in told else []
    parts += [f"Try again in {retry_after} s"] if retry_after else []
    return RequestFailed(". ".join(part for part in parts if part), status=status)
