"""Checkpoints of a running job: what each training thread contributes.

    training threads    at one boundary: worker 0 copies its state, the others digest theirs
    training threads    when they continue: report their part, after all proposals made up to then
    coordinator         compares; waits until proposals are stored (`core/operations/save.py`)
    saver lane          on worker 0: writes the copy (`checkpoint_writer.py`)

A state that differs between workers is never saved as if it were equal. For variables that may differ, the
mean is saved. A restarted script does not repeat what callbacks did at the boundary of a checkpoint, so their
proposals there are part of the checkpoint.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import json
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from importlib import metadata
from typing import Any, Literal

import numpy as np

from replicast import faults
from replicast.core.entries import Saved
from replicast.core.events import Ended, WriteOutcome
from replicast.core.records import Refusal, Refuse, ReportId, Snapshot, Stage
from replicast.errors import CheckpointError, JobFailed, NotSupported, ReplicasDiverged, ReplicastError
from replicast.replicas.measures import MetricHistory, mean_history
from replicast.replicas.position import Position
from replicast.replicas.replica import joined
from replicast.replicas.session import Session
from replicast.storage.checkpoint_format import Draft, Manifest, file_order, saved_of
from replicast.storage.checkpoints import CheckpointStore
from replicast.update.audit_report import what_follows
from replicast.update.digest import digest_array
from replicast.update.edits import FLOAT_DTYPES, Array
from replicast.update.schema import Schema
from replicast.update.state import Arrays, State

# The errors of checkpoints that cannot be made, each with what to do.

_MAKE_ROOM = "Free disk space, or keep fewer checkpoints: callback(keep=...)"
_REMEDIES = {
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EROFS: "The file system is read-only: make it writable, or use another run directory",
    errno.EACCES: "Give this user write permission, or use another run directory",
}


def no_run_dir() -> NotSupported:
    """The error for a checkpoint without a run directory."""
    return NotSupported(
        "A checkpoint without a run directory",
        reason="there is nowhere to write it",
        remedy="Use Replicas(model, run_dir=...), or start the job with 'replicast run'",
    )


def not_written(error: OSError, store: CheckpointStore | None, step: int) -> CheckpointError:
    """The error for a checkpoint that could not be written, with what to do."""
    failure = CheckpointError(
        f"The checkpoint of step {step} could not be written",
        path=None if store is None else store.path(step),
        step=step,
        received=str(error),
        remedy=f"{_REMEDIES.get(error.errno or 0, 'Check the file system')}. Earlier checkpoints are intact",
    )
    failure.__cause__ = error
    return failure


def ended_before() -> JobFailed:
    """The error of a checkpoint that nobody will write any more."""
    return JobFailed("The job ended before its checkpoint was written")


# The user's view of checkpoints: when to save, which ones to keep, and the one being written.

SaveEvery = int | timedelta | Literal["epoch"]
WhenBusy = Literal["wait", "skip"]
LOOK_SECS = 0.5


@dataclass(frozen=True, slots=True)
class Keeping:
    """Which checkpoints to keep."""

    last: int = 3
    best: tuple[str, Literal["min", "max"]] | None = None

    def __post_init__(self) -> None:
        if type(self.last) is not int or self.last < 1:  # `type`, since True is an int to isinstance
            raise ValueError(f"keep is a number of checkpoints, at least 1. Received: {self.last!r}")
        pair = isinstance(self.best, tuple | list) and len(self.best) == 2 and isinstance(self.best[0], str)
        if self.best is not None and not (pair and self.best[1] in ("min", "max")):
            raise ValueError(
                f'keep_best is a metric and "min" or "max", as in ("loss", "min"). Received: {self.best!r}'
            )


@dataclass(frozen=True, slots=True)
class SavePlan:
    """When to make checkpoints, and which of them to keep."""

    every: SaveEvery | None = None
    keeping: Keeping = field(default_factory=Keeping)
    when_busy: WhenBusy = "wait"

    def __post_init__(self) -> None:
        wrong = isinstance(self.every, bool) or (isinstance(self.every, int) and self.every < 1)
        wrong = wrong or (isinstance(self.every, timedelta) and self.every < timedelta(0))
        if wrong or not (
            self.every is None or self.every == "epoch" or isinstance(self.every, int | timedelta)
        ):
            raise ValueError(
                f'save_every is a number of steps, a datetime.timedelta or "epoch". Received: {self.every!r}'
            )
        if self.when_busy not in ("wait", "skip"):
            raise ValueError(f'when_busy must be "wait" or "skip". Received: {self.when_busy!r}')


class Saving:
    """A checkpoint that is being written. On all workers but worker 0 it is done immediately."""

    def __init__(self, id_: str, check: Callable[[], None] = lambda: None) -> None:
        self.id = id_
        self._check = check
        self._done = threading.Event()
        self._manifest: Manifest | None = None
        self._error: Exception | None = None
        self.told = False
        """Whether the caller of `result` has received its failure."""
        self._lock = threading.Lock()
        self.is_writing = False
        """Whether writing has begun. Until then another checkpoint may replace it."""

    def done(self) -> bool:
        """Whether it is written, or never will be."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until it is done, at most `timeout` seconds. Returns whether it is."""
        ends = math.inf if timeout is None else time.monotonic() + timeout
        while not self._done.wait(max(0.0, min(LOOK_SECS, ends - time.monotonic()))):
            self._check()
            if time.monotonic() >= ends:
                return False
        return True

    def result(self, timeout: float | None = None) -> Manifest | None:
        """Blocks until the checkpoint is durable, at most `timeout` seconds."""
        if not self.wait(timeout):
            raise CheckpointError("The checkpoint is still being written", received=f"after {timeout} s")
        if self._error is not None:
            self.told = True
            raise self._error
        return self._manifest

    def failure(self) -> str:
        """Why it was not written; empty if it was, or is not done yet."""
        return "" if self._error is None else str(self._error)

    def begin_writing(self) -> bool:
        """Marks that writing begins. Returns False if the checkpoint was replaced before."""
        with self._lock:
            self.is_writing = not self.done()
            return self.is_writing

    def replace(self) -> None:
        """Settles it because another checkpoint replaces it, unless it is being written."""
        with self._lock:
            if not self.is_writing:
                self.finish()

    def finish(self, manifest: Manifest | None = None, error: Exception | None = None) -> None:
        """Settles it. The first outcome is final."""
        if not self.done():
            self._manifest, self._error = manifest, error
            self._done.set()


# Variables that may differ between workers, made one value for a checkpoint: the mean over the workers.

MOST_AVERAGED_BYTES = 2**20
"""Values that may differ are sent as text. If they are larger than this in total, worker 0's are saved."""


def averaged_names(schema: Schema, may_differ: Collection[str]) -> list[str]:
    """The variables whose mean is saved. For all others, integers included, worker 0's value is saved."""
    floats = [v for v in schema if v.name in may_differ and v.dtype in FLOAT_DTYPES]
    return [v.name for v in floats] if sum(v.nbytes for v in floats) <= MOST_AVERAGED_BYTES else []


def packed(state: State, names: Iterable[str]) -> dict[str, str]:
    """This worker's values as text."""
    values = state.read(names)
    return {name: base64.b64encode(value.tobytes()).decode() for name, value in values.items()}


def mean(own: Array, others: Sequence[Mapping[str, str]], name: str) -> Array:
    """The mean of worker 0's value and the packed values of the others, in the variable's dtype."""
    total = own.astype(np.float64)
    for other in others:
        total += np.frombuffer(base64.b64decode(other[name]), own.dtype).reshape(own.shape)
    averaged: Array = (total / (len(others) + 1)).astype(own.dtype)
    return averaged


# Worker 0's part in checkpoints: writes the copies of the state, and says why one was not written.
#
# saver lane writes a checkpoint that all workers agree on, and removes old ones release lane hears from the
# coordinator how each save ended; one that was not written is settled here

logger = logging.getLogger("replicast")


@dataclass(slots=True)
class StateCopy:
    """Worker 0's copy of the state, to be written to a file."""

    draft: Draft
    arrays: Arrays
    digests: dict[str, str]
    measured: MetricHistory
    saving: Saving


class CheckpointWriter:
    """Writes checkpoints, on worker 0. For its lanes, unless a method says otherwise."""

    def __init__(self, session: Session, schema: Schema, store: CheckpointStore | None) -> None:
        self._session = session
        self._schema = schema
        self._store = store
        self._expected: dict[str, Saving] = {}
        self._failed: tuple[Saving, Exception] | None = None
        self._warned_of_metric = False
        self.keeping = Keeping()
        self.named: int | None = None
        self.policy: Callable[[], str] = lambda: "raise"
        self.remove_payloads: Callable[[frozenset[int], frozenset[tuple[str, str]] | None], None] = (
            lambda held, pending: None
        )

    # The training thread.

    def expect(self, saving: Saving) -> None:
        """The save of this id is about to be decided by all workers; `ended` is called for each."""
        self._expected[saving.id] = saving

    def check(self) -> None:
        """Raises the error of a failed checkpoint, once, unless `result` has raised it already."""
        failed, self._failed = self._failed, None
        if failed is not None and not failed[0].told:
            raise failed[1]

    # The lanes.

    def write(self, saved: Saved) -> WriteOutcome:
        """Writes a checkpoint, in the saver lane. It is settled afterwards, even if writing failed."""
        copy: StateCopy = saved.state[0]
        others: Sequence[dict[str, Any]] = saved.state[1:]
        if not copy.saving.begin_writing():  # another checkpoint has replaced it and reuses its memory
            return WriteOutcome.FAILED
        try:
            manifest = self._written(copy, others, saved)
        except JobFailed as error:
            copy.saving.finish(error=error)
            return WriteOutcome.FENCED
        except (ReplicastError, OSError) as error:
            failure = not_written(error, self._store, saved.step) if isinstance(error, OSError) else error
            self._fail(copy.saving, failure)
            return WriteOutcome.FAILED
        except BaseException as error:
            copy.saving.finish(error=JobFailed(f"Checkpoints can no longer be written: {error}"))
            raise
        copy.saving.finish(manifest)
        copy.arrays, copy.measured = {}, []
        for other in others:
            other.clear()
        return WriteOutcome.DURABLE

    def ended(self, ended: Ended) -> None:
        """A save has ended: if it was not written, says why. In the lane "release"."""
        saving, refusal = self._expected.pop(ended.id, None), ended.outcome.result
        if not isinstance(refusal, Refusal):
            if saving is not None:
                saving.finish()  # it was skipped, unless it is written
            return
        problem = f"The state is not saved. {refusal.problem}"
        if ended.outcome.stage is Stage.FAILED:
            error: ReplicastError = ReplicasDiverged(
                f"{problem}. {what_follows(self.policy())}",  # type: ignore[arg-type]
                worker=refusal.workers[0] if refusal.workers else None,
                step=(refusal.details or {}).get("step"),
            )
            logger.warning("%s", error)
            if saving is not None:
                saving.finish(error=error)
        elif saving is None:  # nobody holds it: it was due, and no worker has taken its part
            logger.warning("%s", problem)
        elif not saving.done():
            self._fail(saving, CheckpointError(problem))

    def _fail(self, saving: Saving, error: Exception) -> None:
        self._failed = saving, error
        saving.finish(error=error)

    def _written(self, copy: StateCopy, others: Sequence[dict[str, Any]], saved: Saved) -> Manifest:
        if self._store is None:
            raise no_run_dir()
        replica = self._session.replica
        for name in averaged_names(self._schema, replica.may_differ) if others else ():
            values = [other["values"] for other in others]
            np.copyto(copy.arrays[name], mean(copy.arrays[name], values, name))
            copy.digests[name] = digest_array(copy.arrays[name])
        arrays = ((name, copy.arrays[name]) for name in file_order(copy.draft.schema))
        # One line of text, as it is long and not for people. A trial after a restart is compared with it.
        histories = [copy.measured, *(json.loads(other["measured"]) for other in others)]
        measured = json.dumps(mean_history(histories))
        draft = replace(copy.draft, measured=measured).with_updates(saved)
        manifest = self._store.write(draft, arrays, copy.digests)
        self._prune(manifest)
        return manifest

    def _prune(self, manifest: Manifest) -> None:
        """Removes old checkpoints. The new one is intact, whatever happens to the others."""
        best = self.keeping.best
        if best is not None and best[0] not in manifest.metrics and not self._warned_of_metric:
            self._warned_of_metric = True
            logger.warning(
                "keep_best: the checkpoint of step %d has no metric %r, so it cannot be the best one. It "
                'has: %s. For validation metrics, use save_every="epoch"',
                manifest.step,
                best[0],
                ", ".join(manifest.metrics) or "none",
            )
        try:
            if self._store is not None:
                self._store.prune(self.keeping.last, best, self.named)
                self._remove_payloads(self._store)
        except (ReplicastError, OSError) as error:
            logger.warning("old checkpoints cannot be removed and use disk space: %s", error)

    def _remove_payloads(self, store: CheckpointStore) -> None:
        """Removes the payloads that no start from a checkpoint needs.

        Called in the only thread that writes and removes checkpoints: the list has all of them.
        """
        kept = [saved_of(manifest) for manifest in store.list()]
        held = frozenset.intersection(*(saved.holds for saved in kept)) if kept else frozenset()
        proposals = [one.proposal for saved in kept for one in saved.pending]
        pending = frozenset((one.id, one.digest) for one in proposals)
        # One that is damaged now may be repaired, and nobody knows what it proposes.
        self.remove_payloads(held, None if store.problems() else pending)


def numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """The logs that are numbers; a metric may be anything."""
    found = {}
    for name, value in logs.items():
        with contextlib.suppress(TypeError, ValueError):
            found[name] = float(value)
    return found


@functools.cache
def versions() -> Mapping[str, Any]:
    """The versions of the packages that a checkpoint depends on. Asked once: that takes milliseconds."""
    found = {}
    for package in ("replicast", "tensorflow", "tensorflow-cpu", "keras", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


REMIND_SECS = 30.0


class Checkpoints:
    """One worker's part in checkpoints. All methods are for the training thread unless they say otherwise."""

    def __init__(self, session: Session, state: State, store: CheckpointStore | None, attempt: int) -> None:
        self._session = session
        self._state = state
        self._store = store
        self._attempt = attempt
        self._plan = SavePlan()
        self._buffers: Arrays = {}
        self._copying = threading.Lock()  # held while the buffers are written over, or digested
        self._unreported: tuple[ReportId, Callable[[], Snapshot | None]] | None = None
        self._current: Saving | None = None  # worker 0: whose copy the buffers hold
        self._requested = Saving("")  # the last one for which all workers were stopped
        self.writer = CheckpointWriter(session, state.schema, store)
        self.position = Position()
        self.metrics: Mapping[str, Any] = {}
        self.save_due: Callable[[], object] = self.save_in_passing
        session.replica.take_snapshot = self._take_when_asked

    @property
    def has_place(self) -> bool:
        """Whether there is a run directory."""
        return self._store is not None

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written, on worker 0. Any thread."""
        current = self._current
        return current is not None and not current.done()

    @property
    def plan(self) -> SavePlan:
        """When checkpoints are made."""
        return self._plan

    @plan.setter
    def plan(self, plan: SavePlan) -> None:
        if plan.every is not None and self._store is None:
            raise no_run_dir()
        self._plan = plan
        self.writer.keeping = plan.keeping

    def save_here(self) -> Saving:
        """Saves the state of this boundary, where all workers stop; returns while it is being written."""
        if self._store is None:
            raise no_run_dir()
        self.report()
        outcome = self._session.rest("save")
        if isinstance(outcome, Refusal):
            in_trial = "Save after the trial; save_every of the callback does so automatically"
            raise CheckpointError(
                f"The state is not saved. {outcome.problem}",
                step=self._session.step,
                remedy=in_trial if self._session.replica.on_trial else None,
            )
        return _done() if self._session.rank != 0 else self._requested

    def save_in_passing(self) -> Saving:
        """Saves the state of this boundary without waiting. All workers call it at the same boundary.

        It is written when all of them have called `report`. During a trial, it is made after the trial.
        """
        self.report()
        id_ = self._session.next_report("save")
        if self._session.replica.on_trial:
            if self._session.rank == 0:
                logger.warning(
                    "the checkpoint of step %d is postponed until the trial ends", self._session.step
                )
            self._unreported = id_, lambda: None
            return _done()
        if self.is_busy and not self._waits_for_current():
            self._unreported = id_, self._empty
            return _done()
        saving = self._opened(str(id_))
        self._unreported = id_, self._take(saving)
        return saving

    def save_once_more(self) -> None:
        """Another checkpoint is due where `save_in_passing` was called just now: worker 0 skips it.

        It counts all the same: another worker may take the two at different moments of this boundary.
        """
        taken = self._unreported
        self.report()
        if taken is not None:
            part = self._empty if self._session.rank == 0 else taken[1]
            self._unreported = self._session.next_report("save"), part

    def report(self) -> None:
        """Called when training continues: this worker's proposals so far belong to the last checkpoint."""
        unreported, self._unreported = self._unreported, None
        if unreported is not None:
            self._session.report(*unreported)

    def check(self) -> None:
        """Raises the error of a failed checkpoint, once, unless `result` has raised it already."""
        self.writer.check()

    def why_not_written(self) -> str:
        """Why the last checkpoint was not written; empty if it was, or if this worker does not know."""
        return "" if self._current is None else self._current.failure()

    def settle(self, timeout_secs: float | None = None) -> None:
        """Blocks until nothing is being written. Without a timeout, logs every 30 s what it waits for."""
        self.report()
        if self._current is None:
            return
        started = reminded = time.monotonic()
        ends = math.inf if timeout_secs is None else started + timeout_secs
        while not self._is_done_soon(self._current):
            now = time.monotonic()
            if now > ends:
                raise CheckpointError(
                    "The previous checkpoint is still being written", received=f"after {timeout_secs} s"
                )
            if now - reminded > REMIND_SECS:
                reminded = now
                logger.warning("waiting since %.0f s for %s to be written", now - started, self._current.id)

    def _is_done_soon(self, saving: Saving) -> bool:
        """Waits briefly for a checkpoint. Returns whether it is done."""
        if saving.wait(0.05):
            return True
        self._session.check()
        if self._session.threads.stopping.is_set() and not saving.done():
            # The saver may still be writing: going on would change the copy that it writes.
            raise ended_before()
        return False

    def _waits_for_current(self) -> bool:
        """Waits for the checkpoint being written, if the plan says so. Returns whether it is done.

        Does not wait if the checkpoint needs this training thread to reach a boundary first, and at most
        `answer_secs` for what the other workers contribute: they had the time since the last boundary.
        """
        current = self._current
        if current is None or self._plan.when_busy == "skip":
            return current is None
        decided_by = time.monotonic() + self._session.timeouts.answer_secs
        while not self._is_done_soon(current):
            is_late = self._session.is_wanted or time.monotonic() > decided_by
            if is_late and not current.is_writing:
                logger.warning(
                    "the checkpoint of step %d is skipped: the previous one is not decided yet",
                    self._session.step,
                )
                return False
        return True

    def _take_when_asked(self, id_: str, due: bool, again: bool) -> Callable[[], Snapshot]:
        """Takes this worker's part of a checkpoint for which all workers are stopped.

        One that is due is made without waiting: proposals of callbacks at this boundary belong to it, and the
        end of an epoch comes first. One that was requested is never skipped: the script may end here.
        """
        if self._current is not None and (again or not due):
            self._current.replace()  # its copy is not written
        if due:
            self.save_due()
            return self._empty
        self.report()
        self._requested = self._opened(id_)
        secs = 0.9 * self._session.timeouts.compute_secs  # before the coordinator stops waiting for this
        try:
            self.settle(secs)
        except CheckpointError as error:
            raise Refuse(str(error), (self._session.rank,)) from error
        return self._take(self._requested)

    def _opened(self, id_: str) -> Saving:
        """A checkpoint that worker 0 writes, if the coordinator of the job has nothing against it."""
        if self._session.rank != 0:
            return _done()
        saving = Saving(id_, self._check_written)
        self.writer.expect(saving)
        return saving

    def _empty(self) -> Snapshot:
        """The snapshot for a checkpoint that is not made."""
        return Snapshot(self._session.step, "", frozenset(self._session.replica.holds), None)

    def _take(self, saving: Saving) -> Callable[[], Snapshot]:
        """Takes this worker's part of a checkpoint; the returned function finishes it in the background."""
        faults.point("snapshot")
        step, replica = self._session.step, self._session.replica
        holds, measured = frozenset(replica.holds), replica.measures.history()
        if self._session.rank != 0:
            names = [variable.name for variable in self._state.schema]
            averaged = averaged_names(self._state.schema, replica.may_differ)
            digests = self._state.digests(names)
            details = {"values": packed(self._state, averaged), "measured": json.dumps(measured)}
            snapshot = Snapshot(step, joined(self._strict(digests)), holds, details)
            return lambda: snapshot
        with self._copying:
            self._state.snapshot(self._buffers)
        draft = self._draft(step)
        self._current = saving

        def finish() -> Snapshot:
            with self._copying:
                if saving.done():  # another checkpoint has replaced it: the buffers may hold that one's copy
                    return Snapshot(step, "", holds, None)
                digests = {name: digest_array(value) for name, value in self._buffers.items()}
            copy = StateCopy(draft, self._buffers, digests, measured, saving)
            return Snapshot(step, joined(self._strict(digests)), holds, copy)

        return finish

    def _check_written(self) -> None:
        """Raises if no thread is left that could write. Any thread."""
        if self._session.threads.have_ended():
            self._session.threads.check()
            raise ended_before()

    def _strict(self, digests: Mapping[str, str]) -> dict[str, str]:
        may_differ = self._session.replica.may_differ
        return {name: digest for name, digest in digests.items() if name not in may_differ}

    def _draft(self, step: int) -> Draft:
        return Draft(
            step=step,
            epoch=self.position.epoch,
            batch=self.position.batch,
            created_at=time.time(),
            workers=self._session.size,
            attempt=self._attempt,
            schema=self._state.schema,
            metrics=numbers(self.metrics),
            versions=versions(),
            script=self.position.script(),
        )


def _done() -> Saving:
    saving = Saving("")
    saving.finish()
    return saving
