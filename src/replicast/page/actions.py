"""What can be done to a run: POST. Each request has been checked for the token."""

from __future__ import annotations

from typing import Any

from replicast.client import Examination, Run
from replicast.client.uploads import new_upload, update_in
from replicast.files import RunPath
from replicast.page.context import Context
from replicast.page.requests import PushQuery, RateBody, RevertBody, WaitBody
from replicast.page.upload import uploaded
from replicast.update.edits import EditKind
from replicast.update.update import Update


async def push(context: Context) -> dict[str, Any]:
    """Hands the update in the body to the job; with `dry_run` only says what it would do."""
    query = context.query_as(PushQuery)
    temporary = new_upload(context.watch.run.path or context.watch.run.where)
    limit = context.settings.max_upload_bytes

    def propose(path: RunPath) -> dict[str, Any]:
        update = update_in(
            path,
            operation=None if query.operation is None else EditKind(query.operation),
            weight=query.weight,
            id=query.id,
            note=query.note,
            author=_author(context, query.author),
            reset_slots=query.reset_slots,
            allow_nonfinite=query.allow_nonfinite,
        )
        return _pushed(context, update, query)

    async with uploaded(context.request, temporary, context.runs.readers, limit) as path:
        return await context.act(lambda: propose(path))


async def set_learning_rate(context: Context) -> dict[str, Any]:
    """Assigns a learning rate on every worker; with `dry_run` only says what it would do."""
    body = context.body_as(RateBody)
    update = Update(id=body.id, note=body.note or "", author=_author(context, body.author))
    return await context.act(lambda: _pushed(context, update.assign(body.variable, body.value), body))


async def withdraw(context: Context) -> dict[str, Any]:
    """Takes back an update that is not committed yet."""
    run, which = context.watch.run, context.path["update"]
    return await context.act(lambda: run.withdraw(which).to_json())


async def revert(context: Context) -> dict[str, Any]:
    """Pushes a new update that undoes one that was applied; with `dry_run` only says what it would do."""
    run, which, body = context.watch.run, context.path["update"], context.body_as(RevertBody)
    author = _author(context, body.author)
    found = await context.act(
        lambda: run.revert(which, body.note, body.dry_run, body.force, body.next_start, author)
    )
    if isinstance(found, Examination):
        return found.to_json()
    return {"id": found.id, "number": found.number, "warning": found.warning}


async def audit(context: Context) -> dict[str, Any]:
    """Asks the job for an audit at its next step, and waits for the report."""
    run, secs, author = _asked(context)
    return await context.act(lambda: run.audit(secs, author).to_json())


async def checkpoint(context: Context) -> dict[str, Any]:
    """Asks the job for a checkpoint, and waits until it is complete."""
    run, secs, author = _asked(context)
    return {"step": await context.act(lambda: run.checkpoint(secs, author))}


async def stop(context: Context) -> dict[str, Any]:
    """Asks the job to save a checkpoint and to end, and waits until it has."""
    run, secs, author = _asked(context)
    return {"step": await context.act(lambda: run.stop(secs, author))}


def _pushed(context: Context, update: Update, asked: PushQuery | RateBody) -> dict[str, Any]:
    run, trial = context.watch.run, asked.trial()
    if asked.dry_run:
        return run.examine(update).to_json()
    pushed = run.push(update, asked.at_step, trial, asked.next_start)
    return {"id": pushed.id, "number": pushed.number, "warning": pushed.warning}


def _asked(context: Context) -> tuple[Run, float, str]:
    """The run, how long to wait for its job, and who asks."""
    body = context.body_as(WaitBody)
    return context.watch.run, body.timeout_secs, _author(context, body.author)


def _author(context: Context, given: str | None) -> str:
    return given if given else f"page@{context.peer}"
