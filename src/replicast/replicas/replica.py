"""One worker's copy of the state: the core's `Replica` interface on real variables and real bytes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash
from msgspec.structs import replace

from replicast import faults
from replicast.core.entries import Saved
from replicast.core.events import Ended, WriteOutcome
from replicast.core.messages import Tell
from replicast.core.operations.pull import Ranges
from replicast.core.records import Applied, Content, Published, Refuse, SeenDigests, Snapshot, Stage
from replicast.core.worker import WorkerMachine
from replicast.errors import FileDamaged, PayloadRemoved
from replicast.replicas.lanes import Lane
from replicast.replicas.measures import RecentMetrics
from replicast.replicas.parcels import NO_LIMITS, Function, Parcels, computed_update
from replicast.storage.journal import Journal, undo_of
from replicast.transport import Parcel
from replicast.update.digest import digest_array
from replicast.update.distance import deviation
from replicast.update.edits import Edit
from replicast.update.guard import Guard
from replicast.update.inverse import bytes_to_keep, parts_to_keep, update_before
from replicast.update.schema import Limits, planned
from replicast.update.state import Arrays, Held, State
from replicast.update.trial import Trial
from replicast.update.update import Update

logger = logging.getLogger("replicast")


def _no_snapshot(id_: str, due: bool, again: bool) -> Callable[[], Snapshot]:
    raise Refuse("This worker makes no checkpoints")


@dataclass
class WorkerHooks:
    """What a session and its replica ask of the worker around them, and in which thread."""

    # Any thread: raises if another worker has failed.
    check: Callable[[], None] = lambda: None
    # Training thread: how many transfers this worker has started in steps.
    trained: Callable[[], int] = lambda: 0
    # Training thread: this worker's part of a checkpoint, as `Replica.snapshot`.
    take_snapshot: Callable[[str, bool, bool], Callable[[], Snapshot]] = _no_snapshot
    # Worker 0, lane "saver".
    write_checkpoint: Callable[[Saved], WriteOutcome] = lambda saved: WriteOutcome.DURABLE
    # Worker 0, training thread, all workers stopped: those known by checkpoint and journal.
    expected_fingerprints: Callable[[Sequence[str]], dict[str, str]] = lambda names: {}
    # Training thread: this worker has applied an update.
    on_applied: Callable[[str], None] = lambda id_: None
    # Training thread: the report of an audit for which all workers stopped, and whether it is raised.
    on_report: Callable[[Any, bool], None] = lambda report, raises: None
    # Training thread: all workers exit now. Why the state was not saved, and who asked.
    on_leave: Callable[[str, tuple[str, ...]], None] = lambda problem, asked_by: None
    # Training thread: it has waited at this boundary for some time; None when that is over.
    on_long_wait: Callable[[int | None], None] = lambda step: None
    # Worker 0, lane "release": a save, an audit or a request has ended.
    on_ended: Callable[[Ended], None] = lambda ended: None
    # Worker 0, loop: the outcome of a proposal from outside the job.
    on_inbox: Callable[[str, Tell], None] = lambda ticket, tell: None
    # Worker 0, readers: the note of a worker that does not see the run directory.
    on_note: Callable[[int, str], None] = lambda rank, text: None


class _Before(NamedTuple):
    """What an update has overwritten, held without a copy of whole variables; if not, `problem` says why."""

    id: str
    values: Held | None
    rows: Arrays
    problem: str


@dataclass(eq=False)
class StateReplica:
    """Implements `replicast.core.messages.Replica`, which documents the methods.

    An `UpdateRefused` that an order raises is this worker's refusal of it (`Session`, `Gate`).
    """

    machine: WorkerMachine
    state: State
    parcels: Parcels
    releasing: Lane
    reached: Callable[[str, Stage], None]
    limits: Limits
    receive_secs: float
    journal: Journal | None
    guard: Guard | None
    may_differ: frozenset[str]

    def __post_init__(self) -> None:
        self.rank = self.machine.rank
        self.hooks = WorkerHooks()  # those of the worker around, from `Session.start` on
        self.functions: dict[str, Function] = {}  # that this worker has proposed and will run
        self._copy: Arrays | None = None  # during a trial: the state before it
        # Worker 0: what updates have overwritten, from their boundary until it is written. A revert needs it.
        self._before: dict[int, _Before] = {}
        self.pulled: dict[str, npt.NDArray[Any]] = {}
        self.holds: set[int] = set()
        self.measures = RecentMetrics()
        self.stopped_at = 0.0  # when the training thread began to wait at this boundary
        self.in_function = False  # whether the training thread runs a user's function

    # In the background.

    def load(self, id_: str, digest: str) -> Content:
        try:
            return self.parcels.publish(self._journal_of_worker_0().load(id_, digest))
        except PayloadRemoved as error:
            raise Refuse(str(error)) from error

    def prepare(self, id_: str, digest: str, content: Content) -> None:
        if not isinstance(content, Parcel):
            raise Refuse(f"No bytes were published for {id_}")
        self.parcels.prepare(id_, digest, content, self.receive_secs)
        self.reached(id_, Stage.PREPARED)

    def write_before(self, sequence: int) -> tuple[Content, str]:
        before = self._before.pop(sequence)
        if before.values is None:
            logger.warning("%s", before.problem)
            return None, before.problem
        whole, parts = before.values()
        for value in (*whole.values(), *parts.values()):
            value.flags.writeable = False  # an update does not copy what nobody writes to
        pairs = {name: (before.rows[name], values) for name, values in parts.items()}
        try:
            return self._journal_of_worker_0().stage_before(update_before(before.id, whole, pairs)), ""
        except OSError as error:
            logger.warning(
                "update %d cannot be reverted: its values before cannot be written: %s", sequence, error
            )
            problem = f"The values before update {sequence} cannot be written ({error.strerror})"
            raise Refuse(problem) from error

    def drop_before(self, sequence: int) -> None:
        self._before.pop(sequence, None)

    def invert(self, id_: str, sequence: int, *, forced: bool) -> Published:
        try:
            plan = undo_of(self._journal_of_worker_0(), sequence, id_=id_)
            if not forced:
                plan.check()
        except FileDamaged as error:
            raise Refuse(str(error)) from error
        return self._checked_and_published(plan.update)

    def discard(self, id_: str) -> None:
        self.functions.pop(id_, None)
        self.parcels.discard(id_)

    def _journal_of_worker_0(self) -> Journal:
        if self.journal is None:
            raise Refuse("Only worker 0 reads and writes the journal")
        return self.journal

    # In the training thread.

    @property
    def on_trial(self) -> bool:
        return self._copy is not None

    def apply(self, id_: str, digest: str, sequence: int, *, keep: bool) -> Callable[[], Applied]:
        update, parcel_id = self.parcels.take(id_, digest)
        keeps = keep and self.rank == 0 and self._hold_before(id_, sequence, update.edits)
        faults.point("apply")
        self.state.apply(update.edits)
        self.holds.add(sequence)
        applied_at = time.time()
        strict = [edit for edit in update.edits if edit.variable not in self.may_differ]
        digested = self.state.digest_later(strict)
        self.releasing.do(lambda: self.parcels.release_applied(parcel_id))
        self.reached(id_, Stage.APPLIED)
        faults.point("ack")
        stall_secs, trained = time.monotonic() - self.stopped_at, self.hooks.trained()
        return lambda: Applied(digested(), applied_at, stall_secs, trained, keeps)

    def _hold_before(self, id_: str, sequence: int, edits: Sequence[Edit]) -> bool:
        whole, rows = parts_to_keep(edits, self.state.schema)
        if not whole and not rows:
            return False
        nbytes, most = bytes_to_keep(whole, rows, self.state.schema), self.limits.max_before_bytes
        problem = (
            f"Update {sequence} cannot be reverted: it has overwritten {nbytes / 2**20:,.1f} MiB, and only "
            f"up to {most / 2**20:,.1f} MiB are kept. Limits(max_before_bytes=...) keeps more"
        )
        values = self.state.hold(whole, rows) if nbytes <= most else None
        self._before[sequence] = _Before(id_, values, rows, problem)
        return True

    def compute(self, id_: str) -> Published:
        function = self.functions.get(id_)
        if function is None:
            raise Refuse(f"Worker {self.rank} has no function for {id_}", (self.rank,))
        self.in_function = True
        try:
            published = self._checked_and_published(computed_update(id_, function, self.state, self.rank))
        finally:
            self.in_function = False
            known = self.functions.pop(id_, None)
        if known is None:  # the function took too long: it was refused and discarded before it was published
            self.parcels.discard(id_)
            raise Refuse(f"Worker {self.rank} took too long to compute {id_}", (self.rank,))
        return published

    def check_by_guard(self, update: Update) -> None:
        if self.guard is not None:
            self.guard.check(update.edits, self.state.schema, self.state.read)

    def publish(self, id_: str, names: tuple[str, ...]) -> Published:
        update = Update(id=id_, allow_nonfinite=True)
        for name, value in self.state.read(names).items():
            value.flags.writeable = False  # no one else holds it: `assign` needs no second copy
            update = update.assign(name, value)
        return self._published(planned(update, self.state.schema, NO_LIMITS))

    def _checked_and_published(self, update: Update) -> Published:
        update = planned(update, self.state.schema, self.limits)
        self.check_by_guard(update)
        return self._published(update)

    def _published(self, update: Update) -> Published:
        parcel = self.parcels.publish(update)
        return Published(parcel.digest, parcel, update.note)

    def pull(self, id_: str, name: str, rows: Ranges) -> str:
        if self.rank != 0 and not rows:
            return self.state.digests([name])[name]
        indices = np.concatenate([np.arange(*one, dtype=np.int64) for one in rows]) if rows else None
        value = self.state.read([name])[name] if indices is None else self.state.read_rows(name, indices)
        if self.rank == 0:
            self.pulled[id_] = value
        return digest_array(value)

    def digest(self) -> str:
        return joined(self.state.digests(self.strict_names()))

    def strict_names(self) -> list[str]:
        """The variables that must be equal on all workers."""
        return [one.name for one in self.state.schema if one.name not in self.may_differ]

    def digests(self, names: tuple[str, ...] = ()) -> dict[str, str]:
        return self.state.digests(names or tuple(variable.name for variable in self.state.schema))

    def examine(self) -> SeenDigests:
        started = time.monotonic()
        digests = self.state.fingerprints(variable.name for variable in self.state.schema)
        secs = time.monotonic() - started
        free = {name: digests.pop(name) for name in self.may_differ}
        return SeenDigests(self.machine.step, digests, free, secs, self.hooks.trained(), time.time())

    def examine_quietly(self) -> SeenDigests:
        """As `examine`, with one digest for all variables that must be equal: less to send."""
        seen = self.examine()
        return replace(seen, digests={"": joined(seen.digests)})

    def expected(self, names: tuple[str, ...]) -> dict[str, str]:
        return self.hooks.expected_fingerprints(names)

    def deviations(self, id_: str, digest: str, names: tuple[str, ...]) -> Mapping[str, Any]:
        found = {}
        for edit in self.parcels.prepared(id_, digest).edits:
            if edit.variable in names:
                mine, value = self.state.read([edit.variable])[edit.variable], edit.arrays["value"]
                if mine.tobytes() != value.tobytes():
                    found[edit.variable] = deviation(mine, value)
        return found

    def snapshot(self, id_: str, *, due: bool, again: bool) -> Callable[[], Snapshot]:
        return self.hooks.take_snapshot(id_, due, again)

    def keep_copy(self) -> None:
        self._copy = {}
        self.state.snapshot(self._copy)
        self.measures.begin(self.machine.step)

    def go_back(self) -> None:
        if self._copy is not None:
            faults.point("settle")
            self.state.restore_snapshot(self._copy)
            self._copy = None
            self.measures.end(reverted=True)

    def drop_copy(self) -> None:
        if self._copy is not None:
            faults.point("settle")
        self._copy = None
        self.measures.end(reverted=False)

    def measure(self, trial: Trial) -> tuple[float | None, int]:
        if self.on_trial:
            return self.measures.during(trial.metric)
        return self.measures.before(trial.metric, trial.steps), trial.steps

    def report(self, report: Any, *, raises: bool) -> None:
        self.hooks.on_report(report, raises)

    def leave(self, problem: str, asked_by: tuple[str, ...]) -> None:
        self.hooks.on_leave(problem, asked_by)


def joined(digests: Mapping[str, str]) -> str:
    return xxhash.xxh3_128_hexdigest("".join(digests[name] for name in sorted(digests)).encode())
