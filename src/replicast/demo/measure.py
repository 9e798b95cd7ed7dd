"""What the workers of `replicast bench` run: each measures, and writes its times to a file of its own.

Run by `replicast run -m replicast.demo.measure BYTES ROUNDS`; the files are in the run directory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import replicast
from replicast.config import RUN_DIR
from replicast.demo import WARM_UP, figures_file
from replicast.update.update import Update

VARIABLES = 20
RESULT_SECS = 120.0


class Weights(keras.Model):  # type: ignore[misc]
    """Variables `part_0`, `part_1` and so on, initially zero."""

    def __init__(self, count: int, shape: tuple[int, ...], net: keras.Model | None = None) -> None:
        super().__init__(name="weights")
        self.parts = [
            self.add_weight(shape=shape, initializer="zeros", trainable=False, name=f"part_{number}")
            for number in range(count)
        ]
        self.net = net
        self.built = True

    def call(self, inputs: Any) -> Any:
        """Does nothing."""
        return inputs


def adding(changes: Iterable[Any]) -> Update:
    """The changes of all variables as an update."""
    update = Update()
    for number, change in enumerate(changes):
        update = update.add(f"part_{number}", change)
    return update


class Measures:
    """The measures of one worker, on one state."""

    def __init__(self, strategy: Any, nbytes: int) -> None:
        self._strategy = strategy
        shape = (max(1, nbytes // 4 // VARIABLES),)
        with strategy.scope():
            model = Weights(VARIABLES, shape)
        self._replicas = replicast.Replicas(model)
        self._replicas.training_begins()
        self._array = np.ones((VARIABLES, *shape), np.float32)
        self._copy = np.zeros_like(self._array)
        self._tensors = [tf.constant(part) for part in self._array]
        self._reduce: Any = tf.function(lambda tensors: strategy.run(_sum, args=(tensors,)))
        self._meet: Any = tf.function(lambda: strategy.run(_sum, args=([tf.ones([])],)))

    def measure(self, tell: Callable[[str, float], None]) -> None:
        """Measures everything once. All workers begin each measure together."""
        tell("copy", self._timed(lambda: np.copyto(self._copy, self._array)))
        tell("all-reduce", self._timed(lambda: self._reduce(self._tensors)))
        tell("update", self._update())
        self._checkpoint(tell)
        tell("audit", self._timed(self._replicas.audit))

    def close(self) -> None:
        """Leaves the job together with the other workers."""
        self._replicas.close()

    def _timed(self, act: Callable[[], Any]) -> float:
        self._meet()
        start = time.perf_counter()
        act()
        return time.perf_counter() - start

    def _update(self) -> float:
        """Worker 0 proposes while all wait at the boundary; its receipt has the time of the last to apply."""
        proposed = adding(self._array) if self._replicas.rank == 0 else None
        self._meet()
        ticket = self._replicas.propose(proposed) if proposed is not None else None
        self._replicas.training_ends()
        return ticket.result(RESULT_SECS).propose_to_applied_secs if ticket is not None else 0.0

    def _checkpoint(self, tell: Callable[[str, float], None]) -> None:
        self._replicas.boundary()  # a checkpoint of another step
        self._meet()
        start = time.perf_counter()
        saving = self._replicas.save()
        tell("checkpoint-stall", time.perf_counter() - start)
        saving.result(RESULT_SECS)
        tell("checkpoint", time.perf_counter() - start)


def _sum(tensors: list[Any]) -> Any:
    # all_reduce refuses an argument of a tf.function, which has no device yet; identity copies nothing.
    placed = [tf.identity(tensor) for tensor in tensors]
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, placed)


def main(nbytes: int, rounds: int) -> None:
    """Measures in a round to warm up, and in all others."""
    strategy = replicast.Strategy()
    with figures_file(Path(os.environ[RUN_DIR]), strategy.rank).open("w", buffering=1) as file:
        measures = Measures(strategy, nbytes)
        for number in range(WARM_UP, rounds):

            def tell(name: str, secs: float, number: int = number) -> None:
                file.write(json.dumps({"name": name, "round": number, "secs": secs}) + "\n")

            measures.measure(tell)
        measures.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
