"""Workers that compute different functions are refused before the first step."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import replicast
from replicast.training.graphs import Functions, Step
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
            assert re.search(r"operation 'wood\w*/tree\w*/MatMul', or a constant that it uses", message)
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
    for name, layer in layers.items():
        model = model_with(strategy, layer)
        for use in ("fit", "evaluate", "predict") if name == "declared while tracing" else ("fit",):
            USES[use](model)
    uneven = Own(lambda x: x * 2.0)
    # Shares of 2 and 3 rows, then of 2 and 2: only worker 1 traces again.
    model_with(strategy, uneven).fit(*data(9), batch_size=5, verbose=0)
    return uneven.traces


def test_what_may_differ_is_not_refused_and_one_worker_may_trace_alone(pool2: Pool) -> None:
    of_first, of_second = pool2.run(allowed)
    assert of_first < of_second


Compute = Callable[[tf.Tensor], Any]


class Pair:
    """Two workers in two threads, which trace a function for the first time."""

    def __init__(self) -> None:
        self.counter = tf.Variable(0)
        self.said: dict[int, str] = {}
        self.meetings = 0
        self.barrier = threading.Barrier(2, timeout=120)

    def functions(self, rank: int) -> Functions:
        def meet(message: str) -> dict[int, str]:
            self.said[rank] = message
            if self.barrier.wait() == 0:
                self.meetings += 1
            heard = dict(sorted(self.said.items()))
            self.barrier.wait()
            return heard

        lifetime: Any = SimpleNamespace(meet=meet)
        return Functions(lifetime, self.counter)

    def trace(
        self,
        first: Compute,
        second: Compute,
        rows: tuple[int, int] = (4, 4),
        loop: str = "",
        transfer: bool = True,
    ) -> list[str]:
        """The errors of both workers."""

        def keras_function() -> None:
            """What Keras keeps of a step."""

        def traced(rank: int) -> str:
            functions = self.functions(rank)

            def step(x: tf.Tensor) -> Any:
                begun = Step.begin("step", loop or keras_function, (x,))
                if transfer:
                    self.counter.assign_add(1)
                outputs = (first, second)[rank](x)
                functions.compare(begun, outputs)
                functions.compare(begun, outputs)  # as a later trace
                return outputs

            try:
                tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec([rows[rank], 3]))
            except replicast.NotSupported as refusal:
                return str(refusal)
            return ""

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(traced, range(2)))


def difference(first: Compute, second: Compute, rows: tuple[int, int] = (4, 4)) -> str:
    of_first, of_second = Pair().trace(first, second, rows)
    assert of_first == of_second
    return of_first


def plus(value: Any) -> Compute:
    constant = np.asarray(value)
    return lambda x: x + tf.constant(constant, x.dtype)


NORMAL = np.random.default_rng(1).normal(size=(3,))


def test_the_first_trace_is_compared_and_a_later_one_is_not() -> None:
    pair = Pair()
    for message in pair.trace(plus(NORMAL), plus(NORMAL[::-1])):
        assert "A step that is not the same on worker 0 and worker 1" in message
        assert "the operation 'add', or a constant that it uses" in message
    assert pair.meetings == 2
    pair = Pair()
    assert pair.trace(plus(NORMAL), plus(NORMAL)) == ["", ""]
    assert pair.meetings == 1


def test_a_custom_loop_warns_because_its_constants_may_be_the_data_of_a_worker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert Pair().trace(plus(NORMAL), plus(NORMAL[::-1]), loop="step") == ["", ""]
    for message in caplog.messages:
        assert "not the same on worker 0 and worker 1" in message
        assert "replicast.per_worker(value)" in message
    assert len(caplog.messages) == 2  # one of each worker


def test_a_function_without_a_transfer_is_not_compared_because_one_worker_may_run_it_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    pair = Pair()
    assert pair.trace(plus(NORMAL), plus(-NORMAL), loop="step", transfer=False) == ["", ""]
    assert (pair.meetings, caplog.messages) == (0, [])


def test_shares_of_other_shapes_are_compared_by_their_values() -> None:
    def by_rows(x: tf.Tensor) -> Any:
        rows = x.shape[0]
        return tf.reshape(x, [rows * 3, 1]) + tf.ones((rows * 3, 1)) * float(np.log(rows))

    assert difference(by_rows, by_rows, (2, 3)) == ""
    message = difference(
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

    assert difference(looks_up(table, "one"), looks_up(table, "another")) == ""
    assert "differ in the operation" in difference(looks_up(table, "one"), looks_up(other, "one"))
    assert "differ in the operation" in difference(
        lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x + 1.0, lambda: x),
        lambda x: tf.cond(tf.reduce_sum(x) > 0, lambda: x - 1.0, lambda: x),
    )
