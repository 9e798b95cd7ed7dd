"""One reader per run for all who look at it: a hundred browsers cost the disk what one costs."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from replicast.client import Run
from replicast.errors import printable
from replicast.page.jsontext import dumped
from replicast.page.problems import HttpError, error_body, http_error
from replicast.page.threads import Threads

logger = logging.getLogger("replicast")

POLL_SECS = 1.0
_T = TypeVar("_T")
_MAX_KEPT, _MAX_KEPT_BYTES = 64, 16 * 2**20
_MAX_BEHIND = 32
_POINTS_PER_EVENT = 500
_COSTLY = 10.0
"""What took a second to read is kept for ten: reading never takes more than a tenth of a core."""
_CLOCK = ("time",)
"""Parts of the status that change by themselves, and are no reason for an event."""


@dataclass(slots=True)
class _Kept:
    task: asyncio.Task[Any]
    max_age: float
    read_at: float

    @property
    def nbytes(self) -> int:
        """The size of its text, once it is read."""
        is_read = self.task.done() and not self.task.cancelled() and self.task.exception() is None
        found = self.task.result() if is_read else b""
        return len(found) if isinstance(found, bytes) else 0


class Watch:
    """What is known of one run."""

    def __init__(self, name: str, run: Run, threads: Threads) -> None:
        self.name = name
        self.run = run
        self._threads = threads
        self._kept: OrderedDict[Any, _Kept] = OrderedDict()
        self._streams: set[asyncio.Queue[bytes | None]] = set()
        self._poller: asyncio.Task[None] | None = None
        self._parts: dict[str, str] = {}
        self._position: int | None = None

    async def read(self, key: Any, act: Callable[[], _T], max_age: float = POLL_SECS) -> _T:
        """The result of a blocking call, shared by all who ask for the same within `max_age` seconds."""
        loop = asyncio.get_running_loop()
        kept = self._kept.get(key)
        if kept is None or (kept.task.done() and loop.time() - kept.read_at >= kept.max_age):
            kept = self._kept[key] = _Kept(
                asyncio.ensure_future(self._threads.call(act)), max_age, loop.time()
            )
            kept.task.add_done_callback(partial(self._was_read, kept, loop))
        self._kept.move_to_end(key)
        result: _T = await asyncio.shield(kept.task)
        return result

    async def text(self, key: Any, act: Callable[[], Any], max_age: float = POLL_SECS) -> bytes:
        """The result of a blocking call as JSON, shared as in `read`."""
        return await self.read(key, lambda: dumped(act()).encode(), max_age)

    def _was_read(self, kept: _Kept, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
        took, kept.read_at = loop.time() - kept.read_at, loop.time()
        kept.max_age = max(kept.max_age, _COSTLY * took) if kept.max_age else 0.0
        if not task.cancelled():
            task.exception()  # Marks it as seen; asyncio would log it if nobody awaits the task.
        nbytes = sum(one.nbytes for one in self._kept.values())
        for key in list(self._kept):  # What was asked for longest ago comes first.
            if len(self._kept) <= _MAX_KEPT and nbytes <= _MAX_KEPT_BYTES:
                break
            nbytes -= self._kept.pop(key).nbytes

    async def status(self) -> dict[str, Any]:
        """The overview of the run, at most a second old."""
        return await self.read("status", lambda: self.run.status().to_json(), POLL_SECS / 2)

    def keep(self, key: Any, max_age: float) -> None:
        """Keeps what was read for longer, since it hardly changes."""
        if key in self._kept:
            self._kept[key].max_age = max_age

    def forget(self) -> None:
        """Called after an action: the next read sees what it did."""
        for kept in self._kept.values():
            kept.max_age = 0.0

    @asynccontextmanager
    async def stream(self) -> AsyncIterator[asyncio.Queue[bytes | None]]:
        """The events from now on, beginning with the whole status; None ends them."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(_MAX_BEHIND)
        if self._parts:
            queue.put_nowait(_event("status", "{" + ",".join(self._parts.values()) + "}"))
        self._streams.add(queue)
        if self._poller is None or self._poller.done():
            self._parts, self._position = {}, None
            self._poller = asyncio.create_task(self._poll())
        try:
            yield queue
        finally:
            self._streams.discard(queue)

    def stop(self) -> None:
        """Ends every stream."""
        if self._poller is not None:
            self._poller.cancel()
        for queue in self._streams:
            _put(queue, None)
        self._streams.clear()

    async def _poll(self) -> None:
        while self._streams:
            for event in await self._look():
                for queue in list(self._streams):
                    if not _put(queue, event):  # Too slow: it begins again with the whole status.
                        self._streams.discard(queue)
            await asyncio.sleep(POLL_SECS)

    async def _look(self) -> list[bytes]:
        try:
            status, metrics = await self.status(), await self._new_metrics()
            return [*self._changed(await self._parts_of({"unreadable": None, **status})), *metrics]
        except Exception as error:
            problem = http_error(error)
            if problem is None:
                logger.exception("The run %s cannot be read", printable(self.name))
                problem = HttpError(500, "The server failed", remedy="Its log says why")
            return self._changed(await self._parts_of({"unreadable": error_body(problem)["error"]}))

    async def _parts_of(self, status: dict[str, Any]) -> dict[str, str]:
        """The parts of the status as JSON."""
        return await self._threads.call(
            lambda: {name: f"{dumped(name)}:{dumped(value)}" for name, value in status.items()}
        )

    def _changed(self, parts: dict[str, str]) -> list[bytes]:
        """An event with the parts of the status that differ from the last one."""
        changed = [text for name, text in parts.items() if self._parts.get(name) != text]
        news = [name for name in parts if self._parts.get(name) != parts[name] and name not in _CLOCK]
        self._parts |= parts
        return [_event("status", "{" + ",".join(changed) + "}")] if news else []

    async def _new_metrics(self) -> list[bytes]:
        since = self._position

        def read() -> tuple[int, list[bytes]]:
            found = self.run.metrics(since=since, points=_POINTS_PER_EVENT)
            is_new = since is not None and found.series
            return found.position, [_event("metrics", dumped(found.to_json()))] if is_new else []

        self._position, events = await self._threads.call(read)
        return events


def _event(name: str, data: str) -> bytes:
    return f"event: {name}\ndata: {data}\n\n".encode()


def _put(queue: asyncio.Queue[bytes | None], event: bytes | None) -> bool:
    """Adds an event; a queue that is full is ended instead."""
    try:
        queue.put_nowait(event)
    except asyncio.QueueFull:
        queue.get_nowait()
        queue.put_nowait(None)
        return False
    return True
