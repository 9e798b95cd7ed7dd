"""A two-tower recommender: rows of a table are corrected while two workers train, and a kill changes nothing.

replicast run -n 2 --max-restarts 3 --run-dir runs/recommender examples/recommender.py

Kill a worker with -9 while it trains: the run ends with the same weights, to the last bit. Live rows:

replicast pull runs/recommender items/embeddings --rows 500:520 -o rows.npy
"""

import keras
import numpy as np
import tensorflow as tf

import replicast
from replicast.update.digest import digest_state

USERS, ITEMS, WIDTH, CLICKS, BATCH = 20_000, 100_000, 32, 25_600, 256
SPAM = np.arange(500, 520)  # items whose clicks were bought

keras.utils.set_random_seed(1)
tf.config.experimental.enable_op_determinism()  # So that repeated steps give the same bits.
strategy = replicast.Strategy()

random = np.random.default_rng(0)
users, items = random.integers(0, USERS, CLICKS), random.integers(0, ITEMS, CLICKS)
clicked = (users % 7 == items % 7).astype("float32")

with strategy.scope():
    user, item = (keras.Input((), dtype="int32", name=name) for name in ("user", "item"))
    taste = keras.layers.Embedding(USERS, WIDTH, name="users")(user)
    content = keras.layers.Embedding(ITEMS, WIDTH, name="items")(item)
    match = keras.layers.Dot(1)([keras.layers.Dense(WIDTH)(taste), content])
    model = keras.Model([user, item], keras.layers.Activation("sigmoid")(match))
    # Moments of the rows of a batch only. A step costs what these rows cost, however large the tables are.
    model.compile(replicast.optimizers.LazyAdam(0.01), "binary_crossentropy")

replicas = replicast.Replicas(model)
restored = replicas.restore()  # The last checkpoint of the run directory; None if there is none yet.
if restored is not None:
    print(f"resumes after step {restored.step}")

if replicas.rank == replicas.size - 1:
    # One worker proposes, all of them apply it after step 70. A restarted script proposes it again; the id
    # makes that the same update, which is applied once.
    correction = replicast.Update(id="no-spam", note="bought clicks", reset_slots=True)
    correction = correction.assign_rows("items/embeddings", SPAM, np.zeros((len(SPAM), WIDTH), "float32"))
    replicas.propose(correction, at_step=70)

data = {"user": users.astype("int32"), "item": items.astype("int32")}
model.fit(data, clicked, batch_size=BATCH, epochs=2, verbose=2, callbacks=[replicas.callback(save_every=20)])

for receipt in replicas.history:  # The same on every worker.
    by_worker = ", ".join(f"worker {worker}: {digest[:8]}" for worker, digest in receipt.digests.items())
    print(f"update {receipt.sequence} at step {receipt.step}, digests: {by_worker}")
print(f"trained {replicas.step} steps")
print("digest of the weights:", digest_state({weight.path: weight.numpy() for weight in model.weights}))
