"""`replicast.Replicas`: the user's interface for changing all replicas of a model."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import keras

from replicast.audits.report import AuditReport, Policy
from replicast.core.entries import Receipt
from replicast.core.operation import Timeouts
from replicast.core.refusal import Refusal
from replicast.replicas.auditing import AuditPlan
from replicast.replicas.callback import BoundaryCallback
from replicast.replicas.checkpoint_errors import no_run_dir
from replicast.replicas.joining import Durability, settle, strategy_of
from replicast.replicas.lifecycle import ReplicasLifecycle
from replicast.replicas.model_files import on_worker_0, read_model, write_model
from replicast.replicas.proposing import checked_worker
from replicast.replicas.restoring import Restored, restore
from replicast.replicas.saving import Keeping, SaveEvery, SavePlan, Saving, WhenBusy
from replicast.runtime import Ticket
from replicast.runtime.functions import Function
from replicast.runtime.ticket import refused
from replicast.storage.checkpoint import CheckpointStore
from replicast.strategy.passes import Batches
from replicast.update.guard import Guard
from replicast.update.trial import Trial
from replicast.update.update import Update
from replicast.update.validate import Limits

logger = logging.getLogger("replicast")


class Replicas(ReplicasLifecycle):
    """The replicas of one model, seen from one worker. Create it on all workers, after compiling the model.

    Blocks until all workers have created theirs. Updates are applied at boundaries: pass `callback()` to
    `fit`, or call `boundary()` after each step of a custom training loop.

    Example:
        replicas = replicast.Replicas(model)
        model.fit(dataset, callbacks=[replicas.callback()])

    Args:
        model: Created and compiled inside `strategy.scope()` of a `replicast.Strategy`. A model that is not
            built yet can be changed once training has begun.
        optimizer: For a custom training loop, whose optimizer the model does not know.
        run_dir: The directory of the journal, the inbox and the files that `replicast status` reads. Default:
            the launcher's run directory (for a second model, its subdirectory `replicas-2`, and so on);
            without a launcher, none.
        durability: "disk": an update is committed when it is on disk. "memory": nothing is written, and a
            restarted job has lost the updates. Default: "disk" if there is a run directory.
        limits: Size limits for updates: `replicast.Limits`.
        guard: Limits on how much an update may change, and variables that must not change. Default: none.
        audit_every: For a custom training loop: compare all replicas every this many steps. For `fit`, pass
            it to `callback`.
        on_divergence: What happens when replicas differ: "raise", "heal" or "warn". For a custom training
            loop and `audit`.
        may_differ: Names of variables that may differ between workers; "*" matches anything.
        timeouts: How long each wait may take: `replicast.Timeouts`.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        optimizer: keras.optimizers.Optimizer | None = None,
        run_dir: str | os.PathLike[str] | None = None,
        durability: Durability | None = None,
        limits: Limits | None = None,
        guard: Guard | None = None,
        audit_every: int | None = None,
        on_divergence: Policy = "raise",
        may_differ: Sequence[str] = (),
        timeouts: Timeouts | None = None,
    ) -> None:
        strategy = strategy_of(model)
        settings = settle(
            None if run_dir is None else Path(run_dir),
            durability,
            limits,
            timeouts,
            guard,
            AuditPlan(audit_every, on_divergence),
            may_differ,
            strategy,
        )
        self._restores = 0
        self._moves = 0
        super().__init__(model, optimizer, strategy, settings)

    def callback(
        self,
        *,
        save_every: SaveEvery | None = None,
        keep: int = 3,
        keep_best: tuple[str, Literal["min", "max"]] | None = None,
        when_busy: WhenBusy = "wait",
        audit_every: int | None = 100,
        on_divergence: Policy | None = None,
    ) -> BoundaryCallback:
        """The callback to pass to `fit`, on all workers.

        Args:
            save_every: Makes a checkpoint after a number of steps, after a `datetime.timedelta`, or "epoch".
            keep: The number of latest checkpoints to keep.
            keep_best: A metric and "min" or "max": the best checkpoint by this metric is kept too.
            when_busy: If a checkpoint is due while the previous one is still being written: "wait" for the
                previous one, or "skip" the new one.
            audit_every: Compares all replicas every this many steps, at the end of every epoch and at the end
                of training; None for never.
            on_divergence: "heal" makes differing replicas equal again and logs it, "raise" ends the training
                on all workers, "warn" only logs it. Default: "heal"; without audits, "raise".
        """
        saves = SavePlan(save_every, Keeping(keep, keep_best), when_busy)
        usual: Policy = "raise" if audit_every is None else "heal"
        policy = usual if on_divergence is None else on_divergence
        return BoundaryCallback(self, saves, AuditPlan(audit_every, policy, ends=True))

    def save(self) -> Saving:
        """Saves the whole state at this boundary as a checkpoint. All workers must call it.

        Worker 0 writes it in the background, and only if the state is the same on all workers.

        Returns:
            A handle: on worker 0, `result(timeout)` returns the manifest once the checkpoint is durable.

        Raises:
            CheckpointError: A trial is not decided yet.
        """
        return self._together().checkpoints.save_here()

    def restore(self, step: int | None = None, *, partial: bool = False) -> Restored | None:
        """Restores a checkpoint on every worker, bit for bit. All workers must call it, before training.

        Only worker 0 needs to see the run directory. `fit` then resumes where the checkpoint was made, even
        in the middle of an epoch, and later updates in the journal are applied again at their steps.

        Args:
            step: The checkpoint's step. Default: the last intact checkpoint.
            partial: For a changed model: restore the variables that fit, and report which were left out.

        Returns:
            What was restored; None if there is no checkpoint yet.

        Raises:
            CheckpointError: There is no checkpoint of that step, or it belongs to another model.
        """
        parts = self._counted()
        if self._settings.run_dir is None:
            raise no_run_dir()
        self._restores += 1
        store = CheckpointStore(self._settings.run_dir)
        restored = restore(parts.session, parts.state, parts.transport, store, self._restores, step, partial)
        if restored is None:
            return None
        parts.training.restored(restored, step)
        position = restored.position
        self._strategy.start_data_at(self.model, position.epoch, position.batch, restored.step)
        if restored.left_out and self.rank == 0:
            left_out = ", ".join(restored.left_out)
            logger.warning("not restored, because the checkpoint has no matching variable: %s", left_out)
        return restored

    def propose(
        self,
        update: Update | Function,
        *,
        source: int | None = None,
        at_step: int | None = None,
        trial: Trial | None = None,
    ) -> Ticket:
        """Proposes a change of all replicas. Any worker, any thread; returns at once.

        Args:
            update: An `Update`; or a function that gets the live values by name at the agreed boundary, and
                returns an `Update` or a dict from variable names to new values.
            source: For a function: the worker that runs it, which must also propose it. Default: this one. If
                all workers propose it at the same step, it still runs once.
            at_step: Apply it at the boundary after this many steps; with `steps_per_execution`, at the first
                boundary at or after it. Default: the next possible boundary.
            trial: A condition on a metric. If it is not met, all replicas revert to the state before.

        Returns:
            A ticket, whose `result(timeout)` returns the receipt or raises the reason for the refusal.

        Raises:
            UpdateRefused: `source`, `at_step` or `trial` is not valid.
        """
        return self._active().proposing.propose(update, source=source, at_step=at_step, trial=trial)

    def revert(self, number: int, note: str = "", *, force: bool = False) -> Ticket:
        """Proposes an update that undoes a committed one. Any worker, any thread; returns at once.

        Added values are subtracted, scaled ones are divided, and training since then stays. Assigned and
        blended values, and optimizer slots that the update has reset, go back to exactly what they were
        before it; training since then is lost for them. A revert can be reverted like any other update.

        Args:
            number: The update's sequence number: `receipt.sequence`, or from `replicast log`.
            note: Why.
            force: Revert it even if it is reverted already, or later updates have changed the same variables.

        Returns:
            A ticket, whose `result(timeout)` returns the receipt or raises the reason for the refusal: there
            is no such update, it is reverted already, it failed its trial, later updates have changed the
            same variables, or the values before it are not kept any more.

        Raises:
            UpdateRefused: The number is not valid.
        """
        return self._active().proposing.revert(number, note, force=force)

    def boundary(
        self, *, steps: int = 1, logs: Mapping[str, Any] | None = None, batches: int | None = None
    ) -> None:
        """Marks a boundary after `steps` more steps. Call it after each step of a custom training loop.

        It is cheap when there is no update. It may block while an update is decided or applied.

        Args:
            steps: The number of steps since the last boundary; the same on all workers.
            logs: Loss and metrics of these steps, for `replicast status` and for trials.
            batches: The number of batches of `resume`'s dataset that they used. Default: one per step.
        """
        if self._parts is not None:
            self._parts.uncounted.count(known=steps)
        if not self._trained:
            self.training_begins()
        parts = self._active()
        parts.run_files.training = True
        if logs is not None:
            parts.run_files.logs = logs
        self._strategy.wait_for_device()
        parts.training.goes_on()
        parts.training.used(steps if batches is None else batches)
        parts.proposing.go_on()
        step = parts.session.step + steps
        parts.session.replica.measures.note(step, steps, logs)
        parts.session.arrive(step)
        parts.auditing.after_step(steps)
        parts.training.after_step(steps)

    def resume(self, dataset: Batches) -> Batches:
        """The next pass over the data of a custom training loop. `fit` with the callback needs no such call.

        Call it for every pass. The first call after a restore returns the rest of the pass in which the state
        was saved, and advances the shuffle order past the earlier passes; all other calls return the dataset
        as it is. A pass may end early, and its length need not be known. A list of batches works too. For an
        iterator, such as a Python generator, the finished batches are read and discarded, and worker 0 warns.

        Example:
            replicas.restore()
            while replicas.step < 300:
                for batch in replicas.resume(dataset.take(15)):
                    train_step(batch)
                    replicas.boundary()

        Each step is assumed to use one batch of this dataset. Otherwise, say so: `boundary(batches=2)` for
        two batches, `boundary(batches=0)` for a step on other data. If a loop leaves a pass by `break` after
        `boundary`, a checkpoint made at that boundary does not know of the break, and resumes with the rest
        of the pass; `dataset.take(n)` avoids this. `position` tells the pass, as `epoch`, and how many of its
        batches are done.
        """
        self.proposing.go_on()
        return self.training.resume(dataset)

    def sync(self, source: int = 0, variables: Sequence[str] | None = None) -> Receipt | None:
        """Makes every replica equal to worker `source`'s. All workers must call it, with the same arguments.

        Only variables that differ are transferred, and the change is journaled like any update.

        Args:
            source: The worker whose values are used.
            variables: Names; any unique suffix works. Default: the whole state.

        Returns:
            The receipt, or None if nothing differed.
        """
        source = checked_worker(source, self.size)
        if isinstance(variables, str):
            variables = [variables]
        chosen = list(self.schema) if variables is None else [self.schema.resolve(name) for name in variables]
        names = sorted({variable.name for variable in chosen})
        receipt = self._together().session.rest("sync", source, *names)
        if isinstance(receipt, Refusal):
            raise refused(receipt)
        return receipt if isinstance(receipt, Receipt) else None

    def audit(self, on_divergence: Policy | None = None) -> AuditReport:
        """Compares all replicas, bit for bit, at this boundary. All workers must call it.

        Args:
            on_divergence: What happens when replicas differ. Default: the value given to the constructor.

        Returns:
            Which workers differ, in which variables, by how much and since when; the same on all workers.

        Raises:
            ReplicasDiverged: They differ, and the policy is "raise", or they could not be healed.
        """
        return self._together().auditing.audit(on_divergence)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Writes the model for other tools. All workers must call it; worker 0 writes.

        Args:
            path: Ends in `.keras` (the whole model), in `.weights.h5` (Keras' weights), or is the prefix of a
                `tf.train.Checkpoint` with `model` and `optimizer`.
        """
        session = self._together().session
        session.rest("meet", "export")
        self._moves += 1
        on_worker_0(session.exchange, self._moves, lambda: write_model(self.model, Path(path)))

    def import_weights(self, path: str | os.PathLike[str]) -> Receipt | None:
        """Loads the weights of a file that `export`, Keras or TensorFlow wrote into every replica.

        All workers must call it: worker 0 reads the file, and the others receive the differences, as in
        `sync`.

        Args:
            path: As for `export`. A `.keras` file is read in Keras' safe mode: no code in it is run.

        Returns:
            The receipt, or None if the weights were the same already.

        Raises:
            CheckpointError: Worker 0 cannot read it.
        """
        session = self._together().session
        session.rest("meet", "import")
        self._moves += 1
        on_worker_0(session.exchange, self._moves, lambda: read_model(self.model, Path(path)))
        return self.sync(source=0)
