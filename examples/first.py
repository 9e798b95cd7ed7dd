"""The training of the tutorial (docs/index.md). Its learning rate is too high: correct it while it trains.

replicast run -n 2 --max-restarts 3 --run-dir runs/first examples/first.py
replicast push runs/first --set optimizer/learning_rate=0.001 --wait
"""

import keras
from sklearn.datasets import load_digits

import replicast

keras.utils.set_random_seed(1)
strategy = replicast.Strategy()  # Instead of tf.distribute.MultiWorkerMirroredStrategy().

digits = load_digits()
x, y = digits.images.astype("float32") / 16.0, digits.target

with strategy.scope():
    model = keras.Sequential(
        [
            keras.Input((8, 8)),
            keras.layers.Flatten(),
            keras.layers.Dense(256, activation="relu", name="hidden"),
            keras.layers.Dropout(0.2),
            keras.layers.Dense(10, activation="softmax", name="digits"),
        ]
    )
    model.compile(keras.optimizers.Adam(0.05), "sparse_categorical_crossentropy", metrics=["accuracy"])

replicas = replicast.Replicas(model)  # On all workers, after compile.
replicas.restore()  # The last checkpoint, if there is one.
model.fit(x, y, batch_size=128, epochs=2000, callbacks=[replicas.callback(save_every=500)])
