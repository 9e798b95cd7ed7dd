"""Train a small classifier of handwritten digits: stock Keras 3 and one extra line.

python examples/train.py                     one process
replicast run -n 2 examples/train.py         two workers on this machine
"""

import keras
from sklearn.datasets import load_digits

import replicast
from replicast.update.digest import digest_state

keras.utils.set_random_seed(1)
strategy = replicast.Strategy()  # The extra line. Without TF_CONFIG, a job with one worker.

digits = load_digits()
images, labels = digits.images.astype("float32") / 16.0, digits.target
train, test = slice(0, 1500), slice(1500, None)

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8)),
            keras.layers.Flatten(),
            keras.layers.Dense(64, activation="relu"),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])

# batch_size is the global batch size: each worker takes its share of every batch.
model.fit(images[train], labels[train], batch_size=64, epochs=5, validation_data=(images[test], labels[test]))

loss, accuracy = model.evaluate(images[test], labels[test], verbose=0)
print(f"accuracy on unseen digits: {accuracy:.3f}")

# Not needed for training: shows that every worker ends with the same weights, bit for bit.
print("digest of the weights:", digest_state({weight.path: weight.numpy() for weight in model.weights}))
