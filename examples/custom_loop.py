"""The same training with a custom training loop instead of `fit`.

python examples/custom_loop.py                  one process
replicast run -n 2 examples/custom_loop.py      two workers on this machine
"""

import keras
import tensorflow as tf
from sklearn.datasets import load_digits

import replicast
from replicast.update.digest import digest_state

BATCH = 64

keras.utils.set_random_seed(1)
strategy = replicast.Strategy()

digits = load_digits()
images, labels = digits.images.astype("float32") / 16.0, digits.target
batches = tf.data.Dataset.from_tensor_slices((images, labels)).shuffle(len(images), seed=1)
batches = strategy.experimental_distribute_dataset(batches.batch(BATCH, drop_remainder=True))

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8)),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10),
        ]
    )
    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)

per_example_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")


def step(images, labels):
    """One worker's part of a step. The optimizer sums the gradients of all workers."""
    with tf.GradientTape() as tape:
        # Divide by the global batch size, so that the sum over the workers is the mean over the batch.
        loss = tf.reduce_sum(per_example_loss(labels, model(images, training=True))) / BATCH
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@tf.function  # One graph for the whole step: without it, every operation is dispatched separately.
def distributed_step(images, labels):
    return strategy.reduce("SUM", strategy.run(step, args=(images, labels)), axis=None)


for epoch in range(5):
    for batch_images, batch_labels in batches:
        loss = distributed_step(batch_images, batch_labels)
    print(f"epoch {epoch + 1}: loss of the last batch {float(loss):.3f}")

print("digest of the weights:", digest_state({weight.path: weight.numpy() for weight in model.weights}))
