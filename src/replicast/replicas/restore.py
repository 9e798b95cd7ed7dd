"""Restores a checkpoint as the state of all workers.

    all workers on one host, which see its directory    each reads it, into the memory of its new variables
    otherwise                                           worker 0 reads it and sends it to all, twice

All training threads are in `restore` together, so they exchange messages and bytes directly. Every worker
checks all that it reads or receives against the digests in the manifest, and hears that all others have,
before any state changes: a restore that is refused has changed nothing. A damaged checkpoint is found by all
together, and all try the one before.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from replicast.codec import Record, decode, encode
from replicast.config import host_id
from replicast.core.records import Refusal
from replicast.errors import CheckpointError, FileDamaged, JobFailed, ReplicastError, UpdateRefused
from replicast.mapped_memory import memory_to_fill
from replicast.replicas.position import Position
from replicast.replicas.session import Session
from replicast.storage.checkpoint_tools import differences
from replicast.storage.checkpoints import (
    CheckpointReader,
    CheckpointStore,
    Manifest,
    advice,
    choose,
    dtype_of,
    saved_of,
)
from replicast.transport import Parcel, Transport
from replicast.transport.parcel_layout import arrays_in, lay_out
from replicast.update.digest import digest_array
from replicast.update.edits import Edit, EditKind
from replicast.update.state import Arrays, State

logger = logging.getLogger("replicast")

PARCEL_BYTES = 1 << 28  # variables are sent in parcels of about this size: shared memory must hold one
MOST_AT_ONCE = 1 << 31  # a larger state is not read at once: that needs memory beside the state it replaces
_UNSEEN = "does not see the checkpoint"


@dataclass(frozen=True, slots=True)
class Restored:
    """The restored state."""

    step: int
    position: Position
    left_out: tuple[str, ...]
    holds: frozenset[int]


class RestorePlan(Record):
    """What worker 0 tells all: its host, the manifest, and which variables the checkpoint does not have."""

    host: str
    manifest: dict[str, Any]
    left_out: list[str]


class RestoreProblem(Record):
    """Why nothing can be restored, for all to raise."""

    problem: str
    fields: dict[str, Any]


_Told = RestorePlan | RestoreProblem | None


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
    if session.begun:  # before any state changes
        raise CheckpointError(
            "restore() must be called before training",
            expected="no fit, boundary, sync, save or audit before it",
            received=f"step {session.step}",
            remedy="Call it first; to go back to a checkpoint later, restart the script",
        )
    worker = _Restore(session, state, transport, store)
    damaged: dict[int, str] = {}
    for turn in itertools.count():
        what = f"restore/{number}/{turn}"
        reader = worker.tell_plan(what, step, partial, damaged)
        told: _Told = decode(session.exchange.hear(what, session.timeouts.join_secs))
        if told is None:
            return None
        if isinstance(told, RestoreProblem):
            raise CheckpointError(told.problem, **told.fields)
        left_out = told.left_out
        manifest = Manifest.from_json(told.manifest)
        problem = worker.take(what, reader, told.host, manifest, left_out)
        if not problem:
            break
        damaged[manifest.step] = problem  # The same on all workers, which try another checkpoint together.
    if session.rank == 0:
        for damaged_step, problem in sorted(damaged.items()):
            logger.warning(
                "THE CHECKPOINT OF STEP %d IS DAMAGED; step %d is restored instead. %s",
                damaged_step,
                manifest.step,
                problem,
            )
    saved = saved_of(manifest)
    session.replica.measures.recall(json.loads(manifest.measured))
    session.start_from(saved)
    position = Position(manifest.epoch, manifest.batch).at(manifest.script)
    return Restored(manifest.step, position, tuple(left_out), saved.holds)


class _Restore:
    """One worker's part."""

    def __init__(self, session: Session, state: State, transport: Transport, store: CheckpointStore) -> None:
        self._rank = session.rank
        self._exchange = session.exchange
        self._secs = session.timeouts.join_secs
        self._state = state
        self._transport = transport
        self._store = store

    def tell_plan(
        self, what: str, step: int | None, partial: bool, damaged: dict[int, str]
    ) -> CheckpointReader | None:
        """Worker 0 tells the others what will be restored, or why nothing can be."""
        if self._rank != 0:
            return None
        reader: CheckpointReader | None = None
        told: _Told
        try:
            reader = choose(self._store, step, damaged)
            told = None if reader is None else self._plan(reader, partial)
        except (ReplicastError, OSError) as error:
            if reader is not None:
                reader.close()
            reader, told = None, _problem_of(error)
        self._exchange.tell(what, encode(told))
        return reader

    def _plan(self, reader: CheckpointReader, partial: bool) -> RestorePlan:
        manifest, schema = reader.manifest, self._state.schema
        differing = differences(schema, manifest.schema)
        if differing and not partial:
            said = "; ".join(f"{d.name}: expected {d.first}, received {d.second}" for d in differing[:10])
            more = f" and {len(differing) - 10} more" if len(differing) > 10 else ""
            raise CheckpointError(
                f"The checkpoint of step {manifest.step} is of another model ({said}{more}). "
                "partial=True restores the variables that fit"
            )
        differs = {difference.name for difference in differing}
        left_out = sorted(variable.name for variable in schema if variable.name in differs)
        return RestorePlan(host_id(os.environ), manifest.to_json(), left_out)

    def take(
        self, what: str, reader: CheckpointReader | None, host: str, manifest: Manifest, left_out: list[str]
    ) -> str:
        """All workers read or receive the checkpoint. Returns what is wrong with it; empty if nothing is."""
        names = [variable.name for variable in self._state.schema if variable.name not in left_out]
        with contextlib.ExitStack() as closing:
            if reader is None and host == host_id(os.environ):
                reader = self._see(manifest)
            if reader is not None:
                closing.enter_context(reader)
            problem = self._read_all(reader, what, names) if manifest.nbytes <= MOST_AT_ONCE else None
            if problem is not None:
                return problem
            return self._receive_all(reader if self._rank == 0 else None, what, manifest, names)

    def _see(self, manifest: Manifest) -> CheckpointReader | None:
        """Opens the same checkpoint on another worker of the same host; None if that is not possible."""
        try:
            reader = self._store.open(manifest.step)
        except (ReplicastError, OSError):
            return None
        if reader.manifest.state_digest != manifest.state_digest:
            reader.close()
            return None
        return reader

    # Each reads it.

    def _read_all(self, reader: CheckpointReader | None, what: str, names: list[str]) -> str | None:
        """Every worker reads the checkpoint. No state changes before all have read and verified all of it.

        Whether all see its directory is not asked first: that would cost every restore on one host a round of
        messages, and spare the workers on worker 0's host only a reading in vain where there are several.
        """
        values, problem = ({}, _UNSEEN) if reader is None else self._read(reader, names)
        verdicts = self._exchange.agree(f"{what}/read", problem, self._secs)
        if reader is None or _UNSEEN in verdicts.values():
            return None
        found = [f"worker {rank} reads: {verdict}" for rank, verdict in verdicts.items() if verdict]
        if found:
            file = reader.path / "state.safetensors"
            return str(FileDamaged(file, f"{'; '.join(found[:3])[:500]}. {advice(reader.path)}"))
        self._state.apply([Edit(EditKind.ASSIGN, name, {"value": values[name]}) for name in names])
        return ""

    def _read(self, reader: CheckpointReader, names: list[str]) -> tuple[Arrays, str]:
        """All variables, and what is wrong with them. TensorFlow takes over their memory without a copy."""
        shapes = {variable.name: variable for variable in self._state.schema}
        like = [np.broadcast_to(np.zeros((), dtype_of(shapes[name])), shapes[name].shape) for name in names]
        pieces, nbytes = lay_out(like)
        values = dict(zip(names, arrays_in(memory_to_fill(nbytes), pieces), strict=True))
        try:
            wrong = [name for name in names if not reader.read_into(name, values[name])]
        except FileDamaged as error:
            return values, error.problem.removesuffix(f". {advice(reader.path)}")
        return values, f"the bytes of {', '.join(wrong[:5])} are not those that were written" if wrong else ""

    # Worker 0 sends it.

    def _receive_all(
        self, reader: CheckpointReader | None, what: str, manifest: Manifest, names: list[str]
    ) -> str:
        """Worker 0 sends the checkpoint twice. The first time all workers only check it: no state changes.

        The second time each takes what it receives. So nobody needs memory for a second state.
        """
        problem = self._transfer(reader, f"{what}/check", manifest, names, lambda edits: None)
        if problem:
            return problem
        try:
            problem = self._transfer(reader, f"{what}/take", manifest, names, self._state.apply)
        except CheckpointError as error:
            problem = error.problem
        if problem:
            raise JobFailed(
                f"The state is restored in part only, although all workers had received the checkpoint of "
                f"step {manifest.step} intact before: {problem}. Start the job again"
            )
        return ""

    def _transfer(
        self,
        reader: CheckpointReader | None,
        what: str,
        manifest: Manifest,
        all_names: list[str],
        take: Callable[[list[Edit]], None],
    ) -> str:
        """Worker 0 sends all variables, in parcels; `take` gets each that all have received intact."""
        for place, names in enumerate(self._batches(all_names)):
            key = f"{what}/{place}"
            if reader is not None:
                self._exchange.tell(key, encode(self._published(reader, key, names)))
            parcel: Parcel | Refusal = decode(self._exchange.hear(key, self._secs))
            if isinstance(parcel, Refusal):
                if parcel.workers:
                    raise CheckpointError(f"Worker 0 could not send the checkpoint: {parcel.problem}")
                return parcel.problem
            values, problem = self._received(parcel, names, manifest.digests)
            verdicts = self._exchange.agree(key, problem, self._secs)
            found = {rank: verdict for rank, verdict in verdicts.items() if verdict}
            if not found:
                pairs = zip(names, values, strict=True)
                take([Edit(EditKind.ASSIGN, name, {"value": value}) for name, value in pairs])
            self._transport.release(parcel.id)
            for rank, verdict in found.items():
                raise CheckpointError(f"Worker {rank} has not received the checkpoint intact: {verdict}")
        return ""

    def _published(self, reader: CheckpointReader, key: str, names: list[str]) -> Parcel | Refusal:
        """Worker 0: a parcel with these variables; or what is wrong with the file, or why worker 0 cannot."""
        parcel_id = f"{self._exchange.name}-{key.replace('/', '-')}"
        try:
            return self._transport.publish(parcel_id, [reader.read(name) for name in names])
        except FileDamaged as error:
            return Refusal(str(error))
        except UpdateRefused as error:  # there is no room
            return Refusal(str(error), (0,))

    def _received(
        self, parcel: Parcel, names: list[str], digests: Mapping[str, str]
    ) -> tuple[list[npt.NDArray[Any]], str]:
        """The values of these variables, and what is wrong with them."""
        try:
            values = self._transport.receive(parcel, self._secs)
        except UpdateRefused as error:
            return [], str(error)
        pairs = zip(names, values, strict=True)
        wrong = [name for name, value in pairs if digest_array(value) != digests[name]]
        return values, f"{', '.join(wrong[:5])} has other values" if wrong else ""

    def _batches(self, names: list[str]) -> Iterator[list[str]]:
        sizes = {variable.name: variable.nbytes for variable in self._state.schema}
        batch: list[str] = []
        for name in names:
            if batch and sum(sizes[n] for n in batch) + sizes[name] > PARCEL_BYTES:
                yield batch
                batch = []
            batch.append(name)
        if batch:
            yield batch


def _problem_of(error: Exception) -> RestoreProblem:
    if not isinstance(error, CheckpointError):
        return RestoreProblem(str(error), {})
    names = ("path", "step", "variable", "expected", "received", "remedy")
    fields = {name: getattr(error, name) for name in names}
    return RestoreProblem(error.problem, fields | {"path": error.path and str(error.path)})
