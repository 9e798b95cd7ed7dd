"""`replicast.Replicas`: the user's interface for changing all replicas of a model.

Before the model is built, its variables have no names, and there is nothing to join. Everything that exists
once all workers have built it is a `JoinedWorker`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import keras
import numpy.typing as npt
import tensorflow as tf

from replicast.client import connect
from replicast.client.run import Brief
from replicast.config import read_launch, start_timeout_secs
from replicast.core.entries import Receipt
from replicast.core.messages import Refusal
from replicast.core.operation import Timeouts
from replicast.errors import CheckpointError, ClusterError, FileDamaged, JobFailed, NotFound, NotSupported
from replicast.files import RunDir, below
from replicast.replicas.callback import ReplicasCallback
from replicast.replicas.job_audits import AuditPlan
from replicast.replicas.job_checkpoints import Restore, Restored, SaveEvery, Saving, WhenBusy, no_run_dir
from replicast.replicas.joined_worker import JoinedWorker
from replicast.replicas.position import Position
from replicast.replicas.proposals import Ticket, checked_worker, refused
from replicast.replicas.replica import Function, numbers
from replicast.storage.checkpoints import CheckpointStore, Equality, Manifest, differences
from replicast.storage.run_files import EVALUATIONS, JobState, append_metrics, measured_in
from replicast.training import Source, Strategy, TensorFlowState, job_of
from replicast.training.resuming import Batches
from replicast.training.strategy import StockJob
from replicast.training.tensorflow_state import GLOBAL_SEED
from replicast.training.writing import writing_alone
from replicast.update.audit_report import AuditReport, Policy
from replicast.update.edits import Edit, EditKind
from replicast.update.guard import Guard, checked_guard
from replicast.update.schema import Limits, Schema
from replicast.update.trial import Trial
from replicast.update.update import Update

logger = logging.getLogger("replicast")

Durability = Literal["disk", "memory"]

POLL_SECS, REMIND_SECS = 1.0, 60.0  # of the evaluator
WRITE_SECS = 3600.0  # how long the others wait while worker 0 reads or writes a model file
_TO_BUILD = "Call model(sample_batch) inside strategy.scope(), or give the model a keras.Input"


class Replicas:
    """The replicas of one model, seen from one worker. Create it on all workers, after compiling the model.

    Blocks until all workers have created theirs. Updates are applied at boundaries: pass `callback()` to
    `fit`, or call `boundary()` after each step of a custom training loop.

    Example:
        replicas = replicast.Replicas(model)
        model.fit(dataset, callbacks=[replicas.callback()])

    Args:
        model: A Keras 3 or `tf_keras` model, a `tf.Module`, a `tf.train.Checkpoint`, or a dict of names to
            variables; created inside the scope of a `replicast.Strategy` or of one of TensorFlow's
            (`MultiWorkerMirroredStrategy`, `MirroredStrategy`), or without a strategy. A model that is not
            built yet can be changed once training has begun.
        optimizer: For a custom training loop, whose optimizer the model does not know.
        run_dir: The directory of the journal, the inbox and the files that `replicast status` reads. Default:
            the launcher's run directory (for a second model, its subdirectory `replicas-2`, and so on);
            without a launcher, none. Under `replicast run`, the first one's must be that of the launcher.
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
        model: Any,
        *,
        optimizer: Any = None,
        run_dir: str | os.PathLike[str] | None = None,
        durability: Durability | None = None,
        limits: Limits | None = None,
        guard: Guard | None = None,
        audit_every: int | None = None,
        on_divergence: Policy = "raise",
        may_differ: Sequence[str] = (),
        timeouts: Timeouts | None = None,
    ) -> None:
        source = Source(model, optimizer)
        job = job_of(source.strategy)
        if source.is_tf_keras and isinstance(job, Strategy):
            raise NotSupported(
                "A tf_keras model in the scope of a replicast.Strategy",
                reason="the steps of that strategy are made for Keras 3",
                remedy="Create it in the scope of a tf.distribute.MultiWorkerMirroredStrategy",
            )
        launch, name = read_launch(os.environ), job.next_name("replicas")
        directory: RunDir | None = None if run_dir is None else Path(run_dir)
        if run_dir is not None and name == "replicas-1":
            launch.check_run_dir(Path(run_dir))
        if run_dir is None and launch.run_dir is not None:
            directory = launch.run_dir if name == "replicas-1" else below(launch.run_dir) / name
        if durability not in (None, "disk", "memory"):
            raise ValueError(f'durability must be "disk" or "memory". Received: {durability!r}')
        if durability == "disk" and directory is None:
            raise ClusterError(
                'durability="disk" needs a run directory',
                remedy="Give run_dir=..., or start the job with 'replicast run'",
            )
        self.model = model
        self._source = source
        self._job = job
        self._run_dir = directory
        self._join = partial(
            JoinedWorker,
            source,
            job,
            name=name,
            run_dir=directory,
            durable=durability != "memory" and directory is not None,
            limits=Limits() if limits is None else limits,
            timeouts=Timeouts() if timeouts is None else timeouts,
            guard=checked_guard(guard),
            audits=AuditPlan(audit_every, on_divergence),
            may_differ=(may_differ,) if isinstance(may_differ, str) else tuple(may_differ),
        )
        self._worker: JoinedWorker | None = None
        self._closed = False
        self._warned = False
        self._model_files = 0
        job.on_fit.append(self._fit_begins)
        if source.is_built and not job.is_evaluator:
            self._open()

    # What can be read, by any thread. Nothing here waits or changes anything.

    @property
    def rank(self) -> int:
        """Which worker this is."""
        return self._job.rank

    @property
    def size(self) -> int:
        """The number of workers."""
        return self._job.size

    @property
    def step(self) -> int:
        """The number of steps trained up to the last boundary."""
        return self._opened().session.step

    @property
    def schema(self) -> Schema:
        """The names, shapes and dtypes of all variables that an update can change."""
        return self._opened().state.schema

    @property
    def run_dir(self) -> Path | None:
        """The run directory, if there is one."""
        return None if self._run_dir is None else below(self._run_dir).as_path()

    @property
    def history(self) -> Sequence[Receipt]:
        """The receipts of all verified updates, the same on every worker."""
        return tuple(self._opened().session.receipts)

    @property
    def audits(self) -> Sequence[AuditReport]:
        """The reports of all audits so far, the latest last.

        Audits that stopped all workers, because one was requested or replicas differed, are known on every
        worker. Audits that found all replicas equal without stopping them are known on worker 0 only.
        """
        return self._opened().audits.reports

    @property
    def position(self) -> Position:
        """The position of the training in its data: the epoch, and how many batches of it are done."""
        return self._opened().training.position

    def read(self, names: Iterable[str] | None = None) -> dict[str, npt.NDArray[Any]]:
        """Copies of this replica's values, by full name. For the training thread, between steps."""
        return self._opened().state.read(self._full_names(names))

    def digests(self, names: Iterable[str] | None = None) -> dict[str, str]:
        """The digest of each of this replica's variables, equal on workers with equal bits. As `read`."""
        return self._opened().state.digests(self._full_names(names))

    def _full_names(self, names: Iterable[str] | None) -> list[str]:
        if names is None:
            return [variable.name for variable in self.schema]
        return [self.schema.resolve(name).name for name in names]

    # Training.

    def once(self, callback: Any) -> Any:
        """A callback for `fit` that runs on worker 0 only: one that reports to another system.

        Those of W&B, MLflow, Comet, Neptune, Aim and DVCLive do so by themselves. A callback that calls
        `evaluate` or `predict`, or that changes the training, must run on all workers.

        Args:
            callback: A callback, or a function without arguments that makes one, which is called on worker 0
                only: it may start the run of a tracker.

        Returns:
            On worker 0 the callback, on the others one that does nothing.
        """
        if self.rank != 0:
            library = sys.modules["tf_keras"] if self._source.is_tf_keras else keras
            return library.callbacks.Callback()
        return callback if hasattr(callback, "on_train_begin") else callback()

    def follow(
        self, evaluate: Callable[[], Mapping[str, float]], *, start_timeout: float | None = None
    ) -> dict[int, dict[str, float]]:
        """Evaluates each new checkpoint until the job has ended. For the evaluator in `TF_CONFIG`.

        Every checkpoint is read into the model, each variable compared with its digest, before `evaluate` is
        called. What it returns is shown by `replicast status` and on the page. Checkpoints that were
        evaluated before this process was started are left out.

            if strategy.is_evaluator:
                replicas.follow(lambda: model.evaluate(x, y, verbose=0, return_dict=True))

        Args:
            evaluate: Returns the metrics by name. Called with the weights of a checkpoint in the model.
            start_timeout: How many seconds to wait for a job that is not running. Default:
                `REPLICAST_START_TIMEOUT`, an hour.

        Returns:
            The metrics by step.

        Raises:
            JobFailed: The job has failed, or is not running for longer than `start_timeout`.
            CheckpointError: A checkpoint is of another model.
        """
        if self._worker is not None or self._run_dir is None:
            raise NotSupported(
                "follow in a worker" if self._run_dir is not None else "follow without a run directory",
                reason="it is for a process that reads the checkpoints of other processes",
                remedy='Call it where strategy.is_evaluator (task type "evaluator" in TF_CONFIG), and give '
                "Replicas the run_dir of the job",
            )
        secs = start_timeout_secs(os.environ) if start_timeout is None else start_timeout
        return Follower(self._source, self._run_dir).run(evaluate, secs)

    def callback(
        self,
        *,
        save_every: SaveEvery | None = None,
        keep: int = 3,
        keep_best: tuple[str, Literal["min", "max"]] | None = None,
        when_busy: WhenBusy = "wait",
        audit_every: int | None = 100,
        on_divergence: Policy | None = None,
    ) -> ReplicasCallback:
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
        return ReplicasCallback(
            self,
            save_every=save_every,
            keep=keep,
            keep_best=keep_best,
            when_busy=when_busy,
            audit_every=audit_every,
            on_divergence=on_divergence,
        )

    def save(self) -> Saving:
        """Saves the whole state at this boundary as a checkpoint. All workers must call it.

        Worker 0 writes it in the background, and only if the state is the same on all workers.

        Returns:
            A handle: on worker 0, `result(timeout)` returns the manifest once the checkpoint is durable.

        Raises:
            CheckpointError: A trial is not decided yet.
        """
        worker = self._active()
        worker.together()
        return worker.checkpoints.save_here()

    def restore(self, step: int | None = None, *, partial: bool = False) -> Restored | None:
        """Restores a checkpoint on every worker, bit for bit. All workers must call it, before training.

        Only worker 0 needs to see the run directory. `fit` then resumes where the checkpoint was made, even
        in the middle of an epoch. Updates in the journal that the checkpoint lacks are applied again: those
        of its step before this returns, later ones at their steps.

        Args:
            step: The checkpoint's step. Default: the last intact checkpoint.
            partial: For a changed model: restore the variables that fit, and report which were left out.

        Returns:
            What was restored; None if there is no checkpoint yet.

        Raises:
            CheckpointError: There is no checkpoint of that step, or it belongs to another model.
        """
        worker = self._active()
        worker.count_steps()
        if self._run_dir is None:
            raise no_run_dir()
        worker.restores += 1
        store = CheckpointStore(self._run_dir)
        restored = Restore(worker.session, store).run(worker.restores, step, partial)
        if restored is None:
            return None
        position = restored.position
        worker.checkpoints.named = step
        worker.training.restored(position)
        if restored.left_out and self.rank == 0:
            left_out = ", ".join(restored.left_out)
            logger.warning("not restored, because the checkpoint has no matching variable: %s", left_out)
        worker.session.begin()  # a loop may call nothing else before its first step
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
        return self._active().session.proposals.propose(update, source, at_step, trial)

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
        return self._active().session.proposals.revert(number, note, force=force)

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
        worker = self._open() if self._worker is None else self._active()
        worker.boundary(steps=steps, logs=logs, batches=steps if batches is None else batches)

    def resume(self, dataset: Batches) -> Batches:
        """The next pass over the data of a custom training loop. `fit` with the callback needs no such call.

        Call it for every pass, on all workers. The first call after a restore returns the rest of the pass in
        which the state was saved, and advances the shuffle order past the earlier passes; all other calls
        return the dataset as it is. A pass may end early, and its length need not be known. A list of batches
        works too. For an iterator, such as a Python generator, the finished batches are read and discarded,
        and worker 0 warns.

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
        worker = self._active()
        if not worker.training.has_begun:
            worker.begin_training()
        worker.session.proposals.training_continues()
        return worker.training.resume(dataset)

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
        receipt = self._active().together().rest("sync", source, *names)
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
        worker = self._active()
        worker.together()
        return worker.audits.audit(on_divergence)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Writes the model for other tools. All workers must call it; worker 0 writes.

        Args:
            path: Ends in `.keras` (a whole Keras model), in `.weights.h5` (Keras' weights), or is the prefix
                of a `tf.train.Checkpoint` with `model` and `optimizer`; for one, as it is.
        """
        self._model_file("export", partial(write_model, self._source), Path(path))

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
        self._model_file("import", partial(read_model, self._source), Path(path))
        return self.sync(source=0)

    def leave(self) -> None:
        """Makes all workers save at one of the next boundaries and exit with code 143, as SIGTERM does.

        For your own signal handlers, and for training outside the main thread. Any thread of any worker;
        returns at once. One call is enough for all workers.
        """
        self._active().departure.ask()

    def close(self) -> None:
        """Settles open proposals together with all workers, and stops this worker's threads.

        Called automatically at the end of the script. A second call does nothing. If all workers were told to
        exit, open proposals are left for the next start.
        """
        self._close(at_exit=False)

    # Joining, and the end.

    def training_begins(self) -> JoinedWorker:
        """Called by the callback, on all workers."""
        worker = self._open() if self._worker is None else self._active()
        worker.begin_training()
        return worker

    def _open(self) -> JoinedWorker:
        """Joins the other workers. All of them call it, each with a built model."""
        if self._job.is_evaluator:
            raise NotSupported(
                "Training, or an operation of the workers, in the evaluator",
                reason="it is not one of them: it evaluates the checkpoints that they make",
                remedy="if strategy.is_evaluator: replicas.follow(evaluate), and nothing else of replicas",
            )
        self._worker = self._join()
        self._job.before_leaving(self._close_at_the_end, always=self._abandon)
        return self._worker

    def _opened(self) -> JoinedWorker:
        if self._worker is None:
            if self._job.is_evaluator:
                self._open()  # It says what an evaluator can do.
            raise NotSupported(
                "A model that is not built",
                reason="its variables do not exist yet, so they have no names",
                remedy=f"{_TO_BUILD}, or wait until training has begun",
            )
        return self._worker

    def _active(self) -> JoinedWorker:
        if self._closed:
            raise NotSupported(
                "A closed Replicas",
                reason="its threads have ended, on all workers",
                remedy="Create a new replicast.Replicas(model)",
            )
        return self._opened()

    def _close(self, *, at_exit: bool) -> None:
        if not self._closed and self._worker is not None:
            self._worker.close(at_exit=at_exit)
            self._closed = True
            self._job.on_fit.remove(self._fit_begins)

    def _close_at_the_end(self) -> None:
        self._opened().script_ends()
        self._close(at_exit=True)

    def _abandon(self) -> None:
        if self._worker is not None and not self._closed:
            self._worker.abandon()

    def _fit_begins(self, model: Any, callbacks: Any) -> None:
        """Called at the start of every `fit`; `callbacks` is a list, a `CallbackList`, one, or None."""
        each = getattr(callbacks, "callbacks", callbacks)
        given = each if isinstance(each, list | tuple) else [each]
        if model is not self.model or any(isinstance(one, ReplicasCallback) for one in given):
            return
        if not self._warned:
            self._warned = True
            logger.warning(
                f"worker {self.rank}: fit was not given replicas.callback(). Updates wait for its end, "
                "nothing is saved or audited, and SIGTERM loses the state. Call fit(..., "
                "callbacks=[replicas.callback()])"
            )
        if self._worker is not None:
            self._worker.fit_without_callback()

    def _model_file(self, what: str, act: Callable[[Path], None], path: Path) -> None:
        """Worker 0 reads or writes a file; the others wait, at most an hour. If it fails, all raise."""
        session = self._active().together()
        session.rest("meet", what)
        self._model_files += 1
        key, exchange = f"model-file/{self._model_files}", session.exchange
        if exchange.rank != 0 and what == "export" and isinstance(self._job, StockJob):
            # Reading a variable of which each replica has its own value is a transfer there.
            with tempfile.TemporaryDirectory() as unused, contextlib.suppress(Exception):
                act(Path(unused, path.name))
        if exchange.rank == 0:
            said = ""
            try:
                act(path)
            except Exception as error:  # any error of Keras or TensorFlow must reach the others
                said = f"{type(error).__name__}: {error}"
            exchange.tell(key, json.dumps(said))
        if problem := json.loads(exchange.hear(key, WRITE_SECS)):
            raise CheckpointError(f"Worker 0 could not read or write the model file: {problem}")


# The model in the file formats of other tools. Only worker 0 reads and writes.


def write_model(source: Source, path: Path) -> None:
    """Writes a model in the format given by the path's suffix."""
    model = source.model
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing_alone():  # the others do not save here
        if path.name.endswith(".keras"):
            model.save(path)
        elif path.name.endswith(".weights.h5"):
            model.save_weights(path)
        else:
            _tracked(source).write(str(path))


def read_model(source: Source, path: Path) -> None:
    """Loads the values in a file into one worker's replicas."""
    model = source.model
    if path.name.endswith(".keras"):
        loading = keras.saving if source.is_keras_3 else sys.modules["tf_keras"].saving
        loaded = loading.load_model(path, compile=False, safe_mode=True)
        model.set_weights(loaded.get_weights())
    elif path.name.endswith(".weights.h5"):
        model.load_weights(path)
    else:
        _tracked(source).read(str(path)).assert_existing_objects_matched()


def _tracked(source: Source) -> tf.train.Checkpoint:
    if isinstance(source.model, tf.train.Checkpoint):
        return source.model
    optimizers = {name: one for name, one in source.optimizers().items() if name == "optimizer"}
    return tf.train.Checkpoint(model=source.model, **optimizers)


class Follower:
    """The evaluator of a job: reads each new checkpoint into the model and measures it.

    It is no worker. It reads the run directory as anybody outside does, claims nothing in it, and writes one
    file of its own, evaluations.jsonl. So it can be late, killed or started again, and the job does not
    notice. A checkpoint is known by its step and the moment when worker 0 made it: after a restart of the job
    there may be another one of the same step.
    """

    def __init__(self, source: Source, run_dir: RunDir) -> None:
        if not source.is_built:
            raise NotSupported(
                "follow with a model that is not built",
                reason="its variables do not exist yet, so they have no names",
                remedy=_TO_BUILD,
            )
        named, hints = source.variables()
        weights = (one._replace(slots=()) for one in named if one.kind != "optimizer")
        self._state = TensorFlowState([one for one in weights if one.name != GLOBAL_SEED], hints)
        self._names = [variable.name for variable in self._state.schema]
        self._run_dir = run_dir
        self._store = CheckpointStore(run_dir)

    def run(self, evaluate: Callable[[], Any], start_secs: float) -> dict[int, dict[str, float]]:
        found: dict[int, dict[str, float]] = {}
        known = {(one["step"], one["time"]) for one in measured_in(self._run_dir, EVALUATIONS)}
        # If it was stopped or has failed, a scheduler may be starting it again, together with this process.
        brief = self._brief()
        at_first = None if brief is None else (brief.state, brief.heard_at)
        has_run, seen = False, time.monotonic()
        reminded = seen
        while True:
            brief = self._brief()  # Before the checkpoints: one that the job makes at its end is not missed.
            if brief is not None and (brief.running or (brief.state, brief.heard_at) != at_first):
                has_run = True
            for manifest in self._store.manifests():
                key = (manifest.step, round(manifest.created_at, 6))
                if key in known:
                    continue
                known.add(key)  # Also a damaged one: it is said once.
                if not self._restore(manifest):
                    continue
                metrics = evaluate()
                if not isinstance(metrics, Mapping):
                    raise TypeError(
                        "evaluate must return metrics by name, as model.evaluate(…, return_dict=True) does. "
                        f"Received: {type(metrics).__name__}"
                    )
                found[manifest.step] = values = numbers(metrics)
                append_metrics(self._run_dir, (manifest.step, manifest.created_at, values), file=EVALUATIONS)
                logger.info("step %d evaluated: %s", manifest.step, values)
            now, state = time.monotonic(), None if brief is None else brief.state
            if brief is not None and brief.running:
                seen = now
            elif state == JobState.FINISHED or (has_run and state == JobState.STOPPED):
                return found
            elif brief is not None and has_run and state == JobState.FAILED:
                raise JobFailed(f"The job of {below(self._run_dir)} has failed: {brief.sentence}")
            elif now - seen > start_secs:
                if found:
                    return found
                said = "has no job" if brief is None else f"has no running job ({brief.sentence})"
                raise JobFailed(f"{below(self._run_dir)} {said}; the evaluator has waited {start_secs:.0f} s")
            elif now - reminded > REMIND_SECS:
                logger.warning("the evaluator waits for a job in %s", below(self._run_dir))
                reminded = now
            time.sleep(POLL_SECS)

    def _brief(self) -> Brief | None:
        try:
            return connect(str(below(self._run_dir).as_path())).brief()
        except (NotFound, FileDamaged):  # It is not there yet.
            return None

    def _restore(self, manifest: Manifest) -> bool:
        """Reads a checkpoint into the model. False if it was removed meanwhile, or is damaged."""
        try:
            with self._store.open(manifest.step) as reader:
                for one in differences(self._state.schema, reader.manifest.schema):
                    if one.verdict is not Equality.ONLY_SECOND:  # as those of its optimizer
                        raise CheckpointError(
                            "The checkpoint is of another model",
                            path=reader.path,
                            step=manifest.step,
                            variable=one.name,
                            expected=one.first,
                            received=one.second,
                        )
                values = {name: reader.read(name) for name in self._names}
        except FileDamaged as error:
            logger.warning("the checkpoint of step %d is not evaluated: %s", manifest.step, error)
            return False
        except CheckpointError:
            if any(one.step == manifest.step for one in self._store.manifests()):
                raise
            return False  # Removed since it was listed: the job keeps the latest ones.
        self._state.apply([Edit(EditKind.ASSIGN, name, {"value": values[name]}) for name in self._names])
        return True
