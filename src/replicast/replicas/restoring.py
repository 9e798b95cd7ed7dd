"""A checkpoint becomes the state of all workers: worker 0 reads it, everyone receives it.

All training threads are in `restore` together, so they exchange words and bytes directly; what they receive
is checked against the digests in the manifest, on every worker.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from replicast.checkpoint import CheckpointReader, CheckpointStore, Manifest, differences
from replicast.digest import digest_array
from replicast.edits import Edit, Operation
from replicast.errors import CheckpointError, FileDamaged, JobFailed, ReplicastError
from replicast.protocol import Member
from replicast.replicas.position import Position
from replicast.transport import Parcel

PARCEL_BYTES = 1 << 28
"""Variables travel in parcels of about this size: shared memory must hold one of them."""


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
    member: Member, store: CheckpointStore | None, number: int, step: int | None, partial: bool
) -> Restored | None:
    """Gives all workers the state of a checkpoint. All of them call it; blocks until all have it.

    Args:
        member: This worker's part in the protocol.
        store: On worker 0 only; the others need not see the directory.
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
    if store is not None:
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
    try:
        _receive_all(member, reader, number, told)
    finally:
        if reader is not None:
            reader.close()
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
    # The digests of what is sent, which is quicker than the file's sha256; before any worker's state changes.
    damaged = [name for name in names if digest_array(reader.read(name)) != manifest.digests[name]]
    if damaged:
        reader.close()
        return None, {"error": str(FileDamaged(reader.path, f"{damaged[0]} is not what was written"))}
    return reader, {
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
