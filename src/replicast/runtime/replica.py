"""One worker's copy of the state: the core's `Replica` interface on real variables and real bytes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from replicast import faults
from replicast.audits.distances import deviation
from replicast.core.operations.pull import Ranges
from replicast.core.proposal import Content, Published
from replicast.core.refusal import Refuse
from replicast.core.reports import Applied, Seen, Snapshot
from replicast.errors import FileDamaged, PayloadRemoved, UpdateRefused
from replicast.runtime.functions import Function, computed_update
from replicast.runtime.gate import Gate
from replicast.runtime.held_values import HeldValues
from replicast.runtime.measures import Measures
from replicast.runtime.parcels import NO_LIMITS, Parcels
from replicast.runtime.threads import Lane
from replicast.runtime.ticket import refusal_of
from replicast.storage.journal import Journal
from replicast.storage.reverting import Undo, changes_since, inverse_of
from replicast.transport import Parcel
from replicast.update.digest import digest_array
from replicast.update.edits import Edit
from replicast.update.guard import Guard
from replicast.update.state import Arrays, State
from replicast.update.trial import Trial
from replicast.update.update import Update
from replicast.update.validate import Limits, planned

logger = logging.getLogger("replicast")


class StateReplica:
    """Implements `replicast.core.order.Replica`, which documents the methods.

    Args:
        rank: Which worker this is.
        state: The variables.
        parcels: The bytes of updates.
        gate: Where the training thread waits.
        releasing: Runs work that would take the training thread too long.
        limits: Size limits for updates.
        receive_secs: How long bytes may take to arrive.

    Attributes:
        holds: The sequence numbers of the updates that the state contains.
        measures: Loss and metrics of the recent steps.
        journal: On worker 0: where payloads are loaded from.
        guard: The checks that every proposal of this worker must pass, if any.
        may_differ: The variables that may differ between workers.
        trained: How far this worker has trained, in a unit that all workers count alike.
        step: The boundary at which the training thread is.
        take_snapshot: Takes this worker's part of a checkpoint. Its arguments are those of `snapshot`.
        expectation: The digest that a variable should have according to checkpoint and journal, if known.
        on_report: Called with the report of each audit.
        on_leave: Called before the process exits, with the ids of the requests that this answers.
        before: On worker 0: the values that updates have overwritten.
        pulled: On worker 0: the values of each pull that has not ended, by the operation's id.
        on_applied: Called with the id of each update that this worker has applied.
        on_stage: Called with the progress of each update on this worker.
    """

    def __init__(
        self,
        rank: int,
        state: State,
        parcels: Parcels,
        gate: Gate,
        releasing: Lane,
        limits: Limits,
        receive_secs: float,
    ) -> None:
        self.rank = rank
        self.state = state
        self._parcels = parcels
        self._gate = gate
        self._releasing = releasing
        self._limits = limits
        self._receive_secs = receive_secs
        self._functions: dict[str, Function] = {}
        self._copy: Arrays | None = None
        self.before = HeldValues(state, limits)
        self.pulled: dict[str, npt.NDArray[Any]] = {}
        self.holds: set[int] = set()
        self.measures = Measures()
        self.journal: Journal | None = None
        self.guard: Guard | None = None
        self.may_differ: frozenset[str] = frozenset()
        self.trained: Callable[[], int] = lambda: 0
        self.step: Callable[[], int] = lambda: 0
        self.take_snapshot: Callable[[str, bool, bool], Any] = lambda id_, due, again: None
        self.expectation: Callable[[str], str | None] = lambda name: None
        self.on_report: Callable[[Any, bool], None] = lambda report, raises: None
        self.on_leave: Callable[[str, tuple[str, ...]], None] = lambda problem, asked_by: None
        self.on_applied: Callable[[str], None] = lambda id_: None
        self.on_stage: Callable[[str, str], None] = lambda id_, stage: None

    # In the background.

    def load(self, id_: str, digest: str) -> Content:
        """As in `Replica`."""
        if self.journal is None:
            raise Refuse("Only worker 0 reads the journal")
        try:
            return self._parcels.publish(self.journal.load(id_, digest))
        except PayloadRemoved as error:
            raise Refuse(str(error)) from error
        except UpdateRefused as error:
            raise _refuse(error, self.rank) from error

    def prepare(self, id_: str, digest: str, content: Content) -> None:
        """As in `Replica`."""
        if not isinstance(content, Parcel):
            raise Refuse(f"No bytes were published for {id_}")
        try:
            self._parcels.prepare(id_, digest, content, self._receive_secs)
        except UpdateRefused as error:
            raise _refuse(error, self.rank) from error
        self.on_stage(id_, "prepared")

    def write_before(self, sequence: int) -> tuple[Content, str]:
        """As in `Replica`."""
        if self.journal is None:
            raise Refuse("Only worker 0 writes the journal")
        return self.before.write(sequence, self.journal)

    def drop_before(self, sequence: int) -> None:
        """As in `Replica`."""
        self.before.drop(sequence)

    def invert(self, id_: str, sequence: int, *, forced: bool) -> Published:
        """As in `Replica`."""
        journal = self.journal
        if journal is None:
            raise Refuse("Only worker 0 reads the journal")
        history = journal.history()
        record = history.committed[sequence]
        try:
            update = inverse_of(
                record,
                lambda: journal.load(record.id, record.digest),
                lambda: journal.load_before(sequence),
                id_=id_,
            )
            if not forced:
                since = changes_since(history, record, update, lambda one: journal.edits(one.id, one.digest))
                Undo(record, update, since).check()
            update = planned(update, self.state.schema, self._limits)
            self.check_by_guard(update)
            return self._published(update)
        except UpdateRefused as error:
            raise _refuse(error, self.rank) from error
        except FileDamaged as error:
            raise Refuse(str(error)) from error

    def discard(self, id_: str) -> None:
        """As in `Replica`."""
        self._functions.pop(id_, None)
        self._parcels.discard(id_)

    # In the training thread.

    @property
    def on_trial(self) -> bool:
        """As in `Replica`."""
        return self._copy is not None

    def apply(self, id_: str, digest: str, sequence: int, *, keep: bool) -> Callable[[], Applied]:
        """As in `Replica`."""
        update, parcel_id = self._parcels.take(id_, digest)
        keeps = keep and self.rank == 0 and self.before.hold(id_, sequence, update.edits)
        faults.point("apply")
        self.state.apply(update.edits)
        self.holds.add(sequence)
        applied_at = time.time()
        digested = self.state.digest_later(self._to_be_equal(update.edits))
        self._releasing.do(lambda: self._parcels.release_applied(parcel_id))
        self.on_stage(id_, "applied")
        self.on_applied(id_)
        faults.point("ack")
        stall_secs, trained = time.monotonic() - self._gate.since, self.trained()
        return lambda: Applied(digested(), applied_at, stall_secs, trained, keeps)

    def add_function(self, id_: str, function: Function) -> None:
        """Adds a function that this worker has proposed and will run. Any thread."""
        self._functions[id_] = function

    def compute(self, id_: str) -> Published:
        """As in `Replica`."""
        function = self._functions.get(id_)
        if function is None:
            raise Refuse(f"Worker {self.rank} has no function for {id_}", (self.rank,))
        try:
            with self._gate.in_function():
                update = computed_update(id_, function, self.state, self.rank)
            update = planned(update, self.state.schema, self._limits)
            self.check_by_guard(update)
            published = self._published(update)
        except UpdateRefused as error:
            raise _refuse(error, self.rank) from error
        finally:
            known = self._functions.pop(id_, None)
        if known is None:  # the function took too long: it was refused and discarded before it was published
            self._parcels.discard(id_)
            raise Refuse(f"Worker {self.rank} took too long to compute {id_}", (self.rank,))
        return published

    def check_by_guard(self, update: Update) -> None:
        """Raises `UpdateRefused` when the guard does not allow the update."""
        if self.guard is not None:
            self.guard.check(update.edits, self.state.schema, self.state.read)

    def publish(self, id_: str, names: tuple[str, ...]) -> Published:
        """As in `Replica`."""
        update = Update(id=id_, allow_nonfinite=True)
        for name, value in self.state.read(names).items():
            value.flags.writeable = False  # no one else holds it: `assign` needs no second copy
            update = update.assign(name, value)
        try:
            return self._published(planned(update, self.state.schema, NO_LIMITS))
        except UpdateRefused as error:
            raise _refuse(error, self.rank) from error

    def _published(self, update: Update) -> Published:
        parcel = self._parcels.publish(update)
        return Published(parcel.digest, parcel, update.note)

    def pull(self, id_: str, name: str, rows: Ranges) -> str:
        """As in `Replica`."""
        if self.rank != 0 and not rows:
            return self.state.digests([name])[name]
        indices = np.concatenate([np.arange(*one, dtype=np.int64) for one in rows]) if rows else None
        value = self.state.read([name])[name] if indices is None else self.state.read_rows(name, indices)
        if self.rank == 0:
            self.pulled[id_] = value
        return digest_array(value)

    def digest(self) -> str:
        """As in `Replica`."""
        names = (variable.name for variable in self.state.schema)
        return joined(self.state.digests(name for name in names if name not in self.may_differ))

    def digests(self, names: tuple[str, ...] = ()) -> dict[str, str]:
        """As in `Replica`."""
        return self.state.digests(names or tuple(variable.name for variable in self.state.schema))

    def examine(self) -> Seen:
        """As in `Replica`."""
        started = time.monotonic()
        digests = self.state.fingerprints(variable.name for variable in self.state.schema)
        secs = time.monotonic() - started
        strict = {name: digest for name, digest in digests.items() if name not in self.may_differ}
        free = {name: digest for name, digest in digests.items() if name in self.may_differ}
        return Seen(self.step(), strict, free, secs, self.trained(), time.time())

    def examine_quietly(self) -> Seen:
        """As `examine`, with one digest for all variables that must be equal: less to send."""
        seen = self.examine()
        return Seen(seen.step, {"": joined(seen.digests)}, seen.free, seen.secs, seen.trained, seen.time)

    def expected(self, names: tuple[str, ...]) -> dict[str, str]:
        """As in `Replica`."""
        found = {name: self.expectation(name) for name in names}
        return {name: digest for name, digest in found.items() if digest is not None}

    def deviations(self, id_: str, digest: str, names: tuple[str, ...]) -> Mapping[str, Any]:
        """As in `Replica`, for the variables that differ."""
        found = {}
        for edit in self._parcels.prepared(id_, digest).edits:
            if edit.variable in names:
                mine = self.state.read([edit.variable])[edit.variable]
                value = edit.arrays["value"]
                if mine.tobytes() != value.tobytes():
                    found[edit.variable] = deviation(mine, value)
        return found

    def snapshot(self, id_: str, *, due: bool, again: bool) -> Callable[[], Snapshot]:
        """As in `Replica`."""
        finish: Callable[[], Snapshot] = self.take_snapshot(id_, due, again)
        return finish

    def keep_copy(self) -> None:
        """As in `Replica`."""
        self._copy = {}
        self.state.snapshot(self._copy)
        self.measures.begin(self.step())

    def go_back(self) -> None:
        """As in `Replica`."""
        if self._copy is not None:
            faults.point("settle")
            self.state.restore_snapshot(self._copy)
            self._copy = None
            self.measures.end(reverted=True)

    def drop_copy(self) -> None:
        """As in `Replica`."""
        if self._copy is not None:
            faults.point("settle")
        self._copy = None
        self.measures.end(reverted=False)

    def measure(self, trial: Trial) -> tuple[float | None, int]:
        """As in `Replica`."""
        if self.on_trial:
            return self.measures.during(trial.metric)
        try:
            return self.measures.before(trial.metric, trial.steps), trial.steps
        except UpdateRefused as error:
            raise _refuse(error, self.rank) from error

    def report(self, report: Any, *, raises: bool) -> None:
        """As in `Replica`."""
        self.on_report(report, raises)

    def leave(self, problem: str, asked_by: tuple[str, ...]) -> None:
        """As in `Replica`."""
        self.on_leave(problem, asked_by)

    def _to_be_equal(self, edits: Iterable[Edit]) -> list[Edit]:
        return [edit for edit in edits if edit.variable not in self.may_differ]


def joined(digests: Mapping[str, str]) -> str:
    """Combines several digests into one."""
    return xxhash.xxh3_128_hexdigest("".join(digests[name] for name in sorted(digests)).encode())


def _refuse(error: UpdateRefused, rank: int) -> Refuse:
    refusal = refusal_of(error, rank)
    return Refuse(refusal.problem, refusal.workers, refusal.details)
