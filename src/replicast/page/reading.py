"""What can be read of a run: GET."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

from starlette.responses import Response

from replicast.client import Pulled, UpdateView
from replicast.errors import RequestRefused
from replicast.page.context import Context
from replicast.page.events import SlotResponse
from replicast.page.problems import HttpError
from replicast.page.requests import (
    LastQuery,
    LogsQuery,
    LookQuery,
    MetricsQuery,
    ValuesQuery,
    rank_of,
    row_numbers,
)
from replicast.page.settings import MAX_DETAILS_BYTES, MAX_EDITS, MAX_JSON_BYTES, MAX_VALUES_BYTES
from replicast.page.watch import Watch

_RUNNING_SECS, _RESTING_SECS = 2.0, 15.0
_PIECE_BYTES = 256 * 1024


async def list_runs(context: Context) -> list[dict[str, Any]]:
    """All runs, each in a few words."""
    return list(await asyncio.gather(*(briefly(context, watch) for watch in await context.runs.all())))


async def brief(context: Context) -> dict[str, Any]:
    """How a run is, in a few words."""
    return await briefly(context, context.watch)


async def briefly(context: Context, watch: Watch) -> dict[str, Any]:
    """How a run is, in a few words; read less often while it rests."""
    found: dict[str, Any] = await watch.read("brief", lambda: watch.run.brief().to_json(), _RUNNING_SECS)
    if not found["running"]:
        watch.keep("brief", _RESTING_SECS)
    return {"name": watch.name, "actions": context.settings.token is not None, **found}


async def status(context: Context) -> dict[str, Any]:
    """Workers, metrics, what is under way, updates and what waits."""
    return await context.watch.status()


async def schema(context: Context) -> bytes:
    """The variables that an update may change."""
    run = context.watch.run
    return await context.watch.text("schema", lambda: {"variables": run.schema().to_json()}, 10.0)


async def metrics(context: Context) -> bytes:
    """The metrics of the training, decimated so that spikes stay visible."""
    run, query = context.watch.run, context.query_as(MetricsQuery)
    key = "metrics", query.since, query.points
    return await context.watch.text(key, lambda: run.metrics(query.since, query.points).to_json())


async def updates(context: Context) -> bytes:
    """The last committed updates, in the order in which they are applied."""
    run, last = context.watch.run, context.query_as(LastQuery).last
    return await context.watch.text(("log", last), lambda: {"updates": _listed(run.log(last))})


def _listed(views: list[UpdateView]) -> list[dict[str, Any]]:
    """Updates as JSON values. Where they have very many edits, those of the latest ones are told."""
    told, left = [], MAX_EDITS
    for view in reversed(views):
        left_out = len(view.edits) if len(view.edits) > left else 0
        view = replace(view, edits=()) if left_out else view
        left -= len(view.edits)
        told.append(view.to_json() | {"edits_left_out": left_out})
    return told[::-1]


async def update(context: Context) -> dict[str, Any]:
    """Everything about one update, by its number, its id or the beginning of its id."""
    run, query, which = context.watch.run, context.query_as(LookQuery), context.path["update"]
    if query.exact:
        return await context.read(lambda: run.look(which, query.thoroughly).to_json())
    return await context.read(lambda: run.show(which, MAX_DETAILS_BYTES).to_json())


async def audits(context: Context) -> bytes:
    """The last audits, oldest first."""
    run, last = context.watch.run, context.query_as(LastQuery).last
    key = "audits", last
    return await context.watch.text(key, lambda: {"audits": [one.to_json() for one in run.audits(last)]})


async def checkpoints(context: Context) -> bytes:
    """The checkpoints that are complete, in the order of their steps."""
    run = context.watch.run
    return await context.watch.text(
        "checkpoints", lambda: {"checkpoints": [one.to_json() for one in run.checkpoints()]}, 3.0
    )


async def logs(context: Context) -> bytes:
    """The last lines that a worker has printed, oldest first."""
    run, query = context.watch.run, context.query_as(LogsQuery)
    worker = rank_of(context.path["worker"])
    key = "logs", worker, query.lines, query.attempt
    return await context.watch.text(
        key, lambda: {"worker": worker, "lines": run.log_lines(worker, query.lines, query.attempt)}
    )


async def variable(context: Context) -> dict[str, Any] | Response:
    """The values of a variable at one step of the running job, or in the last checkpoint."""
    query, run, name = context.query_as(ValuesQuery), context.watch.run, context.path["variable"]
    rows, is_file = row_numbers(query.rows), query.format == "safetensors"
    files, most = context.runs.files, MAX_VALUES_BYTES if is_file else MAX_JSON_BYTES

    def read() -> Pulled:
        try:
            return run.pull(name, rows, query.timeout, most)
        except RequestRefused as error:
            larger = "" if is_file else ", or add format=safetensors"
            raise HttpError(422, str(error), remedy=f"Name rows, as in rows=0-99{larger}") from error

    if not is_file:
        return await context.act(lambda: _with_values(read()))
    files.take()
    try:
        return SlotResponse(files, _pieces(await context.act(read)), "application/octet-stream")
    except BaseException:
        files.give_back()
        raise


async def _pieces(pulled: Pulled) -> AsyncIterator[bytes]:
    for chunk in pulled.file_chunks():
        for start in range(0, len(chunk), _PIECE_BYTES):
            yield bytes(chunk[start : start + _PIECE_BYTES])


def _with_values(pulled: Pulled) -> dict[str, Any]:
    """An array as nested lists of numbers that JSON can say."""
    array = pulled.array if pulled.array.dtype.kind in "biu" else pulled.array.astype("float64")
    return pulled.to_json() | {"values": array.tolist()}
