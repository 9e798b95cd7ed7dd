"""A served run, and requests to it as a browser or a program makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial, partialmethod
from pathlib import Path
from typing import Any

import httpx
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from replicast.page.app import App
from replicast.page.live import Find
from replicast.page.web_server import PageSettings
from tests.page.live import TOKEN as TOKEN
from tests.page.prompt_run import PromptRun

BEARER = {"Authorization": f"Bearer {TOKEN}"}


class Client:
    """Sends requests to an application that is called `host`, from the address `peer`, without a network."""

    def __init__(self, loop: BlockingPortal, app: App, host: str, peer: str) -> None:
        transport = httpx.ASGITransport(app, client=(peer, 50000), raise_app_exceptions=False)
        self._http = httpx.AsyncClient(transport=transport, base_url=f"http://{host}", timeout=120)
        self._loop = loop

    def request(self, method: str, path: str, **parts: Any) -> httpx.Response:
        return self._loop.call(partial(self._http.request, method, path, **parts))

    get = partialmethod(request, "GET")
    post = partialmethod(request, "POST")


Serve = Callable[..., Client]


@pytest.fixture
def run(tmp_path: Path) -> PromptRun:
    """A run of two workers that do at once what they are asked for."""
    return PromptRun(tmp_path / "prompt")


@pytest.fixture
def serve(run: PromptRun) -> Iterator[Serve]:
    """Serves the run, or what `find` finds, with some settings; requests come from `peer`, to `host`."""
    found = {"first": run}
    with start_blocking_portal() as loop:  # One for all requests, as on a server.

        def start(
            host: str = "127.0.0.1:8080", peer: str = "127.0.0.1", find: Find = lambda: found, **settings: Any
        ) -> Client:
            return Client(loop, App(find, PageSettings(**{"token": TOKEN, **settings})), host, peer)

        yield start


@pytest.fixture
def client(serve: Serve) -> Client:
    """A browser on the same machine, without the token."""
    return serve()
