"""A training with the same final bits in every job of the same size, however often it is killed.

Updates come from the last worker, for the next step and for a later one (with the learning rate and a reset
of moments), from a function, and from the inbox.
A `sync` makes updates without `at_step` land at the step at which they are proposed, in every attempt. There
is no checkpoint at a step of a proposal: an attempt that starts from it would not run that line again.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

import replicast
from replicast.update.digest import digest_state

STEPS_PER_EPOCH, EPOCHS, BATCH = 24, 3, 6
SAVE_EVERY = 6
PROPOSE_AT = (2, 4)
"""Steps after a checkpoint."""

keras.utils.set_random_seed(7)
tf.config.experimental.enable_op_determinism()
strategy = replicast.Strategy()
with strategy.scope():
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
    )
    model.compile(keras.optimizers.Adam(0.05), "mse")
replicas = replicast.Replicas(model)
replicas.restore()
features = np.random.default_rng(3).normal(size=(STEPS_PER_EPOCH * BATCH, 3)).astype("float32")


def halved(values: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {"dense/kernel": values["dense/kernel"] * np.float32(0.5)}


class Corrections(keras.callbacks.Callback):
    """Proposes at the same steps in every attempt."""

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        step = replicas.step
        if step % SAVE_EVERY == PROPOSE_AT[0] and replicas.rank == replicas.size - 1:
            later = replicast.Update(note="for later", reset_slots=True)
            later = later.add("dense_1/bias", np.full(1, step, "float32"))
            replicas.propose(later.scale("optimizer/learning_rate", 0.9), at_step=step + 5)
            replicas.propose(replicast.Update(note="for now").scale("dense/kernel", 0.9))
        if step % (2 * SAVE_EVERY) == PROPOSE_AT[1]:
            replicas.propose(halved, source=0)
        if step % SAVE_EVERY in PROPOSE_AT:
            replicas.sync()


model.fit(
    features,
    features[:, :1],
    batch_size=BATCH,
    epochs=EPOCHS,
    verbose=0,
    callbacks=[replicas.callback(save_every=SAVE_EVERY), Corrections()],
)
values = {variable.path: variable.numpy() for variable in model.variables}
values |= {f"optimizer/{variable.path}": variable.numpy() for variable in model.optimizer.variables}
assert replicas.run_dir is not None
final = replicas.run_dir / f"final-{replicas.rank}.txt"
final.write_text(f"{replicas.step} {digest_state(values)}\n")
