"""The job of the restart table: two workers with a state of 100 MB, one of which kills itself once with -9.

Run by `replicast run -m`, with the path of its notes as the argument: lines with the name of an event and a
time of `time.monotonic_ns`, which is the same clock in all processes of a machine. It trains until a
checkpoint is durable, and then kills a worker.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import keras
import numpy as np

import replicast
from benchmarks.checkpoint_restart import FIRST_STEP, KILLED

UNITS = 2880
"""Weights and both moments of Adam: 3 x 2880 x 2880 float32."""
BATCH = 32
SAVE_AT = 3
MOST_STEPS = 10_000


class Story(keras.callbacks.Callback):
    """Notes the first step; kills a worker once the checkpoint is durable."""

    def __init__(self, replicas: replicast.Replicas, notes: Path, restarted: bool) -> None:
        super().__init__()
        self._replicas = replicas
        self._notes = notes
        self._restarted = restarted
        self._steps = 0

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self._steps += 1
        last = self._replicas.rank == self._replicas.size - 1
        if self._steps == 1 and last:
            self._note(FIRST_STEP)
        if self._restarted:
            self.model.stop_training = True
            return
        if self._replicas.step == SAVE_AT:
            self._replicas.save()
        if last and self._is_saved():
            self._note(KILLED)
            os.kill(os.getpid(), signal.SIGKILL)

    def _is_saved(self) -> bool:
        """Whether a checkpoint is durable: worker 0 writes it in the background."""
        return any((self._notes.parent / "run" / "checkpoints").glob("*/manifest.json"))

    def _note(self, word: str) -> None:
        with self._notes.open("a") as file:
            file.write(f"{word} {time.monotonic_ns()}\n")


def main() -> None:
    keras.utils.set_random_seed(1)
    strategy = replicast.Strategy()
    with strategy.scope():
        model = keras.Sequential([keras.Input((UNITS,)), keras.layers.Dense(UNITS, use_bias=False)])
        model.compile("adam", "mse")
    replicas = replicast.Replicas(model)
    restarted = replicas.restore() is not None
    x = np.random.default_rng(0).standard_normal((BATCH, UNITS), dtype=np.float32)
    callbacks = [replicas.callback(), Story(replicas, Path(sys.argv[1]), restarted)]
    model.fit(x, x, batch_size=BATCH, epochs=MOST_STEPS, verbose=0, callbacks=callbacks)


if __name__ == "__main__":
    main()
