"""A training on several hosts: the same final bits in every job of the same size, whatever disturbs it.

The last worker proposes one update of a variable that no step changes: the update may land at any step, and
the variable's final value says how often it was applied.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import replicast
from replicast.update.digest import digest_state
from tests.workers import changing

STEPS_PER_EPOCH, BATCH = 100, 12
EPOCHS = int(os.environ.get("EPOCHS", "3"))
SAVE_EVERY = 40
PROPOSE_AT = 95
STEP_SECS = float(os.environ.get("STEP_SECS", "0.03"))
"""A job that is over before its fault has begun shows nothing."""
CARGO = int(os.environ.get("CARGO", "1000"))
"""How many float32 values the update has."""
DRIFT_AT = int(os.environ.get("DRIFT_AT", "0"))
"""At this step the last worker changes its own replica, without replicast."""


class Cargo(keras.layers.Layer):
    """Passes its input on, and has a variable that only updates change."""

    def build(self, shape: Any) -> None:
        self.values = self.add_weight(shape=(CARGO,), initializer="zeros", trainable=False, name="values")

    def call(self, inputs: Any) -> Any:
        return inputs


keras.utils.set_random_seed(7)
tf.config.experimental.enable_op_determinism()
strategy = replicast.Strategy()
with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(16, activation="relu"),
            keras.layers.Dropout(0.2),
            Cargo(name="cargo"),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.01), "mse")
replicas = replicast.Replicas(model, run_dir=os.environ["JOB_RUN_DIR"])
replicas.restore()
reports = Path(os.environ["JOB_REPORTS"])


class Moments(keras.callbacks.Callback):
    """Proposes the update, and reports that this worker trains."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        time.sleep(STEP_SECS)
        is_last = replicas.rank == replicas.size - 1
        if replicas.step == DRIFT_AT and is_last:
            changing.flip(model, "dense/bias", (3,), bit=20)
        if replicas.step == PROPOSE_AT:
            if is_last:
                one = np.ones(CARGO, "float32")
                replicas.propose(replicast.Update(note="cargo").add("cargo/values", one))
            (reports / f"trains-{os.environ['REPLICAST_ATTEMPT']}-{replicas.rank}").touch()


features = np.random.default_rng(3).normal(size=(STEPS_PER_EPOCH * BATCH, 8)).astype("float32")
model.fit(
    features,
    features[:, :1],
    batch_size=BATCH,
    epochs=EPOCHS,
    verbose=0,
    callbacks=[replicas.callback(save_every=SAVE_EVERY, audit_every=25), Moments()],
)
values = {variable.path: variable.numpy() for variable in model.variables}
cargo = values.pop(next(path for path in values if path.endswith("cargo/values")))
values |= {f"optimizer/{variable.path}": variable.numpy() for variable in model.optimizer.variables}
final = f"{replicas.step} {digest_state(values)} cargo {cargo.min():g} to {cargo.max():g}\n"
(reports / f"final-{replicas.rank}").write_text(final)
