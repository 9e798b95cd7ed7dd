"""A pool of workers that runs test functions on all ranks together and reports which rank failed."""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.pool.messages import Call, Died, Outcome, Raised, Returned, Stuck
from tests.pool.process import WorkerProcess, held_ports

START_SECS = 300.0
CALL_SECS = 300.0
LEAVE_SECS = 120.0
SETTLE_SECS = 1.0
"""After a death: for the others to follow, so that the report names all who did."""


class WorkerFailed(AssertionError):  # noqa: N818 - reads as a sentence
    """At least one worker raised, died or hung; the message shows each one's traceback and log."""

    def __init__(self, message: str, outcomes: dict[int, Outcome] | None = None) -> None:
        super().__init__(message)
        self.outcomes = outcomes or {}


class Pool:
    """A job of real processes, started by the first call and again by the first call after a failure.

    A call that fails ends the processes: a worker that left a collective half way would spoil the next test.
    Each worker builds a `replicast.Strategy`; with a number as `strategy`, one of TensorFlow's with that many
    devices: `MultiWorkerMirroredStrategy`, for one worker `MirroredStrategy`. Without, functions get None.
    """

    def __init__(
        self, size: int, directory: Path, *, strategy: bool | int = True, grace_secs: float = 20.0
    ) -> None:
        self.size = size
        self._directory = directory
        self._strategy = strategy
        self._grace_secs = grace_secs
        self._starts = 0
        self._workers: list[WorkerProcess] = []
        self._ports = contextlib.ExitStack()

    def run(
        self, function: Callable[..., Any], *args: Any, deadline_secs: float = CALL_SECS, **kwargs: Any
    ) -> list[Any]:
        """What `function(strategy, *args, **kwargs)` returns on every worker, or `WorkerFailed`."""
        __tracebackhide__ = True
        return self._begin([Call(function, args, kwargs)] * self.size, deadline_secs)()

    def begin(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[], list[Any]]:
        """As `run`, for another pool to run beside this one; call what comes back for the results."""
        return self._begin([Call(function, args, kwargs)] * self.size, CALL_SECS)

    def run_each(
        self,
        function: Callable[..., Any],
        per_worker_args: Sequence[Iterable[Any]],
        *,
        deadline_secs: float = CALL_SECS,
    ) -> list[Any]:
        """Calls `function(strategy, *per_worker_args[rank])` on every worker, otherwise as `run`."""
        __tracebackhide__ = True
        if len(per_worker_args) != self.size:
            raise ValueError(f"{self.size} workers need as many arguments. Received: {len(per_worker_args)}")
        return self._begin([Call(function, tuple(args)) for args in per_worker_args], deadline_secs)()

    def stop(self) -> None:
        """Lets the workers leave by themselves, as at the end of a script, with exit code 0."""
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.connection.close()
        until = time.monotonic() + LEAVE_SECS
        problems = {worker: worker.leave(until) for worker in workers}
        self._ports.close()
        sections = [
            f"--- worker {worker.rank} {problem}\n{_log(worker)}"
            for worker, problem in problems.items()
            if problem is not None
        ]
        if sections:
            raise WorkerFailed("\n".join(["The pool did not end well.", *sections]))

    def kill(self) -> None:
        """Ends the workers at once. The next call starts new ones."""
        for worker in self._workers:
            worker.kill()
        self._workers = []
        self._ports.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.stop()
        else:
            self.kill()

    def _begin(self, calls: list[Call], deadline_secs: float) -> Callable[[], list[Any]]:
        __tracebackhide__ = True
        messages = [pickle.dumps(call) for call in calls]  # what cannot be sent to all is sent to none
        if not self._workers:
            self._start()
        for worker, message in zip(self._workers, messages, strict=True):
            worker.send(message)
        function = calls[0].function
        return partial(self._gather, f"{function.__module__}.{function.__qualname__}", deadline_secs)

    def _start(self) -> None:
        __tracebackhide__ = True
        self._starts += 1
        directory = self._directory / f"start-{self._starts}"
        directory.mkdir(parents=True)
        ports = self._ports.enter_context(held_ports(self.size))
        for rank in range(self.size):
            self._workers.append(WorkerProcess(rank, ports, directory, strategy=self._strategy))
        self._gather("The start of the pool", START_SECS)

    def _gather(self, what: str, deadline_secs: float) -> list[Any]:
        __tracebackhide__ = True
        started = time.monotonic()
        try:
            outcomes = _outcomes(self._workers, deadline_secs, self._grace_secs)
            values = [outcome.value for outcome in outcomes.values() if isinstance(outcome, Returned)]
            if len(values) == self.size:
                return values
            report = _report(self._workers, outcomes)
        except BaseException:  # Ctrl-C: the workers are in the middle of something
            self.kill()
            raise
        self.kill()
        summary = f"{what} failed on {self.size} workers after {time.monotonic() - started:.1f} s."
        raise WorkerFailed(f"{summary}\n{report}", outcomes)


def _outcomes(workers: list[WorkerProcess], deadline_secs: float, grace_secs: float) -> dict[int, Outcome]:
    outcomes: dict[int, Outcome] = {}
    waiting = list(workers)
    ends = time.monotonic() + deadline_secs
    while waiting and time.monotonic() < ends:
        wait([worker.connection for worker in waiting], timeout=0.1)
        for worker in list(waiting):
            outcome = worker.receive()
            if outcome is None:
                continue
            outcomes[worker.rank] = outcome
            waiting.remove(worker)
            if isinstance(outcome, Raised):
                ends = min(ends, time.monotonic() + grace_secs)
            elif isinstance(outcome, Died):
                ends = min(ends, time.monotonic() + SETTLE_SECS)
    for worker in waiting:
        outcomes[worker.rank] = Stuck(worker.stacks())
    return dict(sorted(outcomes.items()))


def _report(workers: list[WorkerProcess], outcomes: dict[int, Outcome]) -> str:
    sections = []
    first_to_raise: dict[str, int] = {}
    for worker in workers:
        name = f"--- worker {worker.rank}"
        match outcomes[worker.rank]:
            case Returned():
                sections.append(f"{name} returned")
            case Raised(traceback) if traceback in first_to_raise:
                sections.append(f"{name} raised the same as worker {first_to_raise[traceback]}")
            case Raised(traceback):
                first_to_raise[traceback] = worker.rank
                sections.append(f"{name} raised\n{traceback}{_log(worker)}")
            case Died(how):
                sections.append(f"{name} {how}\n{_log(worker)}")
            case Stuck(stacks):
                sections.append(f"{name} was still running; its threads stood at\n{stacks}{_log(worker)}")
    return "\n".join(sections)


def _log(worker: WorkerProcess) -> str:
    return f"--- worker {worker.rank}, end of its log {worker.log}\n{worker.log_tail()}"
