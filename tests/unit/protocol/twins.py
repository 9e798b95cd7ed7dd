"""N threads that play N workers: the protocol with the twins in memory of all that it stands on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Self

import numpy as np

from replicast.coordination import MemoryCoordination
from replicast.errors import JobFailed
from replicast.journal import AnyJournal, MemoryJournal
from replicast.protocol import Channel, Coordinator, Member, Patience
from replicast.state import MemoryState
from replicast.transport import MemoryTransport
from replicast.update import Update

DEADLINE_SECS = 20.0
PATIENCE = Patience(stage_secs=5, answer_secs=5, decide_secs=10, compute_secs=5, begin_secs=10, park_secs=0.5)


def start_values() -> dict[str, np.ndarray[Any, Any]]:
    return {
        "dense/kernel": np.arange(12, dtype=np.float32).reshape(4, 3),
        "dense/bias": np.zeros(3, np.float32),
        "table/embeddings": np.zeros((8, 2), np.float32),
        "optimizer/learning_rate": np.asarray(0.1, np.float32),
    }


class Worker:
    """One worker: its member, and a training thread that is told what to do, step by step."""

    def __init__(self, job: Job, rank: int) -> None:
        self.rank = rank
        self.coordination = MemoryCoordination(job.store)
        self.state = MemoryState(start_values() if job.start is None else job.start)
        self.failure: JobFailed | None = None
        self.member = Member(
            Channel(self.coordination, "test", rank, job.size),
            MemoryTransport(job.board, rank),
            self.state,
            patience=job.patience,
            check=self._check,
        )
        self.applied: list[tuple[int, str]] = []
        self._watch_applied()

    def _watch_applied(self) -> None:
        apply = self.member.apply

        def noting(go: Any, step: int, since: float) -> None:
            apply(go, step, since)
            self.applied += [(step, id_) for _, id_ in go.updates]

        self.member.apply = noting  # type: ignore[method-assign]

    def _check(self) -> None:
        if self.failure is not None:
            raise self.failure

    def die(self) -> None:
        """What another worker's death looks like from here: every wait ends."""
        self.failure = JobFailed("a worker died")
        self.member.gate.wake()


class Job:
    """A job of `size` workers. Leaving the context stops every thread."""

    def __init__(
        self,
        size: int,
        journal: AnyJournal | None = None,
        *,
        durable: bool = False,
        patience: Patience = PATIENCE,
        values: dict[str, np.ndarray[Any, Any]] | None = None,
    ) -> None:
        self.size = size
        self.start = values
        self.patience = patience
        self.store = MemoryCoordination.Store()
        self.board = MemoryTransport.Board()
        self.journal = journal or MemoryJournal()
        self.workers = [Worker(self, rank) for rank in range(size)]
        self.coordinator = Coordinator(self.workers[0].member, self.journal, durable=durable)

    def __enter__(self) -> Self:
        for worker in self.workers:
            worker.member.start()
        self.coordinator.start()
        self.on_all(lambda worker: worker.member.pause("train"))
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.die()
        for worker in self.workers:
            worker.member.stop()

    def on_all(self, act: Callable[[Worker], Any]) -> list[Any]:
        """Calls `act` with every worker, each in its own thread, and gives what they returned."""
        outcomes: dict[int, Any] = {}
        errors: dict[int, BaseException] = {}

        def run(worker: Worker) -> None:
            try:
                outcomes[worker.rank] = act(worker)
            except BaseException as error:
                errors[worker.rank] = error

        threads = [threading.Thread(target=run, args=(worker,)) for worker in self.workers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_SECS)
        assert not any(thread.is_alive() for thread in threads), "a worker is stuck"
        for error in errors.values():
            raise error
        return [outcomes[rank] for rank in range(self.size)]

    def train(self, steps: int, at_each: Callable[[Worker, int], None] = lambda worker, step: None) -> None:
        """Every worker trains: a step is over when all have come to its end, as a transfer makes them."""
        barrier = threading.Barrier(self.size)

        def loop(worker: Worker) -> None:
            for _ in range(steps):
                barrier.wait(DEADLINE_SECS)
                step = worker.member.gate.step + 1
                worker.member.arrive(step)
                at_each(worker, step)
            worker.member.pause("drain")

        self.on_all(loop)

    def close(self) -> None:
        """As at the end of a script."""
        self.on_all(lambda worker: (worker.member.pause("drain"), worker.member.pause("close")))

    def values(self) -> list[dict[str, bytes]]:
        return [{name: value.tobytes() for name, value in w.state.values.items()} for w in self.workers]


def eventually(condition: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE_SECS
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.002)


def bias(amount: float, **options: Any) -> Update:
    return Update(**options).add("dense/bias", np.full(3, amount, np.float32))
