"""Misuse of updates, each mistake of which is answered with an error; and what went wrong once."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import replicast
from replicast.errors import NotSupported, UpdateRefused
from replicast.storage.run_files import last_metrics, read_worker_notes
from replicast.transport import ChainTransport
from replicast.update.update import Update
from tests.pool import Pool, WorkerFailed
from tests.pool.checks import assert_equal_on_all, state
from tests.pool.scripts import equal_on_all
from tests.scripts.compare import heard
from tests.threads import eventually
from tests.workers.recipes import CLASSES, FEATURES, arrays, perceptron
from tests.workers.test_updates import WAIT_SECS, adam, quietly, replicas_of, transports_opened

ONES = np.ones(CLASSES, np.float32)


@equal_on_all("pool2")
def test_weights_in_bfloat16_are_made_trained_and_changed_alike(strategy: Any) -> Any:
    with strategy.scope():
        layers = [keras.layers.Dense(8, dtype="bfloat16"), keras.layers.Dense(CLASSES)]
        model = keras.Sequential([keras.Input((FEATURES,)), *layers])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    with replicas_of(model) as replicas:
        ticket = replicas.propose(Update().scale("dense/kernel", 0.5)) if strategy.rank == 1 else None
        model.fit(*arrays(), batch_size=30, verbose=0, callbacks=[replicas.callback()])
        if ticket is not None:
            ticket.result(WAIT_SECS)
    return {name: value.tobytes() for name, value in state(model).items()}


@equal_on_all("pool2")
def test_a_model_that_was_compiled_again_is_refused(strategy: Any) -> None:
    model = perceptron(strategy)
    with replicas_of(model) as replicas:
        model.fit(*arrays(), batch_size=30, verbose=0, callbacks=[replicas.callback()])
        with strategy.scope():
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        with pytest.raises(NotSupported, match="compiled again"):
            model.fit(*arrays(), batch_size=30, verbose=0, callbacks=[replicas.callback()])


@equal_on_all("pool2")
def test_two_callbacks_in_one_fit_are_refused_since_they_would_count_every_step_twice(strategy: Any) -> None:
    model = perceptron(strategy)
    with replicas_of(model) as replicas:
        with pytest.raises(NotSupported, match="Two callbacks of one Replicas"):
            model.fit(
                *arrays(), batch_size=30, verbose=0, callbacks=[replicas.callback(), replicas.callback()]
            )
        model.fit(*arrays(), batch_size=30, verbose=0, callbacks=[replicas.callback()])
        assert replicas.step == int(np.asarray(model.optimizer.iterations))


@equal_on_all("pool2")
def test_wrong_proposals_are_answered_without_ending_the_training(strategy: Any) -> None:
    model = perceptron(strategy)
    with replicas_of(model) as replicas:
        replicas.boundary()
        late = replicas.propose(Update().add("dense_1/bias", ONES), at_step=0)
        with pytest.raises(UpdateRefused, match="Step 0 is past"):
            late.result(WAIT_SECS)
        with pytest.raises(UpdateRefused, match="Only an Update or a function"):
            replicas.propose({"dense_1/bias": ONES})
        with pytest.raises(UpdateRefused, match="at_step must be a number of steps"):
            replicas.propose(Update().add("dense_1/bias", ONES), at_step=2.5)
        assert replicas.sync(variables="dense_1/bias") is None
    with pytest.raises(NotSupported, match="closed"):
        replicas.propose(Update().add("dense_1/bias", ONES))
    with pytest.raises(NotSupported, match="closed"):
        replicas.boundary()


def miss_a_boundary(strategy: Any) -> None:
    model = perceptron(strategy)
    x, y = arrays()
    replicas = replicast.Replicas(model, durability="memory")
    for step in range(12):
        model.train_on_batch(x[:30], y[:30])
        if strategy.rank != 1 or step != 3:
            replicas.boundary()
        if strategy.rank == 0 and step == 6:
            ticket = replicas.propose(Update().assign("dense_1/bias", ONES), at_step=10)
            eventually(lambda ticket=ticket: ticket.stage == "scheduled")  # all will stop at its step


@pytest.mark.ends_its_pool
def test_a_boundary_that_one_worker_missed_is_named_as_the_reason(pool2: Pool) -> None:
    with pytest.raises(WorkerFailed, match="one of them has missed a boundary"):
        pool2.run(miss_a_boundary)


# What went wrong once.

BIAS = "sequential/dense_1/bias"


def bias_of(model: keras.Model) -> list[float]:
    return state(model)[BIAS].tolist()


@equal_on_all("pool2")
def test_a_function_proposed_by_all_is_one_also_when_one_of_them_has_proposed_something_else(
    strategy: Any,
) -> str:
    model = perceptron(strategy)
    with replicas_of(model) as replicas:
        replicas.boundary()
        if strategy.rank == 0:
            replicas.propose(Update().scale("dense/kernel", 2.0))
        ticket = replicas.propose(lambda values: {"dense/bias": values["dense/bias"] + 1}, source=1)
        quietly(replicas, lambda step: None, lambda: len(replicas.history) == 2)
    return ticket.result(0).id


def an_attempt(strategy: Any, directory: Path) -> list[float]:
    model = perceptron(strategy)
    before = bias_of(model)
    with replicas_of(model, run_dir=directory, durability="disk") as replicas:
        replicas.propose(Update().add("dense_1/bias", np.ones(CLASSES, np.float32)))
        quietly(replicas, lambda step: None, lambda: bool(replicas.history))
    return [after - was for after, was in zip(bias_of(model), before, strict=True)]


def test_an_update_that_was_applied_before_the_first_step_is_applied_by_the_next_attempt_too(
    pool1: Pool, tmp_path: Path
) -> None:
    assert pool1.run(an_attempt, tmp_path) == [[1.0] * CLASSES]
    assert pool1.run(an_attempt, tmp_path) == [[1.0] * CLASSES], "the journal knows it, and nobody applied it"


@equal_on_all("pool1")
def test_adagrad_behind_a_loss_scale_is_reset_to_what_it_began_with(strategy: Any) -> None:
    def scaled() -> Any:
        adagrad = keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.25)
        return keras.optimizers.LossScaleOptimizer(adagrad)

    model = perceptron(strategy, scaled)
    with replicas_of(model) as replicas:
        update = Update(reset_slots=True).scale("dense/bias", 1.0)
        ticket = replicas.propose(update)
        quietly(replicas, lambda step: None, ticket.done)
        values = replicas.read(variable.name for variable in replicas.schema)
    assert {float(value.ravel()[0]) for name, value in values.items() if "accumulator" in name} == {0.25}


@keras.saving.register_keras_serializable("tests")
class Twins(keras.Model):
    """Two layers of one name, which a subclassed model may have."""

    def __init__(self) -> None:
        super().__init__()
        self.first = keras.layers.Dense(3, name="twin")
        self.second = keras.layers.Dense(3, name="twin")

    def call(self, x: Any) -> Any:
        return self.second(self.first(x))


@equal_on_all("pool1")
def test_each_of_two_layers_of_one_name_has_its_own_moments(strategy: Any) -> None:
    with strategy.scope():
        model = Twins()
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        model(np.zeros((1, 3), np.float32))
    with replicas_of(model) as replicas:
        slots = [variable.slots for variable in replicas.schema if variable.kind == "trainable"]
    assert [len(owned) for owned in slots] == [1] * 4
    assert len({slot for ((slot, _),) in slots}) == 4


@equal_on_all("pool1")
def test_a_log_that_is_not_a_number_does_not_end_the_training(strategy: Any, tmp_path: Path) -> None:
    model = perceptron(strategy)
    with replicas_of(model, run_dir=tmp_path) as replicas:
        ends = time.monotonic() + WAIT_SECS
        for _ in range(3):
            replicas.boundary(logs={"loss": 1.0, "confusion": np.zeros((2, 2))})
        while (written := last_metrics(tmp_path)) is None or written["step"] < 3:
            assert time.monotonic() < ends, "step 3 was not written"
            time.sleep(0.05)  # its thread writes once a second, perhaps an earlier step first
        assert written["values"]["loss"] == 1.0
        assert "confusion" not in written["values"]
    assert replicas.step == 3


def one_after_the_other(strategy: Any, host: str) -> list[Any]:
    """Two models, one after the other, with updates of different sizes between two hosts."""
    said = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPLICAST_HOST_ID", host)
        for number in range(2):
            keras.utils.clear_session()  # the second has the names of the first
            model = perceptron(strategy)
            with transports_opened() as opened:
                replicas = replicast.Replicas(model, durability="memory")
            assert isinstance(opened[0], ChainTransport)
            mark = Update(note="x" * 1000 * number).add("dense_1/bias", np.full(CLASSES, 9.0, np.float32))
            ticket = replicas.propose(mark) if strategy.rank == 0 else None
            quietly(replicas, lambda step: None, lambda ticket=ticket: ticket is None or ticket.done())
            if ticket is not None:
                ticket.result(0)
            said.append(bias_of(model))
            replicas.close()
    return said


def test_a_second_model_across_hosts_is_changed_as_the_first(pool2: Pool) -> None:
    results = pool2.run_each(one_after_the_other, [["a"], ["b"]], deadline_secs=300)
    assert_equal_on_all(results)
    assert results[0] == [[9.0] * CLASSES] * 2


# A `fit` without `replicas.callback()`: a warning says so, and no step is made up.

DEADLINE_SECS = 120.0
EPOCHS = 2


class Propose(keras.callbacks.Callback):
    """A callback of the script's own: worker 1 proposes, and looks at what others can see of it."""

    def __init__(self, replicas: replicast.Replicas, run_dir: Path) -> None:
        super().__init__()
        self.replicas, self.run_dir = replicas, run_dir
        self.ticket: Any = None
        self.steps = 0
        self.seen: set[str] = set()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.steps += 1
        if self.steps == 2:
            if self.replicas.rank == 1:
                self.ticket = self.replicas.propose(replicast.Update().scale("dense/kernel", 0.5))
            ends = time.monotonic() + DEADLINE_SECS
            while not any(self.seen) and time.monotonic() < ends:
                self.seen = {note.waiting_for for note in read_worker_notes(self.run_dir)}
                time.sleep(0.05)


def trained_without(strategy: Any, run_dir: Path) -> dict[str, Any]:
    with heard() as said, replicas_of(perceptron(strategy, adam), run_dir=run_dir) as replicas:
        propose = Propose(replicas, run_dir)
        x, y = arrays()
        for _ in range(2):
            replicas.model.fit(x, y, batch_size=30, epochs=EPOCHS, verbose=0, callbacks=[propose])
        replicas.sync()
        step = replicas.step
        replicas.model.fit(x, y, batch_size=30, verbose=0, callbacks=[replicas.callback()])
        receipt = None if propose.ticket is None else propose.ticket.result(DEADLINE_SECS)
    return {
        "steps": propose.steps,
        "step": step,
        "receipt": None if receipt is None else receipt.step,
        "seen": propose.seen,
        "said": [each for each in said if "was not given replicas.callback()" in each],
    }


def test_a_fit_without_the_callback_is_said_once_and_its_steps_are_counted(
    pool2: Pool, tmp_path: Path
) -> None:
    first, second = pool2.run(trained_without, tmp_path)
    for each in (first, second):
        assert len(each["said"]) == 1
        assert "a boundary: its fit has no replicas.callback()" in each["seen"]
        assert each["step"] == each["steps"]
    assert second["receipt"] == second["steps"]
