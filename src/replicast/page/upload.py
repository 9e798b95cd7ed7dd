"""A file on its way in: straight to disk beside the inbox, piece by piece, never whole in memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from starlette.requests import ClientDisconnect, Request

from replicast.files import RunPath, make_durably
from replicast.page.problems import HttpError
from replicast.page.settings import MAX_BODY_BYTES
from replicast.page.threads import Threads
from replicast.strictjson import parse_integer

STALL_SECS = 30.0
"""An upload that makes no progress for so long is given up."""


@asynccontextmanager
async def uploaded(
    request: Request, temporary: RunPath, threads: Threads, max_bytes: int
) -> AsyncIterator[RunPath]:
    """The body of a request in a file, which is gone afterwards."""
    _check_length(request, max_bytes)
    descriptor = await threads.call(lambda: _created(temporary))
    try:
        try:
            received = 0
            async for chunk in pieces(request):
                received += len(chunk)
                if received > max_bytes:
                    raise too_large(max_bytes)
                await threads.call(partial(_write, descriptor, chunk))
        finally:
            await threads.call(partial(os.close, descriptor))
        yield temporary
    finally:  # Removing gigabytes takes time.
        await threads.call(partial(temporary.unlink, missing_ok=True))


async def small_body(request: Request) -> bytes:
    """The body of a request that is a small JSON object."""
    _check_length(request, MAX_BODY_BYTES)
    content = b""
    async for chunk in pieces(request):
        content += chunk
        if len(content) > MAX_BODY_BYTES:
            raise too_large(MAX_BODY_BYTES)
    return content


async def pieces(request: Request) -> AsyncIterator[bytes]:
    """The pieces of a body, each within its time."""
    stream = request.stream()
    while True:
        try:
            chunk = await asyncio.wait_for(anext(stream, None), STALL_SECS)
        except TimeoutError:
            raise HttpError(408, f"Nothing has arrived for {STALL_SECS:g} s") from None
        except ClientDisconnect:
            raise HttpError(400, "The connection was closed before all had arrived") from None
        if chunk is None:
            return
        if chunk:
            yield chunk


def too_large(max_bytes: int) -> HttpError:
    """The answer to a body that is too large."""
    return HttpError(413, "The body is too large", expected=f"at most {max_bytes} bytes")


def _check_length(request: Request, max_bytes: int) -> None:
    try:
        length = parse_integer(request.headers.get("content-length", "0"))
    except ValueError as error:
        raise HttpError(400, f"Content-Length cannot be used: {error}") from error
    if not 0 <= length <= max_bytes:
        raise too_large(max_bytes)


def _created(path: RunPath) -> int:
    make_durably(path.parent)
    return path.open(os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)


def _write(descriptor: int, chunk: bytes) -> None:
    rest = memoryview(chunk)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
