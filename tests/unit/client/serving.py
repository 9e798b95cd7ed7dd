"""A small server of one run with the API of the page, for tests of the client: a table of answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from replicast.client import Examination, Run
from replicast.errors import NoAnswer, NotFound, ReplicastError, UpdateRefused
from replicast.update.trial import Trial
from replicast.update.update import Update

TOKEN = "a token of the tests"
Query = dict[str, str]


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
            status, answer = (
                201 if path.endswith("/updates") and length else 200,
                self._found(path, query, content),
            )
        except AnswerError as error:
            return self._send(error.status, {"error": {"problem": str(error)}}, **error.headers)
        except ReplicastError as error:
            return self._send(*told(error))
        return self._send(status, answer)

    def _found(self, path: str, query: Query, content: bytes) -> Any:
        run = self.server.run
        if path == "/api/runs":
            return [{"name": "first", **run.brief().to_json()}]
        if path.partition("/api/runs/first")[0]:
            raise AnswerError(404, "There is no run with this name")
        rest = path.removeprefix("/api/runs/first")
        if self.command == "GET":
            return read(run, rest, query)
        return act(run, rest, query, content, self.server.work)

    def _send(self, status: int, answer: Any, **headers: str) -> None:
        content = answer if isinstance(answer, bytes) else json.dumps(answer, allow_nan=False).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(content))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)


def read(run: Run, path: str, query: Query) -> Any:
    numbers = {name: int(value) for name, value in query.items() if value.isdigit()}
    kind, _, rest = path.removeprefix("/").partition("/")
    match kind:
        case "":
            return {"name": "first", **run.brief().to_json()}
        case "status":
            return run.status().to_json()
        case "schema":
            return {"variables": run.schema().to_json()}
        case "metrics":
            return run.metrics(numbers.get("since"), numbers.get("points", 2000)).to_json()
        case "updates" if not rest:
            return {"updates": [view.to_json() for view in run.log(numbers.get("last"))]}
        case "updates":
            is_exact, thoroughly = query.get("exact") == "true", query.get("thoroughly") == "true"
            return (run.look(rest, thoroughly) if is_exact else run.show(rest)).to_json()
        case "audits":
            return {"audits": [one.to_json() for one in run.audits(numbers["last"])]}
        case "checkpoints":
            return {"checkpoints": [one.to_json() for one in run.checkpoints()]}
        case "logs":
            lines = run.log_lines(int(rest), numbers["lines"], numbers.get("attempt"))
            return {"worker": int(rest), "lines": lines}
        case "variables":
            rows = [int(row) for row in query["rows"].split(",")] if "rows" in query else None
            pulled = run.pull(rest, rows, float(query["timeout"]))
            assert query["format"] == "safetensors"
            return b"".join(pulled.file_chunks())
    raise AnswerError(404, "There is no such address")


def act(run: Run, path: str, query: Query, content: bytes, work: Path) -> Any:
    if path == "/updates":
        file = work / "uploaded.safetensors"
        file.write_bytes(content)
        at_step = int(query["at_step"]) if "at_step" in query else None
        trial = None
        if "trial_steps" in query:
            worse, mode = float(query["trial_max_increase"]), query["trial_mode"]
            trial = Trial(int(query["trial_steps"]), query["trial_metric"], worse, mode)  # type: ignore[arg-type]
        pushed = run.push(Update.load(file), at_step, trial, query.get("next_start") == "true")
        return {"id": pushed.id, "number": pushed.number, "warning": pushed.warning}
    body = json.loads(content)
    if path == "/audit":
        return run.audit(body["timeout_secs"], body["author"]).to_json()
    if path in ("/checkpoint", "/stop"):
        return {"step": getattr(run, path[1:])(body["timeout_secs"], body["author"])}
    _, _, which, action = path.split("/")
    if action == "withdraw":
        return run.withdraw(which).to_json()
    dry_run, next_start, author = (
        body.get("dry_run", False),
        body.get("next_start", False),
        body.get("author", ""),
    )
    found = run.revert(which, body["note"], dry_run, body["force"], next_start, author)
    return found.to_json() if isinstance(found, Examination) else {"id": found.id, "number": found.number}


def told(error: ReplicastError) -> tuple[int, dict[str, Any]]:
    if isinstance(error, UpdateRefused):
        fields = {name: value for name, value in error.to_json().items() if value is not None}
        return 409 if "Another update" in error.problem else 422, {"error": fields}
    status = {NotFound: 404, NoAnswer: 504}.get(type(error), 503)
    return status, {"error": {"problem": str(error)}}


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
