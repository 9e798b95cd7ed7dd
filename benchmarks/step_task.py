"""The task of the questions about a training step: a model, its data, and how long a turn is."""

from __future__ import annotations

import abc
import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from benchmarks.runner import Array, BaseTask, Implementation, Times, lasted

Kind = Literal["mlp", "convolution", "embedding"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTask(BaseTask):
    """What every contestant trains.

    Attributes:
        steps: Steps of one turn.
        epochs: Epochs of one turn: `fit` is called once for all of them.
        batch: Examples in a step, over all workers.
        kind: Layers of `units`; two convolutions; or the mean of some rows of a table.
        units: The widths of the hidden layers.
        table: The number of rows of the embedding's table.
        optimizer: Its name in Keras, or in replicast.
    """

    steps: int
    epochs: int = 1
    batch: int = 128
    kind: Kind = "mlp"
    units: tuple[int, ...] = (128,)
    table: int = 0
    optimizer: str = "adam"
    features: int = 784
    classes: int = 10
    words: int = 20
    width: int = 64

    def arrays(self) -> tuple[Array, Array]:
        """As many examples as one epoch needs, the same in every process."""
        random = np.random.default_rng(0)
        rows = max(1, self.steps // self.epochs) * self.batch
        labels = random.integers(0, self.classes, rows).astype(np.int32)
        if self.kind == "embedding":
            return random.integers(0, self.table, (rows, self.words)).astype(np.int32), labels
        return random.standard_normal((rows, self.features), dtype=np.float32), labels


class Training(Implementation):
    """One way to train. The figure is the mean time of a step in a turn, on the slowest worker."""

    @abc.abstractmethod
    def train(self) -> None:
        """Trains for exactly the steps of the task."""

    def trained(self) -> int | None:
        """The number of steps so far; None where nobody counts them."""
        return None

    def arrange(self, index: int) -> None:
        """Continues where the last turn ended."""

    def round(self, index: int) -> Times:
        start = time.monotonic_ns()
        self.train()
        return lasted((time.monotonic_ns() - start) // self.task.steps)

    def check(self, rounds: int) -> None:
        """Fails if a turn did not have the number of steps by which its time is divided."""
        trained = self.trained()
        if trained is not None and trained != rounds * self.task.steps:
            raise RuntimeError(f"{rounds} turns were {trained} steps instead of {rounds * self.task.steps}")
