"""How all workers get the bytes of a checkpoint that they restore: each reads them, or worker 0 sends them.

Every worker checks all that it reads or receives against the digests in the manifest, and hears that all
others have, before any state changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from replicast.core.refusal import Refusal
from replicast.errors import CheckpointError, FileDamaged, JobFailed, UpdateRefused
from replicast.mapping import memory_to_fill
from replicast.runtime import Exchange, Session
from replicast.runtime.codec import decode, encode
from replicast.storage.checkpoint import (
    CheckpointReader,
    advice,
    dtype_of,
)
from replicast.transport import Parcel, Transport
from replicast.transport.layout import arrays_in, lay_out
from replicast.update.digest import digest_array
from replicast.update.edits import Edit, EditKind
from replicast.update.state import Arrays, State

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

    Args:
        worker: This worker.
        reader: The checkpoint, if this worker sees it.
        what: The name of this restore.
        told: The plan.

    Returns:
        What is wrong with the bytes that any worker has read. None if one does not see it; then no state has
        changed, and all must receive it.
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

    Returns:
        What is wrong with the bytes that worker 0 has read.

    Raises:
        CheckpointError: A worker could not receive it, or has received something else. Nothing has changed.
        JobFailed: The same, when the state has begun to change.
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
