"""Small Keras trainings of every kind that people do: each a function of a strategy that returns its history.

Stock Keras code, as one writes it for one process. `RECIPES` are compared with one process, number by number;
`NOISY` have randomness or statistics that depend on how a batch is divided: only the replicas are compared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.pool.checks import digest, state

ROWS, FEATURES, CLASSES = 150, 12, 4

Recipe = Callable[[Any], tuple[keras.Model, dict[str, list[float]]]]
RECIPES: dict[str, Recipe] = {}
NOISY: dict[str, Recipe] = {}


def trained(strategy: Any, name: str) -> dict[str, Any]:
    """Runs a recipe on a worker; what comes back can be compared between workers."""
    recipe = {**RECIPES, **NOISY}[name]
    model, history = recipe(strategy)
    return {"history": history, "digest": digest(model), "state": state(model)}


def same_numbers(recipe: Recipe) -> Recipe:
    RECIPES[recipe.__name__] = recipe
    return recipe


def noisy(recipe: Recipe) -> Recipe:
    NOISY[recipe.__name__] = recipe
    return recipe


def arrays(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(7)
    x = random.normal(size=(rows, FEATURES)).astype("float32")
    y = np.argmax(x[:, :CLASSES] + 0.3 * random.normal(size=(rows, CLASSES)), axis=1)
    return x, y.astype("int32")


def batches(batch_size: int = 32) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices(arrays()).shuffle(ROWS, seed=3).batch(batch_size)


def perceptron(
    strategy: Any,
    optimizer: Callable[[], Any] = lambda: keras.optimizers.SGD(0.1),
    extra: tuple[Callable[[], keras.Layer], ...] = (),
    **options: Any,
) -> keras.Model:
    with strategy.scope():
        hidden = [make() for make in extra]
        layers = [keras.layers.Dense(16, activation="tanh"), *hidden, keras.layers.Dense(CLASSES)]
        model = keras.Sequential([keras.Input((FEATURES,)), *layers])
        options.setdefault("metrics", ["accuracy"])
        model.compile(optimizer(), keras.losses.SparseCategoricalCrossentropy(from_logits=True), **options)
    return model


def fitted(model: keras.Model, *args: Any, **options: Any) -> tuple[keras.Model, dict[str, list[float]]]:
    options.setdefault("epochs", 2)
    return model, model.fit(*args, verbose=0, **options).history


class Batches(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        rows = slice(index * 31, min(ROWS, (index + 1) * 31))
        return tuple(part[rows] for part in arrays())


def endless() -> Any:
    x, y = arrays()
    while True:
        for first in range(0, ROWS, 25):
            yield x[first : first + 25], y[first : first + 25]


def finite() -> Any:
    x, y = arrays()
    for first in range(0, ROWS, 40):
        yield x[first : first + 40], y[first : first + 40]


@same_numbers
def dict_inputs_and_several_outputs(strategy: Any) -> Any:
    x, y = arrays()
    with strategy.scope():
        left, right = keras.Input((4,), name="left"), keras.Input((8,), name="right")
        both = keras.layers.Concatenate()([keras.layers.Dense(8)(left), keras.layers.Dense(8)(right)])
        outputs = {
            "kind": keras.layers.Dense(CLASSES, activation="softmax", name="kind")(both),
            "size": keras.layers.Dense(1, name="size")(both),
        }
        model = keras.Model({"left": left, "right": right}, outputs)
        losses = {"kind": "sparse_categorical_crossentropy", "size": "mse"}
        model.compile("adam", losses, loss_weights={"kind": 1.0, "size": 0.3}, metrics={"kind": "accuracy"})
    inputs = {"left": x[:, :4], "right": x[:, 4:]}
    # Batches that divide: Keras itself counts every batch of a per-output loss the same, whatever its rows.
    return fitted(model, inputs, {"kind": y, "size": x.sum(axis=1)}, batch_size=30)


@same_numbers
def embedding(strategy: Any) -> Any:
    """Sparse gradients, of a different length on each worker."""
    x, y = arrays()
    words = np.abs((x * 40).astype("int32")) % 100
    with strategy.scope():
        layers = [
            keras.layers.Embedding(100, 8),
            keras.layers.GlobalAveragePooling1D(),
            keras.layers.Dense(4),
        ]
        model = keras.Sequential([keras.Input((FEATURES,), dtype="int32"), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(0.01), loss, metrics=["accuracy"])
    return fitted(model, words, y, batch_size=31)


def recurrent(strategy: Any, layer: Callable[[], keras.Layer]) -> Any:
    x, y = arrays()
    with strategy.scope():
        model = keras.Sequential([keras.Input((6, 2)), layer(), keras.layers.Dense(CLASSES)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return fitted(model, x.reshape(-1, 6, 2), y, batch_size=31)


@same_numbers
def several_steps_per_execution_with_an_embedding(strategy: Any) -> Any:
    with strategy.scope():
        layers = [keras.layers.Embedding(100, 8), keras.layers.Flatten(), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((FEATURES,), dtype="int32"), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, steps_per_execution=4)
    x, y = arrays()
    return fitted(model, np.abs((x * 40).astype("int32")) % 100, y, batch_size=31)


@same_numbers
def loss_that_is_a_sum(strategy: Any) -> Any:
    model = perceptron(strategy, lambda: keras.optimizers.SGD(0.001))
    with strategy.scope():
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
        model.compile(keras.optimizers.SGD(0.001), loss)
    fitted(model, *arrays(), batch_size=30)
    return model, {}  # Keras multiplies a summed loss by the number of replicas before it reports it


@same_numbers
def loss_that_returns_a_number(strategy: Any) -> Any:
    """Keras divides such a loss by no number of replicas; nor does it count rows."""

    def loss(y: Any, y_pred: Any) -> Any:
        return keras.ops.mean(keras.losses.sparse_categorical_crossentropy(y, y_pred, from_logits=True))

    model = perceptron(strategy)
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.1), loss)
    return fitted(model, *arrays(), batch_size=31)


class PlainTrainStep(keras.Model):
    """A train_step written as for one process: the mean of its own rows."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(CLASSES)

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            losses = keras.losses.sparse_categorical_crossentropy(y, self(x, training=True), from_logits=True)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"mean": loss}


@same_numbers
def plain_train_step(strategy: Any) -> Any:
    with strategy.scope():
        model = PlainTrainStep()
        model.compile(keras.optimizers.SGD(0.1))
    return fitted(model, *arrays(), batch_size=150)


@same_numbers
def convolution_and_residuals_on_fewer_rows_than_workers(strategy: Any) -> Any:
    """The last batch has one row, the first fit has only one: layers that fail on no rows at all."""
    images = np.random.default_rng(1).normal(size=(17, 8, 8, 3)).astype("float32")
    with strategy.scope():
        inputs = keras.Input((8, 8, 3))
        x = keras.layers.MaxPooling2D()(keras.layers.Conv2D(4, 3, activation="relu")(inputs))
        x = keras.layers.Dense(6)(keras.layers.Flatten()(keras.layers.Conv2D(4, 2)(x)))
        x = keras.layers.Add()([x, keras.layers.Dense(6)(x)])
        model = keras.Model(inputs, keras.layers.Dense(1)(x))
        model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
    targets = images.mean(axis=(1, 2, 3))
    first = model.fit(images[:1], targets[:1], verbose=0).history
    history = model.fit(images, targets, batch_size=8, shuffle=False, verbose=0).history
    scores = model.evaluate(images[:1], targets[:1], verbose=0)
    predictions = [model.predict(images[:n], batch_size=8, verbose=0).tolist() for n in (1, 9, 17)]
    return model, {
        **history,
        "first": first["mae"],
        "scores": scores[1:],
        **{f"predictions {place}": rows for place, rows in enumerate(predictions)},
    }


@same_numbers
def metrics_with_state(strategy: Any) -> Any:
    x, y = arrays()
    with strategy.scope():
        model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1, activation="sigmoid")])
        metrics = [keras.metrics.AUC(), keras.metrics.Precision(), "accuracy"]
        model.compile("adam", "binary_crossentropy", metrics=metrics)
    return fitted(model, x, (y > 1).astype("float32"), batch_size=31, validation_split=0.2)


class Distance(keras.Model):
    """A subclassed model with a train_step of its own, as in Keras' guide."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = keras.layers.Dense(8, activation="tanh")
        self.out = keras.layers.Dense(CLASSES)
        self.error = keras.metrics.Mean(name="error")

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(y=y, y_pred=y_pred)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        self.error.update_state(tf.abs(y_pred[:, 0]))
        return {"error": self.error.result(), "norm": tf.reduce_mean(y_pred**2)}


@same_numbers
def custom_train_step(strategy: Any) -> Any:
    with strategy.scope():
        model = Distance()
        model.compile(keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return fitted(model, *arrays(), batch_size=50)


class TwoOptimizers(keras.Model):
    """As a GAN: a train_step that trains its halves with an optimizer each."""

    def __init__(self) -> None:
        super().__init__()
        self.lower, self.upper = keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(CLASSES)

    def compile(self, lower: Any, upper: Any, **options: Any) -> None:
        super().compile(**options)
        self.lower_optimizer, self.upper_optimizer = lower, upper

    def call(self, x: Any) -> Any:
        return self.upper(self.lower(x))

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape(persistent=True) as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        for optimizer, layer in ((self.lower_optimizer, self.lower), (self.upper_optimizer, self.upper)):
            gradients = tape.gradient(loss, layer.trainable_variables)
            optimizer.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))
        return {"norm": tf.reduce_mean(tf.abs(self(x)))}


@same_numbers
def two_optimizers(strategy: Any) -> Any:
    with strategy.scope():
        model = TwoOptimizers()
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        optimizers = keras.optimizers.SGD(0.1, global_clipnorm=0.05), keras.optimizers.Adam(0.01)
        model.compile(*optimizers, loss=loss)
    return fitted(model, *arrays(), batch_size=31, epochs=1)


@same_numbers
def several_calls_of_train_on_batch(strategy: Any) -> Any:
    """Each worker passes rows of its own: together they are the batch."""
    model = perceptron(strategy)
    x, y = arrays(120)
    rank, size = getattr(strategy, "rank", 0), getattr(strategy, "size", 1)
    losses = []
    for first in range(0, 120, 30):
        rows = slice(first + 30 * rank // size, first + 30 * (rank + 1) // size)
        losses.append(float(model.train_on_batch(x[rows], y[rows], return_dict=True)["loss"]))
    return model, {"loss": losses}


@same_numbers
def evaluate_and_predict(strategy: Any) -> Any:
    model = perceptron(strategy, lambda: keras.optimizers.Adam(0.01))
    x, y = arrays()
    model.fit(x, y, batch_size=31, verbose=0)
    scores = model.evaluate(x, y, batch_size=37, verbose=0, return_dict=True)
    predictions = model.predict(x, batch_size=43, verbose=0)
    assert predictions.shape == (ROWS, CLASSES)
    return model, {"scores": list(scores.values()), "predictions": predictions.tolist()}


@noisy
def convolution_with_augmentation_dropout_and_batch_normalization(strategy: Any) -> Any:
    random = np.random.default_rng(1)
    images, labels = random.normal(size=(61, 8, 8, 1)).astype("float32"), random.integers(0, 3, 61)
    with strategy.scope():
        layers = [
            keras.layers.RandomFlip("horizontal"),
            keras.layers.Conv2D(4, 3),
            keras.layers.BatchNormalization(),
            keras.layers.ReLU(),
            keras.layers.Dropout(0.2),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
        model = keras.Sequential([keras.Input((8, 8, 1)), *layers])
        model.compile(
            "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"]
        )
    return fitted(model, images, labels, batch_size=15, validation_split=0.2)


def with_policy(strategy: Any, policy: str) -> Any:
    keras.config.set_dtype_policy(policy)
    return fitted(perceptron(strategy, lambda: keras.optimizers.Adam(0.01)), *arrays(), batch_size=31)


@noisy
def mixed_float16_that_overflows_on_one_worker_only(strategy: Any) -> Any:
    """The last rows of each batch are too large for float16: only the last worker sees infinity."""
    keras.config.set_dtype_policy("mixed_float16")
    x, y = arrays(120)
    x[24::30] *= 1e6
    model = perceptron(strategy, lambda: keras.optimizers.Adam(0.01))
    fitted(model, x, y, batch_size=30, shuffle=False)
    scale = float(model.optimizer.dynamic_scale.numpy())
    assert scale < model.optimizer.initial_scale, "it did not overflow"
    return model, {"scale": [scale]}  # the loss is NaN, everywhere


def of_a_perceptron(
    optimizer: Callable[[], Any] = lambda: keras.optimizers.SGD(0.1),
    data: Callable[[], Any] = arrays,
    compiled: dict[str, Any] | None = None,
    **options: Any,
) -> Recipe:
    """A perceptron, trained with these options of `fit`: a function makes one anew each time."""

    def recipe(strategy: Any) -> Any:
        given, model = data(), perceptron(strategy, optimizer, **(compiled or {}))
        made = {name: option() if callable(option) else option for name, option in options.items()}
        return fitted(model, *(given if isinstance(given, tuple) else (given,)), **made)

    return recipe


def stops_early() -> keras.callbacks.Callback:
    return keras.callbacks.EarlyStopping("val_loss", patience=1, min_delta=0.2, restore_best_weights=True)


def averaging() -> keras.optimizers.Optimizer:
    return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=4)


def decaying() -> keras.optimizers.Optimizer:
    return keras.optimizers.AdamW(keras.optimizers.schedules.CosineDecay(0.02, 8), weight_decay=0.01)


SGD, ADAM = keras.optimizers.SGD, keras.optimizers.Adam
CLASS_WEIGHTS = {0: 1.0, 1: 3.0, 2: 0.5, 3: 1.0}
RECIPES |= {
    "sgd_on_arrays": of_a_perceptron(batch_size=30, shuffle=False),
    "adam_on_arrays": of_a_perceptron(lambda: ADAM(0.01), batch_size=30),
    # Batches of 31, 31, 31, 31, 26: no part of it divides by 2 and 3.
    "batches_that_do_not_divide": of_a_perceptron(batch_size=31, shuffle="batch"),
    # The last batch has one row: all workers but one have none.
    "a_last_batch_smaller_than_the_job": of_a_perceptron(
        data=lambda: arrays(91), batch_size=30, shuffle=False, epochs=3
    ),
    "sample_weights": of_a_perceptron(
        compiled={"weighted_metrics": ["accuracy"]},
        sample_weight=lambda: np.linspace(0.1, 2.0, ROWS).astype("float32"),
        batch_size=31,
    ),
    "tf_data": of_a_perceptron(data=batches),
    "tf_data_of_fixed_batches": of_a_perceptron(
        data=lambda: batches(30).unbatch().batch(50, drop_remainder=True)
    ),
    "tf_data_of_unknown_length": of_a_perceptron(data=lambda: batches().filter(lambda x, y: True), epochs=3),
    "infinite_dataset": of_a_perceptron(data=lambda: batches().repeat(), steps_per_epoch=4, epochs=3),
    "py_dataset": of_a_perceptron(data=Batches, shuffle=False),
    "generator": of_a_perceptron(data=endless, steps_per_epoch=6),
    "generator_that_ends": of_a_perceptron(data=finite, epochs=1),
    "class_weights": of_a_perceptron(class_weight=CLASS_WEIGHTS, batch_size=31),
    "class_weights_on_a_dataset": of_a_perceptron(data=batches, class_weight=CLASS_WEIGHTS),
    "validation_split": of_a_perceptron(validation_split=0.3, batch_size=31),
    "validation_data": of_a_perceptron(data=batches, validation_data=lambda: batches(29), validation_freq=2),
    "gru": lambda s: recurrent(s, lambda: keras.layers.GRU(8)),
    "lstm": lambda s: recurrent(s, lambda: keras.layers.LSTM(8)),
    "several_steps_per_execution": of_a_perceptron(
        compiled={"steps_per_execution": 3}, batch_size=31, epochs=3
    ),
    "gradient_accumulation": of_a_perceptron(
        lambda: ADAM(0.01, gradient_accumulation_steps=3), batch_size=31, epochs=3
    ),
    "exponential_moving_average": of_a_perceptron(averaging, batch_size=31),
    "learning_rate_schedule_and_weight_decay": of_a_perceptron(decaying, batch_size=31),
    "clipping_by_norm": of_a_perceptron(lambda: SGD(0.5, clipnorm=0.1), batch_size=31),
    "clipping_by_global_norm": of_a_perceptron(lambda: SGD(0.5, global_clipnorm=0.1), batch_size=31),
    "clipping_by_value": of_a_perceptron(lambda: SGD(0.5, clipvalue=0.01), batch_size=31),
    "regularizer": of_a_perceptron(
        compiled={"extra": (lambda: keras.layers.Dense(8, kernel_regularizer=keras.regularizers.L2(0.1)),)},
        batch_size=31,
    ),
    "frozen_layer": of_a_perceptron(
        compiled={"extra": (lambda: keras.layers.Dense(16, trainable=False),)}, batch_size=31
    ),
    "eager_steps": of_a_perceptron(compiled={"run_eagerly": True}, batch_size=75),
    "early_stopping": of_a_perceptron(validation_split=0.3, batch_size=31, epochs=9, callbacks=stops_early),
    "plateau": of_a_perceptron(
        callbacks=lambda: keras.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=1.0, factor=0.5),
        batch_size=31,
        epochs=5,
    ),
}
NOISY |= {
    "py_dataset_shuffled": of_a_perceptron(data=lambda: Batches(workers=2, use_multiprocessing=False)),
    "mixed_bfloat16": lambda s: with_policy(s, "mixed_bfloat16"),
    "mixed_float16": lambda s: with_policy(s, "mixed_float16"),
    "all_float16": lambda s: with_policy(s, "float16"),
}
