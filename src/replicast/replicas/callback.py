"""The boundaries of `fit`, of Keras 3 and of `tf_keras`.

After a restore, `fit` of Keras 3 continues at the batch where the state was saved. That of `tf_keras`
continues at the same step of the same epoch, but on data from the start of a pass: it offers no other place.
"""

from __future__ import annotations

import sys
from typing import Any, Literal

import keras

from replicast.errors import NotSupported, logger
from replicast.replicas.job_audits import AuditPlan
from replicast.replicas.job_checkpoints import SaveEvery, SavePlan, WhenBusy
from replicast.replicas.joined_worker import JoinedWorker
from replicast.replicas.position import Fit, Position
from replicast.training import start_at_epoch
from replicast.training.resuming import ResumedEpoch, callbacks_of, resume_fit, skip_fit, start_tf_keras_at
from replicast.training.step import EpochMetrics
from replicast.training.strategy import StockJob
from replicast.update.audit_report import Policy


class ReplicasCallback(keras.callbacks.Callback):
    """Makes every end of a batch a boundary; with `steps_per_execution`, every end of an execution.

    The arguments are those of `Replicas.callback`, which creates it. It works in `fit` of `tf_keras` too.
    """

    _worker: JoinedWorker  # from `on_train_begin` on: the model may not be built before
    _supports_tf_logs = True  # tf_keras: logs may be tensors, which need not be waited for after each batch

    def __init__(
        self,
        replicas: Any,  # a `Replicas`, whose module imports this one
        *,
        save_every: SaveEvery | None = None,
        keep: int = 3,
        keep_best: tuple[str, Literal["min", "max"]] | None = None,
        when_busy: WhenBusy = "wait",
        audit_every: int | None = 100,
        on_divergence: Policy | None = None,
    ) -> None:
        super().__init__()
        self._replicas = replicas
        self._own_model = replicas.model
        self._saves = SavePlan(save_every, keep, keep_best, when_busy)
        usual: Policy = "raise" if audit_every is None else "heal"
        policy = usual if on_divergence is None else on_divergence
        self._audits = AuditPlan(audit_every, policy, ends=True)
        self._is_keras_3 = isinstance(self._own_model, keras.Model)
        self._first_step = 0
        self._resumed = Position()
        self._resumed_epoch = ResumedEpoch()
        self._epoch = 0
        self._after_others: keras.callbacks.Callback | None = None
        self._metrics: EpochMetrics | None = None  # from the first batch on

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Applies the journal's updates for this step, and resumes at the position of a restored state."""
        if self.model is not self._own_model:
            raise NotSupported(
                "This callback with another model",
                reason="it belongs to the model that its Replicas was created with",
                remedy="Create a replicast.Replicas(model) for the model that is trained",
            )
        self._worker = self._replicas.training_begins()
        job = self._worker.job
        if self._is_keras_3 and isinstance(job, StockJob) and job.size > 1:
            raise NotSupported(
                "fit of Keras 3 on a tf.distribute.MultiWorkerMirroredStrategy",
                reason="Keras 3 reduces whole batches and scalar metrics as no such strategy can",
                remedy="Write 'strategy = replicast.Strategy()' instead, which is one too. Or call "
                "replicas.boundary() in a custom training loop, or use tf_keras",
            )
        self._worker.called_by = self
        self._metrics = None
        called_with = self.params or {}
        fit = Fit(called_with.get("epochs", 1), called_with.get("steps"))
        self._resumed = self._worker.training.begin_fit(fit)
        if self._is_over():
            self._skip_fit()
            return
        self._worker.checkpoints.agree_on(self._saves)
        self._worker.audits.plan(self._audits)
        if self._resumed.epoch >= fit.epochs or self._resumed.inside == "stopped":  # let Keras end the fit
            self._skip_fit()
            return
        others = callbacks_of(self.model) if self._is_keras_3 else None
        if others is not None:
            for board in others:
                if isinstance(board, keras.callbacks.TensorBoard):
                    self._worker.session.open_board(str(board.log_dir))
            # After all other callbacks of this `fit`: a checkpoint includes their changes to the state.
            self._after_others = keras.callbacks.LambdaCallback(
                on_train_begin=lambda logs: self._all_have_begun(),
                on_epoch_begin=lambda epoch, logs: self._epoch_has_begun(),
                on_train_batch_end=lambda batch, logs: self._set_moment("batch"),
                on_epoch_end=lambda epoch, logs: self._epoch_has_ended(),
            )
            others.append(self._after_others)
        epoch, batch = self._resumed.epoch, self._resumed.batch
        if self._is_keras_3:
            self._resumed_epoch = resume_fit(self.model, epoch, batch, self._warn)
        elif epoch or batch:
            start_tf_keras_at(self.model, epoch, batch)
            self._warn(
                f"fit of tf_keras continues after batch {batch} of epoch {epoch + 1}, on data from its "
                "start: it cannot start in the middle of a pass. Data that is the same in every epoch, with "
                'save_every="epoch", makes this the same as without a restart; a custom training loop with '
                "replicas.resume(dataset) needs neither"
            )

    def _skip_fit(self) -> None:
        if self._is_keras_3:
            skip_fit(self.model, self._resumed.epoch, self._warn)
        else:
            start_tf_keras_at(self.model, sys.maxsize)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._epoch = epoch
        self._worker.job.epoch = epoch

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
        if self._metrics is None:
            self._metrics = EpochMetrics(self.model, logs or {})
            self._worker.session.replica.measures.means = self._metrics.means
        counts = self._metrics.counts()
        self._worker.training.reached(position, logs, batches=batch + 1, counts=counts, epoch_ends=ends)
        self._worker.boundary(steps=steps, logs=logs, batches=0)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self._resumed_epoch.ended()
        self._worker.training.reached(Position(epoch + 1), logs)
        validated = {name: value for name, value in (logs or {}).items() if name.startswith("val_")}
        self._worker.session.replica.measures.add(self._worker.session.step, validated)
        self._worker.audits.after_epoch()
        if self._after_others is None:
            self._save_epoch()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Settles all proposals, so that none waits for a step that never comes."""
        if self._is_keras_3:
            start_at_epoch(self.model, 0)
        else:
            start_tf_keras_at(self.model, 0)
        self._worker.job.epoch = None
        training = self._worker.training
        others = callbacks_of(self.model) if self._is_keras_3 else None
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
        self._set_moment("fit")

    # Asked by tf_keras, which calls the methods for batches only where they are said to exist.

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def _implements_test_batch_hooks(self) -> bool:
        return False

    _implements_predict_batch_hooks = _implements_test_batch_hooks

    # Called after all other callbacks.

    def _set_moment(self, moment: str, steps_before: int = 0) -> None:
        """A proposal of the same moment of training has the same id in every attempt."""
        session = self._worker.session
        session.proposals.set_moment(moment, session.step - steps_before)

    def _all_have_begun(self) -> None:
        """Inside an epoch: the saved state has the learning rate that was set when the epoch began."""
        self._set_moment("epoch", self._resumed.batch)
        if self._resumed.batch:
            of_optimizers = (each for each in self._worker.state.schema if each.kind == "optimizer")
            self._worker.training.frozen_variables.keep(each.name for each in of_optimizers if not each.shape)

    def _epoch_has_begun(self) -> None:
        self._worker.training.frozen_variables.put_back()
        self._worker.training.frozen_variables.release()
        resumes = self._resumed.batch and self._epoch == self._resumed.epoch
        self._set_moment("batch" if resumes else "first")

    def _save_epoch(self) -> None:
        if self._is_stopped():
            self._worker.training.end_fit(stopped=True)
        self._worker.checkpoints.after_epoch()

    def _epoch_has_ended(self) -> None:
        self._save_epoch()
        self._set_moment("epoch")

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
