"""Joins a worker to the job: checks the settings, agrees with the other workers, starts the threads."""

from __future__ import annotations

import contextlib
import logging
import operator
import os
import sys
import time
import traceback
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import keras
import tensorflow as tf

from replicast.config import ATTEMPT, read_launch
from replicast.core.events import Ended
from replicast.core.operation import Timeouts
from replicast.errors import ClusterError, FileDamaged, JobFailed, NotSupported, ReplicastError, UpdateRefused
from replicast.files import RunDir, below
from replicast.replicas.auditing import Auditing, AuditPlan, Expectation, declared
from replicast.replicas.channel import Channel
from replicast.replicas.exchange import Exchange
from replicast.replicas.parcels import Function
from replicast.replicas.replica import Writer
from replicast.replicas.requests import Requests
from replicast.replicas.saving import Checkpoints
from replicast.replicas.session import Session
from replicast.replicas.ticket import Ticket
from replicast.replicas.training_progress import Training
from replicast.replicas.worker_notes import RunFiles
from replicast.storage.checkpoint_format import saved_of
from replicast.storage.checkpoints import CheckpointStore
from replicast.storage.claims import Fence, last_claim
from replicast.storage.journal import FileJournal, MemoryJournal
from replicast.storage.liveness import check_free
from replicast.storage.run_files import (
    FORMAT,
    WITHOUT_CALLBACK,
    Change,
    RunInfo,
    State,
    clean_run,
    read_run_info,
    write_change,
    write_run_info,
)
from replicast.training import KerasState, Strategy, optimizers_by_name
from replicast.transport import Transport, open_transport
from replicast.update.guard import Guard, checked_guard
from replicast.update.schema import Limits
from replicast.update.trial import Trial
from replicast.update.update import MAX_STEP, Update, checked_text

# Which attempt of the job this is, where no launcher counts: under Kubernetes, Ray or a plain TF_CONFIG.


def attempt_of(
    run_dir: RunDir | None, exchange: Exchange, timeout_secs: float, environ: Mapping[str, str] = os.environ
) -> int:
    """The number of this attempt, from 0: the launcher's, else one more than the last in the run directory.

    All workers call it. Worker 0 looks into the run directory and tells the others, who may not see it.
    """
    if ATTEMPT in environ:
        return read_launch(environ).attempt
    counted = str(_next(run_dir)) if exchange.rank == 0 else ""  # the others may have no run directory
    return int(exchange.agree("attempt", counted, timeout_secs)[0])


def _next(run_dir: RunDir | None) -> int:
    if run_dir is None:
        return 0
    try:
        last = last_claim(run_dir)
    except (FileDamaged, OSError):  # Reported when the run directory is claimed.
        return 0
    return 0 if last is None else last.attempt + 1


# Worker 0 writes down what becomes of a job that no launcher watches (`storage/states.py`).

logger = logging.getLogger("replicast")


class RunStates:
    """The states of a job without a launcher. Does nothing on other workers, or under a launcher."""

    def __init__(self, run_dir: RunDir | None, rank: int, workers: int, attempt: int) -> None:
        writes = rank == 0 and not read_launch(os.environ).launched
        self._run_dir = run_dir if writes else None
        self._workers = workers
        self._attempt = attempt

    def starting(self) -> None:
        """The workers have met."""
        self._write(State.STARTING)

    def ended(self, step: int, *, told_to: bool, at_exit: bool) -> None:
        """The script has come to its end, or all workers were told to save and exit.

        At the exit of the process it may have raised: a job of one worker is closed all the same. An exit by
        `sys.exit` cannot be told from the end of the script.
        """
        if at_exit and not told_to and getattr(sys, "last_value", None) is not None:
            self.abandoned(step, None)
        else:
            self._write(State.STOPPED if told_to else State.FINISHED, step, "SIGTERM" if told_to else "")

    def abandoned(self, step: int, failure: JobFailed | None) -> None:
        """The process exits without having come to the end."""
        error = getattr(sys, "last_value", None)  # what ended the script, set before exit handlers run
        if failure is not None and failure.worker not in (None, 0):
            self._write(State.FAILED, step, str(failure), failure.worker)
        elif isinstance(error, KeyboardInterrupt):
            self._write(State.STOPPED, step, "Ctrl-C")
        else:
            self._write(State.FAILED, step, _said(error), 0)

    def _write(
        self, state: State, step: int | None = None, reason: str = "", worker: int | None = None
    ) -> None:
        if self._run_dir is None:
            return
        change = Change(
            state,
            self._attempt,
            by="worker 0",
            workers=self._workers,
            step=step,
            worker=worker,
            reason=reason,
        )
        try:
            write_change(self._run_dir, change)
        except OSError as error:
            logger.warning("the state of the job cannot be written: %s", error)


def _said(error: BaseException | None) -> str:
    """What ended the script, in one line: TensorFlow's errors have hundreds."""
    if error is None:
        return "it exited before its end"
    lines = "".join(traceback.format_exception_only(error)).split("\n")
    return next((line.strip() for line in lines if line.strip()), type(error).__name__)


# Checks a worker's proposals and gives them ids.


class Proposing:
    """Checks what can be checked immediately, and passes proposals on. Any thread may call it."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._rank = session.rank
        self._size = session.size
        self._has_trained = False
        self._last: dict[str, tuple[str, int]] = {}
        self._moment = (-1, "")

    def comes_to(self, moment: str, step: int) -> None:
        """Assigns the training thread's proposals, from here to the next boundary, to this moment.

        Other proposals belong to the previous boundary, or to step 0 if there is none in this attempt.
        """
        self._moment = self._session.step, f"step-{step}-{moment}"

    def go_on(self) -> None:
        """Called when training continues: proposals belong to the current step from now on."""
        self._has_trained = True

    def propose(
        self,
        update: Update | Function,
        *,
        source: int | None,
        at_step: int | None,
        trial: Trial | None = None,
    ) -> Ticket:
        """See `Replicas.propose`."""
        if trial is not None and not isinstance(trial, Trial):
            raise UpdateRefused(
                "trial is not a Trial", expected="replicast.Trial(steps=...)", received=repr(trial)[:200]
            )
        at_step = checked_step(at_step)
        if isinstance(update, Update):
            return self._propose_update(update, source, at_step, trial)
        if not callable(update):
            raise UpdateRefused(
                "Only an Update or a function can be proposed",
                expected="Update().assign(name, value), or a function of the live values",
                received=type(update).__name__,
            )
        runs_on = self._rank if source is None else checked_worker(source, self._size)
        if runs_on != self._rank and not self._session.in_training_thread():
            raise UpdateRefused(
                f"Worker {self._rank} cannot send a function to worker {runs_on}",
                remedy=f"Propose it on worker {runs_on}, or in the training thread of every worker",
            )
        # Outside the training thread it has no definite step, and a restarted job does not propose it again.
        in_step = self._session.in_training_thread()
        id_ = self._next_id(f"function-{runs_on}") if in_step else f"function-{runs_on}-{uuid.uuid4().hex}"
        return self._session.propose_function(id_, update, runs_on, at_step, trial)

    def revert(self, number: Any, note: str, *, force: bool) -> Ticket:
        """See `Replicas.revert`."""
        sequence = checked_step(number)
        if sequence is None:
            raise UpdateRefused("A revert needs the number of an update", received="None")
        checked_text("note", note)
        in_step = self._session.in_training_thread()
        prefix = f"revert-{sequence}-worker-{self._rank}"
        id_ = self._next_id(prefix) if in_step else f"{prefix}-{uuid.uuid4().hex}"
        return self._session.propose_revert(id_, sequence, note, forced=force)

    def _propose_update(
        self, update: Update, source: int | None, at_step: int | None, trial: Trial | None = None
    ) -> Ticket:
        if source is not None:
            raise UpdateRefused("source is only for functions, not for updates", received=f"source={source}")
        if not update.id_was_given and self._session.in_training_thread():
            update = update.with_id(self._next_id(f"worker-{self._rank}"))
        return self._session.propose(update.signed(f"worker {self._rank}"), at_step, trial)

    def _next_id(self, prefix: str) -> str:
        """An id that a restarted job gives to the same proposal again, so that it is applied only once.

        For the training thread. Proposals before training have step 0, even after a restore.
        """
        step = self._session.step
        since, moment = self._moment
        now = moment if since == step else f"step-{step if self._has_trained else 0}"
        last, count = self._last.get(prefix, (now, 0))
        count = count + 1 if last == now else 1
        self._last[prefix] = (now, count)
        return f"{prefix}-{now}-{count}"


def checked_step(at_step: Any) -> int | None:
    """The step that an author chose, if it can be one. Whether it is past, only the coordinator knows."""
    if at_step is None:
        return None
    try:
        step = -1 if isinstance(at_step, bool) else operator.index(at_step)
    except TypeError:
        step = -1
    if not 0 <= step < MAX_STEP:
        raise UpdateRefused(
            "at_step must be a number of steps", expected="an integer from 0 on", received=repr(at_step)[:200]
        )
    return step


def checked_worker(source: Any, size: int) -> int:
    """Checks the rank of a worker."""
    try:
        number = operator.index(source)
    except TypeError:
        number = -1
    if not 0 <= number < size:
        raise UpdateRefused(
            "There is no such worker", expected=f"source from 0 to {size - 1}", received=repr(source)
        )
    return number


# Steps trained by a `fit` without our callback, which no boundary has counted.


class Uncounted:
    """Detects such a `fit` and counts its steps afterwards. For the training thread.

    The count comes from the optimizer, so that later updates are recorded at their true step.
    """

    def __init__(
        self,
        session: Session,
        run_files: RunFiles,
        optimizers: Iterable[keras.optimizers.Optimizer],
    ) -> None:
        self._session = session
        self._run_files = run_files
        self._optimizers = tuple(optimizers)
        self._since: int | None = None

    def fit_begins(self) -> None:
        """Called when a `fit` of this model begins without our callback."""
        if self._since is None:
            self._since = self._iterations()
        self._run_files.waiting_for = WITHOUT_CALLBACK

    def count(self, known: int = 0) -> None:
        """Called between steps: counts the steps trained meanwhile as one boundary."""
        since, self._since = self._since, None
        if since is None:
            return
        self._run_files.waiting_for = ""
        steps = self._iterations() - since - known
        if steps > 0:
            self._session.arrive(self._session.step + steps)

    def _iterations(self) -> int:
        return max((int(each.iterations.numpy()) for each in self._optimizers), default=0)


def holds_callback(callbacks: Any, kind: type[keras.callbacks.Callback]) -> bool:
    """Whether the `callbacks` argument of `fit` (a list, a `CallbackList`, one, or None) has this kind."""
    each = getattr(callbacks, "callbacks", callbacks)
    return any(isinstance(one, kind) for one in (each if isinstance(each, list | tuple) else [each]))


def warn_of_missing_callback(rank: int) -> None:
    """Warns about what does not work in a `fit` without our callback."""
    logger.warning(
        "worker %d: fit was not given replicas.callback(). Updates wait for its end, nothing is saved or "
        "audited, and SIGTERM loses the state. Call fit(..., callbacks=[replicas.callback()])",
        rank,
    )


Durability = Literal["disk", "memory"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings given by the user and the launcher."""

    name: str
    run_dir: RunDir | None
    attempt: int
    durable: bool
    limits: Limits
    timeouts: Timeouts
    guard: Guard | None
    audits: AuditPlan
    may_differ: tuple[str, ...]
    take_over: str = ""


@dataclass(frozen=True, slots=True)
class Parts:
    """The objects that exist once the model is built, and the number of this attempt of the job."""

    attempt: int
    state: KerasState
    session: Session
    transport: Transport
    run_files: RunFiles
    checkpoints: Checkpoints
    training: Training
    auditing: Auditing
    proposing: Proposing
    uncounted: Uncounted
    optimizers: dict[str, keras.optimizers.Optimizer]


def settle(
    run_dir: RunDir | None,
    durability: Durability | None,
    limits: Limits | None,
    timeouts: Timeouts | None,
    guard: Guard | None,
    audits: AuditPlan,
    may_differ: Sequence[str],
    strategy: Strategy,
) -> Settings:
    """Checks the settings and fills in defaults."""
    launch = read_launch(os.environ)
    name = strategy.next_name("replicas")
    if run_dir is None and launch.run_dir is not None:
        run_dir = launch.run_dir if name == "replicas-1" else below(launch.run_dir) / name
    if durability not in (None, "disk", "memory"):
        raise ValueError(f'durability must be "disk" or "memory". Received: {durability!r}')
    if durability == "disk" and run_dir is None:
        raise ClusterError(
            'durability="disk" needs a run directory',
            remedy="Give run_dir=..., or start the job with 'replicast run'",
        )
    return Settings(
        name=name,
        run_dir=run_dir,
        attempt=launch.attempt,
        durable=durability != "memory" and run_dir is not None,
        limits=Limits() if limits is None else limits,
        timeouts=Timeouts() if timeouts is None else timeouts,
        guard=checked_guard(guard),
        audits=audits,
        may_differ=(may_differ,) if isinstance(may_differ, str) else tuple(may_differ),
        take_over=launch.take_over,
    )


def strategy_of(model: keras.Model) -> Strategy:
    """The strategy in whose scope the model was created."""
    strategy = getattr(model, "distribute_strategy", None)
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and not isinstance(strategy, Strategy):
        raise NotSupported(
            "A model that was created in the scope of a tf.distribute.MultiWorkerMirroredStrategy",
            reason="Replicas needs a strategy whose workers can meet between two steps",
            remedy="Write 'strategy = replicast.Strategy()' instead: it is a MultiWorkerMirroredStrategy",
        )
    if not isinstance(strategy, Strategy):
        raise NotSupported(
            "A model that was created outside the scope of a replicast.Strategy",
            reason="its variables are not the same on every worker",
            remedy="Create and compile it inside 'with strategy.scope():'",
        )
    return strategy


def join(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer | None,
    strategy: Strategy,
    settings: Settings,
) -> Parts:
    """Joins the other workers and starts the threads. All workers call it, each with a built model.

    Blocks until all have called it, at most `timeouts.join_secs`; the error then names the missing worker.
    """
    optimizers = _built_optimizers(model, optimizer, strategy)
    state = KerasState(model, optimizers)
    if settings.guard is not None:
        settings.guard.check_patterns(state.schema)
    local = strategy.statistics == "local"
    may_differ = declared(state.schema, settings.may_differ, local_statistics=local)
    if strategy.rank == 0:
        settings = _free(settings)
    exchange = _agreed(state, strategy, settings)
    settings = replace(settings, attempt=attempt_of(settings.run_dir, exchange, settings.timeouts.join_secs))
    transport = open_transport(
        strategy.coordination, strategy.rank, strategy.size, os.environ, exchange.name, strategy.check_job
    )
    fence, writer, store = _stores(state, strategy, settings)
    identity = "" if fence is None else fence.identity
    group = exchange.agree("group", identity, settings.timeouts.join_secs)[0]
    session = _session(exchange, transport, state, writer, strategy, settings)
    session.replica.may_differ = may_differ
    session.start()
    run_files = RunFiles(
        session,
        settings.run_dir,
        settings.attempt,
        fence,
        None if strategy.rank == 0 else group,
        launcher_reads=_launcher_reads(settings.run_dir),
    )
    checkpoints = Checkpoints(session, state, store, settings.attempt)
    run_files.position = lambda: checkpoints.position
    run_files.start()
    auditing = Auditing(session, state.schema, settings.run_dir, settings.audits)
    if writer is not None:
        _connect(session, writer, checkpoints, auditing, settings)
    training = Training(session, state, checkpoints)
    if writer is not None and settings.run_dir is not None:
        _connect_requests(session, run_files.requests, checkpoints, auditing, training, settings.run_dir)
    return Parts(
        attempt=settings.attempt,
        state=state,
        session=session,
        transport=transport,
        run_files=run_files,
        checkpoints=checkpoints,
        training=training,
        auditing=auditing,
        proposing=Proposing(session),
        uncounted=Uncounted(session, run_files, optimizers.values()),
        optimizers=optimizers,
    )


def _built_optimizers(
    model: keras.Model, optimizer: keras.optimizers.Optimizer | None, strategy: Strategy
) -> dict[str, keras.optimizers.Optimizer]:
    with strategy.scope():
        optimizers = optimizers_by_name(model, optimizer)
        for one in optimizers.values():
            if not one.built:
                one.build(model.trainable_variables)
    return optimizers


def _free(settings: Settings) -> Settings:
    """On worker 0: no job runs in its directory, and one of another host is not watched a second time."""
    if settings.run_dir is None:
        return settings
    found = check_free(settings.run_dir, settings.take_over, tell=logger.warning)
    return replace(settings, take_over=found)


def _agreed(state: KerasState, strategy: Strategy, settings: Settings) -> Exchange:
    """All workers are here, with the same model; worker 0 has the run directory for itself."""
    rank, secs = strategy.rank, settings.timeouts.join_secs
    exchange = Exchange(strategy.coordination, settings.name, rank, strategy.size, strategy.has_left)
    if rank == 0 and settings.run_dir is not None:
        # Before the others hear from this worker: until then none of them writes.
        with contextlib.suppress(OSError):  # If the disk has a problem, the first write reports it.
            clean_run(settings.run_dir)
    _check_same_model(exchange, state, secs)
    accelerated = exchange.agree("accelerator", str(state.on_accelerator), secs)
    state.fingerprints_on_device = str(True) in accelerated.values()  # same kind everywhere: comparable
    return exchange


def _stores(
    state: KerasState, strategy: Strategy, settings: Settings
) -> tuple[Fence | None, Writer | None, CheckpointStore | None]:
    """What this worker may do with the run directory: only worker 0 claims it and writes."""
    run_dir = settings.run_dir
    if strategy.rank > 0:
        return None, None, None if run_dir is None else CheckpointStore(run_dir)
    _free(settings)  # Again: the others may have let this worker wait, and another job may have begun.
    fence = None if run_dir is None else Fence(run_dir, settings.attempt)
    return fence, *_writer(state, strategy.size, settings, fence)


def _launcher_reads(run_dir: RunDir | None) -> bool:
    """Whether the launcher of this host reads the notes in this directory, which it has made."""
    launch = read_launch(os.environ)
    return launch.launched and run_dir is not None and below(run_dir).as_path().absolute() == launch.run_dir


def _session(
    exchange: Exchange,
    transport: Transport,
    state: KerasState,
    writer: Writer | None,
    strategy: Strategy,
    settings: Settings,
) -> Session:
    """This worker's part in the job. Its threads are not started yet."""
    session = Session(
        exchange,
        Channel(strategy.coordination, settings.name, strategy.rank, strategy.size),
        transport,
        state,
        writer=writer,
        attempt=settings.attempt,
        timeouts=settings.timeouts,
        limits=settings.limits,
        guard=settings.guard,
        audit_policy=settings.audits.policy,
        check=strategy.check_job,
    )
    session.replica.trained = strategy.transfers_started
    session.on_long_wait = lambda step: strategy.goes_on() if step is None else strategy.stands(step)
    return session


def _check_same_model(exchange: Exchange, state: KerasState, timeout_secs: float) -> None:
    schemas = exchange.agree("schema", state.schema.digest(), timeout_secs)
    differing = [worker for worker, digest in schemas.items() if digest != schemas[0]]
    if differing:
        raise ClusterError(
            f"The model of worker {differing[0]} has other variables than that of worker 0",
            remedy="Build the same model on every worker",
            received=f"schema {schemas[differing[0]]}, worker 0: {schemas[0]}",
        )


def _writer(
    state: KerasState, size: int, settings: Settings, fence: Fence | None
) -> tuple[Writer, CheckpointStore | None]:
    """Worker 0: the writer of journal entries, and the checkpoint store."""
    if settings.run_dir is None or fence is None:
        return Writer(MemoryJournal()), None
    _warn_if_other_size(settings.run_dir, size)
    info = RunInfo(FORMAT, state.schema, size, settings.attempt, time.time(), journaled=settings.durable)
    write_run_info(fence, info)
    journal = FileJournal(settings.run_dir, fence) if settings.durable else MemoryJournal()
    store = CheckpointStore(settings.run_dir, fence)
    store.clean()
    return Writer(journal, [saved_of(manifest) for manifest in store.list()]), store


def _connect(
    session: Session, writer: Writer, checkpoints: Checkpoints, auditing: Auditing, settings: Settings
) -> None:
    """Worker 0: connects the callbacks of the parts."""
    writer.write_checkpoint = checkpoints.writer.write
    checkpoints.writer.policy = lambda: auditing.policy
    checkpoints.writer.remove_payloads = writer.remove_payloads
    told = {"save": checkpoints.writer.ended, "leave": checkpoints.writer.ended, "audit": auditing.ended}
    session.on_ended = lambda ended: told.get(ended.kind, lambda _: None)(ended)
    if settings.run_dir is not None:
        expectation = Expectation(session, session.replica.state, settings.run_dir, durable=settings.durable)
        session.replica.expectation = expectation.fingerprint


def _connect_requests(
    session: Session,
    requests: Requests,
    checkpoints: Checkpoints,
    auditing: Auditing,
    training: Training,
    run_dir: RunDir,
) -> None:
    """Worker 0: each request from outside the job is answered by the part that has handled it."""
    requests.may_save = lambda: not checkpoints.is_busy
    auditing.answer = lambda report: requests.audited(run_dir, report.requests, report.step, report.to_json())
    training.leaving.answer = lambda problem: requests.left(run_dir, problem)
    tell_others = session.on_ended

    def on_ended(ended: Ended) -> None:
        tell_others(ended)
        requests.ended(run_dir, ended)

    session.on_ended = on_ended


def _warn_if_other_size(run_dir: RunDir, size: int) -> None:
    with contextlib.suppress(ReplicastError, OSError):
        before = read_run_info(run_dir).workers
        if before != size:
            logger.warning("%s: the previous attempt had %d workers, this one has %d", run_dir, before, size)


def check_not_compiled_again(
    model: keras.Model, optimizer: keras.optimizers.Optimizer | None, parts: Parts
) -> None:
    """Raises if the model was compiled with another optimizer since it joined."""
    now = optimizers_by_name(model, optimizer)
    if {name: id(one) for name, one in now.items()} != {
        name: id(one) for name, one in parts.optimizers.items()
    }:
        raise NotSupported(
            "A model that was compiled again",
            reason="it has a new optimizer, which this Replicas does not know",
            remedy="Call close() on this Replicas, and create a new replicast.Replicas(model) after compile",
        )
