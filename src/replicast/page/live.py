"""One reader per run for all who look at it: a hundred browsers cost the disk what one costs."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from replicast.client import Run
from replicast.client.directory import DirectoryRun, runs_below
from replicast.files import RunPath
from replicast.page.web_server import MAX_FILES, MAX_STREAMS, HttpError, Threads, dumped, http_error

POLL_SECS = 1.0
_T = TypeVar("_T")
_MAX_KEPT, _MAX_KEPT_BYTES = 64, 16 * 2**20
_MAX_BEHIND = 32
_POINTS_PER_EVENT = 500
_COSTLY = 10.0  # What took a second to read is kept for ten: reading never takes more than a tenth of a core.
_CLOCK = {"time"}  # Parts of the status that change by themselves, and are no reason for an event.


@dataclass(slots=True)
class _Kept:
    task: asyncio.Task[Any]
    max_age: float
    read_at: float
    nbytes: int = 0  # Of its text, once it is read.


class RunWatch:
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
            task = asyncio.ensure_future(self._threads.call(act))
            kept = self._kept[key] = _Kept(task, max_age, loop.time())
            task.add_done_callback(partial(self._was_read, kept, loop))
        self._kept.move_to_end(key)
        result: _T = await asyncio.shield(kept.task)
        return result

    async def text(self, key: Any, act: Callable[[], Any], max_age: float = POLL_SECS) -> bytes:
        return await self.read(key, lambda: dumped(act()).encode(), max_age)

    def _was_read(self, kept: _Kept, loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any]) -> None:
        took, kept.read_at = loop.time() - kept.read_at, loop.time()
        kept.max_age = max(kept.max_age, _COSTLY * took) if kept.max_age else 0.0
        # `exception` marks it as seen; asyncio would log it if nobody awaits the task.
        if not task.cancelled() and task.exception() is None and isinstance(task.result(), bytes):
            kept.nbytes = len(task.result())
        nbytes = sum(one.nbytes for one in self._kept.values())
        for key in list(self._kept):  # What was asked for longest ago comes first.
            if len(self._kept) <= _MAX_KEPT and nbytes <= _MAX_KEPT_BYTES:
                break
            nbytes -= self._kept.pop(key).nbytes

    async def status(self) -> dict[str, Any]:
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
            status = {"unreadable": None, **await self.status()}
            metrics = await self._threads.call(self._new_metrics)
        except Exception as error:
            status, metrics = {"unreadable": http_error(error).fields}, []
        return [*await self._threads.call(lambda: self._changed(status)), *metrics]

    def _changed(self, status: dict[str, Any]) -> list[bytes]:
        """An event with the parts of the status that differ from the last one. Blocks."""
        parts = {name: f"{dumped(name)}:{dumped(value)}" for name, value in status.items()}
        changed = {name: text for name, text in parts.items() if self._parts.get(name) != text}
        self._parts = self._parts | parts  # A new one: the event loop may be reading the old one.
        return [_event("status", "{" + ",".join(changed.values()) + "}")] if changed.keys() - _CLOCK else []

    def _new_metrics(self) -> list[bytes]:
        """An event with what was written since the last look. Blocks."""
        since, found = self._position, self.run.metrics(since=self._position, points=_POINTS_PER_EVENT)
        self._position = found.position
        return [_event("metrics", dumped(found.to_json()))] if since is not None and found.series else []


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


# Answers in pieces: server-sent events, and large values. Each holds a slot until its end.

QUIET_SECS = 15.0  # Then a comment shows both sides that the connection is alive.


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
        self._free += 1


class SlotResponse(StreamingResponse):
    """An answer that gives its slot back at its end, also when it ends before its first piece."""

    def __init__(self, slots: Slots, pieces: AsyncIterator[bytes], media_type: str, **more: Any) -> None:
        super().__init__(pieces, media_type=media_type, **more)
        self._slots = slots

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._slots.give_back()


async def events(watch: RunWatch) -> AsyncIterator[bytes]:
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


# Which runs are served: one run directory, or all in a directory. Only what is listed can be named.

_READERS = 8
_ACTORS = 16

Find = Callable[[], Mapping[str, Run]]  # The runs that there are, by name.


class Runs:
    """The runs that are served, each with its one reader."""

    def __init__(self, find: Find) -> None:
        self._find = find
        self.readers = Threads(_READERS)
        self.actors = Threads(_ACTORS)
        self.streams = Slots(MAX_STREAMS, "Too many browsers follow this server", "Close some")
        self.files = Slots(MAX_FILES, "Too many files of values are being sent", "Try again later")
        self._watches: dict[str, RunWatch] = {}

    async def all(self) -> list[RunWatch]:
        found = await self.readers.call(self._find)
        for name in [name for name, watch in self._watches.items() if found.get(name) is not watch.run]:
            self._watches.pop(name).stop()
        for name, run in found.items():
            if name not in self._watches:
                self._watches[name] = RunWatch(name, run, self.readers)
        return [self._watches[name] for name in sorted(found)]

    async def named(self, name: str) -> RunWatch:
        # At every request: somebody may have put a link where the run was, or removed it.
        path = self._watches[name].run.path if name in self._watches else None
        if path is None or not await self.readers.call(path.is_dir):
            await self.all()
        if name not in self._watches:
            raise HttpError(404, "There is no run with this name", received=name, remedy="See /api/runs")
        return self._watches[name]

    def stop(self) -> None:
        for watch in self._watches.values():
            watch.stop()


def runs_in(path: Path) -> Find:
    """Finds the run at a path, or else the runs in the directory that it names."""
    opened: dict[RunPath, Run] = {}

    def find() -> dict[str, Run]:
        places = runs_below(RunPath(path.resolve()))
        return {place.name: opened.setdefault(place, DirectoryRun(place)) for place in places}

    return find
