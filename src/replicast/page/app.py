"""The web application: every address, what answers it, and the checks before."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from replicast.page import assets, prometheus
from replicast.page.context import Context
from replicast.page.endpoints import CONVERTORS, ENDPOINTS, RUN, Endpoint
from replicast.page.events import Streams
from replicast.page.jsontext import dumped
from replicast.page.openapi import description
from replicast.page.problems import HttpError, http_error
from replicast.page.requests import Nothing, converted, parsed
from replicast.page.runs import Find, Runs
from replicast.page.security import Access, SecurityMiddleware
from replicast.page.settings import Settings
from replicast.page.upload import small_body

logger = logging.getLogger("replicast")


class App(Starlette):
    """The page and the API of some runs."""

    def __init__(self, find: Find, settings: Settings) -> None:
        self._settings = settings
        self._runs = Runs(find)
        self._streams = Streams()
        super().__init__(
            routes=self._routes(),
            middleware=[Middleware(SecurityMiddleware, access=Access(settings))],
            exception_handlers={HTTPException: _unknown_address, Exception: _failed},
            lifespan=self.lifespan_of,
        )
        self.router.redirect_slashes = False

    def stop(self) -> None:
        """Ends every stream, so that the server can."""
        self._runs.stop()

    @asynccontextmanager
    async def lifespan_of(self, _app: Starlette) -> AsyncIterator[None]:
        """Starlette enters it when the server starts, and leaves it when the server stops."""
        yield
        self.stop()

    def _routes(self) -> list[Route]:
        described = dumped(description())
        api = [
            Route(
                _route_path(one.path),
                _checked(partial(self._answer, one)),
                methods=[one.method],
                name=one.name,
            )
            for one in ENDPOINTS
        ]
        return [
            *api,
            Route(f"{RUN}/events", _checked(self._follow)),
            Route("/metrics", _checked(self._prometheus)),
            Route("/healthz", _checked(self._health)),
            Route(
                "/openapi.json",
                _checked(lambda _request: _later(Response(described, media_type="application/json"))),
            ),
            Route("/static/{name}", _checked(self._asset)),
            Route("/", _checked(self._page)),
            Route("/{run}", _checked(self._page)),
        ]

    async def _answer(self, endpoint: Endpoint, request: Request) -> Response:
        run = request.path_params.get("run")
        watch = None if run is None else await self._runs.named(run)
        is_json = endpoint.method == "POST" and endpoint.body != "file"
        body: Any = endpoint.body if is_json else Nothing
        context = Context(
            request=request,
            settings=self._settings,
            runs=self._runs,
            run=watch,
            path={name: str(value) for name, value in request.path_params.items()},
            query=converted(dict(request.query_params), endpoint.query),
            body=parsed(await small_body(request) if is_json else b"", body),
        )
        answer = await endpoint.answer(context)
        if isinstance(answer, Response):
            return answer
        is_examined = isinstance(answer, dict) and "problems" in answer
        # In a thread: it may be long.
        text = answer if isinstance(answer, bytes) else await context.read(lambda: dumped(answer).encode())
        return Response(text, 200 if is_examined else endpoint.status, media_type="application/json")

    async def _follow(self, request: Request) -> Response:
        return self._streams.follow(await self._runs.named(request.path_params["run"]))

    async def _prometheus(self, _request: Request) -> Response:
        text = await prometheus.exposition(await self._runs.all())
        return PlainTextResponse(text, headers={"Content-Type": prometheus.MEDIA_TYPE})

    async def _health(self, _request: Request) -> Response:
        return PlainTextResponse("ok\n")

    async def _asset(self, request: Request) -> Response:
        name = request.path_params["name"]
        return await self._runs.readers.call(lambda: assets.asset(name, request.headers))

    async def _page(self, request: Request) -> Response:
        return await self._runs.readers.call(lambda: assets.asset(assets.PAGE, request.headers))


def _route_path(path: str) -> str:
    for name, convertor in CONVERTORS.items():
        path = path.replace(f"{{{name}}}", f"{{{name}:{convertor}}}")
    return path


def _checked(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    """Turns what an answer raises into an error that says what is wrong."""

    async def respond(request: Request) -> Response:
        try:
            return await answer(request)
        except Exception as error:
            known = http_error(error)
            if known is None:
                raise
            return known.response()

    return respond


async def _later(response: Response) -> Response:
    return response


async def _unknown_address(_request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 404
    headers = dict(error.headers or {}) if isinstance(error, HTTPException) else {}
    problem = "This address does not take this method" if status == 405 else "There is nothing here"
    return HttpError(status, problem, remedy="See /openapi.json", headers=headers).response()


async def _failed(_request: Request, error: Exception) -> Response:
    logger.error("A request failed: this is a defect", exc_info=error)
    return HttpError(500, "The server failed", remedy="Its log says why").response()
