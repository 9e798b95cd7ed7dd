"""One request to the API: its run, its parameters, and where it may block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from msgspec import Struct
from starlette.requests import Request

from replicast.page.runs import Runs
from replicast.page.settings import Settings
from replicast.page.watch import Watch

_T = TypeVar("_T")
_S = TypeVar("_S", bound=Struct)


@dataclass(frozen=True, slots=True)
class Context:
    """One request to the API."""

    request: Request
    settings: Settings
    runs: Runs
    run: Watch | None
    path: Mapping[str, str]
    query: Struct
    body: Struct

    @property
    def watch(self) -> Watch:
        """The run that the address names."""
        if self.run is None:
            raise LookupError("This address names no run")
        return self.run

    @property
    def peer(self) -> str:
        """The machine that the request comes from."""
        client = self.request.client
        return "unknown" if client is None else client.host

    def query_as(self, kind: type[_S]) -> _S:
        """The parameters of the address."""
        if not isinstance(self.query, kind):
            raise TypeError(f"{kind.__name__} expected")
        return self.query

    def body_as(self, kind: type[_S]) -> _S:
        if not isinstance(self.body, kind):
            raise TypeError(f"{kind.__name__} expected")
        return self.body

    async def read(self, act: Callable[[], _T]) -> _T:
        """Runs a call that reads."""
        return await self.runs.readers.call(act)

    async def act(self, act: Callable[[], _T]) -> _T:
        """Runs a call that may wait for the job."""
        try:
            return await self.runs.actors.call(act)
        finally:
            self.watch.forget()
