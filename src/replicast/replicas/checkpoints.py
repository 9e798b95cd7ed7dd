"""Checkpoints of a running job: what each worker contributes, and how worker 0 writes them.

    training threads    at one boundary: worker 0 copies its state, the others digest theirs
    training threads    when they continue: report their part, after all proposals made up to then
    coordinator         compares; waits until proposals are stored (`core/operations/save.py`)
    saver lane          on worker 0: writes the copy

A state that differs between workers is never saved as if it were equal. For variables that may differ, the
mean is saved. A restarted script does not repeat what callbacks did at the boundary of a checkpoint, so their
proposals there are part of the checkpoint.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from typing import Any

import numpy as np

from replicast import faults
from replicast.audits.report import what_follows
from replicast.core.commands import Ended
from replicast.core.entries import Saved
from replicast.core.events import WriteOutcome
from replicast.core.refusal import Refusal, Refuse
from replicast.core.reports import Snapshot
from replicast.core.stage import Stage
from replicast.errors import CheckpointError, JobFailed, ReplicasDiverged, ReplicastError
from replicast.replicas.averages import averaged_names, mean, packed
from replicast.replicas.checkpoint_errors import ended_before, no_run_dir, not_written
from replicast.replicas.position import Position
from replicast.replicas.saving import SavePlan, Saving
from replicast.runtime import Session
from replicast.runtime.measures import MetricHistory, mean_history
from replicast.runtime.replica import joined
from replicast.storage.checkpoint import CheckpointStore, Draft, Manifest, file_order, saved_of
from replicast.update.digest import digest_array
from replicast.update.state import Arrays, State

logger = logging.getLogger("replicast")


class StateCopy:
    """Worker 0's copy of the state, to be written to a file."""

    def __init__(
        self, draft: Draft, arrays: Arrays, digests: dict[str, str], measured: MetricHistory, saving: Saving
    ) -> None:
        self.draft = draft
        self.arrays = arrays
        self.digests = digests
        self.measured = measured
        self.saving = saving


class Checkpoints:
    """One worker's part in checkpoints. All methods are for the training thread unless they say otherwise.

    Args:
        session: This worker's part in the job.
        state: The variables.
        store: Where worker 0 writes; None without a run directory.
        attempt: The number of this attempt of the job.

    Attributes:
        position: The position of the training in its data.
        metrics: The latest loss and metrics.
        named: The step of a checkpoint to keep: the script restored it by step, and will again on a restart.
        save_due: Makes a checkpoint that is due at this boundary. Set before the first boundary.
        policy: What happens when replicas differ, for messages. Set before the first boundary.
        remove_payloads: Removes payloads that no checkpoint needs, given the updates that all contain and
            those that some propose again. Set before the first boundary.
    """

    def __init__(self, session: Session, state: State, store: CheckpointStore | None, attempt: int) -> None:
        self._session = session
        self._state = state
        self._store = store
        self._attempt = attempt
        self._plan = SavePlan()
        self._buffers: Arrays = {}
        self._reports = 0
        self._unreported: Callable[[], Snapshot | None] | None = None
        self._current: Saving | None = None
        self._not_taken = Saving()  # what `save_here` gives when worker 0 could not copy its state
        self._failed: tuple[Saving, Exception] | None = None
        self._warned_of_metric = False
        self.position = Position()
        self.metrics: Mapping[str, Any] = {}
        self.named: int | None = None
        self.save_due: Callable[[], object] = self.save_in_passing
        self.policy: Callable[[], str] = lambda: "raise"
        self.remove_payloads: Callable[[frozenset[int], frozenset[tuple[str, str]] | None], None] = (
            lambda held, pending: None
        )
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

    def save_here(self) -> Saving:
        """Saves the state of this boundary, where all workers stop; returns while it is being written.

        Raises:
            CheckpointError: A trial is not decided yet, or a worker refused.
        """
        if self._store is None:
            raise no_run_dir()
        self.report()
        before, not_taken = self._current, Saving(self._check_written)
        self._not_taken = not_taken
        outcome = self._session.rest("save")
        if isinstance(outcome, Refusal):
            in_trial = "Save after the trial; save_every of the callback does so automatically"
            raise CheckpointError(
                f"The state is not saved. {outcome.problem}",
                step=self._session.step,
                remedy=in_trial if self._session.replica.on_trial else None,
            )
        if self._session.rank != 0:
            return _done()
        return not_taken if self._current is None or self._current is before else self._current

    def save_in_passing(self) -> Saving:
        """Saves the state of this boundary without waiting. All workers call it at the same boundary.

        It is written when all of them have called `report`. During a trial, it is made after the trial.
        """
        self.report()
        replica = self._session.replica
        if replica.on_trial:
            if self._session.rank == 0:
                logger.warning(
                    "the checkpoint of step %d is postponed until the trial ends", self._session.step
                )
            self._unreported = lambda: None
            return _done()
        if self.is_busy and not self._waits_for_current():
            self._unreported = self._empty
            return _done()
        self._unreported = self._take()
        if self._session.rank != 0 or self._current is None:
            return _done()
        self._current.report = self._reports + 1
        return self._current

    def save_once_more(self) -> None:
        """Another checkpoint is due where `save_in_passing` was called just now: worker 0 skips it.

        It counts all the same: another worker may take the two at different moments of this boundary.
        """
        taken = self._unreported
        self.report()
        self._unreported = self._empty if self._session.rank == 0 else taken

    def report(self) -> None:
        """Called when training continues: this worker's proposals so far belong to the last checkpoint."""
        unreported, self._unreported = self._unreported, None
        if unreported is not None:
            self._reports += 1
            self._session.report("save", unreported)

    def check(self) -> None:
        """Raises the error of a failed checkpoint, once, unless `result` has raised it already."""
        failed, self._failed = self._failed, None
        if failed is not None and not failed[0].told:
            raise failed[1]

    def why_not_written(self) -> str:
        """Why the last checkpoint was not written; empty if it was, or if this worker does not know."""
        return "" if self._current is None else self._current.failure()

    def settle(self, timeout_secs: float | None = None) -> None:
        """Blocks until nothing is being written.

        Raises:
            CheckpointError: A checkpoint is still being written after `timeout_secs`.
            JobFailed: The job ended before that.
        """
        self.report()
        if self._current is None:
            return
        ends = math.inf if timeout_secs is None else time.monotonic() + timeout_secs
        while not self._is_done_soon(self._current):
            if time.monotonic() > ends:
                raise CheckpointError(
                    "The previous checkpoint is still being written", received=f"after {timeout_secs} s"
                )

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

        Does not wait if the checkpoint needs this training thread to reach a boundary first.
        """
        current = self._current
        if current is None or self._plan.when_busy == "skip":
            return current is None
        while not self._is_done_soon(current):
            if not current.is_writing and self._session.is_wanted:
                logger.warning(
                    "the checkpoint of step %d is skipped: the previous one is not decided yet",
                    self._session.step,
                )
                return False
        return True

    def _take_when_asked(self, due: bool, again: bool) -> Callable[[], Snapshot]:
        """Takes this worker's part of a checkpoint for which all workers are stopped.

        One that is due is made without waiting: proposals of callbacks at this boundary belong to it, and the
        end of an epoch comes first. One that was requested is never skipped: the script may end here.

        Raises:
            Refuse: The previous checkpoint is still being written and takes too long.
        """
        if self._current is not None and (again or not due):
            self._current.replace()  # its copy is not written
        if due:
            self.save_due()
            return self._empty
        self.report()
        secs = 0.9 * self._session.timeouts.compute_secs  # before the coordinator stops waiting for this
        try:
            self.settle(secs)
        except CheckpointError as error:
            raise Refuse(str(error), (self._session.rank,)) from error
        return self._take()

    def _empty(self) -> Snapshot:
        """The snapshot for a checkpoint that is not made."""
        return Snapshot(self._session.step, "", frozenset(self._session.replica.holds), None)

    def _take(self) -> Callable[[], Snapshot]:
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
        self._state.snapshot(self._buffers)
        draft, saving = self._draft(step), Saving(self._check_written)
        self._current = saving

        def finish() -> Snapshot:
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
            versions=_versions(),
            script=self.position.script(),
        )

    # Worker 0, in other threads.

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
            self._failed = copy.saving, failure
            copy.saving.finish(error=failure)
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
        """A checkpoint that was not written: says why. In the lane "release"."""
        stage, refusal, current = ended.outcome.stage, ended.outcome.result, self._current
        if not ended.number and isinstance(refusal, Refusal):
            self._not_taken.finish(error=CheckpointError(f"The state is not saved. {refusal.problem}"))
        is_current = current is not None and not current.done() and current.report == ended.number
        if current is None or not is_current or not isinstance(refusal, Refusal):
            return
        if stage is Stage.FAILED:
            error: ReplicastError = ReplicasDiverged(
                f"The state is not saved. {refusal.problem}. {what_follows(self.policy())}",  # type: ignore[arg-type]
                worker=refusal.workers[0] if refusal.workers else None,
                step=(refusal.details or {}).get("step"),
            )
            logger.warning("%s", error)
        else:
            error = CheckpointError(refusal.problem)
            self._failed = current, error
        current.finish(error=error)

    def _written(self, copy: StateCopy, others: Sequence[dict[str, Any]], saved: Saved) -> Manifest:
        if self._store is None:
            raise no_run_dir()
        replica = self._session.replica
        for name in averaged_names(self._state.schema, replica.may_differ) if others else ():
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
        best = self._plan.keeping.best
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
                self._store.prune(self._plan.keeping.last, best, self.named)
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


def _done() -> Saving:
    saving = Saving()
    saving.finish()
    return saving


def _versions() -> dict[str, Any]:
    found = {}
    for package in ("replicast", "tensorflow", "tensorflow-cpu", "keras", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found
