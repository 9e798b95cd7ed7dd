"""A served run in memory, and requests to it as a browser or a program makes them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from replicast.page.app import App
from replicast.page.live import Find
from replicast.page.web_server import PageSettings
from tests.memory_run import MemoryRun
from tests.page.live import TOKEN as TOKEN
from tests.unit.played_job import SCHEMA

BEARER = {"Authorization": f"Bearer {TOKEN}"}


class Client:
    """Sends requests to an application, without a network.

    Args:
        app: The application.
        host: The name and the port by which it is called.
        peer: The address from which the requests come.
    """

    def __init__(self, app: App, host: str, peer: str) -> None:
        transport = httpx.ASGITransport(app, client=(peer, 50000), raise_app_exceptions=False)
        self._loop = asyncio.new_event_loop()
        self._http = httpx.AsyncClient(transport=transport, base_url=f"http://{host}", timeout=120)
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def request(self, method: str, path: str, **parts: Any) -> httpx.Response:
        sent = self._http.request(method, path, **parts)
        return asyncio.run_coroutine_threadsafe(sent, self._loop).result(120)

    def get(self, path: str, **parts: Any) -> httpx.Response:
        return self.request("GET", path, **parts)

    def post(self, path: str, **parts: Any) -> httpx.Response:
        return self.request("POST", path, **parts)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(120)
        self._loop.close()


Serve = Callable[..., Client]


@pytest.fixture
def run(tmp_path: Path) -> MemoryRun:
    """A run of two workers, in memory."""
    return MemoryRun(SCHEMA, tmp_path / "first")


@pytest.fixture
def serve(run: MemoryRun) -> Iterator[Serve]:
    """Serves the run, or what `find` finds, with some settings; requests come from `peer`, to `host`."""
    opened: list[Client] = []
    found = {"first": run}

    def start(
        *,
        host: str = "127.0.0.1:8080",
        peer: str = "127.0.0.1",
        find: Find = lambda: found,
        **settings: Any,
    ) -> Client:
        opened.append(Client(App(find, PageSettings(**{"token": TOKEN, **settings})), host, peer))
        return opened[-1]

    yield start
    for client in opened:
        client.close()


@pytest.fixture
def client(serve: Serve) -> Client:
    """A browser on the same machine, without the token."""
    return serve()
