"""A checkpoint becomes the state of all workers.

    all workers on one host, which see its directory    each reads it, into the memory of its new variables
    else                                                worker 0 reads it, everyone receives it

All training threads are in `restore` together, so they exchange words and bytes directly; what they read or
receive is checked against the digests in the manifest, on every worker.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from replicast.checkpoint import (
    CheckpointReader,
    CheckpointStore,
    Manifest,
    differences,
    dtype_of,
)
from replicast.config import host_id
from replicast.digest import digest_array
from replicast.edits import Edit, Operation
from replicast.errors import CheckpointError, FileDamaged, JobFailed, ReplicastError
from replicast.protocol import Member
from replicast.replicas.position import Position
from replicast.state import Arrays
from replicast.transport import Parcel
from replicast.transport.layout import arrays_in, lay_out
from replicast.transport.mapping import fresh_memory

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
        step: Which one. Default: the last.
        partial: Take what fits.

    Returns:
        What was restored; None when there is no checkpoint and none was asked for.

    Raises:
        CheckpointError: There is none of that step, or it is of another model.
        FileDamaged: Its bytes are not what was written.
    """
    channel, patience = member.channel, member.patience
    reader: CheckpointReader | None = None
    if channel.rank == 0:
        reader, plan = _plan(member, store, step, partial)
        channel.tell(f"restore/{number}", json.dumps(plan))
    text = channel.hear(f"restore/{number}", patience.begin_secs)
    if text is None:
        raise JobFailed(f"worker 0 did not read a checkpoint within {patience.begin_secs:.0f} s", worker=0)
    told = json.loads(text)
    if told is None:
        return None
    if "error" in told:
        raise CheckpointError(told["error"])
    with contextlib.ExitStack() as closing:
        if reader is None:
            reader = _see(store, told)
        if reader is not None:
            closing.enter_context(reader)
        seen = channel.agree(f"restore/{number}/sees", "" if reader is None else "yes", patience.begin_secs)
        at_once = told["nbytes"] <= MOST_AT_ONCE and all(seen.values())
        if reader is not None and at_once:
            _read_all(member, reader, number, told)
        else:
            source = reader if channel.rank == 0 else None
            _check_first(member, source, number, told)
            _receive_all(member, source, number, told)
    return Restored(
        step=told["step"],
        position=Position(told["epoch"], told["batch"]),
        left_out=tuple(told["left_out"]),
        holds=frozenset(range(1, told["sequence"] + 1)) - set(told["later"]),
    )


def _plan(
    member: Member, store: CheckpointStore, step: int | None, partial: bool
) -> tuple[CheckpointReader | None, dict[str, Any] | None]:
    """Worker 0's word on what will be restored, or why nothing can be."""
    try:
        last = store.last()
        if step is None and last is None:
            return None, None
        reader = store.open(step if step is not None else _step_of(last))
    except (ReplicastError, OSError) as error:
        return None, {"error": str(error)}
    manifest = reader.manifest
    differing = differences(member.state.schema, manifest.schema)
    if differing and not partial:
        reader.close()
        said = "; ".join(f"{d.name}: expected {d.expected}, received {d.received}" for d in differing[:10])
        more = f" and {len(differing) - 10} more" if len(differing) > 10 else ""
        return None, {
            "error": f"The checkpoint of step {manifest.step} is of another model ({said}{more}). "
            "partial=True takes what fits"
        }
    left_out = {difference.name for difference in differing}
    names = [variable.name for variable in member.state.schema if variable.name not in left_out]
    return reader, {
        "host": host_id(os.environ),
        "nbytes": manifest.nbytes,
        "state": manifest.state_digest,
        "step": manifest.step,
        "epoch": manifest.epoch,
        "batch": manifest.batch,
        "sequence": manifest.sequence,
        "later": list(manifest.extra.get("committed_for_later", ())),
        "names": names,
        "left_out": sorted(left_out),
        "digests": {name: manifest.digests[name] for name in names},
    }


def _step_of(manifest: Manifest | None) -> int:
    if manifest is None:
        raise CheckpointError("There is no checkpoint")
    return manifest.step


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


def _read_all(member: Member, reader: CheckpointReader, number: int, told: dict[str, Any]) -> None:
    """Every worker reads for itself. No state changes before all have read all of it, and found it right."""
    names: list[str] = told["names"]
    values = _memory_for(member, names)
    wrong = ""
    try:
        wrong = ",".join(name for name in names if not reader.read_into(name, values[name]))
    except FileDamaged as error:
        wrong = str(error)
    verdicts = member.channel.agree(f"restore/{number}/read", wrong, member.patience.begin_secs)
    for worker, verdict in verdicts.items():
        if verdict:
            raise CheckpointError(
                f"Worker {worker} reads other bytes than were written: {verdict[:500]}",
                path=reader.path,
            )
    member.state.apply([Edit(Operation.ASSIGN, name, {"value": values[name]}) for name in names])


def _memory_for(member: Member, names: Sequence[str]) -> Arrays:
    """Memory in which variables can live: TensorFlow takes it over."""
    shapes = {variable.name: variable for variable in member.state.schema}
    like = [np.broadcast_to(np.zeros((), dtype_of(shapes[name])), shapes[name].shape) for name in names]
    pieces, nbytes = lay_out(like)
    return dict(zip(names, arrays_in(fresh_memory(nbytes), Parcel("", 0, nbytes, "", pieces)), strict=True))


def _check_first(member: Member, reader: CheckpointReader | None, number: int, told: dict[str, Any]) -> None:
    """Worker 0 looks at all bytes before any worker's state changes."""
    what, timeout_secs = f"restore/{number}/checked", member.patience.begin_secs
    if reader is not None:
        digests = told["digests"]
        damaged = [name for name in told["names"] if digest_array(reader.read(name)) != digests[name]]
        error = FileDamaged(reader.path, f"{damaged[0]} is not what was written") if damaged else ""
        member.channel.tell(what, str(error))
    said = member.channel.hear(what, timeout_secs)
    if said is None:
        raise JobFailed(f"worker 0 did not look at the checkpoint within {timeout_secs:.0f} s", worker=0)
    if said:
        raise CheckpointError(said)


def _receive_all(member: Member, reader: CheckpointReader | None, number: int, told: dict[str, Any]) -> None:
    channel, patience = member.channel, member.patience
    for place, names in enumerate(_batches(member, told["names"])):
        what = f"restore/{number}/{place}"
        if reader is not None:
            parcel = member.transport.publish(
                f"{channel.name}-restore-{number}-{place}", [reader.read(name) for name in names]
            )
            channel.tell(what, json.dumps(parcel.to_json()))
        text = channel.hear(what, patience.begin_secs)
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
        verdicts = channel.agree(what, ",".join(wrong), patience.begin_secs)
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
