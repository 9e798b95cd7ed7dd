"""Joins a worker to the job: checks the settings, agrees with the other workers, starts the threads."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import keras
import tensorflow as tf

from replicast.config import read_launch
from replicast.core.commands import Ended
from replicast.core.operation import Timeouts
from replicast.errors import ClusterError, NotSupported, ReplicastError
from replicast.files import RunDir, below
from replicast.replicas.attempts import attempt_of
from replicast.replicas.auditing import Auditing, AuditPlan, declared
from replicast.replicas.checkpoints import Checkpoints
from replicast.replicas.expectation import Expectation
from replicast.replicas.proposing import Proposing
from replicast.replicas.requests import Requests
from replicast.replicas.run_files import RunFiles
from replicast.replicas.training import Training
from replicast.replicas.uncounted import Uncounted
from replicast.runtime import Channel, Exchange, Session, Writer
from replicast.storage.checkpoint import CheckpointStore, saved_of
from replicast.storage.fence import Fence
from replicast.storage.journal import FileJournal, MemoryJournal
from replicast.storage.liveness import check_free
from replicast.storage.runfiles import FORMAT, RunInfo, clean_run, read_run_info, write_run_info
from replicast.strategy import KerasState, Strategy, optimizers_by_name
from replicast.transport import Transport, open_transport
from replicast.update.guard import Guard, checked_guard
from replicast.update.validate import Limits

logger = logging.getLogger("replicast")

Durability = Literal["disk", "memory"]


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings given by the user and the launcher.

    Attributes:
        name: Prefix that separates this model's keys from those of other models; the same on all workers.
        run_dir: The run directory, if there is one.
        attempt: The number of this attempt of the job; if no launcher counts, known once all have joined.
        durable: Whether the journal is on disk.
        audits: When replicas are compared outside of `fit`.
        may_differ: Patterns for the names of the variables that may differ.
        take_over: Which running job of another host may be taken over (`liveness.check_free`).
    """

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
