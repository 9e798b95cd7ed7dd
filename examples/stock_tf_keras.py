"""`fit` of tf_keras on TensorFlow's own strategy; replicast adds the lines with (1) to (3).

replicast run -n 2 --max-restarts 3 examples/stock_tf_keras.py

Or start it as TensorFlow's tutorial does, once for each worker with its TF_CONFIG, and give `Replicas` a
`run_dir`. A worker uses all GPUs of its machine, and each is a replica.
"""

import tensorflow as tf
import tf_keras
from sklearn.datasets import load_digits

import replicast
from replicast.update.digest import digest_state

BATCH_PER_REPLICA = 16

tf_keras.utils.set_random_seed(1)
strategy = tf.distribute.MultiWorkerMirroredStrategy()
global_batch = BATCH_PER_REPLICA * strategy.num_replicas_in_sync

digits = load_digits()
images, labels = digits.images.astype("float32") / 16.0, digits.target
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(global_batch, drop_remainder=True)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
dataset = dataset.with_options(options)

with strategy.scope():
    model = tf_keras.Sequential(
        [
            tf_keras.layers.Input((8, 8)),
            tf_keras.layers.Flatten(),
            tf_keras.layers.Dense(32, activation="relu", name="hidden"),
            tf_keras.layers.Dense(10, name="out"),
        ]
    )
    loss = tf_keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])

replicas = replicast.Replicas(model)  # (1)
replicas.restore()  # (2)
saving = replicas.callback(save_every="epoch", audit_every=5)  # (3)

model.fit(dataset, epochs=2, callbacks=[saving], verbose=2)

print("digest of the weights:", digest_state({weight.name: weight.numpy() for weight in model.weights}))
