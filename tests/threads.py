"""A job of N workers as N threads, with state, journal and coordination service in the memory of the process.

Without TensorFlow: it has the runtime and the core of a real job.

    with Job(3) as job:
        ticket = job.workers[2].propose(Update().add("dense/bias", delta))
        job.train(20)
        assert ticket.result(10).step <= 20
    with job.next_attempt() as again:          # the same journal, from the last checkpoint
        again.train(20)
"""

from __future__ import annotations

import itertools
import os
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from replicast.config import shared_memory_directory
from replicast.coordination import DirectExchange, MemoryCoordination
from replicast.core.entries import Saved, Stage
from replicast.core.messages import Ended, Snapshot, Tell, WriteOutcome
from replicast.core.operation import Timeouts
from replicast.errors import FileDamaged, JobFailed, ReplicasDiverged
from replicast.replicas.channel import Channel
from replicast.replicas.proposals import Ticket
from replicast.replicas.replica import WorkerHooks
from replicast.replicas.session import Session
from replicast.storage.journal import Journal, MemoryJournal
from replicast.transport import Transport
from replicast.update.audit_report import AuditReport
from replicast.update.digest import digest_array, digest_state
from replicast.update.edits import Edit, Variable, apply_edit
from replicast.update.guard import Guard
from replicast.update.schema import Arrays, Limits, Schema, State, touched_parts
from replicast.update.trial import Trial
from replicast.update.update import Update

Values = npt.NDArray[Any]
DEADLINE_SECS = 120.0
# Long enough for a machine with much to do, and short enough for a test that hangs.
QUICK = Timeouts(
    prepare_secs=90, answer_secs=60, meet_secs=90, decide_secs=110, compute_secs=60, join_secs=60
)


class MemoryState(State):
    """Variables that are numpy arrays."""

    def __init__(self, values: Mapping[str, npt.NDArray[Any]], schema: Schema | None = None) -> None:
        self.values: Arrays = {name: np.array(value) for name, value in values.items()}
        self.schema = schema or Schema(
            Variable(name, value.shape, value.dtype.name, "trainable") for name, value in self.values.items()
        )

    def apply(self, edits: Sequence[Edit]) -> None:
        for edit in edits:
            self.values[edit.variable] = apply_edit(edit, self.values[edit.variable])

    def digest_later(self, edits: Sequence[Edit]) -> Callable[[], str]:
        whole, rows = touched_parts(edits)
        parts = {name: self.values[name] for name in whole}
        parts.update({f"{name}[rows]": self.values[name][indices] for name, indices in rows.items()})
        digest = digest_state(parts)
        return lambda: digest

    def read(self, names: Iterable[str], devices: Sequence[str] = ()) -> Arrays:
        return {name: self.values[name].copy() for name in names}

    def digests(self, names: Iterable[str]) -> dict[str, str]:
        return {name: digest_array(self.values[name]) for name in names}

    def snapshot(self, buffers: Arrays, replica: int | None = None) -> None:
        buffers.update(self.read(self.values))

    def restore_snapshot(self, buffers: Arrays, replica: int = 0) -> None:
        self.values.update({name: value.copy() for name, value in buffers.items()})


class Worker:
    """One worker: its session, its state, and what it has applied.

    Attributes:
        applied: The step and the id of each update that this worker has applied, in order.
        reports: The reports of the audits for which all workers stopped.
        left: Why the state was not saved when this worker was told to exit; empty if it was.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self.rank = rank
        self.job = job
        self.coordination = MemoryCoordination(job.store)
        self.transport = Transport(job.name, rank, directory=job.directory)
        start = job.checkpoints[-1] if job.checkpoints else None
        self.state = MemoryState(job.start if start is None else start.state[0], job.schema)
        self.failure: JobFailed | None = None
        self.applied: list[tuple[int, str]] = []
        self.reports: list[AuditReport] = []
        self.left: str | None = None
        self.session = Session(
            DirectExchange(self.coordination, "test", rank, job.size, job.gone.__contains__),
            Channel(self.coordination, "test", rank, job.size),
            self.transport,
            self.state,
            journal=job.journal if rank == 0 else None,
            saved=job.checkpoints,
            attempt=job.attempt,
            **job.options,
        )
        if start is not None:
            self.session.start_from(start)
        reached = self.session.replica.reached

        def on_reached(id_: str, stage: Stage) -> None:
            reached(id_, stage)
            if stage is Stage.APPLIED:
                self.applied.append((self.session.step, id_))

        self.session.replica.reached = on_reached
        self.hooks = WorkerHooks(
            check=self._check,
            take_snapshot=self.take_snapshot,
            write_checkpoint=self._write_checkpoint,
            on_report=self._on_report,
            on_leave=self._on_leave,
            on_ended=job.ended.append,
            on_inbox=job.outcomes.__setitem__,
        )
        self._todo: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def start(self) -> None:
        """Starts its threads."""
        threading.Thread(target=self._train, name=f"training-{self.rank}", daemon=True).start()

    def do(self, act: Callable[[], None] | None) -> None:
        """Queues a function for the training thread; None ends the thread."""
        self._todo.put(act)

    def propose(self, update: Update, at_step: int | None = None, trial: Trial | None = None) -> Ticket:
        return self.session.proposals.propose_update(update, at_step, trial)

    def step(self, steps: int = 1, logs: Mapping[str, Any] | None = None) -> None:
        """Reaches the next boundary, after some steps with these logs."""
        step = self.session.step + steps
        self.session.replica.measures.note(step, steps, logs)
        self.session.arrive(step)

    def save_in_passing(self) -> None:
        """Takes a planned snapshot for a checkpoint and continues. Call it on all workers at one boundary."""
        on_trial = self.session.replica.on_trial
        id_ = self.session.next_report("save")
        self.session.report(id_, (lambda: None) if on_trial else self.take_snapshot(str(id_)))

    def audit_in_passing(self) -> None:
        """Takes part in a planned audit and continues. Call it on all workers at one boundary."""
        seen = self.session.replica.examine_quietly(self.session.step)
        self.session.report(self.session.next_report("audit"), lambda: seen)

    def die(self) -> None:
        """Simulates the death of another worker as seen from this one: every wait ends."""
        self.failure = JobFailed("a worker died")

    def _train(self) -> None:
        self.session.start(self.hooks)
        while (act := self._todo.get()) is not None:
            act()

    def take_snapshot(self, id_: str, due: bool = True, again: bool = False) -> Callable[[], Snapshot]:
        """Copies the state; worker 0's copy is the checkpoint."""
        replica, step = self.session.replica, self.session.step
        digest, holds = replica.digest(), frozenset(replica.holds)
        values = {name: value.copy() for name, value in self.state.values.items()}
        return lambda: Snapshot(step, digest, holds, values if self.rank == 0 else None)

    # What the session asks of it.

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def _write_checkpoint(self, saved: Saved) -> Callable[[], WriteOutcome]:
        def write() -> WriteOutcome:
            self.job.checkpoints.append(saved)
            return WriteOutcome.DURABLE

        return write

    def _on_report(self, report: AuditReport, raises: bool) -> None:
        self.reports.append(report)
        if raises:
            names = ", ".join(one.variable for one in report.differences)
            self.session.raise_later(ReplicasDiverged(f"The replicas differ in {names}", step=report.step))

    def _on_leave(self, problem: str, asked_by: tuple[str, ...]) -> None:
        self.left = problem


class Job:
    """A job of `size` workers. Leaving the context stops every thread.

    Args:
        size: The number of workers.
        journal: The journal of earlier attempts; a `FileJournal` to use files.
        values: The variables of a fresh model.
        attempt: The number of this attempt.
        checkpoints: The checkpoints of earlier attempts; the job starts from the last one.
        timeouts: The timeouts of the job.
        guard: The checks that every proposal must pass, if any.
        schema: The variables, for those that have slots; by default each is trainable, without slots.
        limits: Size limits for updates.
        audit_policy: What happens when replicas differ.
        begins: Whether all workers start to train immediately.

    Attributes:
        ended: The saves and audits that have ended, in order.
        outcomes: The outcome of each request from outside, by the ticket that `push` or `withdraw` returned.
        gone: The workers whose scripts have ended; a test may add some.
    """

    def __init__(
        self,
        size: int,
        journal: Journal | None = None,
        *,
        values: Mapping[str, npt.NDArray[Any]] | None = None,
        attempt: int = 0,
        checkpoints: Sequence[Saved] = (),
        timeouts: Timeouts = QUICK,
        guard: Guard | None = None,
        schema: Schema | None = None,
        limits: Limits | None = None,
        audit_policy: str = "heal",
        begins: bool = True,
    ) -> None:
        self.size = size
        self.start = start_values() if values is None else dict(values)
        self.attempt = attempt
        self.checkpoints = list(checkpoints)
        self.schema = schema
        # The same in every attempt.
        self.options: dict[str, Any] = {"timeouts": timeouts, "guard": guard, "audit_policy": audit_policy}
        self.options |= {} if limits is None else {"limits": limits}
        self.store = MemoryCoordination.Store()
        self.name, self.directory = uuid.uuid4().hex, shared_memory_directory(os.environ)
        self.journal = journal or MemoryJournal()
        self.gone: set[int] = set()
        self.ended: list[Ended] = []
        self.outcomes: dict[str, Tell] = {}
        self._numbers = itertools.count(1)
        self._begins = begins
        self.workers = [Worker(self, rank) for rank in range(size)]

    def __enter__(self) -> Self:
        for worker in self.workers:
            worker.start()
        self.on_all(lambda worker: worker.session.begin() if self._begins else None)
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.die()
            worker.session.threads.stopping.set()  # first on all, so that none waits for another
        try:
            self.on_all(lambda worker: worker.session.stop())
        finally:
            for worker in self.workers:
                worker.do(None)

    def next_attempt(self, size: int | None = None, journal: Journal | None = None) -> Job:
        """The restarted job: with the same journal, from the last checkpoint."""
        return Job(
            size or self.size,
            journal or self.journal,
            values=self.start,
            attempt=self.attempt + 1,
            checkpoints=self.checkpoints,
            schema=self.schema,
            **self.options,
        )

    def push(self, update: Update, at_step: int | None = None, trial: Trial | None = None) -> str:
        """Proposes an update from outside; `outcomes` will contain its outcome. May raise `UpdateRefused`."""
        ticket = f"push-{next(self._numbers)}"
        self.workers[0].session.proposals.propose_from_outside(ticket, update, at_step, trial)
        return ticket

    def withdraw(self, id_: str) -> str:
        """Withdraws an update from outside; `outcomes` will contain the result."""
        ticket = f"withdraw-{next(self._numbers)}"
        self.workers[0].session.proposals.withdraw_from_outside(ticket, id_)
        return ticket

    def on_all(self, act: Callable[[Worker], Any]) -> list[Any]:
        """The results of `act` in every training thread. `TimeoutError` if a worker is stuck."""
        outcomes: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}
        done = [threading.Event() for _ in self.workers]

        def run(worker: Worker) -> None:
            try:
                outcomes[worker.rank] = act(worker)
            except BaseException as error:
                errors[worker.rank] = error
                if isinstance(error, JobFailed | FileDamaged):  # it is over for all, as in a real job
                    for other in self.workers:
                        other.failure = other.failure or JobFailed(str(error), worker=worker.rank)
            done[worker.rank].set()

        for worker in self.workers:
            worker.do(partial(run, worker))
        ends = time.monotonic() + DEADLINE_SECS
        stuck = [rank for rank, one in enumerate(done) if not one.wait(max(0.0, ends - time.monotonic()))]
        # Workers that waited for a failed one have a broken barrier, or are told so: that is not the cause.
        causes = (threading.BrokenBarrierError, JobFailed)
        for error in sorted(errors.values(), key=lambda one: isinstance(one, causes)):
            raise error
        if stuck:
            raise TimeoutError(f"worker {stuck[0]} is stuck")
        return [outcomes[rank] for rank in range(self.size)]

    def train(
        self,
        steps: int,
        after_each: Callable[[Worker, int], object] = lambda worker, step: None,
        *,
        one_step: Callable[[Worker, int], Mapping[str, Any] | None] = lambda worker, step: None,
        steps_per_boundary: int = 1,
        closes: bool = True,
    ) -> None:
        """Trains on all workers: a step ends when all have reached its end, as with a transfer.

        Args:
            steps: The number of steps.
            after_each: Called after each boundary, as a callback would be.
            one_step: The training before a boundary; returns its logs.
            steps_per_boundary: The number of steps of one execution.
            closes: Whether all workers close at the end, so that every proposal has its outcome.
        """
        barrier = threading.Barrier(self.size)

        def loop(worker: Worker) -> None:
            for _ in range(steps // steps_per_boundary):
                barrier.wait(DEADLINE_SECS)
                logs = one_step(worker, worker.session.step + steps_per_boundary)
                worker.step(steps_per_boundary, logs)
                after_each(worker, worker.session.step)
            if closes:
                worker.session.rest("close")

        def loop_or_let_go(worker: Worker) -> None:
            try:
                loop(worker)
            except BaseException:
                barrier.abort()
                raise

        self.on_all(loop_or_let_go)

    def files(self) -> list[Path]:
        """The shared memory that holds updates."""
        return sorted(self.directory.glob(f"*-{self.name}-*"))

    def values(self) -> list[dict[str, bytes]]:
        """The bits of every variable of each worker."""
        return [{name: value.tobytes() for name, value in one.state.values.items()} for one in self.workers]


def start_values() -> dict[str, npt.NDArray[Any]]:
    """A small model."""
    return {
        "dense/kernel": np.arange(12, dtype=np.float32).reshape(4, 3),
        "dense/bias": np.zeros(3, np.float32),
        "table/embeddings": np.zeros((8, 2), np.float32),
        "optimizer/learning_rate": np.asarray(0.1, np.float32),
    }


def eventually(condition: Callable[[], object]) -> None:
    """Blocks until a condition holds; `TimeoutError` after 2 min."""
    end = time.monotonic() + DEADLINE_SECS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("it did not happen")
        time.sleep(0.002)
