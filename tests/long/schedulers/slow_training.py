"""A deterministic training that takes a while: 200 steps, each with a pause. Resumes."""

import sys
import time

import keras
import numpy as np
import tensorflow as tf

import replicast
from replicast.update.digest import digest_state

STEPS, PAUSE_SECS = int(sys.argv[1]), float(sys.argv[2])

keras.utils.set_random_seed(1)
tf.config.experimental.enable_op_determinism()
strategy = replicast.Strategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), keras.layers.Dense(1)])
    model.compile("adam", "mse")


class Pause(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(PAUSE_SECS)


replicas = replicast.Replicas(model)
restored = replicas.restore()
print("resumes after step", restored.step if restored is not None else None, flush=True)
x = np.random.default_rng(1).normal(size=(4 * STEPS, 4)).astype("float32")
model.fit(x, x[:, :1], batch_size=4, verbose=0, callbacks=[replicas.callback(save_every=1000), Pause()])
print(f"trained {replicas.step} steps", flush=True)
print("digest", digest_state({weight.path: weight.numpy() for weight in model.weights}), flush=True)
