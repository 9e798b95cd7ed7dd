"""The life of a `Replicas`: it joins the other workers, takes part in trainings, and closes or leaves."""

from __future__ import annotations

import logging
import os
from typing import Any

import keras

from replicast.errors import ReplicastError
from replicast.options import progress_target
from replicast.replicas.callback import BoundaryCallback
from replicast.replicas.checkpoint_writer import numbers
from replicast.replicas.joining import Parts, Settings, check_not_compiled_again, join
from replicast.replicas.leaving import leave_on_sigterm
from replicast.replicas.progress import ProgressReports
from replicast.replicas.run_state import RunStates
from replicast.replicas.uncounted import holds_callback, warn_of_missing_callback
from replicast.replicas.view import ReplicasView
from replicast.strategy import Strategy

logger = logging.getLogger("replicast")


class ReplicasLifecycle(ReplicasView):
    """The part of `Replicas` that joins, begins, ends and closes. For the training thread.

    Args:
        model: The model. One that is not built yet joins when training begins.
        optimizer: For a custom training loop, whose optimizer the model does not know.
        strategy: In whose scope the model was created.
        settings: The settings given by the user and the launcher.

    Attributes:
        called_by: The callback of the last `fit`, which sets it when the `fit` begins.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer | None,
        strategy: Strategy,
        settings: Settings,
    ) -> None:
        self.model = model
        self.called_by: BoundaryCallback | None = None
        self._optimizer = optimizer
        self._strategy = strategy
        self._settings = settings
        self._trained = False
        self._closed = False
        self._at_exit = False
        self._warned = False
        self._parts: Parts | None = None
        strategy.on_fit.append(self._fit_begins)
        if model.built:
            self._open()

    def leave(self) -> None:
        """Makes all workers save at one of the next boundaries and exit with code 143, as SIGTERM does.

        For your own signal handlers, and for training outside the main thread. Any thread of any worker;
        returns at once. One call is enough for all workers.
        """
        self._active().training.leaving.ask()

    def close(self) -> None:
        """Settles open proposals together with all workers, and stops this worker's threads.

        Called automatically at the end of the script. A second call does nothing. If all workers were told to
        exit, open proposals are left for the next start.
        """
        if self._closed or self._parts is None:
            return
        parts = self._parts
        parts.run_files.training = False
        try:
            self._counted()
            parts.run_files.send_last()
            parts.checkpoints.report()
            parts.training.leaving.settle()
            parts.checkpoints.settle()
        except ReplicastError as error:
            logger.debug("the updates could not be settled at the end: %s", error)
        parts.training.warn_of_what_was_left()
        parts.session.stop()
        parts.run_files.finish()
        told_to = parts.training.leaving.left
        self._progress.stop(finished=not told_to)
        self._states.ended(parts.session.step, told_to=told_to, at_exit=self._at_exit)
        self._closed = True
        self._strategy.on_fit.remove(self._fit_begins)
        if not parts.training.leaving.ends:  # at the end of the script it stays: SIGTERM need not exit then
            self._strategy.leavings.remove(parts.training.leaving)

    # For the callback.

    def begin_epoch(self, epoch: int | None) -> None:
        """Called by the callback on all workers. The order of the data follows from the epoch's number."""
        self._strategy.begin_epoch(epoch)

    def training_begins(self) -> None:
        """Called by the callback, or the first boundary, on all workers. Resumes the journal's updates."""
        if self._parts is None:
            self._open()
        parts = self._opened()
        check_not_compiled_again(self.model, self._optimizer, parts)
        if self._trained:
            self._counted()
        else:
            self._together()
            self._trained = True
        parts.session.arrive(parts.session.step)
        parts.run_files.training = True
        self._strategy.take_start(self.model)  # the restored position is for this `fit`, not a later one

    def training_ends(self) -> None:
        """Called by the callback on all workers. All proposals are settled when it returns."""
        parts = self._together()  # of a script that has proposed and not trained, too
        parts.checkpoints.report()
        parts.auditing.after_training()
        try:
            parts.session.rest("close")  # also finishes a checkpoint that needs another boundary
        finally:
            parts.auditing.training_ended()
        parts.session.wait_for_outcomes()
        parts.checkpoints.settle()
        parts.checkpoints.check()
        parts.run_files.training = False

    def _together(self) -> Parts:
        """For operations of all workers, between steps: first resumes unfinished work of earlier attempts."""
        parts = self._counted()
        parts.session.begin()
        return parts

    def _open(self) -> None:
        """Joins the other workers. All of them call it, each with a built model."""
        self._parts = parts = join(self.model, self._optimizer, self._strategy, self._settings)
        session = parts.session
        self._progress = _report_progress(parts)
        self._states = RunStates(self._settings.run_dir, session.rank, session.size, parts.attempt)
        self._states.starting()
        self._strategy.before_leaving(self._close_at_the_end, always=self._abandon)
        # Even before training: a worker that is told to exit then tells the others, and exits with its code.
        leaving = parts.training.leaving
        leaving.is_training = lambda: parts.run_files.training
        leaving.has_trained = lambda: self._trained
        leave_on_sigterm(leaving, self._strategy.leavings)

    def _close_at_the_end(self) -> None:
        leavings = self._strategy.leavings
        if self.training.leaving not in leavings:  # closed before, and the script went on
            leavings.append(self.training.leaving)
        for leaving in leavings:
            leaving.ends = True
        self._at_exit = True
        self.close()

    def _abandon(self) -> None:
        if self._parts is not None and not self._closed:
            self._parts.session.abandon()
            self._parts.run_files.note_end()
            self._progress.stop(finished=False)
            self._states.abandoned(self._parts.session.step, self._strategy.failure)
            self._parts.training.leaving.ends = True  # it exits anyway: SIGTERM need not

    def _fit_begins(self, model: Any, callbacks: Any) -> None:
        if model is not self.model or holds_callback(callbacks, BoundaryCallback):
            return
        if not self._warned:
            self._warned = True
            warn_of_missing_callback(self.rank)
        if self._parts is not None:
            self._parts.uncounted.fit_begins()


def _report_progress(parts: Parts) -> ProgressReports:
    """Starts reports for a scheduler, if the environment asks for them."""
    session, run_files = parts.session, parts.run_files
    reports = ProgressReports(
        progress_target(os.environ, session.rank),
        rank=session.rank,
        attempt=parts.attempt,
        step=lambda: session.step,
        training=lambda: run_files.training,
        position=lambda: run_files.position(),
        metrics=lambda: numbers(run_files.logs or {}),
    )
    reports.start()
    return reports
