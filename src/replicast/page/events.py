"""Answers in pieces: server-sent events, and large values. Each holds a slot until its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from replicast.page.problems import HttpError
from replicast.page.settings import MAX_STREAMS
from replicast.page.watch import Watch

QUIET_SECS = 15.0
"""After so long without an event, a comment shows both sides that the connection is alive."""


class Slots:
    """So many answers at a time.

    A slot is taken at the check: if it were taken when the answer begins, any number of requests could
    pass the check before the first answer has begun.
    """

    def __init__(self, most: int, problem: str, remedy: str) -> None:
        self._free = most
        self._problem = problem
        self._remedy = remedy

    def take(self) -> None:
        """Takes a slot; raises `HttpError` if none is free."""
        if self._free <= 0:
            raise HttpError(503, self._problem, remedy=self._remedy, headers={"Retry-After": "30"})
        self._free -= 1

    def give_back(self) -> None:
        """Gives a slot back."""
        self._free += 1


class SlotResponse(StreamingResponse):
    """An answer that gives its slot back at its end, also when it ends before its first piece."""

    def __init__(
        self, slots: Slots, pieces: AsyncIterator[bytes | memoryview], media_type: str, **headers: str
    ) -> None:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        super().__init__(pieces, media_type=media_type, headers=names)
        self._slots = slots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the answer."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._slots.give_back()


class Streams:
    """The open streams of this server, of all runs."""

    def __init__(self, most: int = MAX_STREAMS) -> None:
        self._slots = Slots(most, "Too many browsers follow this server", "Close some")

    def follow(self, watch: Watch) -> StreamingResponse:
        """A stream of the events of a run. The caller must send it: that gives its slot back."""
        self._slots.take()
        return SlotResponse(self._slots, _events(watch), "text/event-stream", X_Accel_Buffering="no")


async def _events(watch: Watch) -> AsyncIterator[bytes]:
    async with watch.stream() as queue:
        yield b"retry: 1000\n\n"
        while True:
            try:
                event = await asyncio.wait_for(queue.get(), QUIET_SECS)
            except TimeoutError:
                event = b": still here\n\n"
            if event is None:
                return
            yield event
