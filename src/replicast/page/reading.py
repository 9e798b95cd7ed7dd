"""What can be read of a run: GET."""

from __future__ import annotations

import asyncio
from typing import Any

from replicast.page.context import Context
from replicast.page.requests import (
    LastQuery,
    LogsQuery,
    LookQuery,
    MetricsQuery,
    ValuesQuery,
    row_numbers,
)
from replicast.page.watch import Watch

_RUNNING_SECS, _RESTING_SECS = 2.0, 15.0
_METRICS_SECS = 1.0


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


async def schema(context: Context) -> dict[str, Any]:
    """The variables that an update may change."""
    run = context.watch.run
    return {"variables": await context.watch.read("schema", lambda: run.schema().to_json(), 10.0)}


async def metrics(context: Context) -> dict[str, Any]:
    """The metrics of the training, decimated so that spikes stay visible."""
    run, query = context.watch.run, context.query_as(MetricsQuery)
    key = "metrics", query.since, query.points
    return await context.watch.read(
        key, lambda: run.metrics(query.since, query.points).to_json(), _METRICS_SECS
    )


async def updates(context: Context) -> dict[str, Any]:
    """The last committed updates, in the order in which they are applied."""
    run, last = context.watch.run, context.query_as(LastQuery).last
    found = await context.watch.read(("log", last), lambda: [view.to_json() for view in run.log(last)])
    return {"updates": found}


async def update(context: Context) -> dict[str, Any]:
    """Everything about one update, by its number, its id or the beginning of its id."""
    run, query, which = context.watch.run, context.query_as(LookQuery), context.path["update"]
    if query.exact:
        return await context.read(lambda: run.look(which, query.thoroughly).to_json())
    return await context.read(lambda: run.show(which).to_json())


async def audits(context: Context) -> dict[str, Any]:
    """The last audits, oldest first."""
    run, last = context.watch.run, context.query_as(LastQuery).last
    found = await context.watch.read(("audits", last), lambda: [one.to_json() for one in run.audits(last)])
    return {"audits": found}


async def checkpoints(context: Context) -> dict[str, Any]:
    """The checkpoints that are complete, in the order of their steps."""
    run = context.watch.run
    found = await context.watch.read("checkpoints", lambda: [one.to_json() for one in run.checkpoints()], 3.0)
    return {"checkpoints": found}


async def logs(context: Context) -> dict[str, Any]:
    """The last lines that a worker has printed, oldest first."""
    run, query, worker = context.watch.run, context.query_as(LogsQuery), int(context.path["worker"])
    key = "logs", worker, query.lines, query.attempt
    lines = await context.watch.read(key, lambda: run.log_lines(worker, query.lines, query.attempt))
    return {"worker": worker, "lines": lines}


async def variable(context: Context) -> dict[str, Any]:
    """The values of a variable at one step of the running job, or in the last checkpoint."""
    query, run, name = context.query_as(ValuesQuery), context.watch.run, context.path["variable"]
    rows = row_numbers(query.rows)
    pulled = await context.act(lambda: run.pull(name, rows, query.timeout))
    return pulled.to_json() | {"values": _values(pulled.array)}


def _values(array: Any) -> Any:
    """An array as nested lists of numbers that JSON can say."""
    return (array if array.dtype.kind in "biu" else array.astype("float64")).tolist()
