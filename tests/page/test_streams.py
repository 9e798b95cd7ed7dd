"""Server-sent events: what changes reaches everybody, and a hundred browsers cost what one costs."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPResponse
from typing import Any

import pytest

from replicast.errors import FileDamaged
from replicast.page import live as watching
from replicast.page.live import RunWatch, SlotResponse, Slots
from replicast.page.web_server import HttpError, Threads
from tests.page.live import served
from tests.page.prompt_run import PromptRun

EVENTS = "/api/runs/first/events"
SECS = 120.0


@pytest.fixture(autouse=True)
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "POLL_SECS", 0.02)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def watch(run: PromptRun) -> RunWatch:
    return RunWatch("first", run, Threads(8))


def events(response: HTTPResponse) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    for line in response:
        field, _, value = line.decode().strip().partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            yield name, json.loads(value)


def opened(address: str) -> tuple[HTTPConnection, HTTPResponse]:
    connection = HTTPConnection(address.removeprefix("http://"), timeout=SECS)
    connection.request("GET", EVENTS)
    return connection, connection.getresponse()


def test_the_first_event_is_the_whole_status_and_later_ones_what_changed(run: PromptRun) -> None:
    with served(run) as address:
        connection, response = opened(address)
        assert response.getheader("Content-Type") == "text/event-stream; charset=utf-8"
        stream = events(response)
        name, whole = next(stream)
        assert (name, whole["state"], whole["size"]) == ("status", "training", 2)
        run.step = 101
        changed = next(data for name, data in stream if "step 101" in data.get("sentence", ""))
        assert "size" not in changed
        run.train(1)  # Of several, the server may read some before the others are written.
        points = next(data for name, data in stream if name == "metrics")
        assert points["series"]["loss"]["steps"] == [50]
        connection.close()


@pytest.mark.anyio
async def test_a_hundred_streams_read_as_often_as_one(run: PromptRun) -> None:
    async def follow(streams: int) -> int:
        """Reads twenty events with so many streams; returns how often the run was read."""
        run.reads, watch = 0, RunWatch("first", run, Threads(8))

        async def one() -> None:
            async with watch.stream() as queue:
                for _ in range(20):
                    assert await asyncio.wait_for(queue.get(), SECS) is not None
                    run.step += 1

        await asyncio.gather(*(one() for _ in range(streams)))
        watch.stop()
        return run.reads

    assert await follow(100) <= await follow(1) + 5


@pytest.mark.anyio
@pytest.mark.parametrize(("nbytes", "expected"), [(10, "abc"), (6 * 2**20, "abca")])
async def test_what_is_kept_for_others_has_a_bounded_size(
    watch: RunWatch, nbytes: int, expected: str
) -> None:
    read: list[str] = []
    for key in "abca":
        await watch.text(key, lambda key=key: read.append(key) or "x" * nbytes, 1000.0)
    assert "".join(read) == expected


@pytest.mark.anyio
async def test_nobody_reads_a_run_that_nobody_looks_at(run: PromptRun, watch: RunWatch) -> None:
    async with asyncio.timeout(SECS):
        before = len(asyncio.all_tasks())
        async with watch.stream() as queue:
            await queue.get()
        while len(asyncio.all_tasks()) > before:  # Whatever reads the run is a task.
            await asyncio.sleep(0.01)
    assert run.reads


@pytest.mark.anyio
async def test_who_is_too_slow_begins_again(run: PromptRun, watch: RunWatch) -> None:
    async with watch.stream() as slow, watch.stream() as quick:
        for _ in range(40):
            assert await asyncio.wait_for(quick.get(), SECS) is not None
            run.step += 1
        watch.stop()
        assert [slow.get_nowait() for _ in range(slow.qsize())][-1] is None


@pytest.mark.anyio
async def test_a_run_that_cannot_be_read_is_told_and_comes_back(
    run: PromptRun, watch: RunWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged() -> Any:
        raise FileDamaged("run.json", "it is gone")

    async with asyncio.timeout(SECS), watch.stream() as queue:
        await queue.get()
        with monkeypatch.context() as patched:
            patched.setattr(run, "status", damaged)
            assert b'"message":"run.json is damaged: it is gone."' in (await queue.get() or b"")
        assert b'"unreadable":null' in (await queue.get() or b"")
    watch.stop()


@pytest.mark.anyio
async def test_metrics_that_cannot_be_read_hide_no_later_status(
    run: PromptRun, watch: RunWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, failed, reads = asyncio.get_running_loop(), asyncio.Event(), 0

    def damaged(*_: Any, **__: Any) -> Any:
        if run.reads >= reads + 2:  # The second read from now on has begun after the step.
            loop.call_soon_threadsafe(failed.set)
        raise OSError(5, "Input/output error")

    async with asyncio.timeout(SECS), watch.stream() as queue:
        await queue.get()
        with monkeypatch.context() as patched:
            patched.setattr(run, "metrics", damaged)
            run.step, reads = 101, run.reads
            assert b"Input/output error" in (await queue.get() or b"")
            await failed.wait()
        while b"step 101" not in (await queue.get() or b""):
            pass  # A read that took long, as under load, is used again for a while.
    watch.stop()


def test_the_server_ends_its_streams_before_it_ends(run: PromptRun) -> None:
    with ThreadPoolExecutor(1) as threads, served(run) as address:
        connection, response = opened(address)
        stream = events(response)
        next(stream)
        rest = threads.submit(deque, stream)
    rest.result(SECS)
    connection.close()


def test_a_server_has_only_so_many_streams_also_if_all_begin_at_once(
    run: PromptRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "MAX_STREAMS", 2)
    with served(run) as address:
        browsers = [HTTPConnection(address.removeprefix("http://"), timeout=SECS) for _ in range(5)]
        for browser in browsers:
            browser.request("GET", EVENTS)
        assert sorted(browser.getresponse().status for browser in browsers) == [200, 200, 503, 503, 503]
        for browser in browsers:
            browser.close()


@pytest.mark.anyio
async def test_streams_are_limited(watch: RunWatch) -> None:
    slots = Slots(2, "Too many browsers", "Close some")

    def follow() -> SlotResponse:
        slots.take()
        return SlotResponse(slots, watching.events(watch), "text/event-stream")

    # Those that have been accepted count, also before their first byte.
    first, _ = follow(), follow()
    with pytest.raises(HttpError, match="Too many browsers"):
        follow()

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(_message: object) -> None:
        await asyncio.sleep(0)

    await first({"type": "http"}, receive, send)  # Its browser has gone.
    follow()
    with pytest.raises(HttpError, match="Too many browsers"):
        follow()
    watch.stop()
