"""The boundaries of Keras' `fit`."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import keras

from replicast.errors import NotSupported
from replicast.replicas.position import Fit, Position
from replicast.strategy import start_at_epoch
from replicast.strategy.resuming import ResumedEpoch, go_on, pass_over

if TYPE_CHECKING:
    from replicast.replicas.auditing import AuditPlan
    from replicast.replicas.recovery import Saves
    from replicast.replicas.replicas import Replicas

logger = logging.getLogger("replicast")


class BoundaryCallback(keras.callbacks.Callback):
    """Makes every end of a batch a boundary; with `steps_per_execution`, every end of an execution.

    Give it to `fit` on all workers.
    """

    def __init__(self, replicas: Replicas, saves: Saves, audits: AuditPlan) -> None:
        super().__init__()
        self._replicas = replicas
        self._saves = saves
        self._audits = audits
        self._first_step = 0
        self._resumed = Position()
        self._resumed_epoch = ResumedEpoch()
        self._epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Applies what the journal holds for this step, and goes on where a restored state was left."""
        if self.model is not self._replicas.model:
            raise NotSupported(
                "This callback with another model",
                reason="it belongs to the model that its Replicas were made with",
                remedy="Make a replicast.Replicas(model) for the model that is trained",
            )
        self._replicas.training_begins()
        called_with = self.params or {}
        fit = Fit(called_with.get("epochs", 1), called_with.get("steps"))
        self._resumed = self._replicas.recovery.take_resumed(fit)
        if self._is_over():
            pass_over(self.model, self._resumed.epoch, self._warn)
            return
        self._replicas.recovery.plan(self._saves)
        self._replicas.auditing.plan(self._audits)
        if self._resumed.epoch >= fit.epochs:  # all of it is done but what Keras does at its end
            pass_over(self.model, self._resumed.epoch, self._warn)
            return
        self._resumed_epoch = go_on(self.model, self._resumed.epoch, self._resumed.batch, self._warn)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the epoch."""
        self._epoch = epoch
        self._replicas.begin_epoch(epoch)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes where the execution starts."""
        self._first_step = batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """A boundary."""
        steps = batch - self._first_step + 1
        self._replicas.recovery.reached(self._position(batch), logs, batches=batch + 1)
        self._replicas.boundary(steps=steps, logs=logs, batches=0)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """The end of an epoch is where the next one begins."""
        self._resumed_epoch.ended()
        self._replicas.recovery.reached(Position(epoch + 1), logs)
        self._replicas.auditing.after_epoch()
        self._replicas.recovery.after_epoch()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Settles what was proposed during training, so that nothing waits for a step that never comes."""
        start_at_epoch(self.model, 0)
        self._replicas.begin_epoch(None)
        recovery = self._replicas.recovery
        if self._is_over():
            recovery.held.put_back()
            self._replicas.training_ends()
            recovery.held.keep()
            return
        recovery.ended(stopped=self._is_stopped())
        self._replicas.training_ends()

    def _is_over(self) -> bool:
        """Whether this training was done in an earlier life of the job, and is passed over."""
        return self._resumed.inside == "over"

    def _is_stopped(self) -> bool:
        """Whether something ended the training before all its epochs were done."""
        return bool(self.model.stop_training) and self._epoch + 1 < (self.params or {}).get("epochs", 1)

    def _position(self, batch: int) -> Position:
        """Where the data stands after a batch. The last one of an epoch is where the next one begins."""
        length = (self.params or {}).get("steps")
        skipped = self._resumed.batch if self._epoch == self._resumed.epoch else 0
        done = skipped + batch + 1
        ended = length is not None and done >= length
        return Position(self._epoch + 1) if ended else Position(self._epoch, done)

    def _warn(self, message: str) -> None:
        if self._replicas.rank == 0:
            logger.warning(message)
