"""What a custom `train_step` does with gradients and with state of its own."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

from tests.pool import Pool
from tests.scripts.compare import assert_same_as_plain_keras, heard, same_as_plain_keras, weights


class Clipping(keras.Model):
    """Works on its gradients before it applies them, in one of several ways."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table, self.flat = layers.Embedding(40, 3), layers.Flatten()
        self.hidden, self.out = layers.Dense(6, "tanh"), layers.Dense(1)
        self.norm = keras.metrics.Mean(name="norm")

    def call(self, x: Any) -> Any:
        return self.out(self.hidden(self.flat(self.table(x))))

    def gradients(self, x: Any, y: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(y - self(x)))
        return tape.gradient(loss, self.trainable_variables)

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        found = self.gradients(x, y)
        if self.kind == "global norm":
            found, norm = tf.clip_by_global_norm(found, 0.05)
            self.norm.update_state(norm)
        elif self.kind == "norm of each":
            found = [tf.clip_by_norm(tf.convert_to_tensor(gradient), 0.05) for gradient in found]
        elif self.kind == "sharpness-aware":
            norm = tf.linalg.global_norm(found)
            steps = [0.05 * tf.convert_to_tensor(gradient) / norm for gradient in found]
            for variable, step in zip(self.trainable_variables, steps, strict=True):
                variable.assign_add(step)
            found = self.gradients(x, y)
            for variable, step in zip(self.trainable_variables, steps, strict=True):
                variable.assign_sub(step)
        elif self.kind == "through another tape":
            with tf.GradientTape() as outer:
                with tf.GradientTape() as inner:
                    loss = ops.mean(ops.square(y - self(x)))
                slope = inner.gradient(loss, self.out.kernel)
                penalized = loss + 0.1 * tf.reduce_sum(slope)
            found = outer.gradient(penalized, self.trainable_variables)
        self.optimizer.apply(found, self.trainable_variables)
        return {"norm": self.norm.result()}


def clipped(strategy: Any, kinds: dict[str, bool]) -> Any:
    random = np.random.default_rng(5)
    x = random.integers(0, 40, size=(64, 2))
    y = (x.sum(1, keepdims=True) / 20 + random.normal(size=(64, 1))).astype("float32")
    found = {}
    for kind, eager in kinds.items():
        with strategy.scope():
            keras.utils.set_random_seed(3)
            model = (AsAFunction if kind == "global norm" and not eager else Clipping)(kind)
            model.compile(keras.optimizers.Adam(0.01), run_eagerly=eager)
        history = model.fit(x, y, batch_size=32, epochs=1 + (not eager), shuffle=False, verbose=0).history
        found[kind] = {"history": history, "weights": weights(model)}
    return found


def test_gradients_that_a_step_clips_are_those_of_the_whole_batch(pool2: Pool, plain: Pool) -> None:
    kinds = dict.fromkeys(("global norm", "norm of each", "sharpness-aware", "through another tape"), False)
    assert_same_as_plain_keras(pool2, plain, clipped, kinds)


def test_a_step_that_runs_eagerly_clips_the_gradients_of_the_whole_batch(pool2: Pool, plain: Pool) -> None:
    assert_same_as_plain_keras(pool2, plain, clipped, {"global norm": True, "sharpness-aware": True})


class InAFunction(Clipping):
    """Its tape is in a function, so that its gradients stay the worker's until they are applied."""

    gradients = tf.function(Clipping.gradients)


class AsAFunction(Clipping):
    """Its step is compiled by the script, although Keras does that."""

    train_step = tf.function(Clipping.train_step)


class CountsRows(Clipping):
    """Counts the rows of a worker in an integer."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.seen = self.add_weight(shape=(), dtype="int32", trainable=False, name="seen")

    def train_step(self, batch: Any) -> Any:
        self.seen.assign_add(tf.shape(batch[0])[0])
        return super().train_step(batch)


def warned_of(strategy: Any) -> dict[str, list[str]]:
    x, y = np.arange(45).reshape(15, 3) % 40, np.ones((15, 1), "float32")
    found = {}
    for kind in (InAFunction, CountsRows, AsAFunction):
        with strategy.scope():
            model = kind("global norm")
            model.compile(keras.optimizers.SGD(0.1))
            model(x[:1])
        with heard() as said:
            model.fit(x, y, batch_size=5, verbose=0)
        found[kind.__name__] = [text for text in said if "clips" in text or "comes out" in text]
    return found


def test_clipping_of_a_worker_s_own_gradients_and_integers_that_differ_are_warned_of_once(
    pool2: Pool,
) -> None:
    first, second = pool2.run(warned_of)
    assert [text.partition(" gradients")[0] for text in first["InAFunction"]] == ["train_step clips"]
    assert ["/seen comes out of a step" in text for text in first["CountsRows"]] == [True]
    assert first["AsAFunction"] == []
    assert set(map(len, second.values())) == {0}


class PerExample(keras.Model):
    """Clips the gradient of each row by itself, as differential privacy does."""

    def __init__(self) -> None:
        super().__init__()
        self.out = layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.out(x)

    def train_step(self, batch: Any) -> Any:
        def of_one_row(row: Any) -> Any:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(row[1] - self(row[0][None])[0]))
            found, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.5)
            return found

        rows = tf.vectorized_map(of_one_row, batch)
        self.optimizer.apply([tf.reduce_mean(found, axis=0) for found in rows], self.trainable_variables)
        return {"rows": tf.constant(1.0)}


@same_as_plain_keras("pool2")
def test_gradients_of_single_rows_stay_with_their_row(strategy: Any) -> Any:
    x = np.random.default_rng(2).normal(size=(25, 3)).astype("float32")
    with strategy.scope():
        model = PerExample()
        model.compile(keras.optimizers.SGD(0.1))
        model.build((None, 3))
    model.fit(x, 2 * x.sum(1, keepdims=True), batch_size=10, epochs=2, shuffle=False, verbose=0)
    return weights(model)


class Absolute(keras.metrics.Metric):
    """A metric that is not one of Keras: it gets the rows of all workers."""

    def __init__(self) -> None:
        super().__init__(name="absolute")
        self.total = self.add_variable((), "zeros", name="total")

    def update_state(self, wanted: Any, found: Any, sample_weight: Any = None) -> None:
        self.total.assign_add(tf.reduce_sum(tf.abs(tf.cast(wanted, tf.float32) - found)))

    def result(self) -> Any:
        return self.total


class Unusual(keras.Model):
    """Steps that real scripts have, each with an own way from the tape to the optimizer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.table, self.out = layers.Embedding(10, 2), layers.Dense(1)
        self.distance = Absolute()

    def call(self, x: Any) -> Any:
        return self.out(tf.reduce_mean(self.table(x), axis=1))

    def loss_of(self, x: Any, y: Any, reduce: Any = tf.reduce_mean) -> Any:
        return reduce(tf.square(y - self(x)))

    def train_step(self, batch: Any) -> Any:
        x, y = batch
        found = getattr(self, self.kind)(x, y)
        if found is not None:
            self.optimizer.apply(found, self.trainable_variables)
        return {"distance": self.distance.result()}

    def rows_in_a_loop(self, x: Any, y: Any) -> Any:
        sums: list[Any] = [0.0] * len(self.trainable_variables)
        for row in range(x.shape[0]):
            with tf.GradientTape() as tape:
                loss = self.loss_of(x[row : row + 1], y[row : row + 1])
            found, _ = tf.clip_by_global_norm(tape.gradient(loss, self.trainable_variables), 0.1)
            sums = [total + tf.convert_to_tensor(one) for total, one in zip(sums, found, strict=True)]
        return [total / x.shape[0] for total in sums]

    def in_a_branch(self, x: Any, y: Any) -> None:
        with tf.GradientTape() as tape:
            loss = self.loss_of(x, y, tf.reduce_sum)
        found = tape.gradient(loss, self.trainable_variables)
        dense = [0.5 * tf.convert_to_tensor(one) for one in found]

        def apply() -> bool:
            self.optimizer.apply([2.0 * one for one in dense], self.trainable_variables)
            return True

        tf.cond(tf.linalg.global_norm(dense) < 1e6, apply, lambda: False)

    def own_rows_times_a_common_factor(self, x: Any, y: Any) -> list[Any]:
        with tf.GradientTape(persistent=True) as tape:
            loss = self.loss_of(x, y)
            (slices,) = tape.gradient(loss, self.table.trainable_variables)
        found = tape.gradient(loss, self.out.trainable_variables)
        factor = 1.0 / (1.0 + tf.linalg.global_norm(found))
        return [tf.IndexedSlices(slices.values * factor, slices.indices, slices.dense_shape), *found]

    def labels_of_the_share(self, x: Any, y: Any) -> None:
        self.distance.update_state(tf.ones((tf.shape(x)[0], 1)), self(x))

    def arrays_of_the_share(self, x: Any, y: Any) -> None:
        self.distance.update_state(y.numpy(), self(x).numpy())


@same_as_plain_keras("pool2")
def test_unusual_ways_from_the_tape_to_the_optimizer_and_to_metrics_give_the_numbers_of_plain_keras(
    strategy: Any,
) -> Any:
    random = np.random.default_rng(8)
    x, y = random.integers(0, 10, size=(24, 3)), random.normal(size=(24, 1)).astype("float32")
    batches = tf.data.Dataset.from_tensor_slices((x, y)).batch(8, drop_remainder=True)
    found = {}
    for kind in (
        "rows_in_a_loop",
        "in_a_branch",
        "own_rows_times_a_common_factor",
        "labels_of_the_share",
        "arrays_of_the_share",
    ):
        with strategy.scope():
            keras.utils.set_random_seed(3)
            model = Unusual(kind)
            model.compile(
                keras.optimizers.SGD(0.01),
                loss=keras.losses.MeanSquaredError(reduction="sum") if kind == "in_a_branch" else None,
                run_eagerly=kind == "arrays_of_the_share",
            )
            model(x[:1])
        history = model.fit(batches, epochs=1, verbose=0).history
        found[kind] = {"history": history, "weights": weights(model)}
    return found


class Contrast(keras.Model):
    """Keeps the last rows in a queue, as MoCo does; the rows of all workers if it gathers them."""

    def __init__(self, gather: bool) -> None:
        super().__init__(name="contrast")
        self.gather = gather
        self.encoder = layers.Dense(4)
        self.average = layers.BatchNormalization()
        self.queue = self.add_weight(shape=(20, 4), trainable=False, name="queue", initializer="zeros")

    def call(self, x: Any) -> Any:
        return self.encoder(x)

    def train_step(self, batch: Any) -> Any:
        with tf.GradientTape() as tape:
            codes = self.encoder(batch)
            loss = ops.mean(ops.square(codes[:, None] - self.queue[None]))
        loss_weights = self.encoder.trainable_variables
        self.optimizer.apply(tape.gradient(loss, loss_weights), loss_weights)
        self.average(codes, training=True)  # its running means differ, and are known as such
        rows = tf.convert_to_tensor(codes)
        if self.gather:
            rows = tf.distribute.get_replica_context().all_gather(rows, axis=0)
        self.queue.assign(ops.concatenate([rows, self.queue], axis=0)[:20])
        return {"loss": loss}


def queued(strategy: Any, gather: bool) -> Any:
    x = np.random.default_rng(4).normal(size=(48, 3)).astype("float32")
    with strategy.scope():
        keras.utils.set_random_seed(3)
        model = Contrast(gather)
        model.compile(keras.optimizers.SGD(0.1))
    with heard() as warned:
        model.fit(x, batch_size=12, epochs=2, shuffle=False, verbose=0)
    told = [text for text in warned if "comes out of a step" in text]
    return {"queue": model.queue.numpy(), "kernel": model.encoder.kernel.numpy(), "told": told}


def test_a_queue_that_each_worker_fills_from_its_own_rows_is_warned_of_once(pool2: Pool) -> None:
    first, second = pool2.run(queued, False)
    assert [text.partition(" ")[0] for text in first["told"]] == ["contrast/queue"]
    assert "all_gather" in first["told"][0]
    assert second["told"] == []


def test_a_queue_of_gathered_rows_is_that_of_plain_keras(pool2: Pool, plain: Pool) -> None:
    assert_same_as_plain_keras(pool2, plain, queued, True)
