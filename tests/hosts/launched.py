"""A training that `replicast run` starts on several hosts: the same final bits whatever disturbs it.

Its argument is a directory for notes. It saves every 20 steps. Its last worker proposes an update at step 30
and another one, for step 70, at step 31; worker 0 proposes one at step 44. At step 50 it notes its pid, and
stays there while `hold-ATTEMPT` exists, so that whatever shall disturb it does so in the middle.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import replicast
from replicast.update.digest import digest_state

STEPS_PER_EPOCH, EPOCHS, BATCH, SAVE_EVERY = 40, 3, 12, 20
notes = Path(sys.argv[1])
attempt = os.environ["REPLICAST_ATTEMPT"]

keras.utils.set_random_seed(7)
tf.config.experimental.enable_op_determinism()
strategy = replicast.Strategy()
with strategy.scope():
    layers = [keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.01), "mse")
replicas = replicast.Replicas(model)
replicas.restore()
began_at = replicas.step


def note(name: str, text: object) -> None:
    path = notes / f"new-{replicas.rank}"
    path.write_text(str(text))
    path.rename(notes / f"{name}-{replicas.rank}")


class Moments(keras.callbacks.Callback):
    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(0.02)
        step, is_last = replicas.step, replicas.rank == replicas.size - 1
        bias = np.full(1, 0.5, "float32")
        if step == 30 and is_last:
            replicas.propose(replicast.Update(note="now").add("dense_1/bias", bias))
        if step == 31 and is_last:
            replicas.propose(replicast.Update(note="later").scale("dense/kernel", 0.9), at_step=70)
        if step == 44 and replicas.rank == 0:
            replicas.propose(replicast.Update(note="replayed").add("dense_1/bias", -bias))
        if step in (30, 31, 44):
            replicas.sync()  # so that all are decided at these steps in every job
        if step == 50:
            note(f"pid-{attempt}", os.getpid())
        while step == 50 and (notes / f"hold-{attempt}").exists():
            time.sleep(0.02)


features = np.random.default_rng(3).normal(size=(STEPS_PER_EPOCH * BATCH, 8)).astype("float32")
model.fit(
    features,
    features[:, :1],
    batch_size=BATCH,
    epochs=EPOCHS,
    verbose=0,
    callbacks=[replicas.callback(save_every=SAVE_EVERY), Moments()],
)
values = {variable.path: variable.numpy() for variable in model.variables}
values |= {f"optimizer/{variable.path}": variable.numpy() for variable in model.optimizer.variables}
np.savez(
    notes / f"values-{replicas.rank}.npz", **{path.replace("/", ":"): array for path, array in values.items()}
)
note("final", f"from {began_at} to {replicas.step} in attempt {attempt}: {digest_state(values)}")
