"""The boundaries of Keras' `fit`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import keras

from replicast.errors import NotSupported
from replicast.replicas.auditing import Auditing, AuditPlan
from replicast.replicas.joining import Proposing
from replicast.replicas.position import Fit, Position
from replicast.replicas.saving import SavePlan
from replicast.replicas.training_progress import Training
from replicast.training import start_at_epoch
from replicast.training.resuming import ResumedEpoch, callbacks_of, count_done_batches, resume_fit, skip_fit
from replicast.update.schema import Schema

logger = logging.getLogger("replicast")


class FitReplicas(Protocol):
    """What the callback needs of `Replicas`."""

    model: keras.Model
    called_by: BoundaryCallback | None

    @property
    def rank(self) -> int:
        """As in `Replicas`."""

    @property
    def step(self) -> int:
        """As in `Replicas`."""

    @property
    def schema(self) -> Schema:
        """As in `Replicas`."""

    @property
    def training(self) -> Training:
        """As in `Replicas`."""

    @property
    def auditing(self) -> Auditing:
        """As in `Replicas`."""

    @property
    def proposing(self) -> Proposing:
        """As in `Replicas`."""

    def begin_epoch(self, epoch: int | None) -> None:
        """As in `Replicas`."""

    def boundary(self, *, steps: int, logs: Mapping[str, Any] | None, batches: int | None) -> None:
        """As in `Replicas`."""

    def training_begins(self) -> None:
        """As in `Replicas`."""

    def training_ends(self) -> None:
        """As in `Replicas`."""


class LastOfAll(keras.callbacks.Callback):
    """Runs after all other callbacks of a `fit`, so that a checkpoint includes their changes to the state."""

    def __init__(
        self,
        all_began: Callable[[], None],
        epoch_began: Callable[[], None],
        batch_ended: Callable[[], None],
        epoch_ended: Callable[[], None],
    ) -> None:
        super().__init__()
        self._all_began = all_began
        self._epoch_began = epoch_began
        self._batch_ended = batch_ended
        self._epoch_ended = epoch_ended

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """All others have begun."""
        self._all_began()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """All others know that an epoch begins."""
        self._epoch_began()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """All others know that a batch has ended."""
        self._batch_ended()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """All others know that an epoch has ended."""
        self._epoch_ended()


class BoundaryCallback(keras.callbacks.Callback):
    """Makes every end of a batch a boundary; with `steps_per_execution`, every end of an execution.

    Give it to `fit` on all workers.
    """

    def __init__(self, replicas: FitReplicas, saves: SavePlan, audits: AuditPlan) -> None:
        super().__init__()
        self._replicas = replicas
        self._saves = saves
        self._audits = audits
        self._first_step = 0
        self._resumed = Position()
        self._resumed_epoch = ResumedEpoch()
        self._epoch = 0
        self._last_of_all: LastOfAll | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Applies the journal's updates for this step, and resumes at the position of a restored state."""
        if self.model is not self._replicas.model:
            raise NotSupported(
                "This callback with another model",
                reason="it belongs to the model that its Replicas was created with",
                remedy="Create a replicast.Replicas(model) for the model that is trained",
            )
        self._replicas.called_by = self
        self._replicas.training_begins()
        called_with = self.params or {}
        fit = Fit(called_with.get("epochs", 1), called_with.get("steps"))
        self._resumed = self._replicas.training.begin_fit(fit)
        if self._is_over():
            skip_fit(self.model, self._resumed.epoch, self._warn)
            return
        self._replicas.training.agree_on_saves(self._saves)
        self._replicas.training.plan_saves(self._saves)
        self._replicas.auditing.plan(self._audits)
        if self._resumed.epoch >= fit.epochs or self._resumed.inside == "stopped":  # let Keras end the fit
            skip_fit(self.model, self._resumed.epoch, self._warn)
            return
        others = callbacks_of(self.model)
        if others is not None:
            self._last_of_all = LastOfAll(
                self._all_began, self._epoch_began, self._batch_ended, self._epoch_ended
            )
            others.append(self._last_of_all)
        self._resumed_epoch = resume_fit(self.model, self._resumed.epoch, self._resumed.batch, self._warn)
        if others is not None and self._resumed_epoch.done:
            count_done_batches(others, called_with, self._resumed.epoch, self._resumed_epoch.done)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the epoch."""
        self._epoch = epoch
        self._replicas.begin_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes where the execution starts. All callbacks are done with the previous boundary."""
        if self._replicas.called_by is not self:
            raise NotSupported(
                "Two callbacks of one Replicas in one fit",
                reason="every step would be counted twice",
                remedy="Pass a single replicas.callback(...) with all options to fit",
            )
        self._first_step = batch
        self._replicas.training.goes_on()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        steps = batch - self._first_step + 1
        position = self._position(batch)
        ends = self._last_of_all is not None and position.epoch > self._epoch
        self._replicas.training.reached(position, logs, batches=batch + 1, epoch_ends=ends)
        self._replicas.boundary(steps=steps, logs=logs, batches=0)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the end of the epoch, which is the position where the next one begins."""
        self._resumed_epoch.ended()
        self._replicas.training.reached(Position(epoch + 1), logs)
        self._replicas.auditing.after_epoch()
        if self._last_of_all is None:
            self._save_epoch()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Settles all proposals, so that none waits for a step that never comes."""
        start_at_epoch(self.model, 0)
        self._replicas.begin_epoch(None)
        training, others = self._replicas.training, callbacks_of(self.model)
        if others is not None and self._last_of_all in others:
            others.remove(self._last_of_all)
        self._last_of_all = None
        if self._is_over():
            training.frozen_variables.put_back()
            self._replicas.training_ends()
            training.frozen_variables.keep()
            return
        training.end_fit(stopped=self._is_stopped())
        self._replicas.training_ends()
        self._replicas.proposing.comes_to("fit", self._replicas.step)

    # A proposal made at the same moment of training has the same id in every attempt, including one that
    # begins there.

    def _all_began(self) -> None:
        """Freezes the optimizer's scalars when an epoch is resumed in the middle.

        The saved state already contains a learning rate that was changed when the epoch began.
        """
        self._replicas.proposing.comes_to("epoch", self._replicas.step - self._resumed.batch)
        if self._resumed.batch:
            of_optimizers = (each for each in self._replicas.schema if each.kind == "optimizer")
            self._replicas.training.frozen_variables.keep(
                each.name for each in of_optimizers if not each.shape
            )

    def _epoch_began(self) -> None:
        self._replicas.training.frozen_variables.put_back()
        self._replicas.training.frozen_variables.release()
        goes_on = self._resumed.batch and self._epoch == self._resumed.epoch
        self._replicas.proposing.comes_to("batch" if goes_on else "first", self._replicas.step)

    def _batch_ended(self) -> None:
        self._replicas.proposing.comes_to("batch", self._replicas.step)

    def _epoch_ended(self) -> None:
        self._save_epoch()
        self._replicas.proposing.comes_to("epoch", self._replicas.step)

    def _save_epoch(self) -> None:
        """Called at the end of an epoch, after all other callbacks if they could be found."""
        if self._is_stopped():
            self._replicas.training.end_fit(stopped=True)
        self._replicas.training.after_epoch()

    def _is_over(self) -> bool:
        """Whether this training was finished in an earlier attempt and is skipped."""
        return self._resumed.inside == "over"

    def _is_stopped(self) -> bool:
        """Whether the training was stopped before all its epochs were done."""
        return bool(self.model.stop_training) and self._epoch + 1 < (self.params or {}).get("epochs", 1)

    def _position(self, batch: int) -> Position:
        """The position in the data after a batch. After the last batch it is the start of the next epoch."""
        length = (self.params or {}).get("steps")
        skipped = self._resumed.batch if self._epoch == self._resumed.epoch else 0
        done = skipped + batch + 1
        ended = length is not None and done >= length
        return Position(self._epoch + 1) if ended else Position(self._epoch, done)

    def _warn(self, message: str) -> None:
        if self._replicas.rank == 0:
            logger.warning(message)
