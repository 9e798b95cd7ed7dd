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

import json
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from replicast import faults
from replicast.core.refusal import Refusal, Refuse
from replicast.core.reports import ReportId, Snapshot
from replicast.errors import CheckpointError
from replicast.replicas.averages import averaged_names, packed
from replicast.replicas.checkpoint_errors import ended_before, no_run_dir
from replicast.replicas.checkpoint_writer import CheckpointWriter, StateCopy, numbers, versions
from replicast.replicas.position import Position
from replicast.replicas.saving import SavePlan, Saving
from replicast.runtime import Session
from replicast.runtime.replica import joined
from replicast.storage.checkpoint import CheckpointStore, Draft
from replicast.update.digest import digest_array
from replicast.update.state import Arrays, State

logger = logging.getLogger("replicast")

REMIND_SECS = 30.0


class Checkpoints:
    """One worker's part in checkpoints. All methods are for the training thread unless they say otherwise.

    Args:
        session: This worker's part in the job.
        state: The variables.
        store: Where worker 0 writes; None without a run directory.
        attempt: The number of this attempt of the job.

    Attributes:
        writer: On worker 0: writes them, in other threads.
        position: The position of the training in its data.
        metrics: The latest loss and metrics.
        save_due: Makes a checkpoint that is due at this boundary. Set before the first boundary.
    """

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
        """Saves the state of this boundary, where all workers stop; returns while it is being written.

        Raises:
            CheckpointError: A trial is not decided yet, or a worker refused.
        """
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
        """Blocks until nothing is being written. Without a timeout, logs every 30 s what it waits for.

        Raises:
            CheckpointError: A checkpoint is still being written after `timeout_secs`.
            JobFailed: The job ended before that.
        """
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

        Raises:
            Refuse: The previous checkpoint is still being written and takes too long.
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
