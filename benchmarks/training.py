"""A training in which other operations are measured: steps of about 20 ms on a constant batch."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tensorflow as tf

from benchmarks.step_keras import custom_step
from benchmarks.step_task import StepTask

TASK = StepTask(steps=1, batch=512, units=(512,))
"""A step of this size took 12 to 28 ms on two busy cores of 2.8 GHz; the `idle` table prints its time."""


class Training:
    """The model, optimizer and step of a custom training loop."""

    def __init__(self, strategy: Any, task: StepTask = TASK) -> None:
        self._step, self.optimizer, self.model = custom_step(strategy, task)
        mine = task.batch // strategy.num_replicas_in_sync
        self._share = tuple(tf.constant(array[:mine]) for array in task.arrays())

    def step(self) -> None:
        """One step; returns when this worker has applied the gradients of all workers."""
        self._step(self._share)


class Loop:
    """Training that all workers end after the same step, which the source chooses while it runs.

    No worker can finish a step that the source has not started, because it needs the source's gradients. So
    the source writes the number of the last step before it starts that step, and all workers read it after.

    Args:
        training: The training.
        path: A file that all workers map.
        is_source: Whether this worker chooses.
    """

    def __init__(self, training: Training, path: Path, is_source: bool) -> None:
        self._training = training
        self._is_source = is_source
        self._steps = 0
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, mmap.PAGESIZE)
        self._last = memoryview(mmap.mmap(descriptor, mmap.PAGESIZE)).cast("q")
        os.close(descriptor)

    def reset(self) -> None:
        """Before `run`, while no worker runs."""
        self._steps = 0
        if self._is_source:
            self._last[0] = 0

    def run(self, boundary: Callable[[], None], enough: Callable[[int], bool]) -> None:
        """Trains until the source decides to stop.

        Args:
            boundary: Called after each step.
            enough: Called on the source after each step with the number of steps so far; true to stop.
        """
        while True:
            self._training.step()
            self._steps += 1
            boundary()
            if self._last[0] == self._steps:
                return
            if self._is_source and self._last[0] == 0 and enough(self._steps):
                self._last[0] = self._steps + 1
