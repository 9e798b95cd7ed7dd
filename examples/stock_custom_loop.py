"""A custom training loop on TensorFlow's own strategy; replicast adds the lines with (1) to (3).

replicast run -n 2 examples/stock_custom_loop.py

Or start it as TensorFlow's tutorial does, once for each worker with its TF_CONFIG, and give `Replicas` a
`run_dir`. A worker uses all GPUs of its machine, and each is a replica.
"""

import tensorflow as tf
from sklearn.datasets import load_digits

import replicast
from replicast.update.digest import digest_state

BATCH_PER_REPLICA = 16
EPOCHS = 2

strategy = tf.distribute.MultiWorkerMirroredStrategy()
global_batch = BATCH_PER_REPLICA * strategy.num_replicas_in_sync

digits = load_digits()
images, labels = digits.images.reshape(-1, 64).astype("float32") / 16.0, digits.target
dataset = tf.data.Dataset.from_tensor_slices((images, labels)).batch(global_batch, drop_remainder=True)
options = tf.data.Options()
options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
dataset = strategy.experimental_distribute_dataset(dataset.with_options(options))


class Perceptron(tf.Module):
    """Two dense layers."""

    def __init__(self):
        super().__init__()
        uniform = tf.random.stateless_uniform
        self.hidden = tf.Variable(uniform((64, 32), seed=(1, 2), minval=-0.2, maxval=0.2))
        self.hidden_bias = tf.Variable(tf.zeros(32))
        self.out = tf.Variable(uniform((32, 10), seed=(3, 4), minval=-0.2, maxval=0.2))
        self.out_bias = tf.Variable(tf.zeros(10))

    def __call__(self, images):
        return tf.nn.relu(images @ self.hidden + self.hidden_bias) @ self.out + self.out_bias


with strategy.scope():
    model = Perceptron()


def replica_step(images, labels):
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images))
        loss = tf.nn.compute_average_loss(losses, global_batch_size=global_batch)
    gradients = tape.gradient(loss, model.trainable_variables)
    context = tf.distribute.get_replica_context()
    for weight, gradient in zip(model.trainable_variables, gradients, strict=True):
        weight.assign_sub(0.5 * context.all_reduce("SUM", gradient))
    return loss


@tf.function
def train_step(batch):
    return strategy.reduce("SUM", strategy.run(replica_step, args=batch), axis=None)


replicas = replicast.Replicas(model, audit_every=5, on_divergence="heal")  # (1)
replicas.restore()  # (2)

for epoch in range(EPOCHS):
    for batch in dataset:
        loss = train_step(batch)
        replicas.boundary(logs={"loss": loss})  # (3)
    print(f"epoch {epoch + 1}: loss of the last batch {float(loss):.3f}")

print("digest of the weights:", digest_state(replicas.read(["hidden", "hidden_bias", "out", "out_bias"])))
