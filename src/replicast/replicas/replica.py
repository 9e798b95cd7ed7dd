"""One worker's copy of the state: the core's `Replica` interface on real variables and real bytes.

`Parcels` holds the bytes of updates:

    publish    the author, a function's source, or worker 0 for a loaded payload: makes bytes available to all
    prepare    every worker: fetches and checks the bytes, and keeps them until they are applied or discarded
    release    frees the memory of both

`RecentMetrics` holds loss and metrics of the recent steps, unconverted until a trial needs them. Keras' logs
in `fit` are running means over the rows of the epoch so far. If m is the mean of n rows, and m' that of the
n' rows before the last steps, their own mean is (m·n - m'·n') / (n - n'). Where Keras counts no rows, batches
take their place. The logs of a custom training loop are used as they are.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash
from msgspec.structs import replace

from replicast import faults
from replicast.core.entries import Content, Saved, Stage
from replicast.core.messages import (
    Applied,
    Ended,
    Published,
    Refuse,
    SeenDigests,
    Snapshot,
    Tell,
    WriteOutcome,
)
from replicast.core.operations.audit import Ranges
from replicast.core.worker import WorkerMachine
from replicast.errors import FileDamaged, PayloadRemoved, UpdateRefused, logger
from replicast.mapped_memory import copied
from replicast.storage.journal import Journal, undo_of
from replicast.storage.run_files import RATE
from replicast.transport import Parcel, Transport
from replicast.update.audit_report import SLICE_BYTES, rows_in_turn
from replicast.update.digest import deviation, digest_array, is_finite
from replicast.update.edits import RESETS, Edit, EditKind
from replicast.update.guard import MEASURED_BYTES, Guard, check_rates, effects
from replicast.update.schema import (
    NO_LIMITS,
    Arrays,
    Held,
    Limits,
    Schema,
    State,
    bytes_to_keep,
    parts_to_keep,
    planned,
    touched_parts,
    update_before,
)
from replicast.update.trial import Effect, Trial
from replicast.update.update import Update


@dataclass(eq=False, repr=False)
class Parcels:
    """One worker's. Any thread publishes and releases; one thread prepares; the training thread takes."""

    transport: Transport
    name: str
    rank: int
    schema: Schema

    def __post_init__(self) -> None:
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._prepared: dict[tuple[str, str], tuple[Update, str]] = {}
        self._published: dict[str, tuple[str, str]] = {}
        self._refused: dict[str, list[str]] = {}  # by update: its parcels that this worker did not prepare
        self._unwanted: set[str] = set()

    def publish(self, update: Update, ticket: str = "") -> Parcel:
        parcel_id = f"{self.name}-{self.rank}-{next(self._numbers)}"
        # The outcome of a proposal comes when no worker reads its values any more.
        parcel = self.transport.publish(parcel_id, update.content(), to_read=bool(ticket))
        with self._lock:
            self._published[parcel.id] = (update.id, ticket)
        return parcel

    def prepare(self, id_: str, digest: str, parcel: Parcel, timeout_secs: float) -> None:
        """Fetches the bytes and checks them. Until `discard`, other hosts may fetch them from here.

        All workers of a host share the check for non-finite values: each checks its part of the bytes while
        they are in the processor's cache.
        """
        faults.point("stage")
        try:
            update = self._checked(id_, parcel, timeout_secs)
        except BaseException:
            with self._lock:
                self._refused.setdefault(id_, []).append(parcel.id)
            raise
        if parcel.to_read:  # a variable takes over the memory of what `assign` gives it; the others read only
            update = update.replaced(
                [
                    dataclasses.replace(edit, arrays={"value": copied(edit.arrays["value"])})
                    if edit.operation is EditKind.ASSIGN
                    else edit
                    for edit in update.edits
                ]
            )
        with self._lock:
            self._prepared[id_, digest] = update, parcel.id
        faults.point("ready")

    def _checked(self, id_: str, parcel: Parcel, timeout_secs: float) -> Update:
        if id_ in self._unwanted:
            raise UpdateRefused(f"Update {id_!r} has ended before it was prepared", worker=self.rank)
        doubtful: set[int] = set()

        def inspect(place: int, part: npt.NDArray[Any]) -> None:
            if place not in doubtful and not is_finite(part):
                doubtful.add(place)

        update = Update.from_content(id_, self.transport.receive(parcel, timeout_secs, inspect))
        first = [0, *itertools.accumulate(len(edit.arrays) for edit in update.edits)]

        def look_at(place: int) -> bool:  # only doubtful edits are checked again, to name the value
            return not doubtful.isdisjoint(range(first[place], first[place + 1]))

        return planned(update, self.schema, NO_LIMITS, look_at=look_at)

    def prepared(self, id_: str, digest: str) -> Update:
        with self._lock:
            return self._prepared[id_, digest][0]

    def take(self, id_: str, digest: str) -> tuple[Update, str]:
        """Removes and returns the prepared update, and the parcel to release once it is applied."""
        with self._lock:
            return self._prepared.pop((id_, digest))

    def release(self, parcel_id: str, *, reuse: bool = False) -> None:
        """Frees memory. This takes as long as applying the update: not for the training thread."""
        with self._lock:
            self._published.pop(parcel_id, None)
        self.transport.release(parcel_id, reuse=reuse)

    def release_applied(self, parcel_id: str) -> None:
        """Frees the memory of an update that this worker has applied, unless a ticket of its own holds it."""
        with self._lock:
            _, ticket = self._published.get(parcel_id, ("", ""))
        if not ticket:
            self.release(parcel_id)

    def release_ticket(self, ticket: str, stage: Stage) -> None:
        """Releases what was published for a proposal of this worker, once it has its outcome."""
        with self._lock:
            parcels = [parcel for parcel, (_, of) in self._published.items() if of == ticket]
        for parcel in parcels:
            self.release(parcel, reuse=stage not in (Stage.REFUSED, Stage.WITHDRAWN))

    def discard_soon(self, id_: str) -> None:
        """An update has ended: until `discard`, nothing waits for its bytes, which its source may release."""
        self._unwanted.add(id_)

    def discard(self, id_: str) -> None:
        """Releases everything that was received for an id, and what this worker has published for it."""
        with self._lock:
            self._unwanted.discard(id_)
            refused = self._refused.pop(id_, [])
            parcels = [parcel for parcel in refused if not self._published.get(parcel, ("", ""))[1]]
            parcels += [parcel for key, (_, parcel) in self._prepared.items() if key[0] == id_]
            self._prepared = {key: one for key, one in self._prepared.items() if key[0] != id_}
            parcels += [one for one, (of, ticket) in self._published.items() if of == id_ and not ticket]
        for parcel in parcels:
            self.release(parcel)


# Updates that one worker computes from the live values at a boundary.

Function = Callable[[Mapping[str, npt.NDArray[Any]]], "Update | Mapping[str, Any] | None"]


class LiveValues(Mapping[str, "npt.NDArray[Any]"]):
    """The values of the variables at this boundary, by any unique suffix of a name. Each lookup copies."""

    def __init__(self, state: State) -> None:
        self._state = state

    def __getitem__(self, name: str) -> npt.NDArray[Any]:
        full = self._state.schema.resolve(name).name
        return self._state.read([full])[full]

    def __iter__(self) -> Iterator[str]:
        return (variable.name for variable in self._state.schema)

    def __len__(self) -> int:
        return len(self._state.schema)


def computed_update(id_: str, function: Function, state: State, rank: int) -> Update:
    """Runs a user's function on the live values and returns its update under the agreed id."""
    name = getattr(function, "__qualname__", repr(function))
    try:
        returned = function(LiveValues(state))
    except (UpdateRefused, KeyboardInterrupt):
        raise
    except BaseException as error:  # an exit is an error of the function too: all wait for its result
        said = f"The function {name} raised {type(error).__name__}: {error}"
        raise UpdateRefused(said, worker=rank) from error
    if isinstance(returned, Update):
        return returned.with_id(id_)
    if isinstance(returned, Mapping):
        update = Update(id=id_)
        for variable, value in returned.items():
            update = update.assign(variable, value)
        return update
    raise UpdateRefused(
        f"The function {name} must return an Update, or a dict from variable names to new values",
        received=type(returned).__name__,
        worker=rank,
    )


MOST_BOUNDARIES = 512  # how many boundaries to remember; during a trial all are kept
MOST_UNWRITTEN = 20_000
_COARSE = 0.05  # A larger error in the value of a single step is too large, if the value is not larger still.

# One tuple per boundary, oldest first: the step, the number of steps it covers, and its metrics.
MetricHistory: TypeAlias = list[tuple[int, int, dict[str, float]]]


class _Logs(NamedTuple):
    step: int
    steps: int
    logs: Mapping[str, Any]
    time: float = 0.0
    batches: int | None = None  # of the epoch so far; None outside of `fit`
    counts: Mapping[
        str, Sequence[Any]
    ] = {}  # what each mean is over so far: parts of a sum; not of all known
    before: Mapping[str, Any] = {}  # the logs after the batches of the epoch before these steps
    counts_before: Mapping[str, Sequence[Any]] = {}
    means: Mapping[str, bool] = {}  # of `fit`: whether the logs have its running mean

    def own_mean(self, metric: str) -> float | None:
        """These steps alone, of a metric whose running mean the logs have; None if that is not known."""
        value = _number(self.logs.get(metric))
        if value is None or self.batches is None or self.batches <= self.steps:
            return value
        mean = _number(self.before.get(metric))
        if mean is None:
            return None
        done, whole = float(self.batches - self.steps), float(self.batches)
        if metric in self.counts:
            done, whole = (sum(map(float, of.get(metric, ()))) for of in (self.counts_before, self.counts))
            if whole <= done:  # not measured in these steps; or not by this metric, or it was reset
                return None if 0 < whole == done and value == mean else value
        own = (value * whole - mean * done) / (whole - done)
        # Keras adds up in float32: after a loss of 1e17, nothing is left of the next ones in that epoch.
        error = max(abs(value * whole), abs(mean * done)) * 2**-23 / (whole - done)
        return None if max(_COARSE, abs(own) / 4) < error < math.inf else own


class RecentMetrics:
    def __init__(self, *, written: bool = True) -> None:
        self._last: deque[_Logs] = deque()
        # For metrics.jsonl, on worker 0. While nobody can write it, the oldest are dropped.
        self._new: deque[_Logs] = deque(maxlen=MOST_UNWRITTEN if written else 0)
        self._previous: _Logs | None = None  # the last boundary, even if a trial was reverted since
        self._since: int | None = None
        # Of `fit`, set before `note`.
        self.batches: int | None = None
        self.counts: Mapping[str, Sequence[Any]] = {}
        self.means: Mapping[str, bool] = {}
        self.rate: float | None = None  # The learning rate, when it was last told.

    def note(self, step: int, steps: int, logs: Mapping[str, Any] | None, rate: float | None = None) -> None:
        """What was measured in the last steps; of the learning rate, metrics.jsonl is told each change."""
        batches, self.batches = self.batches, None
        if logs is None:
            return
        last, now = self._previous, _Logs(step, steps, dict(logs), time.time(), batches, self.counts)
        now = now if batches is None else now._replace(means=self.means)
        if last is not None and batches is not None and last.batches == batches - steps:
            now = now._replace(before=last.logs, counts_before=last.counts)
        self._previous = now
        self._last.append(now)
        if rate is not None and rate != self.rate:
            self.rate = rate
            now = now._replace(logs={**logs, RATE: logs.get(RATE, rate)})
        self._new.append(now)
        if self._since is None and len(self._last) > MOST_BOUNDARIES:
            self._last.popleft()

    def add(self, step: int, logs: Mapping[str, Any]) -> None:
        """What was measured beside the steps, as by a validation: for metrics.jsonl alone."""
        self._new.append(_Logs(step, 0, dict(logs), time.time()))

    def take(self) -> Iterator[tuple[int, float, dict[str, float], list[str]]]:
        """What is new: step, time, own values, and which are of the epoch so far. Not the training thread."""
        while self._new:
            one = self._new.popleft()
            running = [name for name, is_mean in one.means.items() if not is_mean]
            yield one.step, one.time, self._own_of_all(one), running

    def begin(self, step: int) -> None:
        self._since = step

    def during(self, metric: str) -> tuple[float | None, int]:
        """The mean since the trial began (None if nothing was measured), and how many steps it covers."""
        values = self._own_values(metric, self._since)
        return _mean(values), sum(steps for steps, _ in values)

    def end(self, *, reverted: bool) -> None:
        """Ends the trial. The training thread is stopped at the trial's last boundary."""
        since, self._since = self._since, None
        if since is not None and reverted:
            self._last = deque(one for one in self._last if one.step <= since)
        while len(self._last) > MOST_BOUNDARIES:
            self._last.popleft()

    def before(self, metric: str, steps: int) -> float:
        """The mean over the last `steps` steps, or over fewer if fewer were measured."""
        last = self._last[-1] if self._last else None
        if last is None:
            raise UpdateRefused(
                "A trial needs a metric from before the update, and nothing was measured yet",
                remedy="Propose the update after the first step; in a custom training loop, pass the metrics "
                "to replicas.boundary(logs={...})",
                received=f"metric {metric!r}",
            )
        if metric not in last.logs:
            raise UpdateRefused(
                "The metric of the trial is not in the logs",
                expected=f"one of {', '.join(map(str, last.logs)) or 'none: the logs are empty'}",
                received=repr(metric),
            )
        if last.means.get(metric) is False:
            means = [name for name, is_mean in last.means.items() if is_mean]
            raise UpdateRefused(
                "The metric of a trial must be a mean. Keras computes this one over the whole epoch, and "
                "does not report it for single steps",
                expected=f"one of {', '.join(means)}" if means else "a loss, or a keras.metrics.Mean",
                received=repr(metric),
            )
        latest: list[tuple[int, float]] = []
        values = self._own_values(metric, None)
        while values and steps > 0:
            latest.append(values.pop())
            steps -= latest[-1][0]
        mean = _mean(latest)
        if mean is None or not math.isfinite(mean):
            raise UpdateRefused(
                f"The metric of the trial has no finite value before the update: {metric!r}",
                remedy="Propose the update once the metric is finite. In fit, a running mean that is not "
                "finite stays so until the end of the epoch",
                received="nothing" if mean is None else f"{mean}",
            )
        return mean

    def history(self) -> MetricHistory:
        """The values that a later trial may need, for a checkpoint. For the training thread."""
        return [(one.step, one.steps, self._own_of_all(one)) for one in self._last]

    def recall(self, history: Iterable[Sequence[Any]]) -> None:
        self._last = deque(_Logs(int(step), int(steps), logs) for step, steps, logs in history)

    def _own_values(self, metric: str, since: int | None) -> list[tuple[int, float]]:
        """The number of steps and the own value of each boundary, oldest first."""
        # A copy: the training thread may append meanwhile.
        chosen = (one for one in tuple(self._last) if since is None or one.step > since)
        return [(one.steps, value) for one in chosen if (value := self._own(one, metric)) is not None]

    def _own_of_all(self, one: _Logs) -> dict[str, float]:
        own = {str(metric): self._own(one, metric) for metric in one.logs}
        return {metric: value for metric, value in own.items() if value is not None}

    def _own(self, one: _Logs, metric: str) -> float | None:
        return one.own_mean(metric) if one.means.get(metric) else _number(one.logs.get(metric))


def _number(value: Any) -> float | None:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return None


def numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): number for name, value in logs.items() if (number := _number(value)) is not None}


def _mean(values: Sequence[tuple[int, float]]) -> float | None:
    steps = sum(count for count, _ in values)
    return sum(count * value for count, value in values) / steps if steps else None


@dataclass
class WorkerHooks:
    """What a session and its replica ask of the worker around them, and in which thread."""

    # Training thread: this worker's part of a checkpoint, as `Replica.snapshot`.
    take_snapshot: Callable[[str, bool, bool], Callable[[], Snapshot]]
    # Any thread: raises if another worker has failed.
    check: Callable[[], None] = lambda: None
    # Training thread: how many transfers this worker has started in steps.
    trained: Callable[[], int] = lambda: 0
    # Worker 0, loop; what it returns, lane "saver".
    write_checkpoint: Callable[[Saved], Callable[[], WriteOutcome]] = lambda _: lambda: WriteOutcome.DURABLE
    # Worker 0, training thread, all workers stopped: those known by checkpoint and journal.
    expected_digests: Callable[[Sequence[str]], dict[str, str]] = lambda names: {}
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


@dataclass(eq=False, repr=False)
class StateReplica:
    """Implements `replicast.core.messages.Replica`, which documents the methods.

    An `UpdateRefused` that an order raises is this worker's refusal of it (`Session`, `Gate`).
    """

    machine: WorkerMachine
    state: State
    parcels: Parcels
    release_later: Callable[[Callable[[], object]], None]  # in the lane "release"
    reached: Callable[[str, Stage], None]
    limits: Limits
    receive_secs: float
    journal: Journal | None
    guard: Guard | None
    may_differ: frozenset[str]

    def __post_init__(self) -> None:
        self.rank = self.machine.rank
        self.hooks: WorkerHooks  # those of the worker around, from `Session.start` on
        self.functions: dict[str, Function] = {}  # that this worker has proposed and will run
        self._copy: list[Arrays] | None = None  # during a trial: the state before it, of each local replica
        # Worker 0: what updates have overwritten, from their boundary until it is written. A revert needs it.
        self._before: dict[int, _Before] = {}
        self.pulled: dict[str, npt.NDArray[Any]] = {}
        self.holds: set[int] = set()
        self.measures = RecentMetrics(written=self.rank == 0)
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

    def invert(self, id_: str, sequence: int, forced: bool) -> Published:
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

    def apply(self, id_: str, digest: str, sequence: int, keep: bool) -> Callable[[], Applied]:
        update, parcel_id = self.parcels.take(id_, digest)
        keeps = keep and self.rank == 0 and self._hold_before(id_, sequence, update.edits)
        faults.point("apply")
        self.state.apply(update.edits)
        self.holds.add(sequence)
        applied_at = time.time()
        strict = [edit for edit in update.edits if edit.variable not in self.may_differ]
        digested = self.state.digest_later(strict)
        measured = self._measure_later(update.edits, self._before.get(sequence)) if self.rank == 0 else tuple
        self.reached(id_, Stage.APPLIED)
        faults.point("ack")
        stall_secs, trained = time.monotonic() - self.stopped_at, self.hooks.trained()

        def report() -> Applied:
            applied = Applied(digested(), applied_at, stall_secs, trained, keeps, measured())
            self.release_later(lambda: self.parcels.release_applied(parcel_id))
            return applied

        return report

    def _measure_later(
        self, edits: Sequence[Edit], before: _Before | None
    ) -> Callable[[], tuple[Effect, ...]]:
        """What edits have done, by the values as they are now. Any thread may call the result, once."""
        schema = self.state.schema
        whole, rows = touched_parts([edit for edit in edits if edit.operation not in RESETS])
        if bytes_to_keep(whole, rows, schema) > MEASURED_BYTES:
            return tuple
        held = self.state.hold(whole, rows)

        def measure() -> tuple[Effect, ...]:
            try:
                kept = ({}, {}) if before is None or before.values is None else before.values()
                after = held()
                return effects(edits, schema, kept[0] | kept[1], after[0] | after[1])
            except Exception:  # The update is applied, whatever can be told of it.
                logger.exception("what an update has changed cannot be measured")
                return ()

        return measure

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
        check_rates(update.edits, self.state.schema, self.state.read)
        if self.guard is not None:
            self.guard.check(update.edits, self.state.schema, self.state.read)

    def publish(self, id_: str, names: tuple[str, ...], devices: tuple[str, ...] = ()) -> Published:
        update = Update(id=id_, allow_nonfinite=True)
        for name, value in self.state.read(names, devices).items():
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

    def examine(self, turn: int | None = None) -> SeenDigests:
        """With a turn, of each large table only the rows whose turn it is."""
        started = time.monotonic()
        by_rows = frozenset() if turn is None else self.state.written_by_rows()
        large = [one for one in self.state.schema if one.name in by_rows and one.nbytes > SLICE_BYTES]
        partly = rows_in_turn({one.name: (one.shape[0], one.nbytes) for one in large}, turn or 0)
        digests = self.state.digests(one.name for one in self.state.schema if one not in large)
        for one in partly:
            if one.stop:
                rows = self.state.read_rows(one.variable, np.arange(one.start, one.stop))
                digests[one.variable] = digest_array(rows)
        secs = time.monotonic() - started
        free = {name: digests.pop(name) for name in [*digests] if name in self.may_differ}
        trained, devices = self.hooks.trained(), self.state.devices
        return SeenDigests(self.machine.step, digests, free, secs, trained, time.time(), partly, devices)

    def examine_quietly(self, turn: int | None) -> SeenDigests:
        """As `examine`, with one digest for all variables that must be equal: less to send."""
        seen = self.examine(turn)
        return replace(seen, digests={"": joined(seen.digests)})

    def expected(self, names: tuple[str, ...]) -> dict[str, str]:
        return self.hooks.expected_digests(names)

    def deviations(self, id_: str, digest: str, names: tuple[str, ...]) -> Mapping[str, Any]:
        found = {}
        devices: list[tuple[str, ...]] = [(device,) for device in self.state.devices] or [()]
        for edit in self.parcels.prepared(id_, digest).edits:
            name, value = edit.variable, edit.arrays["value"]
            for device in devices if name in names else ():
                mine = self.state.read([name], device)[name]
                if mine.tobytes() != value.tobytes():
                    found[name] = deviation(mine, value)
                    break
        return found

    def snapshot(self, id_: str, *, due: bool, again: bool) -> Callable[[], Snapshot]:
        return self.hooks.take_snapshot(id_, due, again)

    def keep_copy(self) -> None:
        self._copy = [{} for _ in self.state.devices or ("",)]
        for replica, copy in enumerate(self._copy):
            self.state.snapshot(copy, replica)
        self.measures.begin(self.machine.step)

    def go_back(self) -> None:
        if self._copy is not None:
            faults.point("settle")
            for replica, copy in enumerate(self._copy):
                self.state.restore_snapshot(copy, replica)
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

    def report(self, report: Any, raises: bool) -> None:
        self.hooks.on_report(report, raises)

    def leave(self, problem: str, asked_by: tuple[str, ...]) -> None:
        self.hooks.on_leave(problem, asked_by)


def joined(digests: Mapping[str, str]) -> str:
    """One digest for several variables; with a comma if local replicas differ in one of them."""
    text = "".join(digests[name] for name in sorted(digests))
    return xxhash.xxh3_128_hexdigest(text.encode()) + ("," if "," in text else "")
