"""One worker's copy of the state: the core's `Replica` interface on real variables and real bytes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from replicast import faults
from replicast.core.entries import Committed, Decided, Entry, History, Payload, Receipt, Saved
from replicast.core.events import WriteOutcome
from replicast.core.operations.pull import Ranges
from replicast.core.records import Applied, Content, Published, Refuse, Seen, Snapshot
from replicast.errors import FileDamaged, JobFailed, PayloadRemoved, UpdateRefused
from replicast.replicas.gate import Gate
from replicast.replicas.measures import Measures
from replicast.replicas.parcels import NO_LIMITS, Function, Parcels, computed_update
from replicast.replicas.threads import Lane, Threads
from replicast.replicas.ticket import refusal_of
from replicast.storage.journal import Journal, NotWritten, PerhapsWritten
from replicast.storage.updates import Undo, changes_since, inverse_of
from replicast.transport import Parcel
from replicast.update.audit_report import deviation
from replicast.update.digest import digest_array
from replicast.update.edits import Edit
from replicast.update.guard import Guard
from replicast.update.inverse import bytes_to_keep, parts_to_keep, update_before
from replicast.update.schema import Limits, planned
from replicast.update.state import Arrays, Held, State
from replicast.update.trial import Trial
from replicast.update.update import Update

# Worker 0: the values that updates have overwritten, from the boundary of the update until they are
# written.
#
# A revert needs them (`update/inverse.py`). Holding them costs the training thread no copy of whole
# variables, and they are written in the background.

logger = logging.getLogger("replicast")


@dataclass(frozen=True, slots=True)
class _Held:
    id: str
    values: Held | None
    rows: Arrays
    problem: str = ""


class HeldValues:
    """The values that updates have overwritten, by the update's number."""

    def __init__(self, state: State, limits: Limits) -> None:
        self._state = state
        self._limits = limits
        self._held: dict[int, _Held] = {}

    def hold(self, id_: str, sequence: int, edits: Sequence[Edit]) -> bool:
        """Holds what these edits are about to overwrite. For the training thread."""
        whole, rows = parts_to_keep(edits, self._state.schema)
        if not whole and not rows:
            return False
        nbytes, most = bytes_to_keep(whole, rows, self._state.schema), self._limits.max_before_bytes
        if nbytes <= most:
            self._held[sequence] = _Held(id_, self._state.hold(whole, rows), rows)
            return True
        problem = (
            f"Update {sequence} cannot be reverted: it has overwritten {_mib(nbytes)}, and only up to "
            f"{_mib(most)} are kept. Limits(max_before_bytes=...) keeps more"
        )
        self._held[sequence] = _Held(id_, None, {}, problem)
        return True

    def write(self, sequence: int, journal: Journal) -> tuple[Content, str]:
        """Makes the values durable. For a thread in the background."""
        held = self._held.pop(sequence)
        if held.values is None:
            logger.warning("%s", held.problem)
            return None, held.problem
        whole, parts = held.values()
        for value in (*whole.values(), *parts.values()):
            value.flags.writeable = False  # an update does not copy what nobody writes to
        pairs = {name: (held.rows[name], values) for name, values in parts.items()}
        try:
            return journal.stage_before(update_before(held.id, whole, pairs)), ""
        except OSError as error:
            logger.warning(
                "update %d cannot be reverted: its values before cannot be written: %s", sequence, error
            )
            raise Refuse(
                f"The values before update {sequence} cannot be written ({error.strerror})"
            ) from error

    def drop(self, sequence: int) -> None:
        """Forgets what is held for an update. No-op if nothing is."""
        self._held.pop(sequence, None)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


class StateReplica:
    """Implements `replicast.core.messages.Replica`, which documents the methods."""

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
        if self.journal is None:
            raise Refuse("Only worker 0 reads the journal")
        try:
            return self._parcels.publish(self.journal.load(id_, digest))
        except PayloadRemoved as error:
            raise Refuse(str(error)) from error
        except UpdateRefused as error:
            raise _refuse(error, self.rank) from error

    def prepare(self, id_: str, digest: str, content: Content) -> None:
        if not isinstance(content, Parcel):
            raise Refuse(f"No bytes were published for {id_}")
        try:
            self._parcels.prepare(id_, digest, content, self._receive_secs)
        except UpdateRefused as error:
            raise _refuse(error, self.rank) from error
        self.on_stage(id_, "prepared")

    def write_before(self, sequence: int) -> tuple[Content, str]:
        if self.journal is None:
            raise Refuse("Only worker 0 writes the journal")
        return self.before.write(sequence, self.journal)

    def drop_before(self, sequence: int) -> None:
        self.before.drop(sequence)

    def invert(self, id_: str, sequence: int, *, forced: bool) -> Published:
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
        self._functions.pop(id_, None)
        self._parcels.discard(id_)

    # In the training thread.

    @property
    def on_trial(self) -> bool:
        return self._copy is not None

    def apply(self, id_: str, digest: str, sequence: int, *, keep: bool) -> Callable[[], Applied]:
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
        if self.rank != 0 and not rows:
            return self.state.digests([name])[name]
        indices = np.concatenate([np.arange(*one, dtype=np.int64) for one in rows]) if rows else None
        value = self.state.read([name])[name] if indices is None else self.state.read_rows(name, indices)
        if self.rank == 0:
            self.pulled[id_] = value
        return digest_array(value)

    def digest(self) -> str:
        names = (variable.name for variable in self.state.schema)
        return joined(self.state.digests(name for name in names if name not in self.may_differ))

    def digests(self, names: tuple[str, ...] = ()) -> dict[str, str]:
        return self.state.digests(names or tuple(variable.name for variable in self.state.schema))

    def examine(self) -> Seen:
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
        finish: Callable[[], Snapshot] = self.take_snapshot(id_, due, again)
        return finish

    def keep_copy(self) -> None:
        self._copy = {}
        self.state.snapshot(self._copy)
        self.measures.begin(self.step())

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
        try:
            return self.measures.before(trial.metric, trial.steps), trial.steps
        except UpdateRefused as error:
            raise _refuse(error, self.rank) from error

    def report(self, report: Any, *, raises: bool) -> None:
        self.on_report(report, raises)

    def leave(self, problem: str, asked_by: tuple[str, ...]) -> None:
        self.on_leave(problem, asked_by)

    def _to_be_equal(self, edits: Iterable[Edit]) -> list[Edit]:
        return [edit for edit in edits if edit.variable not in self.may_differ]


def joined(digests: Mapping[str, str]) -> str:
    """Combines several digests into one."""
    return xxhash.xxh3_128_hexdigest("".join(digests[name] for name in sorted(digests)).encode())


def _refuse(error: UpdateRefused, rank: int) -> Refuse:
    refusal = refusal_of(error, rank)
    return Refuse(refusal.problem, refusal.workers, refusal.details)


# Worker 0's writes: journal entries in one lane, and checkpoints, which take longer, in another.


class Writer:
    """Writes the coordinator's decisions."""

    def __init__(
        self,
        journal: Journal,
        checkpoints: list[Saved] | None = None,
        write_checkpoint: Callable[[Saved], WriteOutcome] = lambda saved: WriteOutcome.DURABLE,
    ) -> None:
        self.journal = journal
        self.write_checkpoint = write_checkpoint
        self._checkpoints = checkpoints or []

    def start(self, threads: Threads) -> None:
        """Starts the lanes."""
        self._entries = threads.lane("journal")
        self._saver = threads.lane("saver")

    def history(self) -> History:
        """The history according to the journal and the checkpoints."""
        history = self.journal.history()
        for saved in self._checkpoints:
            history.add(saved)
        return history

    def write(self, entry: Entry, parcels: Parcels, then: Callable[[WriteOutcome, str], None]) -> None:
        """Writes an entry, then calls `then` with the outcome and any reason for failure. Returns at once."""
        if isinstance(entry, Saved):
            self._saver.do(lambda: then(self.write_checkpoint(entry), "The checkpoint cannot be written"))
            return
        update = parcels.prepared(entry.id, entry.digest) if isinstance(entry, Payload) else None
        self._entries.do(lambda: then(*self._written(entry, update)))

    def remove_payloads(self, held: frozenset[int], pending: frozenset[tuple[str, str]] | None) -> None:
        """Removes the payloads that no kept checkpoint needs (`Journal.remove_payloads`). Returns at once."""
        self._entries.do(lambda: self.journal.remove_payloads(held, pending))

    def _written(self, entry: Entry, update: Update | None) -> tuple[WriteOutcome, str]:
        if isinstance(entry, Receipt):
            faults.point("verify")
        elif isinstance(entry, Decided):
            faults.point("decide")
        try:
            self.journal.write(entry, update)
        except NotWritten as error:
            logger.warning("%s", error)
            return WriteOutcome.FAILED, str(error)
        except (PerhapsWritten, FileDamaged) as error:
            logger.error("%s", error)
            return WriteOutcome.UNKNOWN, str(error)
        except JobFailed as error:
            logger.error("%s", error)
            return WriteOutcome.FENCED, str(error)
        if isinstance(entry, Committed):
            faults.point("commit")
        return WriteOutcome.DURABLE, ""
