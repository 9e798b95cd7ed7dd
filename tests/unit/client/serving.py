"""A small server of one run with the API of the page, for tests of the client: a table of answers."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from replicast.client import Run
from replicast.client.run import OPERATIONS, rows_of
from replicast.errors import ReplicastError
from replicast.page.answers import http_error
from replicast.update.update import Update

TOKEN = "a token of the tests"


class AnswerError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, problem: str, **headers: str) -> None:
        super().__init__(problem)
        self.status, self.headers = status, headers


class Served(ThreadingHTTPServer):
    """Serves one run under the name `first`.

    Attributes:
        requests: Each request so far: method, path, and how many bytes came with it.
        before: Called before each request is answered; may raise, which breaks the connection.
    """

    daemon_threads = True

    def __init__(self, run: Run, work: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.run, self.work = run, work
        self.requests: list[tuple[str, str, int]] = []
        self.before: Callable[[str, str], None] = lambda _method, _path: None
        self.token: str | None = TOKEN

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that a test breaks is no news."""


class Handler(BaseHTTPRequestHandler):
    server: Served

    def log_message(self, *_words: Any) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        parts = urlsplit(self.path)
        path, query = unquote(parts.path), dict(parse_qsl(parts.query))
        length = int(self.headers.get("Content-Length", "0"))
        content = self.rfile.read(length)
        self.server.requests.append((self.command, path, length))
        self.server.before(self.command, path)
        try:
            if self.command == "POST" and self.headers.get("Authorization") != f"Bearer {self.server.token}":
                raise AnswerError(401, "This needs the token")
            answer = self._found(path, query, content)
        except AnswerError as error:
            return self._send(error.status, {"error": {"problem": str(error)}}, **error.headers)
        except ReplicastError as error:
            known = http_error(error)
            assert known is not None
            return self._send(known.status, known.body())
        return self._send(200, answer)

    def _found(self, path: str, query: dict[str, str], content: bytes) -> Any:
        if path == "/api/runs":
            return [{"name": "first", **self.server.run.brief().to_json()}]
        if path.partition("/api/runs/first")[0]:
            raise AnswerError(404, "There is no run with this name")
        is_file = self.headers.get("Content-Type") == "application/octet-stream"
        file = self.server.work / "uploaded.safetensors"
        if is_file:
            file.write_bytes(content)
        given = query if is_file or self.command == "GET" else json.loads(content)
        return answered(self.server.run, self.command, path.removeprefix("/api/runs/first"), given, file)

    def _send(self, status: int, answer: Any, **headers: str) -> None:
        content = answer if isinstance(answer, bytes) else json.dumps(answer, allow_nan=False).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)


def answered(run: Run, method: str, path: str, given: dict[str, Any], file: Path) -> Any:
    """What a run answers, by the table of operations."""
    for row in OPERATIONS.values():
        pattern = row.path.replace("{name}", "(?P<name>.+)")
        found = re.fullmatch(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", pattern), path)
        if row.method == method and found is not None:
            break
    else:
        raise AnswerError(404, "There is no such address")
    options = msgspec.convert(given, row.fields, strict=False)
    arguments: dict[str, Any] = {
        name: int(text) if name == "worker" else text for name, text in found.groupdict().items()
    }
    arguments |= {name: getattr(options, name) for name in row.parameters if hasattr(options, name)}
    if row.name == "push":
        arguments |= {"update": Update.load(file), "trial": options.trial()}  # type: ignore[attr-defined]
    if arguments.get("rows") is not None:
        arguments["rows"] = rows_of(arguments["rows"])
    result = getattr(run, row.name)(**arguments)
    return b"".join(result.file_chunks()) if row.name == "pull" else row.encoded(result)


@contextmanager
def served(run: Run, work: Path) -> Iterator[Served]:
    server = Served(run, work)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(120)
