"""A training that survives crashes: kill a worker with -9, and it still ends with the same weights.

replicast run -n 2 --max-restarts 3 --run-dir runs/restart examples/restart.py

The launcher restarts all workers when one dies. The same command resumes a run that was stopped.
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import replicast
from replicast.update.digest import digest_state

keras.utils.set_random_seed(1)
tf.config.experimental.enable_op_determinism()  # So that repeated steps give the same bits.
strategy = replicast.Strategy()

digits = load_digits()
images, labels = digits.images.astype("float32") / 16.0, digits.target

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8)),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy")

replicas = replicast.Replicas(model)
restored = replicas.restore()  # The last checkpoint of the run directory; None if there is none yet.
if restored is not None:
    print(f"resumes after step {restored.step}")
saving = replicas.callback(save_every=20)  # Steps; or a datetime.timedelta, or "epoch".

# `fit` resumes at the batch after the checkpoint, also in the middle of an epoch.
model.fit(images, labels, batch_size=64, epochs=10, callbacks=[saving], verbose=2)

print(f"trained {replicas.step} steps")
print("digest of the weights:", digest_state({weight.path: weight.numpy() for weight in model.weights}))
