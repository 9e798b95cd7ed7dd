"""Misuse of updates: each mistake is answered with an error, and none is ignored."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import replicast
from replicast.errors import NotSupported, UpdateRefused
from replicast.testing.job import eventually
from replicast.update.update import Update
from tests.pool import Pool, WorkerFailed
from tests.pool.checks import state
from tests.pool.scripts import equal_on_all
from tests.workers.recipes import CLASSES, FEATURES, arrays, perceptron
from tests.workers.test_updates import WAIT_SECS, replicas_of

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


def test_a_boundary_that_one_worker_missed_is_named_as_the_reason(pool2: Pool) -> None:
    with pytest.raises(WorkerFailed, match="one of them has missed a boundary"):
        pool2.run(miss_a_boundary)
