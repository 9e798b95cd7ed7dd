"""Every metric has the value of plain Keras, whatever its `update_state` does with its rows."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import ops

from tests.pool import Pool
from tests.pool.scripts import equal_on_all
from tests.scripts.compare import assert_same_as_plain_keras, weights

CLASSES = 3
ARGUMENTS: dict[str, dict[str, Any]] = {
    "BinaryIoU": {"target_class_ids": [0, 1]},
    "IoU": {"num_classes": CLASSES, "target_class_ids": [0, 2]},
    "MeanIoU": {"num_classes": CLASSES},
    "OneHotIoU": {"num_classes": CLASSES, "target_class_ids": [0, 2]},
    "OneHotMeanIoU": {"num_classes": CLASSES},
    "PrecisionAtRecall": {"recall": 0.6},
    "RecallAtPrecision": {"precision": 0.4},
    "SensitivityAtSpecificity": {"specificity": 0.6},
    "SpecificityAtSensitivity": {"sensitivity": 0.6},
    "TopKCategoricalAccuracy": {"k": 2},
    "SparseTopKCategoricalAccuracy": {"k": 2},
    "MeanMetricWrapper": {"fn": keras.losses.mean_absolute_error},
}
NO_METRICS = {"Metric", "Mean", "Sum"}
"""The base class, and those that take values instead of targets and predictions."""
SPARSE = {"SparseCategoricalAccuracy", "SparseTopKCategoricalAccuracy", "SparseCategoricalCrossentropy"}
LABELS = {"IoU", "MeanIoU"}


def classes_of_keras() -> dict[str, Any]:
    """Every class in keras.metrics that takes targets and predictions."""
    found = vars(keras.metrics).items()
    return {name: kind for name, kind in found if inspect.isclass(kind) and name not in NO_METRICS}


class Of(keras.layers.Layer):
    """Updates every metric of Keras as a model would, with targets and predictions that suit each."""

    def __init__(self) -> None:
        super().__init__()
        self.found = [kind(**ARGUMENTS.get(name, {})) for name, kind in classes_of_keras().items()]
        self.mean, self.sum = (
            keras.metrics.Mean(name="mean_of_values"),
            keras.metrics.Sum(name="sum_of_values"),
        )

    def update(self, targets: Any, scores: Any, weight: Any) -> None:
        for name, metric in zip(classes_of_keras(), self.found, strict=True):
            expected, given = targets, scores
            if name in SPARSE:
                expected = ops.argmax(targets, axis=-1)
            elif name in LABELS:
                expected, given = ops.argmax(targets, axis=-1), ops.argmax(scores, axis=-1)
            elif name == "BinaryIoU":
                expected, given = targets[:, :1], scores[:, :1]
            metric.update_state(expected, given, sample_weight=weight)
        self.mean.update_state(scores[:, 0], sample_weight=weight)
        self.sum.update_state(scores[:, 1])


class Measured(keras.Model):
    """A model whose step updates every metric of Keras."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.of = keras.layers.Dense(CLASSES, "softmax"), Of()

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def test_step(self, data: Any) -> Any:
        x, y, weight = data
        self.of.update(y, self(x), weight)
        return {metric.name: metric.result() for metric in self.of.metrics}


def labelled(rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(3)
    x = random.normal(size=(rows, 5)).astype("float32")
    y = np.eye(CLASSES, dtype="float32")[random.integers(CLASSES, size=rows)]
    return x, y, random.uniform(0.2, 2.0, size=rows).astype("float32")


def all_of_keras(strategy: Any) -> Any:
    with strategy.scope():
        model = Measured()
        model.compile(run_eagerly=strategy.size == 1)  # each trace of all metrics takes seconds
    batches = tf.data.Dataset.from_tensor_slices(labelled(21)).batch(7, drop_remainder=True)  # one trace
    return model.evaluate(batches, return_dict=True, verbose=0)


def test_every_metric_of_keras_has_the_value_of_plain_keras(pool2: Pool, plain: Pool) -> None:
    """Batches of 7 rows on two workers: 3 and 4 rows."""
    found = assert_same_as_plain_keras(pool2, plain, all_of_keras)
    assert len(found) == len(classes_of_keras()) + 2


class Maximum(keras.metrics.Metric):
    """The largest error so far."""

    def __init__(self, name: str = "maximum", aggregation: str = "sum") -> None:
        super().__init__(name=name)
        self.value = self.add_variable((), "zeros", aggregation=aggregation, name="value")
        self.updates = self.add_variable((), "zeros", name="updates", dtype="int32")
        self.seen = self.add_variable((), "zeros", name="seen", dtype="bool")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        error = ops.abs(ops.cast(y_true, "float32") - y_pred)
        if sample_weight is not None:
            error = error * ops.expand_dims(sample_weight, -1)
        self.value.assign(ops.maximum(self.value, ops.max(error)))
        self.updates.assign_add(1)
        self.seen.assign(True)

    def result(self) -> Any:
        return {
            "largest": self.value + 0.0,
            "updates": self.updates + 0,
            "seen": ops.cast(self.seen, "int32"),
        }


class Both(keras.metrics.Metric):
    """Consists of metrics: one of Keras and one of its own."""

    def __init__(self) -> None:
        super().__init__(name="both")
        self.error, self.largest = keras.metrics.MeanSquaredError(), Maximum("inner")

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        self.error.update_state(y_true, y_pred, sample_weight)
        self.largest.update_state(y_true, y_pred, sample_weight)

    def result(self) -> Any:
        return self.error.result() + self.largest.result()["largest"]

    def reset_state(self) -> None:
        self.error.reset_state()
        self.largest.reset_state()


class Confusion(keras.metrics.MeanIoU):
    """As many write it: classes from scores, and then what Keras does."""

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        super().update_state(ops.argmax(y_true, -1), ops.argmax(y_pred, -1), sample_weight)


def correlation(y_true: Any, y_pred: Any) -> Any:
    """One number for all rows."""
    a, b = y_true - ops.mean(y_true, axis=0), y_pred - ops.mean(y_pred, axis=0)
    return ops.sum(a * b) / ops.sqrt(ops.sum(a * a) * ops.sum(b * b))


class Tracked(keras.Model):
    """Tracks scalars: a loss, which is a mean over rows, with a metric of Keras and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = keras.layers.Dense(CLASSES)
        self.loss_mean, self.own, self.direct = keras.metrics.Mean("own_loss"), Loudest(), Assigned()

    def call(self, x: Any) -> Any:
        return self.dense(x)

    def train_step(self, data: Any) -> Any:
        x, y, _ = data
        with tf.GradientTape() as tape:
            loss = ops.mean(ops.square(self(x) - y))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        self.loss_mean.update_state(loss)
        self.own.update_state(loss)
        self.direct.average.assign(loss)
        return {"mean": self.loss_mean.result(), "loudest": self.own.result(), "direct": self.direct.result()}


class Loudest(keras.metrics.Metric):
    def __init__(self) -> None:
        super().__init__(name="loudest")
        self.value = self.add_variable((), "zeros", name="value")

    def update_state(self, value: Any) -> None:
        self.value.assign(ops.maximum(self.value, value))

    def result(self) -> Any:
        return self.value + 0.0


class Assigned(keras.metrics.Metric):
    """A step assigns its variable without `update_state`: its aggregation says what that means."""

    def __init__(self) -> None:
        super().__init__(name="assigned")
        self.average = self.add_variable((), "zeros", aggregation="mean", name="average")

    def result(self) -> Any:
        return self.average + 0.0


def of_the_user(strategy: Any, eagerly: bool) -> Any:
    x, y, weight = labelled(10 if eagerly else 28)  # with a short last batch where that costs no trace
    with strategy.scope():
        model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(CLASSES, "softmax")])
        model.compile(
            keras.optimizers.SGD(0.1),
            "mse",
            metrics=[
                Maximum(),
                Maximum("by_mean", "mean"),
                Both(),
                Confusion(CLASSES),
                correlation,
                keras.losses.Dice(),
                "mae",
            ],
            weighted_metrics=[Maximum("weighted")],
            run_eagerly=eagerly,
        )
    options = {"batch_size": 7, "shuffle": False, "verbose": 0}
    history = model.fit(x, y, sample_weight=weight, epochs=2, **options).history
    evaluated = model.evaluate(x, y, batch_size=7, return_dict=True, verbose=0)
    with strategy.scope():
        tracked = Tracked()
        tracked.compile(keras.optimizers.SGD(0.1), run_eagerly=eagerly)
    tracks = tracked.fit(x, y, sample_weight=weight, epochs=2, **options).history
    return {"history": history, "evaluated": evaluated, "tracks": tracks, "weights": weights(model)}


@pytest.mark.parametrize("eagerly", [False, True])
def test_a_metric_of_the_user_is_updated_from_the_rows_of_all_workers(
    eagerly: bool, pool2: Pool, plain: Pool
) -> None:
    assert_same_as_plain_keras(pool2, plain, of_the_user, eagerly)


@equal_on_all("pool2")
def test_a_step_needs_one_transfer_and_another_one_for_metrics_that_see_all_rows(strategy: Any) -> None:
    found = {}
    x, y, weight = labelled(21)
    for name, metrics in {
        "of Keras": ["mae", "mse", keras.metrics.AUC()],
        "own": [Maximum(), Both()],
    }.items():
        with strategy.scope():
            model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(CLASSES, "softmax")])
            model.compile("sgd", "mse", metrics=metrics, weighted_metrics=["mae"])
        model.fit(x, y, batch_size=7, sample_weight=weight, verbose=0)
        before = strategy.extended.transfers_started()
        model.fit(x, y, batch_size=7, sample_weight=weight, verbose=0)
        found[name] = strategy.extended.transfers_started() - before
    assert found == {"of Keras": 3, "own": 6}, "of three steps"
