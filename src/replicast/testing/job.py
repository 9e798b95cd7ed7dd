"""A job of N threads that play N workers, on twins in memory of all that a real one stands on.

For tests of your own that need no TensorFlow: the same runtime and the same core as in a real job.

    with Job(3) as job:
        ticket = job.workers[2].session.propose(Update().add("dense/bias", delta))
        job.train(20)
        assert ticket.result(10).step <= 20
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from replicast.coordination import MemoryCoordination
from replicast.core.operation import Timeouts
from replicast.errors import JobFailed
from replicast.runtime import Channel, Exchange, Session, Writer
from replicast.state import MemoryState
from replicast.storage.journal import Journal, MemoryJournal
from replicast.transport import MemoryTransport

DEADLINE_SECS = 20.0
QUICK = Timeouts(prepare_secs=15, answer_secs=5, meet_secs=10, decide_secs=20, compute_secs=5, join_secs=10)


class Worker:
    """One worker: its session, its state, and what it has applied.

    Attributes:
        writer: Of worker 0: writes what the coordinator decides.
        applied: The step and the id of each update that this worker has applied, in order.
    """

    def __init__(self, job: Job, rank: int) -> None:
        self.rank = rank
        self.coordination = MemoryCoordination(job.store)
        self.state = MemoryState(job.start)
        self.writer = Writer(job.journal) if rank == 0 else None
        self.failure: JobFailed | None = None
        self.applied: list[tuple[int, str]] = []
        self.session = Session(
            Exchange(self.coordination, "test", rank, job.size),
            Channel(self.coordination, "test", rank, job.size),
            MemoryTransport(job.board, rank),
            self.state,
            writer=self.writer,
            attempt=job.attempt,
            timeouts=job.timeouts,
            audit_policy=job.audit_policy,
            check=self._check,
        )
        self.session.replica.on_applied = self._note_applied

    def step(self) -> None:
        """Comes to the next boundary."""
        self.session.arrive(self.session.step + 1)

    def die(self) -> None:
        """What another worker's death looks like from here: every wait ends."""
        self.failure = JobFailed("a worker died")

    def _note_applied(self, id_: str) -> None:
        self.applied.append((self.session.step, id_))

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure


class Job:
    """A job of `size` workers. Leaving the context stops every thread.

    Args:
        size: The number of workers.
        journal: What earlier attempts have written.
        values: The variables of a fresh model.
        attempt: Which start of the job this is.
        timeouts: How long is waited for whom.
        audit_policy: What happens when replicas differ.
        begins: Whether all workers begin to train at once.
    """

    def __init__(
        self,
        size: int,
        journal: Journal | None = None,
        *,
        values: Mapping[str, npt.NDArray[Any]] | None = None,
        attempt: int = 0,
        timeouts: Timeouts = QUICK,
        audit_policy: str = "heal",
        begins: bool = True,
    ) -> None:
        self.size = size
        self.start = start_values() if values is None else dict(values)
        self.attempt = attempt
        self.timeouts = timeouts
        self.audit_policy = audit_policy
        self.store = MemoryCoordination.Store()
        self.board = MemoryTransport.Board()
        self.journal = journal or MemoryJournal()
        self.workers = [Worker(self, rank) for rank in range(size)]
        self._begins = begins

    def __enter__(self) -> Self:
        for worker in self.workers:
            worker.session.start()
        if self._begins:
            self.on_all(lambda worker: worker.session.begin())
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.die()
        for worker in self.workers:
            worker.session.stop()

    def on_all(self, act: Callable[[Worker], Any]) -> list[Any]:
        """Calls `act` with every worker, each in its own thread, and gives what they returned.

        Raises:
            TimeoutError: A worker is stuck.
        """
        outcomes: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}

        def run(worker: Worker) -> None:
            try:
                outcomes[worker.rank] = act(worker)
            except BaseException as error:
                errors[worker.rank] = error

        threads = [threading.Thread(target=run, args=(worker,), daemon=True) for worker in self.workers]
        for thread in threads:
            thread.start()
        ends = time.monotonic() + DEADLINE_SECS
        for thread in threads:
            thread.join(max(0.0, ends - time.monotonic()))
        for error in errors.values():
            raise error
        stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
        if stuck:
            raise TimeoutError(f"worker {stuck[0]} is stuck")
        return [outcomes[rank] for rank in range(self.size)]

    def train(
        self, steps: int, after_each: Callable[[Worker, int], object] = lambda worker, step: None
    ) -> None:
        """Every worker trains: a step is over when all have come to its end, as a transfer makes them."""
        barrier = threading.Barrier(self.size)

        def loop(worker: Worker) -> None:
            for _ in range(steps):
                barrier.wait(DEADLINE_SECS)
                worker.step()
                after_each(worker, worker.session.step)
            worker.session.rest("close")

        self.on_all(loop)

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
    """Blocks until a condition holds.

    Raises:
        TimeoutError: It does not within 20 s.
    """
    end = time.monotonic() + DEADLINE_SECS
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("it did not happen")
        time.sleep(0.002)
