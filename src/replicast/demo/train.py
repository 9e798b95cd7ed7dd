"""Trains a classifier of handwritten digits on several workers. `replicast demo` runs it; copy it for yours.

replicast run -n 2 --max-restarts 1 --run-dir runs/first train.py

At step 100 worker 1 adds 0.05 to one weight matrix of every replica. With --assign it does so the usual way,
which changes only its own replica.
"""

import argparse
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import replicast

BATCH, STEPS_PER_EPOCH = 128, 10
CHANGE_STEP = 100
DELTA = np.full((64, 32), 0.05, "float32")
SAVE_EVERY = 200
REPORT_EVERY = 50

parser = argparse.ArgumentParser()
parser.add_argument("--assign", action="store_true", help="worker 1 changes only its own replica")
parser.add_argument("--epochs", type=int, default=60)
options = parser.parse_args()

keras.utils.set_random_seed(1)
tf.config.experimental.enable_op_determinism()  # So that steps repeated after a restart give the same bits.
strategy = replicast.Strategy()

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((64,)),
            keras.layers.Dense(32, activation="relu", name="hidden"),
            keras.layers.Dense(10, activation="softmax", name="digits"),
        ],
        name="classifier",
    )
    model.compile(keras.optimizers.Adam(0.005), "sparse_categorical_crossentropy")

replicas = replicast.Replicas(model)
replicas.restore()  # After a restart: the last checkpoint. Does nothing at the beginning.
tickets: list[Any] = []


def after_step(batch: int, logs: Any) -> None:
    """Runs on every worker after each training step."""
    if replicas.rank == 1:
        change_a_weight()
    if replicas.step % REPORT_EVERY == 0:
        print(f"step {replicas.step}", flush=True)


def change_a_weight() -> None:
    """Adds to the weights of the hidden layer, once. Runs on worker 1 only."""
    if options.assign and replicas.step == CHANGE_STEP:
        model.get_layer("hidden").kernel.assign_add(DELTA)  # Changes this replica and no other.
    if not options.assign and replicas.step == CHANGE_STEP // 2:
        update = replicast.Update(note="by worker 1").add("hidden/kernel", DELTA)
        # The default is the next possible step. A fixed step makes the runs of the demo comparable.
        tickets.append(replicas.propose(update, at_step=CHANGE_STEP))


if options.assign:  # No audits during training, as in a job without replicast.
    boundaries = replicas.callback(audit_every=None)
else:
    boundaries = replicas.callback(save_every=SAVE_EVERY)

digits = load_digits()
images = (digits.data / 16).astype("float32")[: BATCH * STEPS_PER_EPOCH]
labels = digits.target[: BATCH * STEPS_PER_EPOCH]

model.fit(
    images,
    labels,
    batch_size=BATCH,  # Of the whole job: each worker takes its share.
    epochs=options.epochs,
    callbacks=[boundaries, keras.callbacks.LambdaCallback(on_train_batch_end=after_step)],
    verbose=0,
)

for ticket in tickets:  # On worker 1. Every proposal has its outcome at the end of `fit`.
    receipt = ticket.result(timeout=30)
    print(f"update {receipt.sequence}: applied at step {receipt.step}, digests {receipt.digests}")
report = replicas.audit(on_divergence="warn")  # Compares every bit of all replicas, the optimizer's too.
if replicas.rank == 0:
    print(report)
