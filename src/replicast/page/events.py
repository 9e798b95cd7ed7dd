"""Server-sent events: what changes in a run, to everybody who looks at it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.responses import StreamingResponse

from replicast.page.problems import HttpError
from replicast.page.settings import MAX_STREAMS
from replicast.page.watch import Watch

QUIET_SECS = 15.0
"""After so long without an event, a comment shows both sides that the connection is alive."""


class Streams:
    """The open streams of this server, of all runs."""

    def __init__(self, most: int = MAX_STREAMS) -> None:
        self._most = most
        self._open = 0

    def follow(self, watch: Watch) -> StreamingResponse:
        """A stream of the events of a run.

        Raises:
            HttpError: There are too many streams.
        """
        if self._open >= self._most:
            raise HttpError(
                503,
                "Too many browsers follow this server",
                remedy="Close some",
                headers={"Retry-After": "30"},
            )
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(self._events(watch), media_type="text/event-stream", headers=headers)

    async def _events(self, watch: Watch) -> AsyncIterator[bytes]:
        self._open += 1
        try:
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
        finally:
            self._open -= 1
