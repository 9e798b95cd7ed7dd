"""The contestants of the `idle` table: one training, with boundaries and without."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import replicast
from benchmarks.runner import Implementation, Times, lasted
from benchmarks.training import Training

CALLS = 20_000
STEPS = 50
_training = functools.cache(Training)


class Without(Implementation):
    """Steps without boundaries, in a process without `Replicas`."""

    def setup(self) -> None:
        self.training = _training(self.group)

    def check(self, rounds: int) -> None:
        """There are no weights to check: nothing is changed."""

    def arrange(self, index: int) -> None:
        self.training.step()

    def round(self, index: int) -> Times:
        return lasted(_each(STEPS, self.training.step))


class With(Without):
    """The same steps of the same model, with a boundary after each. Each turn creates its `Replicas`."""

    def arrange(self, index: int) -> None:
        # With a run directory, to which the background threads write the status of the job.
        run_dir = self.task.directory / f"run-{type(self).__name__}-{index}"
        self.replicas = replicast.Replicas(
            self.training.model, optimizer=self.training.optimizer, run_dir=run_dir
        )
        self._step()

    def round(self, index: int) -> Times:
        time_ns = self._measured()
        self.replicas.close()
        return lasted(time_ns)

    def _measured(self) -> int:
        return _each(STEPS, self._step)

    def _step(self) -> None:
        self.training.step()
        self.replicas.boundary()


class Boundaries(With):
    """Only boundaries, many thousands of them."""

    def _measured(self) -> int:
        before = self.replicas.step
        time_ns = _each(CALLS, self.replicas.boundary)
        if self.replicas.step - before != CALLS:
            raise RuntimeError(f"{self.replicas.step - before} boundaries instead of {CALLS}")
        return time_ns


def _each(times: int, act: Callable[[], Any]) -> int:
    """The mean time of one, in nanoseconds."""
    start = time.monotonic_ns()
    for _ in range(times):
        act()
    return (time.monotonic_ns() - start) // times
