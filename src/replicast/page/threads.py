"""Blocking calls in daemon threads: one that waits for a job does not keep the server from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

_T = TypeVar("_T")


class Threads:
    """Runs blocking calls, at most so many at a time; further ones wait."""

    def __init__(self, most: int) -> None:
        self._slots = asyncio.Semaphore(most)

    async def call(self, act: Callable[[], _T]) -> _T:
        """Runs `act` in a thread, and returns or raises what it does."""
        async with self._slots:
            loop = asyncio.get_running_loop()
            future: asyncio.Future[_T] = loop.create_future()
            threading.Thread(target=_run, args=(act, loop, future), name="page-call", daemon=True).start()
            return await future


def _run(act: Callable[[], Any], loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any]) -> None:
    result, error = None, None
    try:
        result = act()
    except BaseException as raised:
        error = raised

    def settle() -> None:
        if future.done():  # Nobody waits any more.
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    if not loop.is_closed():
        loop.call_soon_threadsafe(settle)
