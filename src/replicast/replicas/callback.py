"""The boundaries of Keras' `fit`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import keras

from replicast.errors import NotSupported
from replicast.replicas.job_audits import AuditPlan
from replicast.replicas.job_checkpoints import SavePlan
from replicast.replicas.joined_worker import JoinedWorker
from replicast.replicas.position import Fit, Position
from replicast.training import start_at_epoch
from replicast.training.resuming import ResumedEpoch, callbacks_of, count_done_batches, resume_fit, skip_fit

logger = logging.getLogger("replicast")


class _AfterOthers(keras.callbacks.Callback):
    """Runs after all other callbacks of a `fit`, so that a checkpoint includes their changes to the state."""

    def __init__(self, ours: BoundaryCallback) -> None:
        super().__init__()
        self._ours = ours

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        self._ours.all_have_begun()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._ours.epoch_has_begun()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self._ours.set_moment("batch")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._ours.save_epoch()
        self._ours.set_moment("epoch")


class BoundaryCallback(keras.callbacks.Callback):
    """Makes every end of a batch a boundary; with `steps_per_execution`, every end of an execution."""

    _worker: JoinedWorker  # from `on_train_begin` on: the model may not be built before

    def __init__(
        self, model: keras.Model, begin: Callable[[], JoinedWorker], saves: SavePlan, audits: AuditPlan
    ) -> None:
        """`begin` begins the training of the model on this worker."""
        super().__init__()
        self._own_model = model
        self._begin = begin
        self._saves = saves
        self._audits = audits
        self._first_step = 0
        self._resumed = Position()
        self._resumed_epoch = ResumedEpoch()
        self._epoch = 0
        self._after_others: _AfterOthers | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Applies the journal's updates for this step, and resumes at the position of a restored state."""
        if self.model is not self._own_model:
            raise NotSupported(
                "This callback with another model",
                reason="it belongs to the model that its Replicas was created with",
                remedy="Create a replicast.Replicas(model) for the model that is trained",
            )
        self._worker = self._begin()
        self._worker.called_by = self
        measured = [
            *self.model.metrics,
            *(m for one in self.model.metrics for m in getattr(one, "metrics", ())),
        ]
        self._worker.run_files.means = tuple(m.name for m in measured if isinstance(m, keras.metrics.Mean))
        called_with = self.params or {}
        fit = Fit(called_with.get("epochs", 1), called_with.get("steps"))
        self._resumed = self._worker.training.begin_fit(fit)
        if self._is_over():
            skip_fit(self.model, self._resumed.epoch, self._warn)
            return
        self._worker.checkpoints.agree_on(self._saves)
        self._worker.audits.plan(self._audits)
        if self._resumed.epoch >= fit.epochs or self._resumed.inside == "stopped":  # let Keras end the fit
            skip_fit(self.model, self._resumed.epoch, self._warn)
            return
        others = callbacks_of(self.model)
        if others is not None:
            self._after_others = _AfterOthers(self)
            others.append(self._after_others)
        self._resumed_epoch = resume_fit(self.model, self._resumed.epoch, self._resumed.batch, self._warn)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        self._worker.strategy.begin_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes where the execution starts. All callbacks are done with the previous boundary."""
        if self._worker.called_by is not self:
            raise NotSupported(
                "Two callbacks of one Replicas in one fit",
                reason="every step would be counted twice",
                remedy="Pass a single replicas.callback(...) with all options to fit",
            )
        self._first_step = batch
        self._worker.checkpoints.report()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        steps = batch - self._first_step + 1
        position = self._position(batch)
        ends = self._after_others is not None and position.epoch > self._epoch
        self._worker.training.reached(position, logs, batches=batch + 1, epoch_ends=ends)
        self._worker.boundary(steps=steps, logs=logs, batches=0)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._resumed_epoch.ended()
        self._worker.training.reached(Position(epoch + 1), logs)
        validated = {name: value for name, value in (logs or {}).items() if name.startswith("val_")}
        self._worker.session.replica.measures.add(self._worker.session.step, validated)
        self._worker.audits.after_epoch()
        if self._after_others is None:
            self.save_epoch()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Settles all proposals, so that none waits for a step that never comes."""
        start_at_epoch(self.model, 0)
        self._worker.strategy.begin_epoch(None)
        training, others = self._worker.training, callbacks_of(self.model)
        if others is not None and self._after_others in others:
            others.remove(self._after_others)
        self._after_others = None
        if self._is_over():
            training.frozen_variables.put_back()
            self._worker.end_training()
            training.frozen_variables.keep()
            return
        training.end_fit(stopped=self._is_stopped())
        self._worker.end_training()
        self.set_moment("fit")

    # Called after all other callbacks.

    def set_moment(self, moment: str, steps_before: int = 0) -> None:
        """A proposal made at, or begun from, the same moment of training has the same id in every attempt."""
        session = self._worker.session
        session.proposals.set_moment(moment, session.step - steps_before)

    def all_have_begun(self) -> None:
        """Inside an epoch: the saved state has the learning rate that was set when the epoch began."""
        self.set_moment("epoch", self._resumed.batch)
        if self._resumed.batch:
            of_optimizers = (each for each in self._worker.state.schema if each.kind == "optimizer")
            self._worker.training.frozen_variables.keep(each.name for each in of_optimizers if not each.shape)

    def epoch_has_begun(self) -> None:
        self._worker.training.frozen_variables.put_back()
        self._worker.training.frozen_variables.release()
        resumes = self._resumed.batch and self._epoch == self._resumed.epoch
        for callback in callbacks_of(self.model) or [] if resumes else []:
            if type(callback) is keras.callbacks.ProgbarLogger:
                count_done_batches(callback, self._resumed_epoch.done)
        self.set_moment("batch" if resumes else "first")

    def save_epoch(self) -> None:
        if self._is_stopped():
            self._worker.training.end_fit(stopped=True)
        self._worker.checkpoints.after_epoch()

    def _is_over(self) -> bool:
        return self._resumed.inside == "over"

    def _is_stopped(self) -> bool:
        return bool(self.model.stop_training) and self._epoch + 1 < (self.params or {}).get("epochs", 1)

    def _position(self, batch: int) -> Position:
        """The position in the data after a batch. After the last batch it is the start of the next epoch."""
        length = (self.params or {}).get("steps")
        skipped = self._resumed.batch if self._epoch == self._resumed.epoch else 0
        done = skipped + batch + 1
        ended = length is not None and done >= length
        return Position(self._epoch + 1) if ended else Position(self._epoch, done)

    def _warn(self, message: str) -> None:
        if self._worker.session.rank == 0:
            logger.warning(message)
