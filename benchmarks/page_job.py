"""The job of the page table: trains until a file appears; each worker appends (time, step) of every step."""

from __future__ import annotations

import os
import time
from pathlib import Path

import keras
import numpy as np

import replicast

strategy = replicast.Strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((784,)), keras.layers.Dense(128), keras.layers.Dense(10)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
run_dir = Path(os.environ["REPLICAST_RUN_DIR"])
replicas = replicast.Replicas(model)
values = np.random.default_rng(0)
x, y = values.normal(size=(12_800, 784)).astype("float32"), values.integers(0, 10, 12_800)


class Steps(keras.callbacks.Callback):
    """Writes down when each step has ended, and ends the training when it is told to."""

    def on_train_begin(self, logs: object = None) -> None:
        self.file = (run_dir / f"steps-{strategy.rank}").open("w", buffering=1)

    def on_train_batch_end(self, batch: int, logs: object = None) -> None:
        self.file.write(f"{time.time()}\n")

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self.model.stop_training = (run_dir / f"end-{epoch // 10}").exists()


model.fit(x, y, batch_size=128, epochs=10_000, callbacks=[replicas.callback(), Steps()], verbose=0)
