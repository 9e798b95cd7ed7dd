"""Restores a checkpoint as the state of all workers.

    all workers on one host, which see its directory    each reads it, into the memory of its new variables
    otherwise                                           worker 0 reads it and sends it to all

All training threads are in `restore` together, so they exchange messages and bytes directly. Every worker
checks what it reads or receives against the digests in the manifest.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from replicast.config import host_id
from replicast.core.entries import Saved
from replicast.errors import CheckpointError, FileDamaged, ReplicastError
from replicast.mapping import fresh_memory
from replicast.replicas.position import Position
from replicast.runtime import Exchange, Session
from replicast.runtime.codec import decode, encode
from replicast.storage.checkpoint import (
    CheckpointReader,
    CheckpointStore,
    advice,
    choose,
    differences,
    dtype_of,
    saved_of,
)
from replicast.transport import Transport
from replicast.transport.layout import arrays_in, lay_out
from replicast.update.edits import Edit, Operation
from replicast.update.state import Arrays, State

logger = logging.getLogger("replicast")

PARCEL_BYTES = 1 << 28
"""Variables are sent in parcels of about this size: shared memory must hold one of them."""
MOST_AT_ONCE = 1 << 31
"""A larger state is not read at once: it would need memory beside the state that it replaces."""


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


@dataclass(frozen=True, slots=True)
class _Worker:
    """What a worker needs to take part in a restore."""

    session: Session
    state: State
    transport: Transport

    @property
    def exchange(self) -> Exchange:
        return self.session.exchange

    @property
    def rank(self) -> int:
        return self.session.rank

    @property
    def secs(self) -> float:
        return self.session.timeouts.join_secs


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
        CheckpointError: There is no checkpoint of that step, it belongs to another model or is damaged, or
            training has begun. Nothing has changed.
    """
    worker = _Worker(session, state, transport)
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
    worker: _Worker,
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


def _hear_plan(worker: _Worker, what: str) -> dict[str, Any] | None:
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


def _warn(worker: _Worker, told: dict[str, Any], damaged: dict[int, str]) -> None:
    if worker.rank == 0:
        for step, problem in sorted(damaged.items()):
            logger.warning(
                "THE CHECKPOINT OF STEP %d IS DAMAGED; step %d is restored instead. %s",
                step,
                told["step"],
                problem,
            )


def _take(
    worker: _Worker, store: CheckpointStore, what: str, reader: CheckpointReader | None, told: dict[str, Any]
) -> str:
    """All workers read or receive the checkpoint.

    Returns:
        What is wrong with its bytes, the same on all workers; if anything is, no state has changed.
    """
    exchange = worker.exchange
    with contextlib.ExitStack() as closing:
        if reader is None:
            reader = _see(store, told)
        if reader is not None:
            closing.enter_context(reader)
        seen = exchange.agree(f"{what}/sees", "" if reader is None else "yes", worker.secs)
        if reader is not None and told["nbytes"] <= MOST_AT_ONCE and all(seen.values()):
            return _read_all(worker, reader, what, told)
        source = reader if worker.rank == 0 else None
        problem = _check_first(worker, source, what, told)
        if not problem:
            _receive_all(worker, source, what, told)
        return problem


def _plan(worker: _Worker, reader: CheckpointReader, partial: bool) -> dict[str, Any]:
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


def _read_all(worker: _Worker, reader: CheckpointReader, what: str, told: dict[str, Any]) -> str:
    """Every worker reads the checkpoint. No state changes before all have read and verified all of it.

    Returns:
        What is wrong with the bytes that any worker has read.
    """
    names: list[str] = told["names"]
    values = _memory_for(worker, names)
    try:
        wrong = [name for name in names if not reader.read_into(name, values[name])]
        problem = f"the bytes of {', '.join(wrong[:5])} are not those that were written" if wrong else ""
    except FileDamaged as error:
        problem = error.problem.removesuffix(f". {advice(reader.path)}")
    verdicts = worker.exchange.agree(f"{what}/read", problem, worker.secs)
    found = [f"worker {rank} reads: {verdict}" for rank, verdict in verdicts.items() if verdict]
    if found:
        file = reader.path / "state.safetensors"
        return str(FileDamaged(file, f"{'; '.join(found[:3])[:500]}. {advice(reader.path)}"))
    worker.state.apply([Edit(Operation.ASSIGN, name, {"value": values[name]}) for name in names])
    return ""


def _memory_for(worker: _Worker, names: Sequence[str]) -> Arrays:
    """Memory for new variables, which TensorFlow takes over without a copy."""
    shapes = {variable.name: variable for variable in worker.state.schema}
    like = [np.broadcast_to(np.zeros((), dtype_of(shapes[name])), shapes[name].shape) for name in names]
    pieces, nbytes = lay_out(like)
    return dict(zip(names, arrays_in(fresh_memory(nbytes), pieces), strict=True))


def _check_first(worker: _Worker, reader: CheckpointReader | None, what: str, told: dict[str, Any]) -> str:
    """Worker 0 checks all bytes before any worker's state changes.

    Returns:
        What is wrong with them.
    """
    if reader is not None:
        problem = ""
        try:
            for name in told["names"]:
                for _ in reader.pieces(name):
                    pass  # The reader compares the digest.
        except FileDamaged as error:
            problem = str(error)
        worker.exchange.tell(f"{what}/checked", problem)
    return worker.exchange.hear(f"{what}/checked", worker.secs)


def _receive_all(worker: _Worker, reader: CheckpointReader | None, what: str, told: dict[str, Any]) -> None:
    exchange, transport = worker.exchange, worker.transport
    for place, names in enumerate(_batches(worker, told["names"])):
        parcel_is = f"{what}/{place}"
        if reader is not None:
            parcel_id = f"{exchange.name}-{what.replace('/', '-')}-{place}"
            parcel = transport.publish(parcel_id, [reader.read(name) for name in names])
            exchange.tell(parcel_is, encode(parcel))
        parcel = decode(exchange.hear(parcel_is, worker.secs))
        values = transport.receive(parcel, worker.secs)
        edits = [Edit(Operation.ASSIGN, name, {"value": v}) for name, v in zip(names, values, strict=True)]
        worker.state.apply(edits)
        found = worker.state.digests(names)
        wrong = [name for name in names if found[name] != told["digests"][name]]
        verdicts = exchange.agree(parcel_is, ",".join(wrong), worker.secs)
        transport.release(parcel.id)
        for rank, verdict in verdicts.items():
            if verdict:
                raise CheckpointError(
                    f"Worker {rank} has other values than the checkpoint", variable=verdict.split(",")[0]
                )


def _batches(worker: _Worker, names: list[str]) -> Iterator[list[str]]:
    sizes = {variable.name: variable.nbytes for variable in worker.state.schema}
    batch: list[str] = []
    for name in names:
        if batch and sum(sizes[n] for n in batch) + sizes[name] > PARCEL_BYTES:
            yield batch
            batch = []
        batch.append(name)
    if batch:
        yield batch
