"""Restores a checkpoint as the state of all workers.

    all workers on one host, which see its directory    each reads it, into the memory of its new variables
    otherwise                                           worker 0 reads it and sends it to all, twice

All training threads are in `restore` together, so they exchange messages and bytes directly. Every worker
checks all that it reads or receives against the digests in the manifest, and hears that all others have,
before any state changes: a restore that is refused has changed nothing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
from dataclasses import dataclass
from typing import Any

from replicast.config import host_id
from replicast.core.entries import Saved
from replicast.errors import CheckpointError, ReplicastError
from replicast.replicas.position import Position
from replicast.replicas.receiving import MOST_AT_ONCE, Receiver, read_all, receive_all
from replicast.runtime import Session
from replicast.storage.checkpoint import (
    CheckpointReader,
    CheckpointStore,
    choose,
    differences,
    saved_of,
)
from replicast.transport import Transport
from replicast.update.state import State

logger = logging.getLogger("replicast")


@dataclass(frozen=True, slots=True)
class Restored:
    """The restored state.

    Attributes:
        step: The number of steps it has been trained.
        position: The position in the data.
        left_out: With `partial`: variables of the model that are missing in the checkpoint, or have another
            shape or dtype there.
        holds: The sequence numbers of the updates that it contains.
    """

    step: int
    position: Position
    left_out: tuple[str, ...]
    holds: frozenset[int]


def restore(
    session: Session,
    state: State,
    transport: Transport,
    store: CheckpointStore,
    number: int,
    step: int | None,
    partial: bool,
) -> Restored | None:
    """Restores a checkpoint on all workers. All of them call it; blocks until all have the state.

    Args:
        session: This worker's part in the job.
        state: The variables.
        transport: Carries bytes to workers that do not see the directory.
        store: Read by worker 0, and by the other workers if they see the directory.
        number: The number of this call, the same on all workers.
        step: The checkpoint's step. Default: the last intact one; worker 0 warns about damaged later ones.
        partial: Restore only the variables that fit.

    Returns:
        What was restored; None if there is no checkpoint and no step was given.

    Raises:
        CheckpointError: There is no checkpoint of that step, it belongs to another model or is damaged, a
            worker could not receive it, or training has begun. Nothing has changed.
    """
    worker = Receiver(session, state, transport)
    _check_not_begun(session)
    damaged: dict[int, str] = {}
    told: dict[str, Any] | None = None
    saved: Saved | None = None
    for turn in itertools.count():
        what = f"restore/{number}/{turn}"
        reader = _tell_plan(worker, store, what, step, partial, damaged)
        saved = None if reader is None else saved_of(reader.manifest)
        told = _hear_plan(worker, what)
        if told is None:
            break
        problem = _take(worker, store, what, reader, told)
        if not problem:
            break
        damaged[told["step"]] = problem  # The same on all workers, which try another checkpoint together.
    if told is None:
        return None
    _warn(worker, told, damaged)
    holds = frozenset(told["holds"])
    session.replica.measures.recall(json.loads(told["measured"]))
    session.start_from(saved or Saved(told["step"], 0, holds, (), None))
    return Restored(
        step=told["step"],
        position=Position(told["epoch"], told["batch"]).at(told["script"]),
        left_out=tuple(told["left_out"]),
        holds=holds,
    )


def _tell_plan(
    worker: Receiver,
    store: CheckpointStore,
    what: str,
    step: int | None,
    partial: bool,
    damaged: dict[int, str],
) -> CheckpointReader | None:
    """Worker 0 tells the others what will be restored, or why nothing can be."""
    if worker.rank != 0:
        return None
    reader: CheckpointReader | None = None
    plan: dict[str, Any] | None
    try:
        reader = choose(store, step, damaged)
        plan = None if reader is None else _plan(worker, reader, partial)
    except (ReplicastError, OSError) as error:
        if reader is not None:
            reader.close()
        reader, plan = None, _described(error)
    worker.exchange.tell(what, json.dumps(plan))
    return reader


def _hear_plan(worker: Receiver, what: str) -> dict[str, Any] | None:
    told: dict[str, Any] | None = json.loads(worker.exchange.hear(what, worker.secs))
    if told is not None and "error" in told:
        raise CheckpointError(told["error"], **told["fields"])
    return told


def _described(error: Exception) -> dict[str, Any]:
    """An error in the form that worker 0 sends, for all to raise."""
    if not isinstance(error, CheckpointError):
        return {"error": str(error), "fields": {}}
    names = ("path", "step", "variable", "expected", "received", "remedy")
    fields = {name: getattr(error, name) for name in names}
    return {"error": error.problem, "fields": fields | {"path": error.path and str(error.path)}}


def _check_not_begun(session: Session) -> None:
    """Raises if training has begun, before any state changes."""
    if session.begun:
        raise CheckpointError(
            "restore() must be called before training",
            expected="no fit, boundary, sync, save or audit before it",
            received=f"step {session.step}",
            remedy="Call it first; to go back to a checkpoint later, restart the script",
        )


def _warn(worker: Receiver, told: dict[str, Any], damaged: dict[int, str]) -> None:
    if worker.rank == 0:
        for step, problem in sorted(damaged.items()):
            logger.warning(
                "THE CHECKPOINT OF STEP %d IS DAMAGED; step %d is restored instead. %s",
                step,
                told["step"],
                problem,
            )


def _take(
    worker: Receiver,
    store: CheckpointStore,
    what: str,
    reader: CheckpointReader | None,
    told: dict[str, Any],
) -> str:
    """All workers read or receive the checkpoint.

    Returns:
        What is wrong with its bytes, the same on all workers; if anything is, no state has changed.
    """
    with contextlib.ExitStack() as closing:
        if reader is None:
            reader = _see(store, told)
        if reader is not None:
            closing.enter_context(reader)
        problem = read_all(worker, reader, what, told) if told["nbytes"] <= MOST_AT_ONCE else None
        if problem is not None:
            return problem
        return receive_all(worker, reader if worker.rank == 0 else None, what, told)


def _plan(worker: Receiver, reader: CheckpointReader, partial: bool) -> dict[str, Any]:
    """What all workers must know about a checkpoint.

    Raises:
        CheckpointError: It belongs to another model.
    """
    manifest = reader.manifest
    differing = differences(worker.state.schema, manifest.schema)
    if differing and not partial:
        said = "; ".join(f"{d.name}: expected {d.expected}, received {d.received}" for d in differing[:10])
        more = f" and {len(differing) - 10} more" if len(differing) > 10 else ""
        raise CheckpointError(
            f"The checkpoint of step {manifest.step} is of another model ({said}{more}). "
            "partial=True restores the variables that fit"
        )
    differs = {difference.name for difference in differing}
    left_out = [variable.name for variable in worker.state.schema if variable.name in differs]
    names = [variable.name for variable in worker.state.schema if variable.name not in differs]
    return {
        "host": host_id(os.environ),
        "nbytes": manifest.nbytes,
        "state": manifest.state_digest,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "batch": manifest.batch,
        "script": manifest.script,
        "holds": sorted(saved_of(manifest).holds),
        "measured": manifest.measured,
        "names": names,
        "left_out": sorted(left_out),
        "digests": {name: manifest.digests[name] for name in names},
    }


def _see(store: CheckpointStore, told: dict[str, Any]) -> CheckpointReader | None:
    """Opens the same checkpoint on another worker of the same host; None if that is not possible."""
    if told["host"] != host_id(os.environ):
        return None
    try:
        reader = store.open(told["step"])
    except (ReplicastError, OSError):
        return None
    if reader.manifest.state_digest != told["state"]:
        reader.close()
        return None
    return reader
