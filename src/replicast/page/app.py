"""The web application: a route for every operation in the table (client/run.py), and the page's files.

A request has passed the checks of security.py. Its arguments are checked by the types of the table; then it
is answered by one function for all rows, or by one of those below that know a limit which only a server has.
Files are read, jobs are asked and JSON is made in threads: nothing slow happens on the event loop. What is
read is shared for a second between all who ask for the same (live.py).
"""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import os
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec
import numpy as np
from msgspec import Struct
from msgspec.structs import replace
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from replicast.client import Examination, Pulled, Pushed, Run, UpdateView
from replicast.client.run import MAX_LOG, OPERATIONS, Rank, RateOptions, RunOperation, rows_of
from replicast.errors import FileDamaged, ReplicastError, RequestRefused, refusal_of
from replicast.files import RunPath
from replicast.page import prometheus
from replicast.page.assets import PAGE, PLOTLY, STATIC, TYPES, asset_names, plotly_script
from replicast.page.live import Find, Runs, RunWatch, SlotResponse, events
from replicast.page.openapi import description
from replicast.page.security import SecurityMiddleware
from replicast.page.web_server import HttpError, PageSettings, dumped, http_error, small_body, uploaded
from replicast.update.edits import EditKind
from replicast.update.tensorfiles import outline_of
from replicast.update.update import Update, joined, update_in

RUN = "/api/runs/{run}"
MAX_JSON_BYTES = 256 * 1024  # Of values as JSON, which takes ten times as much, and holds up others.
MAX_VALUES_BYTES = 256 * 2**20  # Of values as a file, of which there are at most `MAX_FILES` at a time.
MAX_DETAILS_BYTES = 16 * 2**20  # Of an update whose values are summarized for everybody who may read.
MAX_SERVED_ROWS = 10_000
MAX_EDITS = 20_000  # In one list of updates.
_T = TypeVar("_T")
_KEPT_SECS = {"schema": 10.0, "checkpoints": 3.0, "show": 0.0, "look": 0.0}  # Others: a second.
_RUNNING_SECS, _RESTING_SECS = 2.0, 15.0
_PIECE_BYTES = 256 * 1024
_SOURCE = "The uploaded file"


def set_learning_rate(_run: Run) -> Pushed | Examination:
    """Assigns a learning rate on every worker; with `dry_run` only says what it would do."""
    raise NotImplementedError


RATE = RunOperation("set_learning_rate", "POST", "/learning-rate", set_learning_rate, options=RateOptions)
ROWS = (*OPERATIONS.values(), RATE)


class _Nothing(Struct, forbid_unknown_fields=True):
    pass


@dataclass(frozen=True, slots=True)
class Asked:
    """One request about a run, checked: `arguments` are those of the method of `Run`, `options` the rest.

    `answer` serves any row of the table, and `do_<name>` one that has a limit which only a server has.
    """

    request: Request
    settings: PageSettings
    runs: Runs
    watch: RunWatch
    row: RunOperation
    arguments: dict[str, Any]
    options: Any

    @property
    def run(self) -> Run:
        return self.watch.run

    @property
    def author(self) -> str:
        """Who asks: as given, or the machine that the request comes from."""
        client = self.request.client
        given: str | None = getattr(self.options, "author", None)
        return given if given else f"page@{'unknown' if client is None else client.host}"

    async def act(self, act: Callable[[], _T]) -> _T:
        """Runs a call that may wait for the job; the next read sees what it did."""
        try:
            return await self.runs.actors.call(act)
        finally:
            self.watch.forget()

    async def answer(self) -> Any:
        row, arguments = self.row, self.arguments
        if "author" in row.parameters:
            arguments["author"] = self.author

        def encoded() -> Any:
            return row.encoded(getattr(self.run, row.name)(**arguments))

        if row.method == "POST":
            return await self.act(encoded)
        kept = _KEPT_SECS.get(row.name, 1.0)
        if not kept:
            return await self.runs.readers.call(encoded)
        return await self.watch.text((row.name, *arguments.values()), encoded, kept)

    async def do_brief(self) -> dict[str, Any]:
        return await _brief(self.watch, self.settings)

    async def do_status(self) -> dict[str, Any]:
        return await self.watch.status()

    async def do_log(self) -> bytes:
        last = self.arguments["last"] or MAX_LOG
        return await self.watch.text(("log", last), lambda: {"updates": _listed(self.run.log(last))})

    async def do_show(self) -> Any:
        self.arguments["max_bytes"] = MAX_DETAILS_BYTES
        return await self.answer()

    async def do_pull(self) -> dict[str, Any] | Response:
        is_file, files = self.options.format == "safetensors", self.runs.files
        most = MAX_VALUES_BYTES if is_file else MAX_JSON_BYTES

        def read() -> Pulled:
            try:
                return self.run.pull(**self.arguments, max_bytes=most)
            except RequestRefused as error:
                larger = "" if is_file else ", or add format=safetensors"
                raise RequestRefused(error.problem, remedy=f"Name rows, as in rows=0:100{larger}") from error

        if not is_file:
            return await self.act(lambda: _with_values(read()))
        files.take()
        try:
            return SlotResponse(files, _pieces(await self.act(read)), "application/octet-stream")
        except BaseException:
            files.give_back()
            raise

    async def do_push(self) -> dict[str, Any]:
        place, most = self.run.path or self.run.where, self.settings.max_upload_bytes
        async with uploaded(self.request, place, self.runs.readers, most) as path:
            return await self.act(lambda: self._propose(_update_in(path, self.options, self.author)))

    async def do_set_learning_rate(self) -> dict[str, Any]:
        options = self.options
        update = Update(id=options.id, note=options.note or "", author=self.author)
        return await self.act(lambda: self._propose(update.assign(options.variable, options.value)))

    def _propose(self, update: Update) -> dict[str, Any]:
        options = self.options
        try:
            trial = options.trial()
        except ValueError as error:
            raise HttpError(400, str(error)) from error
        if options.dry_run:
            return self.run.examine(update).to_json()
        return self.run.push(update, options.at_step, trial, options.next_start).to_json()


async def _brief(watch: RunWatch, settings: PageSettings) -> dict[str, Any]:
    """How a run is, in a few words; read less often while it rests."""
    found: dict[str, Any] = await watch.read("brief", lambda: watch.run.brief().to_json(), _RUNNING_SECS)
    if not found["running"]:
        watch.keep("brief", _RESTING_SECS)
    return {"name": watch.name, "actions": settings.token is not None, **found}


def _listed(views: list[UpdateView]) -> list[dict[str, Any]]:
    """Updates as JSON values. Where they have very many edits, those of the latest ones are told."""
    told, left = [], MAX_EDITS
    for view in reversed(views):
        left_out = len(view.edits) if len(view.edits) > left else 0
        view = replace(view, edits=()) if left_out else view
        left -= len(view.edits)
        told.append(view.to_json() | {"edits_left_out": left_out})
    return told[::-1]


async def _pieces(pulled: Pulled) -> AsyncIterator[bytes]:
    for chunk in pulled.file_chunks():
        for start in range(0, len(chunk), _PIECE_BYTES):
            yield bytes(chunk[start : start + _PIECE_BYTES])


def _with_values(pulled: Pulled) -> dict[str, Any]:
    """An array as nested lists of numbers that JSON can say."""
    array = pulled.array if pulled.array.dtype.kind in "biu" else pulled.array.astype("float64")
    return pulled.to_json() | {"values": array.tolist()}


def _update_in(path: RunPath, options: Any, author: str) -> Update:
    """The update in a file that nobody else changes. Its arrays are views of the mapped file."""
    operation = None if options.operation is None else EditKind(options.operation)
    try:
        outline_of(path)
        with os.fdopen(path.open(os.O_RDONLY), "rb") as opened:
            content = np.memmap(opened, np.uint8, "r").data
        update = update_in(content, _SOURCE, operation, options.weight)
    except FileDamaged as error:
        error.path = Path(_SOURCE)
        raise refusal_of(error) from error
    flags = {"reset_slots": options.reset_slots, "allow_nonfinite": options.allow_nonfinite}
    return joined([update], author, id=options.id, note=options.note, **flags)


class App(Starlette):
    def __init__(self, find: Find, settings: PageSettings) -> None:
        self._settings = settings
        self._runs = Runs(find)
        self._described = dumped(description(ROWS)).encode()
        others = {
            "/api/runs": self._list,
            f"{RUN}/events": self._follow,
            "/metrics": self._prometheus,
            "/healthz": self._health,
            "/openapi.json": self._openapi,
            "/static/{name}": self._asset,
            "/": self._asset,
            "/{run}": self._asset,
        }
        routes = []
        for row in ROWS:
            path = RUN + row.path.replace("{name}", "{name:path}")  # The name of a variable has slashes.
            routes.append(Route(path, partial(self._perform, row), methods=[row.method]))
        super().__init__(
            routes=[*routes, *(Route(path, answer) for path, answer in others.items())],
            middleware=[Middleware(SecurityMiddleware, settings=settings)],
            exception_handlers=dict.fromkeys(
                (HTTPException, HttpError, ReplicastError, OSError, Exception), _answered
            ),
        )
        self.router.redirect_slashes = False

    def stop(self) -> None:
        self._runs.stop()

    async def _perform(self, row: RunOperation, request: Request) -> Response:
        watch = await self._runs.named(request.path_params["run"])
        arguments, options = await _arguments(row, request)
        asked = Asked(request, self._settings, self._runs, watch, row, arguments, options)
        answer = await getattr(asked, f"do_{row.name}", asked.answer)()
        if isinstance(answer, Response):
            return answer
        return await self._json(answer, 201 if row.proposes and "edits" not in answer else 200)

    async def _json(self, answer: Any, status: int = 200) -> Response:
        if not isinstance(answer, bytes):  # In a thread: it may be long.
            answer = await self._runs.readers.call(lambda: dumped(answer).encode())
        return Response(answer, status, media_type="application/json")

    async def _list(self, request: Request) -> Response:
        _converted(dict(request.query_params), _Nothing)
        watches = await self._runs.all()
        return await self._json(await asyncio.gather(*(_brief(watch, self._settings) for watch in watches)))

    async def _follow(self, request: Request) -> Response:
        watch, slots = await self._runs.named(request.path_params["run"]), self._runs.streams
        slots.take()
        headers = {"X-Accel-Buffering": "no"}
        return SlotResponse(slots, events(watch), "text/event-stream", headers=headers)

    async def _prometheus(self, _request: Request) -> Response:
        text = await prometheus.exposition(await self._runs.all())
        return PlainTextResponse(text, headers={"Content-Type": prometheus.MEDIA_TYPE})

    async def _health(self, _request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _openapi(self, _request: Request) -> Response:
        return await self._json(self._described)

    async def _asset(self, request: Request) -> Response:
        name = request.path_params.get("name", PAGE)
        return await self._runs.readers.call(lambda: asset(name, request.headers))


async def _arguments(row: RunOperation, request: Request) -> tuple[dict[str, Any], Struct]:
    """The arguments of a row's method, and all that came beside the path, both checked."""
    arguments: dict[str, Any] = {name: request.path_params[name] for name in row.in_path}
    if "worker" in arguments:
        try:
            arguments["worker"] = msgspec.convert(arguments["worker"], Rank, strict=False)
        except msgspec.ValidationError as error:
            raise HttpError(404, "There is no such worker", received=arguments["worker"][:200]) from error
    query = dict(request.query_params)
    if row.method == "GET" or row.takes_file:
        options = _converted(query, row.fields)
    else:
        _converted(query, _Nothing)
        content = await small_body(request)
        try:
            options = msgspec.json.decode(content if content.strip() else b"{}", type=row.fields)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise _refused("The body is not valid", error, row.fields) from error
    arguments |= {name: getattr(options, name) for name in row.parameters if hasattr(options, name)}
    if arguments.get("rows") is not None:
        try:
            arguments["rows"] = rows_of(arguments["rows"], MAX_SERVED_ROWS)
        except ValueError as error:
            raise HttpError(400, str(error)) from error
    return arguments, options


_WORDS = {"float": "a number", "int": "a whole number", "str": "text", "bool": "true or false"}


def _refused(problem: str, error: Exception, kind: type[Struct], received: str | None = None) -> HttpError:
    """An error of msgspec in plain words; of a parameter with only so many values, with all of them."""
    text, _, place = str(error).replace("Invalid enum", "Unknown").partition(" - at `$.")
    annotated = get_type_hints(kind).get(parameter := place.rstrip("`"))
    told = [one for part in (annotated, *get_args(annotated)) for one in get_args(part)]
    named = ", ".join(one for one in told if isinstance(one, str))
    text = re.sub(r"\w+(?=[ |\w]*`)", lambda word: _WORDS.get(word[0], word[0]), text)
    text = text.replace(" | ", " or ").replace("`", "").replace(", got ", ", received ")
    said, expected = ": ".join(filter(None, (problem, parameter, text))), f"one of {named}" if named else None
    return HttpError(400, said, expected=expected, received=received, remedy="See /openapi.json")


def _converted(given: dict[str, str], kind: type[Struct]) -> Struct:
    # As on the command line too: add-rows.
    spelled = {key: one.replace("-", "_") if key == "operation" else one for key, one in given.items()}
    try:
        return msgspec.convert(spelled, kind, strict=False)
    except msgspec.ValidationError as error:
        received = "&".join(f"{name}={value}" for name, value in given.items())[:500]
        raise _refused("A parameter is not valid", error, kind, received) from error


async def _answered(_request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        problem = "Method not allowed" if error.status_code == 405 else "Nothing is served at this address"
        headers = dict(error.headers or {})
        return HttpError(error.status_code, problem, remedy="See /openapi.json", headers=headers).response
    return http_error(error).response


@lru_cache(maxsize=64)
def _content(name: str) -> tuple[bytes, bytes, str]:
    """A file as it is and compressed, and its tag. Blocks."""
    plain = plotly_script() if name == PLOTLY else (STATIC / name).read_bytes()
    if plain is None:
        raise HttpError(503, "plotly is not installed", remedy="pip install 'replicast[page]'")
    return plain, gzip.compress(plain, 6, mtime=0), hashlib.sha256(plain).hexdigest()[:32]


def asset(name: str, headers: Headers) -> Response:
    """The answer to a request for one of the files. Blocks."""
    if name not in asset_names():
        raise HttpError(404, "There is no such file", received=name)
    plain, compressed, digest = _content(name)
    tag = f'"{digest}"'
    answer = {"ETag": tag, "Cache-Control": "no-cache", "Vary": "Accept-Encoding"}
    if tag in headers.get("if-none-match", ""):
        return Response(status_code=304, headers=answer)
    takes_gzip = "gzip" in headers.get("accept-encoding", "")
    if takes_gzip:
        answer["Content-Encoding"] = "gzip"
    media = TYPES[Path(name).suffix]
    return Response(compressed if takes_gzip else plain, headers=answer | {"Content-Type": media})
