"""Workers that compute different functions are refused before the first step."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import replicast
from replicast.coordination import MemoryCoordination
from replicast.training.functions import Functions, Step
from tests.pool import Pool

FEATURES = 12


class Forest(keras.layers.Layer):
    """Uses some of the features, drawn once, as keras.io's decision forests do."""

    def __init__(self, drawn: Callable[[np.ndarray], Any] = np.asarray, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.used_features_mask = drawn(np.random.rand(FEATURES, 20).round().astype("float32"))

    def call(self, x: Any) -> Any:
        return keras.ops.matmul(x, self.used_features_mask)


def model_with(strategy: Any, layer: keras.layers.Layer, **compiled: Any) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([keras.Input((FEATURES,)), layer, keras.layers.Dense(1)], name="wood")
        model.compile("sgd", "mse", **compiled)
    return model


def data(rows: int = 16) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(5)
    return random.normal(size=(rows, FEATURES)).astype("float32"), random.normal(size=(rows, 1))


USES: dict[str, Callable[[keras.Model], Any]] = {
    "fit": lambda model: model.fit(*data(), batch_size=16, verbose=0),
    "evaluate": lambda model: model.evaluate(*data(), verbose=0),
    "predict": lambda model: model.predict(data()[0], verbose=0),
    "train_on_batch": lambda model: model.train_on_batch(*data()),
    "datasets": lambda model: model.fit(tf.data.Dataset.from_tensor_slices(data()).batch(8), verbose=0),
}


def refused(use: str, model: keras.Model) -> str:
    before = [weight.copy() for weight in model.get_weights()]
    with pytest.raises(replicast.NotSupported) as refusal:
        USES[use](model)
    np.testing.assert_equal(model.get_weights(), before)
    return str(refusal.value)


def unseeded(strategy: Any) -> dict[str, str]:
    """Each worker draws its own mask, as without a seed; in every use of a model, and in every form."""
    np.random.seed(strategy.rank)
    messages = {use: refused(use, model_with(strategy, Forest(name="tree"))) for use in USES}
    messages["captured"] = refused("fit", model_with(strategy, Forest(tf.constant, name="tree")))
    in_a_loop = model_with(strategy, Forest(tf.constant, name="tree"), steps_per_execution=2)
    return {**messages, "in a loop": refused("datasets", in_a_loop)}


def test_a_constant_that_differs_between_workers_is_refused_before_the_first_step(pool3: Pool) -> None:
    found = pool3.run(unseeded)
    for messages in found:
        assert messages == found[0]
        for message in messages.values():
            assert "not the same on worker 0 and worker 1, 2 (" in message
            assert re.search(r"constant or captured tensor that 'wood\w*/tree\w*/MatMul' uses", message)
            assert "keras.utils.set_random_seed(n)" in message
    assert "A predict_step of 'wood'" in found[0]["predict"]


class Own(keras.layers.Layer):
    """Differs between workers; what of it differs is the matter of each test."""

    def __init__(self, compute: Callable[[Any], Any]) -> None:
        super().__init__(name="own")
        self.compute = compute
        self.traces = 0

    def call(self, x: Any) -> Any:
        self.traces += 1
        return self.compute(x)


def other_operations(strategy: Any) -> str:
    own = Own(lambda x: keras.ops.tanh(x) if strategy.rank else x)
    return refused("fit", model_with(strategy, own))


def test_an_operation_that_only_one_worker_has_is_refused(pool2: Pool) -> None:
    for message in pool2.run(other_operations):
        assert re.search(r"they differ in the operation 'wood\w*/", message)


def allowed(strategy: Any) -> int:
    """What may differ, or does not: none of these is refused, and no worker waits for another in vain."""
    rank = strategy.rank
    noise = np.random.default_rng(rank).normal(size=(FEATURES,)).astype("float32")

    def prints(x: Any) -> Any:
        if rank == 0:
            tf.print(tf.reduce_mean(x) + noise[0], output_stream="file:///dev/null")
        return x

    def own_number(x: Any) -> Any:
        context = tf.distribute.get_replica_context()  # None while Keras builds the model
        return x if context is None else x + tf.cast(context.replica_id_in_sync_group, x.dtype)

    keras.utils.set_random_seed(7)
    same_draw = Forest(name="tree")
    np.random.seed(rank)
    layers = {
        "seeded": same_draw,
        "declared": Forest(replicast.per_worker, name="tree"),
        "declared while tracing": Own(lambda x: x + replicast.per_worker(noise)),
        "rank declared": Own(lambda x: x * tf.cast(replicast.per_worker(rank + 1), x.dtype)),
        "printed by worker 0": Own(prints),
        "number in the job": Own(own_number),
        "unseeded noise": Own(lambda x: x + tf.random.normal(tf.shape(x), seed=rank + 1)),
    }
    for layer in layers.values():
        model = model_with(strategy, layer)
        for use in ("fit", "evaluate", "predict"):
            USES[use](model)
    uneven = Own(lambda x: x * 2.0)
    # Shares of 2 and 3 rows, then of 2 and 2: only worker 1 traces again.
    model_with(strategy, uneven).fit(*data(9), batch_size=5, verbose=0)
    return uneven.traces


def test_what_may_differ_is_not_refused_and_one_worker_may_trace_alone(pool2: Pool) -> None:
    of_first, of_second = pool2.run(allowed)
    assert of_first < of_second


Compute = Callable[[tf.Tensor], Any]


class Job:
    """Two workers in one process that have met for a function, and trace it again: nobody waits."""

    def __init__(self) -> None:
        self.store = MemoryCoordination.Store()
        self.counter = tf.Variable(0)
        self.meetings: list[int] = []
        self.workers = [self.worker(rank) for rank in range(2)]
        for rank in range(2):
            self.trace(rank, lambda x: x)
        assert self.meetings == [0, 1]

    def worker(self, rank: int) -> Functions:
        def meet(message: str) -> dict[int, str]:
            self.meetings.append(rank)
            return {rank: message}

        turns: Any = SimpleNamespace(meet=meet, position=lambda: (0, 0))
        return Functions(rank, MemoryCoordination(self.store), turns, self.counter)

    def function(self) -> None:
        """What Keras keeps of a step."""

    def trace(
        self, worker: int, compute: Compute, rows: int = 4, *, transfer: bool = True, of_keras: bool = True
    ) -> None:
        def step(x: tf.Tensor) -> Any:
            begun = Step.begin("step", Job.function if of_keras else None, (x,))
            if transfer:
                self.counter.assign_add(1)
            outputs = compute(x)
            self.workers[worker].compare(begun, outputs)
            return outputs

        tf.function(step).get_concrete_function(tf.TensorSpec([rows, 3]))

    def difference(self, first: Compute, second: Compute, rows: tuple[int, int] = (4, 4)) -> str:
        self.trace(0, first, rows[0])
        try:
            self.trace(1, second, rows[1])
        except replicast.NotSupported as refusal:
            return str(refusal)
        finally:
            assert self.meetings == [0, 1]
        return ""


def plus(value: Any) -> Compute:
    constant = np.asarray(value)
    return lambda x: x + tf.constant(constant, x.dtype)


NORMAL = np.random.default_rng(1).normal(size=(3,))


def test_a_later_trace_is_compared_by_the_worker_that_traces_last_and_nobody_waits() -> None:
    message = Job().difference(plus(NORMAL), plus(NORMAL[::-1]))
    assert "A step that is not the same on worker 0 and worker 1" in message
    assert "'add' uses" in message
    assert Job().difference(plus(NORMAL), plus(NORMAL)) == ""


def test_a_custom_loop_warns_because_its_constants_may_be_the_data_of_a_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job()
    job.trace(0, plus(NORMAL), of_keras=False)
    job.trace(1, plus(NORMAL[::-1]), of_keras=False)
    (message,) = caplog.messages
    assert "not the same on worker 0 and worker 1" in message
    assert "replicast.per_worker(value)" in message


def test_a_function_without_a_transfer_is_not_compared_because_one_worker_may_run_it_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    job = Job()
    job.trace(0, plus(NORMAL), transfer=False, of_keras=False)
    job.trace(1, plus(-NORMAL), transfer=False, of_keras=False)
    assert job.store.values == {}
    assert caplog.messages == []


def test_rounding_of_another_processor_is_no_difference() -> None:
    large = np.random.default_rng(2).normal(size=(100_000, 3)).astype("float32")
    other = np.nextafter(large, np.float32(9))
    assert not np.array_equal(large, other)

    def summed(table: np.ndarray) -> Compute:
        return lambda x: x + tf.reduce_sum(tf.constant(table), axis=0)

    assert Job().difference(summed(large), summed(other)) == ""
    other = large.copy()
    other[77_777, 1] += 1.0
    assert "differ in a constant" in Job().difference(summed(large), summed(other))
    mask = np.array([0.0, -np.inf, np.nan])
    assert Job().difference(plus(mask), plus(mask)) == ""
    assert "differ" in Job().difference(plus(mask), plus(mask[::-1]))


def test_values_that_depend_on_the_rows_of_a_share_are_no_difference() -> None:
    def by_rows(x: tf.Tensor) -> Any:
        rows = x.shape[0]
        scaled = x * tf.constant([1.0 * rows, 2.0 * rows, 3.0 * rows]) / tf.constant([1.0 / rows] * 3)
        shifted = scaled + tf.constant([rows + 1.0, rows + 5.0, rows + 2.0])
        return tf.reshape(shifted, [rows * 3, 1]) + tf.ones((rows * 3, 1)) * float(np.log(rows))

    assert Job().difference(by_rows, by_rows, (2, 3)) == ""
    message = Job().difference(
        lambda x: by_rows(x + tf.constant(NORMAL, x.dtype)),
        lambda x: by_rows(x + tf.constant(-NORMAL, x.dtype)),
        (2, 3),
    )
    assert "differ in a constant" in message


def test_captured_tensors_functions_and_branches_are_compared_and_names_are_not() -> None:
    table, other = tf.constant(np.tile(NORMAL, 100)), tf.constant(np.tile(NORMAL + 1, 100))

    def looks_up(table: tf.Tensor, name: str) -> Compute:
        @tf.function
        def inner(x: tf.Tensor) -> Any:
            return tf.cond(tf.reduce_sum(x) > 0, lambda: x + tf.cast(table[:3], x.dtype), lambda: x)

        def compute(x: tf.Tensor) -> Any:
            with tf.name_scope(name):
                return inner(x)

        return compute

    assert Job().difference(looks_up(table, "one"), looks_up(table, "another")) == ""
    assert "differ in a constant or captured tensor" in Job().difference(
        looks_up(table, "one"), looks_up(other, "one")
    )
    assert "differ in the operation" in Job().difference(
        lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x + 1.0, lambda: x),
        lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x - 1.0, lambda: x),
    )


class Fixed(keras.layers.Layer):
    """Written for batches of 8 rows."""

    def call(self, x: Any) -> Any:
        return tf.reshape(x, [8, FEATURES])


def notes_of_errors(strategy: Any) -> dict[str, tuple[str, list[str]]]:
    """The errors of steps that fail when they are traced, and of steps that fail when they run."""
    x, y = data()
    pairs = tf.data.Dataset.from_tensor_slices((x, y))
    rows = tf.data.Dataset.from_tensor_slices(x)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    cases = {
        "arrays": lambda model: model.fit(x, y, batch_size=8, verbose=0),
        "static shapes": lambda model: model.fit(pairs.batch(8, drop_remainder=True), verbose=0),
        "running": lambda model: model.fit(pairs.batch(8), verbose=0),
        "evaluating": lambda model: model.evaluate(pairs.batch(8), verbose=0),
        "predicting": lambda model: model.predict(rows.batch(8), verbose=0),
        "of a callback": lambda model: model.fit(x, y, batch_size=16, verbose=0, callbacks=[failing]),
        "not divided": lambda model: model.fit(pairs.batch(4).with_options(options), verbose=0),
    }
    failing = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: int("a batch"))
    found = {}
    for name, use in cases.items():
        with pytest.raises((ValueError, tf.errors.InvalidArgumentError)) as raised:
            use(model_with(strategy, Fixed()))
        notes = [note for note in getattr(raised.value, "__notes__", []) if "replicast" in note]
        found[name] = (str(raised.value), notes)
    return found


def test_an_error_about_shapes_says_that_the_batch_was_divided(pool2: Pool) -> None:
    for worker, found in enumerate(pool2.run(notes_of_errors)):
        assert found.pop("of a callback")[1] == []
        assert found.pop("not divided")[1] == []
        for message, notes in found.values():
            assert "shape" in message.lower()  # TensorFlow's own words
            assert [f"of 8 rows, worker {worker} has 4" in note for note in notes] == [True], (message, notes)
