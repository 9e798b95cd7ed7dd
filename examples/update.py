"""Two updates of all replicas during training, each proposed by one worker.

python examples/update.py                    one process
replicast run -n 2 examples/update.py        two workers on this machine
"""

import keras
from sklearn.datasets import load_digits

import replicast
from replicast.update.digest import digest_state

keras.utils.set_random_seed(1)
strategy = replicast.Strategy()

digits = load_digits()
images, labels = digits.images.astype("float32") / 16.0, digits.target

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8)),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax", name="digits"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy")

replicas = replicast.Replicas(model)
corrector = min(1, replicas.size - 1)  # Worker 1, or worker 0 in a job with one worker.
last = replicas.size - 1
tickets = []


def centred_bias(values):
    """Runs on one worker, between two steps, on the current weights. All workers apply what it returns."""
    bias = values["digits/bias"]
    print(f"worker {replicas.rank}: the bias has drifted by {bias.mean():+.5f} on average")
    return replicast.Update(note="centre the drifted bias").assign("digits/bias", bias - bias.mean())


class Changes(keras.callbacks.Callback):
    """Proposes updates during training; no worker waits here."""

    def on_epoch_begin(self, epoch, logs=None):
        if epoch == 2:  # All workers propose the function, so that each has a ticket; one of them runs it.
            tickets.append(replicas.propose(centred_bias, source=corrector))
        if epoch == 3 and replicas.rank == last:
            slower = replicast.Update(note="slower from here").scale("optimizer/learning_rate", 0.5)
            tickets.append(replicas.propose(slower))


model.fit(images, labels, batch_size=64, epochs=5, callbacks=[replicas.callback(), Changes()])

# All proposals are settled when `fit` returns: result() returns the receipt, or raises the error.
for ticket in tickets:
    print(f"worker {replicas.rank} has the receipt of {ticket.id}: step {ticket.result(timeout=30).step}")
for receipt in replicas.history:  # The same on every worker, no matter which one proposed.
    by_worker = ", ".join(f"worker {worker}: {digest[:8]}" for worker, digest in receipt.digests.items())
    print(f"update {receipt.sequence} at step {receipt.step}, digests: {by_worker}")

print(f"learning rate: {float(model.optimizer.learning_rate.numpy()):g}")
print("digest of the weights:", digest_state({weight.path: weight.numpy() for weight in model.weights}))
