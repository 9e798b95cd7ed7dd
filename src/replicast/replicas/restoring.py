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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from replicast.codec import decode, encode
from replicast.config import host_id
from replicast.core.entries import Saved
from replicast.core.records import Refusal
from replicast.errors import CheckpointError, FileDamaged, JobFailed, ReplicastError, UpdateRefused
from replicast.replicas.exchange import Exchange
from replicast.replicas.position import Position
from replicast.replicas.session import Session
from replicast.storage.checkpoint_files import CheckpointReader, advice
from replicast.storage.checkpoint_format import dtype_of, saved_of
from replicast.storage.checkpoint_tools import differences
from replicast.storage.checkpoints import CheckpointStore, choose
from replicast.tensorfiles import memory_to_fill
from replicast.transport import Parcel, Transport
from replicast.transport.layout import arrays_in, lay_out
from replicast.update.digest import digest_array
from replicast.update.edits import Edit, EditKind
from replicast.update.state import Arrays, State

# How all workers get the bytes of a checkpoint that they restore: each reads them, or worker 0 sends them.
#
# Every worker checks all that it reads or receives against the digests in the manifest, and hears that all
# others have, before any state changes.

PARCEL_BYTES = 1 << 28
"""Variables are sent in parcels of about this size: shared memory must hold one of them."""
_UNSEEN = "does not see the checkpoint"
MOST_AT_ONCE = 1 << 31
"""A larger state is not read at once: it would need memory beside the state that it replaces."""


@dataclass(frozen=True, slots=True)
class Receiver:
    """What a worker needs to take part in a restore."""

    session: Session
    state: State
    transport: Transport

    @property
    def exchange(self) -> Exchange:
        """To agree with the others."""
        return self.session.exchange

    @property
    def rank(self) -> int:
        """Which worker this is."""
        return self.session.rank

    @property
    def secs(self) -> float:
        """How long to wait for another worker."""
        return self.session.timeouts.join_secs


def read_all(
    worker: Receiver, reader: CheckpointReader | None, what: str, told: dict[str, Any]
) -> str | None:
    """Every worker reads the checkpoint. No state changes before all have read and verified all of it.

    Whether all see its directory is not asked first: that would cost every restore on one host a round of
    messages, and spare the workers on worker 0's host only a reading in vain where there are several.
    """
    names: list[str] = told["names"]
    values, problem = ({}, _UNSEEN) if reader is None else _read(worker, reader, names)
    verdicts = worker.exchange.agree(f"{what}/read", problem, worker.secs)
    if reader is None or _UNSEEN in verdicts.values():
        return None
    found = [f"worker {rank} reads: {verdict}" for rank, verdict in verdicts.items() if verdict]
    if found:
        file = reader.path / "state.safetensors"
        return str(FileDamaged(file, f"{'; '.join(found[:3])[:500]}. {advice(reader.path)}"))
    worker.state.apply([Edit(EditKind.ASSIGN, name, {"value": values[name]}) for name in names])
    return ""


def _read(worker: Receiver, reader: CheckpointReader, names: Sequence[str]) -> tuple[Arrays, str]:
    """All variables, in memory of their own, and what is wrong with them."""
    values = _memory_for(worker, names)
    try:
        wrong = [name for name in names if not reader.read_into(name, values[name])]
    except FileDamaged as error:
        return values, error.problem.removesuffix(f". {advice(reader.path)}")
    return values, f"the bytes of {', '.join(wrong[:5])} are not those that were written" if wrong else ""


def _memory_for(worker: Receiver, names: Sequence[str]) -> Arrays:
    """Memory for new variables, which TensorFlow takes over without a copy."""
    shapes = {variable.name: variable for variable in worker.state.schema}
    like = [np.broadcast_to(np.zeros((), dtype_of(shapes[name])), shapes[name].shape) for name in names]
    pieces, nbytes = lay_out(like)
    return dict(zip(names, arrays_in(memory_to_fill(nbytes), pieces), strict=True))


def receive_all(worker: Receiver, reader: CheckpointReader | None, what: str, told: dict[str, Any]) -> str:
    """Worker 0 sends the checkpoint twice. The first time all workers only check it: no state changes.

    The second time each takes what it receives. So nobody needs memory for a second state.
    """
    problem = _transfer(worker, reader, f"{what}/check", told, lambda edits: None)
    if problem:
        return problem
    try:
        problem = _transfer(worker, reader, f"{what}/take", told, worker.state.apply)
    except CheckpointError as error:
        problem = error.problem
    if problem:
        raise JobFailed(
            f"The state is restored in part only, although all workers had received the checkpoint of step "
            f"{told['step']} intact before: {problem}. Start the job again"
        )
    return ""


def _transfer(
    worker: Receiver,
    reader: CheckpointReader | None,
    what: str,
    told: dict[str, Any],
    take: Callable[[list[Edit]], None],
) -> str:
    """Worker 0 sends all variables, in parcels; `take` is called for each that all have received intact."""
    for place, names in enumerate(_batches(worker, told["names"])):
        parcel_is = f"{what}/{place}"
        if reader is not None:
            worker.exchange.tell(parcel_is, encode(_published(worker, reader, parcel_is, names)))
        parcel: Parcel | Refusal = decode(worker.exchange.hear(parcel_is, worker.secs))
        if isinstance(parcel, Refusal):
            if parcel.workers:
                raise CheckpointError(f"Worker 0 could not send the checkpoint: {parcel.problem}")
            return parcel.problem
        values, problem = _received(worker, parcel, names, told["digests"])
        verdicts = worker.exchange.agree(parcel_is, problem, worker.secs)
        found = {rank: verdict for rank, verdict in verdicts.items() if verdict}
        if not found:
            pairs = zip(names, values, strict=True)
            take([Edit(EditKind.ASSIGN, name, {"value": value}) for name, value in pairs])
        worker.transport.release(parcel.id)
        for rank, verdict in found.items():
            raise CheckpointError(f"Worker {rank} has not received the checkpoint intact: {verdict}")
    return ""


def _published(
    worker: Receiver, reader: CheckpointReader, parcel_is: str, names: list[str]
) -> Parcel | Refusal:
    """Worker 0: a parcel with these variables; or what is wrong with the file, or why worker 0 cannot."""
    parcel_id = f"{worker.exchange.name}-{parcel_is.replace('/', '-')}"
    try:
        return worker.transport.publish(parcel_id, [reader.read(name) for name in names])
    except FileDamaged as error:
        return Refusal(str(error))
    except UpdateRefused as error:  # there is no room
        return Refusal(str(error), (0,))


def _received(
    worker: Receiver, parcel: Parcel, names: list[str], digests: Mapping[str, str]
) -> tuple[list[npt.NDArray[Any]], str]:
    """The values of these variables, and what is wrong with them."""
    try:
        values = worker.transport.receive(parcel, worker.secs)
    except UpdateRefused as error:
        return [], str(error)
    pairs = zip(names, values, strict=True)
    wrong = [name for name, value in pairs if digest_array(value) != digests[name]]
    return values, f"{', '.join(wrong[:5])} has other values" if wrong else ""


def _batches(worker: Receiver, names: list[str]) -> Iterator[list[str]]:
    sizes = {variable.name: variable.nbytes for variable in worker.state.schema}
    batch: list[str] = []
    for name in names:
        if batch and sum(sizes[n] for n in batch) + sizes[name] > PARCEL_BYTES:
            yield batch
            batch = []
        batch.append(name)
    if batch:
        yield batch


logger = logging.getLogger("replicast")


@dataclass(frozen=True, slots=True)
class Restored:
    """The restored state."""

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
    """Restores a checkpoint on all workers. All of them call it; blocks until all have the state."""
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
    """All workers read or receive the checkpoint."""
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
    """What all workers must know about a checkpoint."""
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
