"""A checkpoint becomes the state of all workers.

    all workers on one host, which see its directory    each reads it, into the memory of its new variables
    else                                                worker 0 reads it, everyone receives it

All training threads are in `restore` together, so they exchange words and bytes directly; what they read or
receive is checked against the digests in the manifest, on every worker.
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

from replicast.checkpoint import (
    CheckpointReader,
    CheckpointStore,
    advice,
    choose,
    differences,
    dtype_of,
)
from replicast.config import host_id
from replicast.edits import Edit, Operation
from replicast.errors import CheckpointError, FileDamaged, JobFailed, ReplicastError
from replicast.mapping import fresh_memory
from replicast.protocol import Member
from replicast.replicas.position import Position
from replicast.state import Arrays
from replicast.transport import Parcel
from replicast.transport.layout import arrays_in, lay_out

logger = logging.getLogger("replicast")

PARCEL_BYTES = 1 << 28
"""Variables travel in parcels of about this size: shared memory must hold one of them."""
MOST_AT_ONCE = 1 << 31
"""A larger state is not read as a whole beside the one that it replaces."""


@dataclass(frozen=True, slots=True)
class Restored:
    """What the state is now.

    Attributes:
        step: How many steps it has been trained.
        position: Where in the data.
        left_out: With `partial`: variables of the model that the checkpoint does not have, or has otherwise.
        holds: The sequence numbers of the updates that are in it.
    """

    step: int
    position: Position
    left_out: tuple[str, ...]
    holds: frozenset[int]


def restore(
    member: Member, store: CheckpointStore, number: int, step: int | None, partial: bool
) -> Restored | None:
    """Gives all workers the state of a checkpoint. All of them call it; blocks until all have it.

    Args:
        member: This worker's part in the protocol.
        store: What worker 0 reads. The others need not see the directory; where they do, they read too.
        number: How often this was called before: the same on all workers.
        step: Which one. Default: the last that is whole; worker 0 says what is wrong with later ones.
        partial: Take what fits.

    Returns:
        What was restored; None when there is no checkpoint and none was asked for.

    Raises:
        CheckpointError: There is none of that step, it is of another model or damaged, or training has begun.
            Nothing has changed then.
    """
    damaged: dict[int, str] = {}
    told: dict[str, Any] | None = None
    for turn in itertools.count():
        what = f"restore/{number}/{turn}"
        reader = _tell_plan(member, store, what, number, step, partial, damaged)
        told = _hear_plan(member, what)
        if told is None:
            break
        problem = _take(member, store, what, reader, told)
        if not problem:
            break
        damaged[told["step"]] = problem  # The same on all workers, who look for another one together.
    if member.channel.rank == 0:
        member.channel.tell(
            f"restore/{number}/stands", str(member.gate.step if told is None else told["step"])
        )
    if told is None:
        return None
    _warn(member, told, damaged)
    member.trying.measures.recall(json.loads(told["measured"]))
    return Restored(
        step=told["step"],
        position=Position(told["epoch"], told["batch"]).at(told["script"]),
        left_out=tuple(told["left_out"]),
        holds=frozenset(range(1, told["sequence"] + 1)) - set(told["later"]),
    )


def _tell_plan(
    member: Member,
    store: CheckpointStore,
    what: str,
    number: int,
    step: int | None,
    partial: bool,
    damaged: dict[int, str],
) -> CheckpointReader | None:
    """Worker 0 says what will be restored, or why nothing can be."""
    if member.channel.rank != 0:
        return None
    reader: CheckpointReader | None = None
    plan: dict[str, Any] | None
    try:
        _check_not_trained(member, number)
        reader = choose(store, step, damaged)
        plan = None if reader is None else _plan(member, reader, partial)
    except (ReplicastError, OSError) as error:
        if reader is not None:
            reader.close()
        reader, plan = None, _described(error)
    member.channel.tell(what, json.dumps(plan))
    return reader


def _hear_plan(member: Member, what: str) -> dict[str, Any] | None:
    timeout_secs = member.patience.begin_secs
    text = member.channel.hear(what, timeout_secs)
    if text is None:
        raise JobFailed(f"worker 0 did not read a checkpoint within {timeout_secs:.0f} s", worker=0)
    told: dict[str, Any] | None = json.loads(text)
    if told is not None and "error" in told:
        raise CheckpointError(told["error"], **told["fields"])
    return told


def _described(error: Exception) -> dict[str, Any]:
    """An error as worker 0 tells it, for all to raise."""
    if not isinstance(error, CheckpointError):
        return {"error": str(error), "fields": {}}
    names = ("path", "step", "variable", "expected", "received", "remedy")
    fields = {name: getattr(error, name) for name in names}
    return {"error": error.problem, "fields": fields | {"path": error.path and str(error.path)}}


def _check_not_trained(member: Member, number: int) -> None:
    """Refused before a state changes, not behind it. Where training stood is worker 0's own word."""
    stood = "0" if number == 1 else member.channel.hear(f"restore/{number - 1}/stands", 0.1)
    if stood is not None and int(stood) != member.gate.step:
        raise CheckpointError(
            "restore() has to come before training",
            expected=f"step {stood}",
            received=f"step {member.gate.step}",
            remedy="Call it before fit or the first boundary; to go back, start the script again",
        )


def _warn(member: Member, told: dict[str, Any], damaged: dict[int, str]) -> None:
    if member.channel.rank == 0:
        for step, problem in sorted(damaged.items()):
            logger.warning(
                "THE CHECKPOINT OF STEP %d IS DAMAGED, that of step %d is restored instead. %s",
                step,
                told["step"],
                problem,
            )


def _take(
    member: Member, store: CheckpointStore, what: str, reader: CheckpointReader | None, told: dict[str, Any]
) -> str:
    """All workers read or receive the checkpoint.

    Returns:
        What is wrong with its bytes, the same on all workers; no state has changed then.
    """
    channel, patience = member.channel, member.patience
    with contextlib.ExitStack() as closing:
        if reader is None:
            reader = _see(store, told)
        if reader is not None:
            closing.enter_context(reader)
        seen = channel.agree(f"{what}/sees", "" if reader is None else "yes", patience.begin_secs)
        if reader is not None and told["nbytes"] <= MOST_AT_ONCE and all(seen.values()):
            return _read_all(member, reader, what, told)
        source = reader if channel.rank == 0 else None
        problem = _check_first(member, source, what, told)
        if not problem:
            _receive_all(member, source, what, told)
        return problem


def _plan(member: Member, reader: CheckpointReader, partial: bool) -> dict[str, Any]:
    """What all workers must know of a checkpoint.

    Raises:
        CheckpointError: It is of another model.
    """
    manifest = reader.manifest
    differing = differences(member.state.schema, manifest.schema)
    if differing and not partial:
        said = "; ".join(f"{d.name}: expected {d.expected}, received {d.received}" for d in differing[:10])
        more = f" and {len(differing) - 10} more" if len(differing) > 10 else ""
        raise CheckpointError(
            f"The checkpoint of step {manifest.step} is of another model ({said}{more}). "
            "partial=True takes what fits"
        )
    differs = {difference.name for difference in differing}
    left_out = [variable.name for variable in member.state.schema if variable.name in differs]
    names = [variable.name for variable in member.state.schema if variable.name not in differs]
    return {
        "host": host_id(os.environ),
        "nbytes": manifest.nbytes,
        "state": manifest.state_digest,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "batch": manifest.batch,
        "script": manifest.extra.get("script"),
        "sequence": manifest.sequence,
        "later": list(manifest.extra.get("committed_for_later", ())),
        "measured": manifest.extra.get("measured", "[]"),
        "names": names,
        "left_out": sorted(left_out),
        "digests": {name: manifest.digests[name] for name in names},
    }


def _see(store: CheckpointStore, told: dict[str, Any]) -> CheckpointReader | None:
    """The same checkpoint, opened by another worker of the same host; None where that cannot be."""
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


def _read_all(member: Member, reader: CheckpointReader, what: str, told: dict[str, Any]) -> str:
    """Every worker reads for itself. No state changes before all have read all of it, and found it right.

    Returns:
        What is wrong with what was read, by any of them.
    """
    names: list[str] = told["names"]
    values = _memory_for(member, names)
    try:
        wrong = [name for name in names if not reader.read_into(name, values[name])]
        problem = f"the bytes of {', '.join(wrong[:5])} are not those that were written" if wrong else ""
    except FileDamaged as error:
        problem = error.problem.removesuffix(f". {advice(reader.path)}")
    verdicts = member.channel.agree(f"{what}/read", problem, member.patience.begin_secs)
    found = [f"worker {worker} reads: {verdict}" for worker, verdict in verdicts.items() if verdict]
    if found:
        file = reader.path / "state.safetensors"
        return str(FileDamaged(file, f"{'; '.join(found[:3])[:500]}. {advice(reader.path)}"))
    member.state.apply([Edit(Operation.ASSIGN, name, {"value": values[name]}) for name in names])
    return ""


def _memory_for(member: Member, names: Sequence[str]) -> Arrays:
    """Memory in which variables can live: TensorFlow takes it over."""
    shapes = {variable.name: variable for variable in member.state.schema}
    like = [np.broadcast_to(np.zeros((), dtype_of(shapes[name])), shapes[name].shape) for name in names]
    pieces, nbytes = lay_out(like)
    return dict(zip(names, arrays_in(fresh_memory(nbytes), pieces), strict=True))


def _check_first(member: Member, reader: CheckpointReader | None, what: str, told: dict[str, Any]) -> str:
    """Worker 0 looks at all bytes before any worker's state changes.

    Returns:
        What is wrong with them.
    """
    if reader is not None:
        problem = ""
        try:
            for name in told["names"]:
                for _ in reader.pieces(name):
                    pass  # Compared with its digest in passing.
        except FileDamaged as error:
            problem = str(error)
        member.channel.tell(f"{what}/checked", problem)
    timeout_secs = member.patience.begin_secs
    said = member.channel.hear(f"{what}/checked", timeout_secs)
    if said is None:
        raise JobFailed(f"worker 0 did not look at the checkpoint within {timeout_secs:.0f} s", worker=0)
    return said


def _receive_all(member: Member, reader: CheckpointReader | None, what: str, told: dict[str, Any]) -> None:
    channel, patience = member.channel, member.patience
    for place, names in enumerate(_batches(member, told["names"])):
        parcel_is = f"{what}/{place}"
        if reader is not None:
            parcel = member.transport.publish(
                f"{channel.name}-{what.replace('/', '-')}-{place}", [reader.read(name) for name in names]
            )
            channel.tell(parcel_is, json.dumps(parcel.to_json()))
        text = channel.hear(parcel_is, patience.begin_secs)
        if text is None:
            raise JobFailed(
                f"worker 0 did not send a checkpoint within {patience.begin_secs:.0f} s", worker=0
            )
        parcel = Parcel.from_json(json.loads(text))
        values = member.transport.receive(parcel, patience.begin_secs)
        edits = [Edit(Operation.ASSIGN, name, {"value": v}) for name, v in zip(names, values, strict=True)]
        member.state.apply(edits)
        found = member.state.digests(names)
        wrong = [name for name in names if found[name] != told["digests"][name]]
        verdicts = channel.agree(parcel_is, ",".join(wrong), patience.begin_secs)
        member.transport.release(parcel.id)
        for worker, verdict in verdicts.items():
            if verdict:
                raise CheckpointError(
                    f"Worker {worker} has other values than the checkpoint", variable=verdict.split(",")[0]
                )


def _batches(member: Member, names: list[str]) -> Iterator[list[str]]:
    sizes = {variable.name: variable.nbytes for variable in member.state.schema}
    batch: list[str] = []
    for name in names:
        if batch and sum(sizes[n] for n in batch) + sizes[name] > PARCEL_BYTES:
            yield batch
            batch = []
        batch.append(name)
    if batch:
        yield batch
