"""One worker of a model that all workers have built: how it joins and leaves, what its parts tell each other.

`JoinedWorker` makes every part, and says which of them the session calls back (`WorkerHooks`). The
constructor meets the other workers in these rounds, each with `join_secs`, and an error names the worker that
is missing: the schema, the state, the attempt, the transport's connections, the group, the audit plan.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from replicast.config import ATTEMPT, TOLD_TO_END, heartbeat_file, host_id, read_launch
from replicast.coordination import DirectExchange
from replicast.core.messages import Ended
from replicast.core.operation import Timeouts
from replicast.errors import (
    ClusterError,
    FileDamaged,
    JobFailed,
    NotSupported,
    ReplicastError,
    exception_sentence,
    logger,
)
from replicast.files import RunDir, below
from replicast.processes import on_sigterm, this_start
from replicast.replicas.channel import Channel, open_sockets
from replicast.replicas.job_audits import AuditPlan, Audits, compare_at_start, declared, expected_digests
from replicast.replicas.job_checkpoints import Checkpoints
from replicast.replicas.position import Training
from replicast.replicas.replica import WorkerHooks
from replicast.replicas.session import Session
from replicast.replicas.worker_notes import RunFiles
from replicast.storage.checkpoints import CheckpointStore, saved_of
from replicast.storage.claims import Fence, last_claim
from replicast.storage.journal import FileJournal, Journal, MemoryJournal
from replicast.storage.run_files import (
    FORMAT,
    WITHOUT_CALLBACK,
    Change,
    JobState,
    RunInfo,
    check_free,
    clean_run,
    read_run_info,
    write_change,
    write_run_info,
)
from replicast.training import Source, StrategyJob, TensorFlowState
from replicast.training.strategy import StockJob
from replicast.training.tensorflow_state import Changes
from replicast.transport import open_transport
from replicast.update.guard import Guard
from replicast.update.schema import Limits

WRONG_CALLS = 100  # how often the end of a script retries while another worker is still at another call


class JoinedWorker:
    """Methods are for the training thread, except those that the session calls (`WorkerHooks`)."""

    def __init__(
        self,
        source: Source,
        job: StrategyJob,
        *,
        name: str,
        run_dir: RunDir | None,
        durable: bool,
        limits: Limits,
        timeouts: Timeouts,
        guard: Guard | None,
        audits: AuditPlan,
        may_differ: Sequence[str],
    ) -> None:
        self._source = source
        self.job = job
        self._run_dir = run_dir
        self._durable = durable
        with job.scope():
            source.build_optimizers()
        self._uncounted_since: int | None = None
        self._warned_of_new = False
        self.called_by: object = None  # the callback of the current `fit`
        self.restores = 0
        self.state = TensorFlowState(*source.variables())
        if guard is not None:
            guard.check_patterns(self.state.schema)
        local_statistics = source.is_keras_3 and isinstance(job, StockJob)
        free = declared(self.state.schema, may_differ, local_statistics=local_statistics) | self.state.local
        self.state.local = free
        rank, size, secs, launch = job.rank, job.size, timeouts.join_secs, read_launch(os.environ)

        watched = ""
        if rank == 0 and run_dir is not None:
            watched = check_free(run_dir, launch.take_over, tell=logger.warning)
            # Before the others hear from this worker: until then none of them writes.
            with contextlib.suppress(OSError):  # If the disk has a problem, the first write reports it.
                clean_run(run_dir)
        exchange = job.lifetime.exchange(name)
        exchange.require_same(
            "schema",
            self.state.schema.digest(),
            secs,
            problem="The model of worker {} has different variables than that of",
            remedy="Build the same model on every worker",
        )
        compare_at_start(exchange, self.state, free, secs)
        attempt = attempt_of(run_dir, exchange, secs)
        transport = open_transport(exchange, os.environ, secs)
        sockets = open_sockets(exchange, host_id(os.environ), secs)

        # Only worker 0 claims the run directory and writes.
        fence: Fence | None = None
        journal: Journal | None = None
        store = None if run_dir is None else CheckpointStore(run_dir)
        if rank == 0:
            journal = MemoryJournal()
        if rank == 0 and run_dir is not None:
            # Again: the others may have let this worker wait, and another job may have begun.
            check_free(run_dir, watched, tell=logger.warning)
            fence = Fence(run_dir, attempt, this_start())
            with contextlib.suppress(ReplicastError, OSError):
                before = read_run_info(run_dir).workers
                if before != size:
                    logger.warning(
                        "%s: the previous attempt had %d workers, this one has %d", run_dir, before, size
                    )
            info = RunInfo(FORMAT, self.state.schema, size, attempt, time.time(), journaled=durable)
            write_run_info(fence, info)
            journal = FileJournal(run_dir, fence) if durable else journal
            store = CheckpointStore(run_dir, fence)
            store.clean()
        group = exchange.agree("group", "" if fence is None else fence.identity, secs)[0]

        listed = store.manifests() if rank == 0 and store is not None else []
        saved = [saved_of(manifest) for manifest in listed]
        self.session = Session(
            exchange,
            Channel(job.coordination, name, rank, size, sockets),
            transport,
            self.state,
            journal=journal,
            saved=saved,
            attempt=attempt,
            timeouts=timeouts,
            limits=limits,
            guard=guard,
            may_differ=free,
        )
        self.training = Training(self.session)
        self.checkpoints = Checkpoints(self.session, self.training, store)
        # Whether the launcher of this host reads the notes in this directory, which it has made.
        path = None if run_dir is None else below(run_dir).as_path()
        launcher_reads = launch.launched and path is not None and path.absolute() == launch.run_dir
        self.run_files = RunFiles(
            self.session,
            run_dir,
            self.training,
            fence,
            None if rank == 0 else group,
            launcher_reads=launcher_reads,
            may_save=lambda: not self.checkpoints.is_busy,
            heartbeat=heartbeat_file(os.environ, rank),
            waited=job.waited_secs,
        )
        self.departure = Departure(
            self.session,
            self.checkpoints,
            self.training,
            job.leavings,
            partial(self.run_files.inbox.left, run_dir),
        )
        self.audits = Audits(self.session, run_dir, audits, partial(self.run_files.inbox.audited, run_dir))
        self.session.start(
            WorkerHooks(
                check=job.lifetime.check,
                trained=job.lifetime.transfers_started,
                take_snapshot=self.checkpoints.take_snapshot,
                write_checkpoint=self.checkpoints.write,
                expected_digests=self._expected_digests,
                on_report=self.audits.on_report,
                on_leave=self.departure.leave,
                on_long_wait=job.lifetime.report_wait,
                on_ended=self._on_ended,
                on_inbox=self.run_files.inbox.on_outcome,
                on_note=self.run_files.on_note,
            )
        )
        self.run_files.start()
        self._states = RunStates(run_dir, rank, size, attempt)
        # Even before training: a worker that is told to exit then tells the others, and exits with its code.
        job.leavings.append(self.departure)
        leave_on_sigterm(job.leavings)

    # Trainings and boundaries.

    def together(self) -> Session:
        """For operations of all workers, between steps: first resumes unfinished work of earlier attempts."""
        self.count_steps()
        self.session.begin()
        return self.session

    def begin_training(self) -> None:
        """Called by `fit` and `resume`, or by the first boundary, whose step is counted by then.

        What is applied here is recorded at this step: the variables must be those of this step.
        """
        self._notice_changes(self._source.changes())
        self.count_steps()
        if not self.training.has_begun:
            self._warn_of_what_is_left_out()
            # Not before: what a script imports or synchronises would replace what an update has changed.
            begun = self.session.begun
            self.run_files.take_first()
            self.session.begin()
            if begun:
                self.session.rest("meet", "training begins")
            self.training.has_begun = True
        self.session.arrive(self.session.step)
        self.training.active = True

    def _warn_of_what_is_left_out(self) -> None:
        store = self.checkpoints.store if self.session.rank == 0 and not self.restores else None
        with contextlib.suppress(ReplicastError, OSError):
            last = None if store is None else store.last()
            if last is not None and last.attempt < self.session.attempt:
                logger.warning(
                    "the run has a checkpoint of step %d, and this script does not call replicas.restore(): "
                    "training does not continue from it, and it is removed once there are later ones. To "
                    "continue from it, call replicas.restore() before training",
                    last.step,
                )

    def _notice_changes(self, changes: Changes) -> None:
        """What is gone from the model cannot be updated any more, and what is new is not kept equal."""
        if changes.lost or changes.optimizers:
            what = "was compiled again" if changes.optimizers else f"has lost {', '.join(changes.lost[:5])}"
            raise NotSupported(
                f"A model that {what}",
                reason="its Replicas knows the optimizers and variables that it had at first",
                remedy="Call close() on this Replicas, and create a new replicast.Replicas(model) after "
                "the change",
            )
        if changes.new and not self._warned_of_new:
            self._warned_of_new = True
            logger.warning(
                "worker %d: the model has new variables, which its Replicas does not update, save or "
                "compare: %s. Call close(), and create a new replicast.Replicas(model)",
                self.session.rank,
                ", ".join(changes.new[:5]),
            )

    def boundary(self, *, steps: int, logs: Mapping[str, Any] | None, batches: int) -> None:
        self.count_steps(known=steps)
        session = self.session
        now = time.monotonic()
        self._notice_changes(self._source.changes(now=now))
        self.training.active = True
        if logs is not None:
            self.run_files.logs = logs
        self.job.wait_for_device()
        self.checkpoints.report()
        self.training.used(batches)
        session.proposals.training_continues()
        step = session.step + steps
        rate = self._source.rate(now, len(session.replica.holds)) if session.rank == 0 else None
        session.replica.measures.note(step, steps, logs, rate)
        session.arrive(step)
        if not self.training.has_begun:
            self.begin_training()
        self.audits.after_step(steps)
        self.checkpoints.after_step(steps)

    def end_training(self) -> None:
        """Called on all workers. All proposals are settled when it returns."""
        session = self.together()  # of a script that has proposed and not trained, too
        self.checkpoints.report()
        self.audits.after_training()
        try:
            session.rest("close")  # also finishes a checkpoint that needs another boundary
        finally:
            self.audits.follow(self.audits.usual)
        session.wait_for_outcomes()
        self.checkpoints.settle()
        self.checkpoints.check()
        self.training.active = False

    # A `fit` without our callback trains steps that no boundary counts. The optimizer has counted them, so
    # that later updates are recorded at their true step.

    def fit_without_callback(self) -> None:
        if self._uncounted_since is None:
            self._uncounted_since = self._iterations()
        self.run_files.waiting_for = WITHOUT_CALLBACK

    def count_steps(self, known: int = 0) -> None:
        """Called between steps: counts the steps of such a `fit` as one boundary."""
        since, self._uncounted_since = self._uncounted_since, None
        if since is None:
            return
        self.run_files.waiting_for = ""
        steps = self._iterations() - since - known
        if steps > 0:
            self.session.arrive(self.session.step + steps)

    def _iterations(self) -> int:
        return max((int(each.iterations.numpy()) for each in self._source.optimizers().values()), default=0)

    # The end.

    def close(self, *, at_exit: bool) -> None:
        self.training.active = False
        try:
            self.count_steps()
            self.checkpoints.report()
            self.departure.settle()
            self.checkpoints.settle()
        except ReplicastError as error:
            logger.debug("the updates could not be settled at the end: %s", error)
        told_to = self.departure.left
        if not told_to:
            self.training.warn_of_what_was_left()
        self.session.stop()
        self.run_files.finish(finished=not told_to)
        self._states.ended(self.session.step, told_to=told_to, at_exit=at_exit)
        if not self.session.script_ended:  # at the end of the script it stays: SIGTERM need not exit then
            self.job.leavings.remove(self.departure)

    def script_ends(self) -> None:
        """The script has come to its end: no model of it need be told to exit any more."""
        if self.departure not in self.job.leavings:  # closed before, and the script went on
            self.job.leavings.append(self.departure)
        for each in self.job.leavings:
            each.session.script_ended = True

    def abandon(self) -> None:
        """The process exits, in whatever state it is. Waits for nobody."""
        self.session.abandon()
        self.run_files.note_end()
        self._states.abandoned(self.session.step, self.job.lifetime.failure)
        self.session.script_ended = True  # it exits anyway: SIGTERM need not

    # What the session asks and tells, where it is not one part alone that answers.

    def _expected_digests(self, names: Sequence[str]) -> dict[str, str]:
        run_dir, holds = self._run_dir, self.session.replica.holds
        return {} if run_dir is None else expected_digests(run_dir, holds, names, durable=self._durable)

    def _on_ended(self, ended: Ended) -> None:
        if ended.kind in ("save", "leave"):
            self.checkpoints.on_ended(ended)
        elif ended.kind == "audit":
            self.audits.on_ended(ended)
        self.run_files.inbox.ended(ended)


def attempt_of(run_dir: RunDir | None, exchange: DirectExchange, timeout_secs: float) -> int:
    """The launcher's number of this attempt, else one more than the last that worker 0 finds; told to all."""
    if ATTEMPT in os.environ:
        return read_launch(os.environ).attempt
    counted = 0
    if exchange.rank == 0 and run_dir is not None:
        with contextlib.suppress(FileDamaged, OSError):  # Reported when the run directory is claimed.
            last = last_claim(run_dir)
            counted = 0 if last is None else last.attempt + 1
    return int(exchange.agree("attempt", str(counted), timeout_secs)[0])


# Leaving. SIGTERM arrives at one worker or at all, or a script calls `replicas.leave()`. Each such worker
# requests the operation "leave" (`core/operations/attempt.py`): all save at one boundary, and the processes
# exit with 143. A script may have several models. The one that reaches a boundary first leaves, and saves the
# other models too: all workers are at the same line of the script then.


@dataclass(eq=False, repr=False)
class Departure:
    """One model's part in leaving. For the training thread; `ask` for any thread and signal handler.

    `companions` are those of all models of the script. `answer` tells those outside the job who have asked
    the workers to exit why the state was not saved, or nothing.
    """

    session: Session
    checkpoints: Checkpoints
    training: Training
    companions: list[Departure]
    answer: Callable[[str], None]
    left: bool = False

    def ask(self) -> None:
        if not self.left and not self.session.script_ended:
            self.session.proposals.request("leave")

    def settle(self) -> None:
        """Settles open proposals together with all workers, unless all have left already."""
        for _ in range(WRONG_CALLS):
            if self.left:
                return
            try:
                self.session.begin()
                if not self.left:
                    self.session.rest("close")
            except ClusterError as error:
                # Another worker is at another call: both get this error, and it reaches its end later.
                logger.warning("worker %d is at the end of its script. %s", self.session.rank, error)
            else:
                return

    def leave(self, problem: str, asked_by: tuple[str, ...]) -> None:
        """Called at a boundary of all workers, after the save; then the process exits."""
        if self.checkpoints.store is None:
            problem = "There is no run directory"
        elif problem:
            problem = self.checkpoints.why_not_written() or problem
        self._say(problem)
        if asked_by:
            self.answer(problem)
        for other in self.companions:
            if not other.left and other.training.has_begun:
                try:
                    problem = other.checkpoints.save_before_leaving()
                except (ReplicastError, OSError) as error:
                    problem = str(error)
                session = other.session  # all workers are here, and worker 0 knows what became of it
                with contextlib.suppress(ReplicastError):
                    said = session.exchange.agree("saved", problem, session.timeouts.join_secs)
                    problem = said[0] or problem
                other._say(problem)
        # Worker 0 hosts the coordination service: the others may still read from it.
        with contextlib.suppress(ReplicastError):
            self.session.exchange.agree("leave", "", self.session.timeouts.answer_secs)

    def _say(self, problem: str) -> None:
        self.left = True
        which = f" ({self.session.exchange.name})" if len(self.companions) > 1 else ""
        said = f"the state is not saved. {problem}" if problem else "the state is saved"
        logger.warning("worker %d was told to exit: %s%s", self.session.rank, said, which)


def leave_on_sigterm(departures: Sequence[Departure]) -> None:
    """Makes all models of the script leave on SIGTERM, also those that are created later."""

    def told() -> None:
        training = [one for one in departures if one.training.active]
        for one in training:
            one.ask()
        if not training and not any(one.left or one.session.script_ended for one in departures):
            logger.warning("this worker was told to exit outside of a training: nothing is saved")
            sys.exit(TOLD_TO_END)

    if not on_sigterm(told):
        logger.warning(
            "On SIGTERM this worker saves nothing: only the main thread can set a signal handler, and this "
            "Replicas was created in another thread. Call replicas.leave() when the machine is to be taken "
            "away"
        )


class RunStates:
    """Worker 0 writes down what becomes of a job that no launcher watches (`storage/run_files.py`)."""

    def __init__(self, run_dir: RunDir | None, rank: int, workers: int, attempt: int) -> None:
        writes = rank == 0 and not read_launch(os.environ).launched
        self._run_dir = run_dir if writes else None
        self._change = partial(Change, attempt=attempt, by="worker 0", workers=workers)
        self._write(JobState.STARTING)

    def ended(self, step: int, *, told_to: bool, at_exit: bool) -> None:
        """The script has come to its end, or all workers were told to save and exit.

        At the exit of the process it may have raised: a job of one worker is closed all the same. An exit by
        `sys.exit` cannot be told from the end of the script.
        """
        if at_exit and not told_to and getattr(sys, "last_value", None) is not None:
            self.abandoned(step, None)
        else:
            state, reason = (JobState.STOPPED, "SIGTERM") if told_to else (JobState.FINISHED, "")
            self._write(state, step, reason)

    def abandoned(self, step: int, failure: JobFailed | None) -> None:
        error = getattr(sys, "last_value", None)  # what ended the script, set before exit handlers run
        if failure is not None and failure.worker not in (None, 0):
            self._write(JobState.FAILED, step, str(failure), failure.worker)
        elif isinstance(error, KeyboardInterrupt):
            self._write(JobState.STOPPED, step, "Ctrl-C")
        else:
            reason = "it exited before its end"
            if error is not None:
                reason = exception_sentence("".join(traceback.format_exception_only(error)).splitlines())
            self._write(JobState.FAILED, step, reason, 0)

    def _write(
        self, state: JobState, step: int | None = None, reason: str = "", worker: int | None = None
    ) -> None:
        try:
            if self._run_dir is not None:
                write_change(self._run_dir, self._change(state, step=step, worker=worker, reason=reason))
        except OSError as error:
            logger.warning("the state of the job cannot be written: %s", error)
