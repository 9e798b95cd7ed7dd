"""Checkpoints of a running job: when they are made, what each worker contributes, and who writes them.

    training threads    at one boundary: worker 0 copies its state, the others digest theirs
    training threads    when they continue: report their part, after all proposals made up to then
    coordinator         compares; waits until proposals are stored (`core/operations/save.py`)
    lane saver          on worker 0: writes the copy, and removes old checkpoints
    lane release        on worker 0: hears how each save ended, and settles one that was not written
    save-timer          on worker 0, with `save_every=timedelta`: requests saves; ends with the other threads

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
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib import metadata
from typing import Any, Literal

import numpy as np

from replicast import faults
from replicast.core.entries import Saved
from replicast.core.events import Ended, WriteOutcome
from replicast.core.records import Refusal, Refuse, ReportId, Snapshot, Stage
from replicast.errors import CheckpointError, JobFailed, NotSupported, ReplicasDiverged, ReplicastError
from replicast.replicas.lanes import LOOK_SECS, Deadline, wait_for
from replicast.replicas.measures import MetricHistory, mean_history
from replicast.replicas.position import Training
from replicast.replicas.replica import joined
from replicast.replicas.session import Session
from replicast.storage.checkpoints import CheckpointStore, Draft, Manifest, file_order, saved_of
from replicast.update.audit_report import what_follows
from replicast.update.digest import digest_array
from replicast.update.edits import FLOAT_DTYPES, Array
from replicast.update.schema import Schema
from replicast.update.state import Arrays, State

logger = logging.getLogger("replicast")

SaveEvery = int | timedelta | Literal["epoch"]
WhenBusy = Literal["wait", "skip"]

MOST_AVERAGED_BYTES = 2**20  # they are sent as text. If there are more in total, worker 0's values are saved
REMIND_SECS = 30.0
_MAKE_ROOM = "Free disk space, or keep fewer checkpoints: callback(keep=...)"
_REMEDIES = {
    errno.ENOSPC: _MAKE_ROOM,
    errno.EDQUOT: _MAKE_ROOM,
    errno.EROFS: "The file system is read-only: make it writable, or use another run directory",
    errno.EACCES: "Give this user write permission, or use another run directory",
}


@dataclass(frozen=True, slots=True)
class SavePlan:
    """When to make checkpoints, and which of them to keep: the arguments of `Replicas.callback`."""

    every: SaveEvery | None = None
    keep: int = 3
    keep_best: tuple[str, Literal["min", "max"]] | None = None
    when_busy: WhenBusy = "wait"

    def __post_init__(self) -> None:
        every, best = self.every, self.keep_best
        wrong = isinstance(every, bool) or (isinstance(every, int) and every < 1)
        wrong = wrong or (isinstance(every, timedelta) and every < timedelta(0))
        if wrong or not (every is None or every == "epoch" or isinstance(every, int | timedelta)):
            raise ValueError(
                f'save_every is a number of steps, a datetime.timedelta or "epoch". Received: {every!r}'
            )
        if type(self.keep) is not int or self.keep < 1:  # `type`, since True is an int to isinstance
            raise ValueError(f"keep is a number of checkpoints, at least 1. Received: {self.keep!r}")
        pair = isinstance(best, tuple | list) and len(best) == 2 and isinstance(best[0], str)
        if best is not None and not (pair and best[1] in ("min", "max")):
            raise ValueError(
                f'keep_best is a metric and "min" or "max", as in ("loss", "min"). Received: {best!r}'
            )
        if self.when_busy not in ("wait", "skip"):
            raise ValueError(f'when_busy must be "wait" or "skip". Received: {self.when_busy!r}')


class Saving:
    """A checkpoint that is being written. On all workers but worker 0 it is done immediately."""

    def __init__(
        self, id_: str = "", check: Callable[[], None] = lambda: None, *, done: bool = False
    ) -> None:
        self.id = id_
        self._check = check
        self._done = threading.Event()
        self._manifest: Manifest | None = None
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self.told = False  # whether the caller of `result` has received its failure
        self.is_writing = False  # until then another checkpoint may replace it
        if done:
            self._done.set()

    def done(self) -> bool:
        """Whether it is written, or never will be."""
        return self._done.is_set()

    def result(self, timeout: float | None = None) -> Manifest | None:
        """Blocks until the checkpoint is durable, at most `timeout` seconds."""
        if not self.wait(timeout):
            raise CheckpointError("The checkpoint is still being written", received=f"after {timeout} s")
        if self._error is not None:
            self.told = True
            raise self._error
        return self._manifest

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until it is done, at most `timeout` seconds. Returns whether it is."""
        return wait_for(self._done, timeout, self._check)

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


@dataclass(slots=True)
class _StateCopy:
    """Worker 0's copy of the state, to be written to a file."""

    draft: Draft
    arrays: Arrays
    digests: dict[str, str]
    measured: MetricHistory
    saving: Saving


class Checkpoints:
    """One worker's part in checkpoints. All methods are for the training thread unless they say otherwise."""

    def __init__(
        self, session: Session, state: State, training: Training, store: CheckpointStore | None, attempt: int
    ) -> None:
        self._session = session
        self._state = state
        self._training = training
        self._store = store
        self._attempt = attempt
        self._plan = SavePlan()
        self._has_timer = False
        self._due_after_epoch = 0
        self._buffers: Arrays = {}
        self._copying = threading.Lock()  # held while the buffers are written over, or digested
        self._unreported: tuple[ReportId, Callable[[], Snapshot | None]] | None = None
        self._current: Saving | None = None  # worker 0: whose copy the buffers hold
        self._requested = Saving()  # the last one for which all workers were stopped
        self._expected: dict[str, Saving] = {}  # worker 0: those whose end the coordinator will tell
        self._failed: tuple[Saving, Exception] | None = None
        self._warned_of_metric = False
        self.named: int | None = None  # a checkpoint that the user restored by its step: it is kept

    @property
    def has_place(self) -> bool:
        """Whether there is a run directory."""
        return self._store is not None

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written, on worker 0. Any thread."""
        current = self._current
        return current is not None and not current.done()

    # When checkpoints are made.

    def agree_on(self, plan: SavePlan) -> None:
        """Each worker takes its part of a checkpoint by itself: all must at the same boundaries."""
        self._session.require_same_plan(
            "saves",
            repr(plan.every),
            problem="Worker {} has a different save_every than",
            remedy="Pass the same save_every on all workers: worker 0 writes, and all take part",
        )
        self.follow(plan)

    def follow(self, plan: SavePlan) -> None:
        """Makes checkpoints by this plan from now on."""
        if plan.every is not None and self._store is None:
            raise no_run_dir()
        self._plan = plan
        if isinstance(plan.every, timedelta) and self._session.rank == 0 and not self._has_timer:
            self._has_timer = True
            self._session.threads.start("save-timer", self._request_in_time)

    def after_step(self, steps: int) -> None:
        """Called at a boundary: makes a checkpoint if one is due, and raises if the last one failed."""
        self.check()
        every, step = self._plan.every, self._session.step
        if isinstance(every, int) and step // every > (step - steps) // every:
            self._save_due()

    def after_epoch(self) -> None:
        """The end of an epoch, with all that callbacks do there."""
        due, self._due_after_epoch, self._training.epoch_ends = self._due_after_epoch, 0, False
        due += self._plan.every == "epoch"
        if due:
            self.save_in_passing()
        for _ in range(due - 1):
            self._save_once_more()

    def _save_due(self) -> None:
        if self._training.epoch_ends:
            self._due_after_epoch += 1
        else:
            self.save_in_passing()

    def _request_in_time(self) -> None:
        waited = 0.0
        while not self._session.threads.stopping.wait(LOOK_SECS):
            waited += LOOK_SECS
            plan = self._plan
            if not isinstance(plan.every, timedelta) or waited < plan.every.total_seconds():
                continue
            waited = 0.0
            if plan.when_busy == "wait" or not self.is_busy:
                self._session.request("save")

    # One checkpoint: the training threads.

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
        return Saving(done=True) if self._session.rank != 0 else self._requested

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
            return Saving(done=True)
        if self.is_busy and not self._waits_for_current():
            self._unreported = id_, self._empty
            return Saving(done=True)
        saving = self._opened(str(id_))
        self._unreported = id_, self._take(saving)
        return saving

    def _save_once_more(self) -> None:
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
        failed, self._failed = self._failed, None
        if failed is not None and not failed[0].told:
            raise failed[1]

    def save_before_leaving(self) -> str:
        """Saves and waits up to a timeout. Returns why nothing was saved, or an empty string."""
        if not self.has_place:
            return "There is no run directory"
        if self._session.replica.on_trial:
            return "A trial is under way"
        secs = self._session.timeouts.join_secs
        self.settle(secs)
        saving = self.save_in_passing()
        self.report()
        saving.result(secs)
        return ""

    def why_not_written(self) -> str:
        """Why the last checkpoint was not written; empty if it was, or if this worker does not know."""
        return "" if self._current is None else self._current.failure()

    def settle(self, timeout_secs: float | None = None) -> None:
        """Blocks until nothing is being written. Without a timeout, logs every 30 s what it waits for."""
        self.report()
        if self._current is None:
            return
        started, deadline, remind = time.monotonic(), Deadline(timeout_secs), Deadline(REMIND_SECS)
        while not self._is_done_soon(self._current):
            if deadline.has_passed():
                raise CheckpointError(
                    "The previous checkpoint is still being written", received=f"after {timeout_secs} s"
                )
            if remind.has_passed():
                remind, secs = Deadline(REMIND_SECS), time.monotonic() - started
                logger.warning("%s is still being written; waited %.0f s so far", self._current.id, secs)

    def _is_done_soon(self, saving: Saving) -> bool:
        """Waits briefly for a checkpoint. Returns whether it is done."""
        if saving.wait(0.05):
            return True
        self._session.check()
        if self._session.threads.stopping.is_set() and not saving.done():
            # The saver may still be writing: going on would change the copy that it writes.
            raise _ended_before()
        return False

    def _waits_for_current(self) -> bool:
        """Waits for the checkpoint being written, if the plan says so. Returns whether it is done.

        Does not wait if the checkpoint needs this training thread to reach a boundary first, and at most
        `answer_secs` for what the other workers contribute: they had the time since the last boundary.
        """
        current = self._current
        if current is None or self._plan.when_busy == "skip":
            return current is None
        decided_by = Deadline(self._session.timeouts.answer_secs)
        while not self._is_done_soon(current):
            is_late = self._session.is_wanted or decided_by.has_passed()
            if is_late and not current.is_writing:
                logger.warning(
                    "the checkpoint of step %d is skipped: the previous one is not decided yet",
                    self._session.step,
                )
                return False
        return True

    def take_snapshot(self, id_: str, due: bool, again: bool) -> Callable[[], Snapshot]:
        """Takes this worker's part of a checkpoint for which all workers are stopped.

        One that is due is made without waiting: proposals of callbacks at this boundary belong to it, and the
        end of an epoch comes first. One that was requested is never skipped: the script may end here.
        """
        if self._current is not None and (again or not due):
            self._current.replace()  # its copy is not written
        if due:
            self._save_due()
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
            return Saving(done=True)
        saving = self._expected[id_] = Saving(id_, self._check_written)
        return saving

    def _check_written(self) -> None:
        """Raises if no thread is left that could write. Any thread."""
        if self._session.threads.have_ended():
            self._session.threads.check()
            raise _ended_before()

    def _empty(self) -> Snapshot:
        """The snapshot for a checkpoint that is not made."""
        return Snapshot(self._session.step, "", frozenset(self._session.replica.holds), None)

    def _take(self, saving: Saving) -> Callable[[], Snapshot]:
        """Takes this worker's part of a checkpoint; the returned function finishes it in the background."""
        faults.point("snapshot")
        step, replica = self._session.step, self._session.replica
        holds, measured = frozenset(replica.holds), replica.measures.history()
        strict = replica.strict_names()
        if self._session.rank != 0:
            averaged = averaged_names(self._state.schema, replica.may_differ)
            details = {"values": packed(self._state, averaged), "measured": json.dumps(measured)}
            snapshot = Snapshot(step, joined(self._state.digests(strict)), holds, details)
            return lambda: snapshot
        with self._copying:
            self._state.snapshot(self._buffers)
        draft = Draft(
            step=step,
            epoch=self._training.position.epoch,
            batch=self._training.position.batch,
            created_at=time.time(),
            workers=self._session.size,
            attempt=self._attempt,
            schema=self._state.schema,
            metrics=numbers(self._training.metrics),
            versions=versions(),
            script=self._training.position.script(),
        )
        self._current = saving

        def finish() -> Snapshot:
            with self._copying:
                if saving.done():  # another checkpoint has replaced it: the buffers may hold that one's copy
                    return Snapshot(step, "", holds, None)
                digests = {name: digest_array(value) for name, value in self._buffers.items()}
            copy = _StateCopy(draft, self._buffers, digests, measured, saving)
            return Snapshot(step, joined({name: digests[name] for name in strict}), holds, copy)

        return finish

    # One checkpoint: worker 0's lanes.

    def write(self, saved: Saved) -> WriteOutcome:
        """Writes a checkpoint, in the lane "saver". It is settled afterwards, even if writing failed."""
        copy: _StateCopy = saved.state[0]
        others: Sequence[dict[str, Any]] = saved.state[1:]
        if not copy.saving.begin_writing():  # another checkpoint has replaced it and reuses its memory
            return WriteOutcome.FAILED
        try:
            manifest = self._written(copy, others, saved)
        except JobFailed as error:
            copy.saving.finish(error=error)
            return WriteOutcome.FENCED
        except (ReplicastError, OSError) as error:
            self._fail(copy.saving, self._not_written(error, saved.step))
            return WriteOutcome.FAILED
        except BaseException as error:
            copy.saving.finish(error=JobFailed(f"Checkpoints can no longer be written: {error}"))
            raise
        copy.saving.finish(manifest)
        copy.arrays, copy.measured = {}, []
        for other in others:
            other.clear()
        return WriteOutcome.DURABLE

    def on_ended(self, ended: Ended) -> None:
        """A save has ended: if it was not written, says why. In the lane "release"."""
        saving, refusal = self._expected.pop(ended.id, None), ended.outcome.result
        if not isinstance(refusal, Refusal):
            if saving is not None:
                saving.finish()  # it was skipped, unless it is written
            return
        problem = f"The state is not saved. {refusal.problem}"
        if ended.outcome.stage is Stage.FAILED:
            error: ReplicastError = ReplicasDiverged(
                f"{problem}. {what_follows(self._session.audit_policy)}",
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

    def _not_written(self, error: Exception, step: int) -> Exception:
        if not isinstance(error, OSError):
            return error
        remedy = _REMEDIES.get(error.errno or 0, "Check the file system")
        failure = CheckpointError(
            f"The checkpoint of step {step} could not be written",
            path=None if self._store is None else self._store.path(step),
            step=step,
            received=str(error),
            remedy=f"{remedy}. Earlier checkpoints are intact",
        )
        failure.__cause__ = error
        return failure

    def _written(self, copy: _StateCopy, others: Sequence[dict[str, Any]], saved: Saved) -> Manifest:
        if self._store is None:
            raise no_run_dir()
        may_differ = self._session.replica.may_differ
        for name in averaged_names(self._state.schema, may_differ) if others else ():
            values = [other["values"] for other in others]
            np.copyto(copy.arrays[name], mean(copy.arrays[name], values, name))
            copy.digests[name] = digest_array(copy.arrays[name])
        arrays = ((name, copy.arrays[name]) for name in file_order(copy.draft.schema))
        # One line of text, as it is long and not for people. A trial after a restart is compared with it.
        histories = [copy.measured, *(json.loads(other["measured"]) for other in others)]
        measured = json.dumps(mean_history(histories))
        draft = replace(copy.draft, measured=measured).with_updates(saved)
        manifest = self._store.write(draft, arrays, copy.digests)
        self._prune(self._store, manifest)
        return manifest

    def _prune(self, store: CheckpointStore, manifest: Manifest) -> None:
        """Removes old checkpoints. The new one is intact, whatever happens to the others."""
        best = self._plan.keep_best
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
            store.prune(self._plan.keep, best, self.named)
            # And the payloads that no start from a checkpoint needs. This is the only thread that writes and
            # removes checkpoints: the list has all of them.
            kept = [saved_of(manifest) for manifest in store.list()]
            held = frozenset.intersection(*(saved.holds for saved in kept)) if kept else frozenset()
            pending = frozenset(
                (one.proposal.id, one.proposal.digest) for saved in kept for one in saved.pending
            )
            # One that is damaged now may be repaired, and nobody knows what it proposes.
            self._session.remove_payloads(held, None if store.problems() else pending)
        except (ReplicastError, OSError) as error:
            logger.warning("old checkpoints cannot be removed and use disk space: %s", error)


def no_run_dir() -> NotSupported:
    return NotSupported(
        "A checkpoint without a run directory",
        reason="there is nowhere to write it",
        remedy="Use Replicas(model, run_dir=...), or start the job with 'replicast run'",
    )


def _ended_before() -> JobFailed:
    return JobFailed("The job ended before its checkpoint was written")


# Variables that may differ between workers, made one value for a checkpoint: the mean over the workers.


def averaged_names(schema: Schema, may_differ: Collection[str]) -> list[str]:
    """The variables whose mean is saved. For all others, integers included, worker 0's value is saved."""
    floats = [v for v in schema if v.name in may_differ and v.dtype in FLOAT_DTYPES]
    return [v.name for v in floats] if sum(v.nbytes for v in floats) <= MOST_AVERAGED_BYTES else []


def packed(state: State, names: Iterable[str]) -> dict[str, str]:
    values = state.read(names)
    return {name: base64.b64encode(value.tobytes()).decode() for name, value in values.items()}


def mean(own: Array, others: Sequence[Mapping[str, str]], name: str) -> Array:
    """The mean of worker 0's value and the packed values of the others, in the variable's dtype."""
    total = own.astype(np.float64)
    for other in others:
        total += np.frombuffer(base64.b64decode(other[name]), own.dtype).reshape(own.shape)
    averaged: Array = (total / (len(others) + 1)).astype(own.dtype)
    return averaged


def numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """The logs that are numbers; a metric may be anything."""
    found = {}
    for name, value in logs.items():
        with contextlib.suppress(TypeError, ValueError, OverflowError):
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
