"""Checkpoints of a job: when they are made, what each worker contributes, who writes and restores them.

    training threads    at one boundary: worker 0 copies its state, the others digest theirs
    training threads    when they continue: report their part, after all proposals made up to then
    coordinator         compares; waits until proposals are stored (`core/operations/attempt.py`)
    lane saver          on worker 0: writes the copy, and removes old checkpoints
    lane release        on worker 0: hears how each save ended, and settles one that was not written

A state that differs between workers is never saved as if it were equal. Of what may differ (variables that
are declared, metrics that each worker measures), worker 0's is saved. A restarted script does not repeat what
callbacks did at the boundary of a checkpoint, so their proposals there are part of the checkpoint.

A restored checkpoint becomes the state of all workers:

    all workers on one host, which see its directory    each reads it, into the memory of its new variables
    otherwise                                           worker 0 verifies it and sends it to all

All training threads are in `restore` together, so they exchange messages and bytes directly. Every byte is
compared with the digests in the manifest before any state changes: a restore that is refused has changed
nothing. A damaged checkpoint is found by all together, and all try the one before.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from replicast import faults
from replicast.codec import Record, decode, encode
from replicast.config import host_id
from replicast.core.entries import Saved, Stage
from replicast.core.messages import Ended, Refusal, Refuse, ReportId, Snapshot, WriteOutcome
from replicast.errors import (
    CheckpointError,
    FileDamaged,
    JobFailed,
    NotSupported,
    ReplicasDiverged,
    ReplicastError,
    UpdateRefused,
    logger,
)
from replicast.mapped_memory import memory_to_fill
from replicast.processes import Deadline, this_start
from replicast.replicas.position import Position, Training
from replicast.replicas.replica import joined, numbers
from replicast.replicas.session import LOOK_SECS, Session, wait_for
from replicast.storage.checkpoints import (
    CheckpointReader,
    CheckpointStore,
    Manifest,
    advice,
    choose,
    differences,
    saved_of,
)
from replicast.transport import Parcel
from replicast.transport.shared import arrays_in, lay_out
from replicast.update.audit_report import what_follows
from replicast.update.digest import digest_array
from replicast.update.edits import Edit, EditKind
from replicast.update.schema import Arrays

SaveEvery = int | timedelta | Literal["epoch"]
WhenBusy = Literal["wait", "skip"]

REMIND_SECS = 30.0
PARCEL_BYTES = 1 << 28  # variables are sent in parcels of about this size: shared memory must hold one
MOST_AT_ONCE = 1 << 31  # a larger state is not read at once: that needs memory beside the state it replaces
_ENDED_BEFORE = "The job ended before its checkpoint was written"
_UNSEEN = "does not see the checkpoint"
_IN_PART = ". The state may be restored in part only: start the job again"
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
            expected = 'save_every is a number of steps, a datetime.timedelta or "epoch"'
            raise ValueError(f"{expected}. Received: {every!r}")
        if type(self.keep) is not int or self.keep < 1:  # `type`, since True is an int to isinstance
            raise ValueError(f"keep is a number of checkpoints, at least 1. Received: {self.keep!r}")
        pair = isinstance(best, tuple | list) and len(best) == 2 and isinstance(best[0], str)
        if best is not None and not (pair and best[1] in ("min", "max")):
            expected = 'keep_best is a metric and "min" or "max", as in ("loss", "min")'
            raise ValueError(f"{expected}. Received: {best!r}")
        if self.when_busy not in ("wait", "skip"):
            raise ValueError(f'when_busy must be "wait" or "skip". Received: {self.when_busy!r}')


def _timer(every: SaveEvery | None) -> Deadline:
    return Deadline(max(LOOK_SECS, every.total_seconds()) if isinstance(every, timedelta) else None)


class Saving:
    """A checkpoint that is being written. On all workers but worker 0 it is done immediately."""

    def __init__(
        self, id_: str = "", check: Callable[[], None] = lambda: None, *, done: bool = False
    ) -> None:
        self.id = id_
        self._check = check
        self._done = threading.Event()
        self._manifest: Manifest | None = None
        self.error: Exception | None = None
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
        if self.error is not None:
            self.told = True
            raise self.error
        return self._manifest

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until it is done, at most `timeout` seconds. Returns whether it is."""
        return wait_for(self._done, timeout, self._check)

    def begin_writing(self) -> bool:
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
            self._manifest, self.error = manifest, error
            self._done.set()


class _StateCopy(NamedTuple):
    draft: Manifest
    arrays: Arrays
    digests: dict[str, str]
    saving: Saving


@dataclass(eq=False, repr=False)
class Checkpoints:
    """One worker's part in checkpoints. All methods are for the training thread unless they say otherwise."""

    session: Session
    training: Training
    store: CheckpointStore | None

    def __post_init__(self) -> None:
        self._plan = SavePlan()
        self._timer = Deadline(None)  # worker 0, with `save_every=timedelta`
        self._due_after_epoch = 0
        self._buffers: Arrays = {}
        self._copying = threading.Lock()  # held while the buffers are written over, or digested
        self._unreported: tuple[ReportId, Callable[[], Snapshot | None]] | None = None
        self._current = Saving(done=True)  # worker 0: whose copy the buffers hold
        self._requested = Saving()  # the last one for which all workers were stopped
        self._expected: dict[str, Saving] = {}  # worker 0: those whose end the coordinator will tell
        self._failed: tuple[Saving, Exception] | None = None
        self._warned_of_metric = False
        self.named: int | None = None  # a checkpoint that the user restored by its step: it is kept

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written, on worker 0. Any thread."""
        return not self._current.done()

    # When checkpoints are made.

    def agree_on(self, plan: SavePlan) -> None:
        """Each worker takes its part of a checkpoint by itself: all must at the same boundaries."""
        self.session.require_same_plan(
            "saves",
            repr(plan.every),
            problem="Worker {} has a different save_every than",
            remedy="Pass the same save_every on all workers: worker 0 writes, and all take part",
        )
        self.follow(plan)

    def follow(self, plan: SavePlan) -> None:
        if plan.every is not None and self.store is None:
            raise no_run_dir()
        if plan.every != self._plan.every:  # Otherwise trainings that are shorter than it would never save.
            self._timer = _timer(plan.every)
        self._plan = plan

    def after_step(self, steps: int) -> None:
        """Called at a boundary: makes a checkpoint if one is due, and raises if the last one failed."""
        self.check()
        every, step = self._plan.every, self.session.step
        if isinstance(every, int) and step // every > (step - steps) // every:
            self._save_due()
        if isinstance(every, timedelta) and self.session.rank == 0 and self._timer.has_passed():
            self._timer = _timer(every)
            if self._plan.when_busy == "wait" or not self.is_busy:
                self.session.proposals.request("save")

    def after_epoch(self) -> None:
        """The end of an epoch, with all that callbacks do there."""
        due, self._due_after_epoch, self.training.epoch_ends = self._due_after_epoch, 0, False
        due += self._plan.every == "epoch"
        if due:
            self.save_in_passing()
        for _ in range(due - 1):
            # Worker 0 skips another one of the same boundary. It counts all the same: another worker may take
            # the two at different moments of this boundary.
            taken = self._unreported
            self.report()
            if taken is not None:
                part = self._empty if self.session.rank == 0 else taken[1]
                self._unreported = self.session.next_report("save"), part

    def _save_due(self) -> None:
        if self.training.epoch_ends:
            self._due_after_epoch += 1
        else:
            self.save_in_passing()

    # One checkpoint: the training threads.

    def save_here(self) -> Saving:
        """Saves the state of this boundary, where all workers stop; returns while it is being written."""
        if self.store is None:
            raise no_run_dir()
        self.report()
        outcome = self.session.rest("save")
        if isinstance(outcome, Refusal):
            in_trial = "Save after the trial; save_every of the callback does so automatically"
            raise CheckpointError(
                f"The state is not saved. {outcome.problem}",
                step=self.session.step,
                remedy=in_trial if self.session.replica.on_trial else None,
            )
        return self._requested

    def save_in_passing(self) -> Saving:
        """Saves this boundary's state without waiting; written when all workers have called `report`."""
        self.report()
        id_ = self.session.next_report("save")
        if self.session.replica.on_trial:
            if self.session.rank == 0:
                step = self.session.step
                logger.warning("the checkpoint of step %d is postponed until the trial ends", step)
            self._unreported = id_, lambda: None
            return Saving(done=True)
        if self.is_busy and not self._waits_for_current():
            self._unreported = id_, self._empty
            return Saving(done=True)
        saving = self._opened(str(id_))
        self._unreported = id_, self._take(saving)
        return saving

    def report(self) -> None:
        """Called when training continues: this worker's proposals so far belong to the last checkpoint."""
        unreported, self._unreported = self._unreported, None
        if unreported is not None:
            self.session.report(*unreported)

    def check(self) -> None:
        """Raises the error of a failed checkpoint, once, unless `result` has raised it already."""
        failed, self._failed = self._failed, None
        if failed is not None and not failed[0].told:
            raise failed[1]

    def save_before_leaving(self) -> str:
        """Saves and waits up to a timeout. Returns why nothing was saved, or an empty string."""
        if self.store is None:
            return "There is no run directory"
        if self.session.replica.on_trial:
            return "A trial is under way"
        secs = self.session.timeouts.join_secs
        self.settle(secs)
        saving = self.save_in_passing()
        self.report()
        saving.result(secs)
        return ""

    def why_not_written(self) -> str:
        """Why the last checkpoint was not written; empty if it was, or if this worker does not know."""
        return "" if self._current.error is None else str(self._current.error)

    def settle(self, timeout_secs: float | None = None) -> None:
        """Blocks until nothing is being written. Without a timeout, logs every 30 s what it waits for."""
        self.report()
        started, deadline, remind = time.monotonic(), Deadline(timeout_secs), Deadline(REMIND_SECS)
        while not self._is_done_soon(self._current):
            if deadline.has_passed():
                received = f"after {timeout_secs} s"
                raise CheckpointError("The previous checkpoint is still being written", received=received)
            if remind.has_passed():
                remind, secs = Deadline(REMIND_SECS), time.monotonic() - started
                logger.warning("%s is still being written; waited %.0f s so far", self._current.id, secs)

    def _is_done_soon(self, saving: Saving) -> bool:
        if saving.wait(0.05):
            return True
        self.session.check()
        if self.session.threads.stopping.is_set() and not saving.done():
            # The saver may still be writing: going on would change the copy that it writes.
            raise JobFailed(_ENDED_BEFORE)
        return False

    def _waits_for_current(self) -> bool:
        """Waits for the checkpoint being written, if the plan says so. Returns whether it is done.

        Does not wait if the checkpoint needs this training thread to reach a boundary first, and at most
        `answer_secs` for what the other workers contribute: they had the time since the last boundary.
        """
        if self._plan.when_busy == "skip":
            return False
        decided_by = Deadline(self.session.timeouts.answer_secs)
        while not self._is_done_soon(self._current):
            is_late = self.session.is_wanted or decided_by.has_passed()
            if is_late and not self._current.is_writing:
                said = "the checkpoint of step %d is skipped: the previous one is not decided yet"
                logger.warning(said, self.session.step)
                return False
        return True

    def take_snapshot(self, id_: str, due: bool, again: bool) -> Callable[[], Snapshot]:
        """Takes this worker's part of a checkpoint for which all workers are stopped.

        One that is due is made without waiting: proposals of callbacks at this boundary belong to it, and the
        end of an epoch comes first. One that was requested is never skipped: the script may end here.
        """
        if again or not due:
            self._current.replace()  # its copy is not written
        if due:
            self._save_due()
            return self._empty
        self.report()
        self._requested = self._opened(id_)
        secs = 0.9 * self.session.timeouts.compute_secs  # before the coordinator stops waiting for this
        try:
            self.settle(secs)
        except CheckpointError as error:
            raise Refuse(str(error), (self.session.rank,)) from error
        return self._take(self._requested)

    def _opened(self, id_: str) -> Saving:
        """A checkpoint that worker 0 writes, if the coordinator of the job has nothing against it."""
        if self.session.rank != 0:
            return Saving(done=True)
        threads = self.session.threads

        def check() -> None:  # Any thread.
            if threads.have_ended():  # no thread is left that could write
                threads.check()
                raise JobFailed(_ENDED_BEFORE)

        saving = self._expected[id_] = Saving(id_, check)
        return saving

    def _empty(self) -> Snapshot:
        return Snapshot(self.session.step, "", frozenset(self.session.replica.holds), None)

    def _take(self, saving: Saving) -> Callable[[], Snapshot]:
        """Takes this worker's part of a checkpoint; the returned function finishes it in the background."""
        faults.point("snapshot")
        step, replica = self.session.step, self.session.replica
        holds, strict = frozenset(replica.holds), replica.strict_names()
        if self.session.rank != 0:
            snapshot = Snapshot(step, joined(self.session.state.digests(strict)), holds, None)
            return lambda: snapshot
        # The copy is that of the first replica of this worker: the others must be equal to it.
        of_all = joined(self.session.state.digests(strict)) if self.session.state.devices else ""
        with self._copying:
            self.session.state.snapshot(self._buffers)
        draft = Manifest(
            step=step,
            epoch=self.training.position.epoch,
            batch=self.training.position.batch,
            created_at=time.time(),
            workers=self.session.size,
            attempt=self.session.attempt,
            schema=self.session.state.schema,
            metrics=numbers(self.training.metrics),
            versions=this_start()["versions"],
            script=self.training.position.script(),
        )
        measured = replica.measures.history()
        self._current = saving

        def finish() -> Snapshot:
            with self._copying:
                if saving.done():  # another checkpoint has replaced it: the buffers may hold that one's copy
                    return Snapshot(step, "", holds, None)
                digests = {name: digest_array(value) for name, value in self._buffers.items()}
            # One line of text, as it is long and not for people. A trial after a restart is compared with it.
            complete = replace(draft, measured=json.dumps(measured))
            copy = _StateCopy(complete, self._buffers, digests, saving)
            digest = of_all or joined({name: digests[name] for name in strict})
            return Snapshot(step, digest, holds, copy)

        return finish

    # One checkpoint: worker 0's lanes.

    def write(self, saved: Saved) -> Callable[[], WriteOutcome]:
        """What writes a checkpoint, in the lane "saver". From now on no other replaces it."""
        copy: _StateCopy = saved.state[0]
        if not copy.saving.begin_writing():  # another checkpoint has replaced it and reuses its memory
            return lambda: WriteOutcome.FAILED
        return lambda: self._write(saved, copy)

    def _write(self, saved: Saved, copy: _StateCopy) -> WriteOutcome:
        """It is settled afterwards, even if writing failed."""
        try:
            if self.store is None:
                raise no_run_dir()
            manifest = self.store.write(copy.draft.with_updates(saved), copy.arrays, copy.digests)
            self._prune(self.store, manifest)
        except JobFailed as error:
            copy.saving.finish(error=error)
            return WriteOutcome.FENCED
        except (ReplicastError, OSError) as error:
            failure: Exception = error
            if isinstance(error, OSError):
                remedy = _REMEDIES.get(error.errno or 0, "Check the file system")
                failure = CheckpointError(
                    f"The checkpoint of step {saved.step} could not be written",
                    path=None if self.store is None else self.store.path(saved.step),
                    step=saved.step,
                    received=str(error),
                    remedy=f"{remedy}. Earlier checkpoints are intact",
                )
                failure.__cause__ = error
            self._fail(copy.saving, failure)
            return WriteOutcome.FAILED
        except BaseException as error:
            copy.saving.finish(error=JobFailed(f"Checkpoints can no longer be written: {error}"))
            raise
        copy.saving.finish(manifest)
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
                f"{problem}. {what_follows(self.session.audit_policy)}",
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
        self._failed = saving, error  # first: who has waited for the end of it then looks for its failure
        saving.finish(error=error)

    def _prune(self, store: CheckpointStore, manifest: Manifest) -> None:
        """Removes old checkpoints. The new one is intact, whatever happens to the others."""
        best = self._plan.keep_best
        if best is not None and best[0] not in manifest.metrics and not self._warned_of_metric:
            self._warned_of_metric = True
            logger.warning(
                f"keep_best: the checkpoint of step {manifest.step} has no metric {best[0]!r}, so it cannot "
                f"be the best one. It has: {', '.join(manifest.metrics) or 'none'}. For validation metrics, "
                'use save_every="epoch"'
            )
        try:
            store.prune(self._plan.keep, best, self.named)
            # And the payloads that no start from a checkpoint needs. This is the only thread that writes and
            # removes checkpoints: the list has all of them.
            kept = [saved_of(manifest) for manifest in store.manifests()]
            held = frozenset.intersection(*(saved.holds for saved in kept)) if kept else frozenset()
            proposals = [one.proposal for saved in kept for one in saved.pending]
            pending = frozenset((one.id, one.digest) for one in proposals)
            # One that is damaged now may be repaired, and nobody knows what it proposes.
            self.session.remove_payloads(held, None if store.problems() else pending)
        except (ReplicastError, OSError) as error:
            logger.warning("old checkpoints cannot be removed and use disk space: %s", error)


def no_run_dir() -> NotSupported:
    return NotSupported(
        "A checkpoint without a run directory",
        reason="there is nowhere to write it",
        remedy="Use Replicas(model, run_dir=...), or start the job with 'replicast run'",
    )


# Restoring.


@dataclass(frozen=True, slots=True)
class Restored:
    step: int
    position: Position
    left_out: tuple[str, ...]
    holds: frozenset[int]


class RestorePlan(Record):
    """What worker 0 tells all: its host, the manifest, and which variables the checkpoint does not have."""

    host: str
    manifest: dict[str, Any]
    left_out: list[str]


@dataclass(eq=False, repr=False)
class Restore:
    """One worker's part. `run` is for the training threads of all workers, each with the same arguments."""

    session: Session
    store: CheckpointStore

    def __post_init__(self) -> None:
        self._secs = self.session.timeouts.join_secs

    def run(self, number: int, step: int | None, partial: bool) -> Restored | None:
        session = self.session
        if session.begun:  # before any state changes
            raise CheckpointError(
                "restore() must be called before training",
                expected="no fit, boundary, sync, save or audit before it, and no other restored checkpoint",
                received=f"step {session.step}",
                remedy="Call it first; to go back to a checkpoint later, restart the script",
            )
        damaged: dict[int, str] = {}
        for turn in itertools.count():
            what = f"restore/{number}/{turn}"
            reader: CheckpointReader | None = None
            told: RestorePlan | Refusal | None = None
            if session.rank == 0:
                try:
                    reader = choose(self.store, step, damaged)
                    told = None if reader is None else self._plan(reader, partial)
                except (ReplicastError, OSError) as error:
                    if reader is not None:
                        reader.close()
                    failed = error if isinstance(error, CheckpointError) else CheckpointError(str(error))
                    reader, told = None, Refusal(failed.problem, details=failed.to_json())
                session.exchange.tell(what, encode(told))
            told = decode(session.exchange.hear(what, self._secs))
            if told is None:
                return None
            if isinstance(told, Refusal):
                raise CheckpointError.from_json(told.details or {})
            left_out, manifest = told.left_out, Manifest.from_json(told.manifest)
            names = [variable.name for variable in session.state.schema if variable.name not in left_out]
            with contextlib.ExitStack() as closing:
                if reader is not None:
                    closing.enter_context(reader)
                elif told.host == host_id(os.environ):  # it may see the same checkpoint
                    with contextlib.suppress(ReplicastError, OSError):
                        found = closing.enter_context(self.store.open(manifest.step))
                        reader = found if found.manifest.state_digest == manifest.state_digest else None
                problem = self._read_all(reader, what, names) if manifest.nbytes <= MOST_AT_ONCE else None
                if problem is None:
                    own = reader if session.rank == 0 else None
                    problem = self._receive_all(own, what, manifest, names)
            if not problem:
                break
            damaged[manifest.step] = problem  # The same on all workers, which try another one together.
        for damaged_step, problem in sorted(damaged.items()) if session.rank == 0 else ():
            instead = f"step {manifest.step} is restored instead"
            logger.warning("THE CHECKPOINT OF STEP %d IS DAMAGED; %s. %s", damaged_step, instead, problem)
        saved = saved_of(manifest)
        session.replica.measures.recall(json.loads(manifest.measured))
        session.start_from(saved)
        position = Position(manifest.epoch, manifest.batch).at(manifest.script)
        return Restored(manifest.step, position, tuple(left_out), saved.holds)

    def _plan(self, reader: CheckpointReader, partial: bool) -> RestorePlan:
        manifest, schema = reader.manifest, self.session.state.schema
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

    def _read_all(self, reader: CheckpointReader | None, what: str, names: list[str]) -> str | None:
        """Every worker reads the checkpoint. No state changes before all have read and verified all of it.

        Whether all see its directory is not asked first: that would cost every restore on one host a round of
        messages, and spare the workers on worker 0's host only a reading in vain where there are several.
        """
        values: Arrays = {}
        problem = _UNSEEN
        if reader is not None:
            found = [self.session.state.schema.resolve(name) for name in names]
            like = [np.broadcast_to(np.zeros((), np.dtype(one.dtype)), one.shape) for one in found]
            pieces, nbytes = lay_out(like)
            # TensorFlow takes over this memory without a copy.
            values = dict(zip(names, arrays_in(memory_to_fill(nbytes), pieces), strict=True))
            try:
                wrong = [name for name in names if not reader.read_into(name, values[name])]
                problem = (
                    f"the bytes of {', '.join(wrong[:5])} are not those that were written" if wrong else ""
                )
            except FileDamaged as error:
                problem = error.problem.removesuffix(f". {advice(reader.path)}")
        verdicts = self.session.exchange.agree(f"{what}/read", problem, self._secs)
        if reader is None or _UNSEEN in verdicts.values():
            return None
        said = [f"worker {rank} reads: {verdict}" for rank, verdict in verdicts.items() if verdict]
        if said:
            file = reader.path / "state.safetensors"
            return str(FileDamaged(file, f"{'; '.join(said[:3])[:500]}. {advice(reader.path)}"))
        self.session.state.apply([Edit(EditKind.ASSIGN, name, {"value": values[name]}) for name in names])
        return ""

    def _receive_all(
        self, reader: CheckpointReader | None, what: str, manifest: Manifest, names: list[str]
    ) -> str:
        """Worker 0 sends the checkpoint in parcels, and each worker takes them one by one.

        So nobody needs memory for a second state. After the first parcel the state is that of the checkpoint
        in part: whatever goes wrong then ends the job. So worker 0 verifies the file before it sends any.
        """
        exchange, transport = self.session.exchange, self.session.transport
        if reader is not None:
            problem = ""
            try:
                reader.verify()
            except FileDamaged as error:
                problem = str(error)
            exchange.tell(f"{what}/verified", json.dumps(problem))
        if problem := str(json.loads(exchange.hear(f"{what}/verified", self._secs))):
            return problem
        for place, batch in enumerate(self._batches(names)):
            key = f"{what}/{place}"
            parcel: Parcel | Refusal
            if reader is not None:
                parcel_id = f"{exchange.name}-{key.replace('/', '-')}"
                try:
                    parcel = transport.publish(parcel_id, [reader.read(name) for name in batch])
                except (FileDamaged, UpdateRefused) as error:  # it has changed meanwhile, or there is no room
                    parcel = Refusal(str(error))
                exchange.tell(key, encode(parcel))
            parcel = decode(exchange.hear(key, self._secs))
            if isinstance(parcel, Refusal):
                raise JobFailed(f"Worker 0 could not send the checkpoint: {parcel.problem}{_IN_PART}")
            pairs: list[tuple[str, npt.NDArray[Any]]] = []
            try:
                pairs = [*zip(batch, transport.receive(parcel, self._secs), strict=True)]
                wrong = [name for name, value in pairs if digest_array(value) != manifest.digests[name]]
                problem = f"{', '.join(wrong[:5])} has other values" if wrong else ""
            except UpdateRefused as error:
                problem = str(error)
            for rank, verdict in exchange.agree(key, problem, self._secs).items():
                if verdict:
                    problem = f"Worker {rank} has not received the checkpoint intact: {verdict}"
                    raise JobFailed(f"{problem}{_IN_PART}", worker=rank)
            self.session.state.apply([Edit(EditKind.ASSIGN, name, {"value": value}) for name, value in pairs])
            transport.release(parcel.id)
        return ""

    def _batches(self, names: list[str]) -> Iterator[list[str]]:
        sizes = {variable.name: variable.nbytes for variable in self.session.state.schema}
        batch: list[str] = []
        for name in names:
            if batch and sum(sizes[n] for n in batch) + sizes[name] > PARCEL_BYTES:
                yield batch
                batch = []
            batch.append(name)
        if batch:
            yield batch
