"""`replicast.Replicas`: how a worker, or somebody outside the job, changes all replicas."""

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
from replicast.errors import ReplicastError
from replicast.replicas.auditing import AuditPlan
from replicast.replicas.callback import BoundaryCallback
from replicast.replicas.checkpoints import no_run_dir
from replicast.replicas.joining import Durability, Parts, check_not_compiled_again, join, settle, strategy_of
from replicast.replicas.model_files import on_worker_0, read_model, write_model
from replicast.replicas.proposing import checked_worker
from replicast.replicas.restoring import Restored, restore
from replicast.replicas.saving import Keeping, SaveEvery, SavePlan, Saving, WhenBusy
from replicast.replicas.signals import leave_on_sigterm
from replicast.replicas.uncounted import holds_callback, warn_of_missing_callback
from replicast.replicas.view import ReplicasView
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


class Replicas(ReplicasView):
    """The replicas of one model, seen from one worker. Make it on all workers, after the model is compiled.

    Blocks until all workers have made theirs. Updates are applied at boundaries: give `callback()` to `fit`,
    or call `boundary()` after each step of a custom training loop.

    Example:
        replicas = replicast.Replicas(model)
        model.fit(dataset, callbacks=[replicas.callback()])

    Args:
        model: Made and compiled inside `strategy.scope()` of a `replicast.Strategy`. One that is not built
            yet can be changed once training has begun.
        optimizer: For a custom training loop, whose optimizer the model does not know.
        run_dir: Where the journal, the inbox and the files that `replicast status` reads are. Default: what
            the launcher gives (for a second model `replicas-2` in it, and so on); without a launcher, none.
        durability: "disk": an update is committed when it is on disk. "memory": nothing is written, and a
            restarted job has lost the updates. Default: "disk" where there is a run directory.
        limits: What is refused as too large: `replicast.Limits`.
        guard: What is refused as too large a change, or as a change of what must stay. Default: nothing.
        audit_every: For a custom training loop: compare all replicas after this number of steps. `fit` has
            it in `callback`.
        on_divergence: What happens when replicas differ: "raise", "heal" or "warn". For a custom training
            loop and `audit`.
        may_differ: Names of variables that each worker may have its own of, in which "*" stands for anything.
        timeouts: How long is waited for whom: `replicast.Timeouts`.
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
        self.model = model
        self._strategy = strategy_of(model)
        self._optimizer = optimizer
        self._settings = settle(
            None if run_dir is None else Path(run_dir),
            durability,
            limits,
            timeouts,
            guard,
            AuditPlan(audit_every, on_divergence),
            may_differ,
            self._strategy,
        )
        self._trained = False
        self._closed = False
        self._warned = False
        self._restores = 0
        self._moves = 0
        self.called_by: BoundaryCallback | None = None
        """The callback of the last `fit`. Written by it, when that begins."""
        self._parts: Parts | None = None
        self._strategy.on_fit.append(self._fit_begins)
        if model.built:
            self._open()

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
        """The callback to give to `fit`, on all workers.

        Args:
            save_every: Makes a checkpoint after a number of steps, after a `datetime.timedelta`, or "epoch".
            keep: How many of the latest checkpoints stay.
            keep_best: A metric and "min" or "max": the best one by it stays too.
            when_busy: What happens to a checkpoint that is due while the one before is being written: the
                training can "wait" for that, or "skip" the new one.
            audit_every: Compares all replicas after this number of steps, at every epoch's end and at the
                end; None for never.
            on_divergence: "heal" makes replicas that differ equal again and says so in the log, "raise" ends
                the training on all workers, "warn" only says so. Default: "heal"; without audits, "raise".
        """
        saves = SavePlan(save_every, Keeping(keep, keep_best), when_busy)
        usual: Policy = "raise" if audit_every is None else "heal"
        policy = usual if on_divergence is None else on_divergence
        return BoundaryCallback(self, saves, AuditPlan(audit_every, policy, ends=True))

    def save(self) -> Saving:
        """Saves the whole state, of this boundary, as a checkpoint. All workers must call it.

        Worker 0 writes, in the background and only if the state is the same on all workers.

        Returns:
            What is being written: `result(timeout)` gives its manifest on worker 0, when it is durable.

        Raises:
            CheckpointError: A trial is not decided yet.
        """
        return self._together().checkpoints.save_here()

    def restore(self, step: int | None = None, *, partial: bool = False) -> Restored | None:
        """Gives every worker the state of a checkpoint, bit for bit. All workers call it, before training.

        Only worker 0 needs to see the run directory. `fit` then goes on where the checkpoint was made, in the
        middle of an epoch too, and what the journal holds for later steps is applied again at its steps.

        Args:
            step: Which checkpoint. Default: the last one that is whole.
            partial: Take the variables that fit a model that was changed, and say which were left out.

        Returns:
            What was restored; None when there is no checkpoint yet.

        Raises:
            CheckpointError: There is none of that step, or it is of another model.
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
            logger.warning("left as they are, because the checkpoint does not have them so: %s", left_out)
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
            update: An `Update`; or a function that is given the live values by name, at the agreed boundary,
                and returns an `Update` or the new value of each variable by name.
            source: For a function: the worker that runs it, which must be among those that propose it.
                Default: this one. If all workers propose it, at the same step, it still runs once.
            at_step: Apply it at the boundary after this many steps; with `steps_per_execution`, at the first
                one at or after it. Default: at the next possible boundary.
            trial: What it has to prove: all replicas go back to the state before, should it not.

        Returns:
            A ticket, whose `result(timeout)` gives the receipt or raises the reason.

        Raises:
            UpdateRefused: `source` or `at_step` make no sense.
        """
        return self._active().proposing.propose(update, source=source, at_step=at_step, trial=trial)

    def boundary(
        self, *, steps: int = 1, logs: Mapping[str, Any] | None = None, batches: int | None = None
    ) -> None:
        """The training thread has finished `steps` more steps. Call it after each step of a custom loop.

        Costs next to nothing when there is no update. May block while one is decided or applied.

        Args:
            steps: How many steps since the last boundary; the same on all workers.
            logs: Loss and metrics of these steps, for `replicast status` and for trials.
            batches: How many batches of the dataset of `resume` they used. Default: one each.
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
        """For a custom training loop: the next pass over its data. `fit` with the callback does this itself.

        Ask for every pass. The first time after a restore it is the rest of the pass in which the state was
        saved, and the orders of those before have been drawn; otherwise it is the dataset as it is. A pass
        may end early, and its length need not be known. A list of batches can be given too; of an iterator,
        such as a Python generator, the batches that were done are read and thrown away, and worker 0 warns.

        Example:
            replicas.restore()
            while replicas.step < 300:
                for batch in replicas.resume(dataset.take(15)):
                    train_step(batch)
                    replicas.boundary()

        What is assumed: every boundary is one batch of this dataset for each of its steps. One that is not
        says so: `boundary(batches=2)` for two batches of it, `boundary(batches=0)` for a step on other data.
        A loop that leaves a pass by `break` leaves it after `boundary`: a checkpoint made just there knows of
        that batch but not of the break, and goes on with the rest of the pass. `dataset.take(n)` has no such
        place. `position` tells the pass, as `epoch`, and how many batches of it are done.
        """
        self.proposing.go_on()
        return self.training.resume(dataset)

    def sync(self, source: int = 0, variables: Sequence[str] | None = None) -> Receipt | None:
        """Makes every replica equal to worker `source`'s. All workers must call it, with the same arguments.

        Only what differs is transferred, and it is written to the journal like any update.

        Args:
            source: Whose values count.
            variables: Names, which may be shortened. Default: the whole state.

        Returns:
            The receipt, or None when nothing differed.
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
            on_divergence: What happens when replicas differ. Default: what the constructor was given.

        Returns:
            Who differs, where, by how much and since when; the same on all workers.

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
        """Gives every replica the weights of a file that `export`, Keras or TensorFlow wrote.

        All workers must call it: worker 0 reads the file, the others receive what differs, as in `sync`.

        Args:
            path: As for `export`. A `.keras` file is read in Keras' safe mode: no code in it is run.

        Returns:
            The receipt, or None when the weights were those already.

        Raises:
            CheckpointError: Worker 0 cannot read it.
        """
        session = self._together().session
        session.rest("meet", "import")
        self._moves += 1
        on_worker_0(session.exchange, self._moves, lambda: read_model(self.model, Path(path)))
        return self.sync(source=0)

    def leave(self) -> None:
        """Has all workers save at one of their next boundaries and end with exit code 143, as SIGTERM does.

        For signal handlers of your own, and trainings that do not run in the main thread. Any thread of any
        worker; returns at once. One call is enough for all workers.
        """
        self._active().training.leaving.ask()

    def close(self) -> None:
        """Ends the worker's part: settles what is open, together with all others, and stops the threads.

        Called by itself at the end of the script. A second time does nothing. What is open when all were told
        to end is for the next start.
        """
        if self._closed or self._parts is None:
            return
        parts = self._parts
        parts.run_files.training = False
        try:
            self._counted()
            parts.checkpoints.report()
            parts.training.leaving.settle()
            parts.checkpoints.settle()
        except ReplicastError as error:
            logger.debug("the updates could not be settled at the end: %s", error)
        parts.training.warn_of_what_was_left()
        parts.session.stop()
        parts.run_files.finish()
        self._closed = True
        self._strategy.on_fit.remove(self._fit_begins)
        if not parts.training.leaving.ends:  # otherwise whoever tells the script to end need not
            self._strategy.leavings.remove(parts.training.leaving)

    # For the callback.

    def begin_epoch(self, epoch: int | None) -> None:
        """All workers: called by the callback. The order of the data follows from the epoch's number."""
        self._strategy.begin_epoch(epoch)

    def training_begins(self) -> None:
        """All workers: called by the callback, or by the first boundary. Takes up what the journal holds."""
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
        self._strategy.take_start(self.model)  # what was restored goes on here, and not in some later `fit`

    def training_ends(self) -> None:
        """All workers: called by the callback. Everything proposed so far is settled when it returns."""
        parts = self._active()
        parts.checkpoints.report()
        parts.auditing.after_training()
        try:
            parts.session.rest("close")  # with it, a checkpoint that needs another boundary
        finally:
            parts.auditing.training_ended()
        parts.checkpoints.settle()
        parts.checkpoints.check()
        parts.run_files.training = False

    def _together(self) -> Parts:
        """For what all workers do together, between steps: what earlier attempts left comes first."""
        parts = self._counted()
        parts.session.begin()
        return parts

    def _open(self) -> None:
        """Joins the other workers. All of them come here, each with a built model."""
        self._parts = parts = join(self.model, self._optimizer, self._strategy, self._settings)
        self._strategy.before_leaving(self._close_at_the_end, always=self._abandon)
        # Also before a training: TensorFlow's own handler would swallow it, and data may take long to load.
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
        self.close()

    def _abandon(self) -> None:
        if self._parts is not None and not self._closed:
            self._parts.session.abandon()
            self._parts.run_files.note_end()
            self._parts.training.leaving.ends = True  # whoever tells it to end now need not

    def _fit_begins(self, model: Any, callbacks: Any) -> None:
        if model is not self.model or holds_callback(callbacks, BoundaryCallback):
            return
        if not self._warned:
            self._warned = True
            warn_of_missing_callback(self.rank)
        if self._parts is not None:
            self._parts.uncounted.fit_begins()
