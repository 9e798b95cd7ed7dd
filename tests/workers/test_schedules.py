"""A learning rate that a schedule computes: updates replace it, scale it, and give it back."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest

import replicast
from tests.pool.scripts import equal_on_all
from tests.workers.test_updates import AtStep, replicas_of

SCHEDULE = {"initial_learning_rate": 0.25, "decay_steps": 3, "decay_rate": 0.5}


def model_of_one_weight(optimizer: Any) -> keras.Model:
    """Its gradient is 1 in every step, so that each step subtracts the learning rate."""
    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, use_bias=False, name="only")], name="one"
    )
    model.compile(optimizer, lambda _, predicted: keras.ops.mean(predicted))
    return model


def rates_of(model: keras.Model, steps: int, *callbacks: Any) -> list[float]:
    """What each step has subtracted from the weight."""
    weights = [float(model.get_weights()[0][0, 0])]
    seen = AtStep(lambda _: weights.append(float(model.get_weights()[0][0, 0])))
    ones = np.ones((steps * 2, 1), np.float32)
    model.fit(ones, ones, batch_size=2, shuffle=False, verbose=0, callbacks=[*callbacks, seen])
    return [float(rate) for rate in -np.diff(weights)]


@equal_on_all("pool2")
@pytest.mark.parametrize("scaled", [False, True])
def test_a_schedule_is_scaled_replaced_and_given_back_at_the_steps_of_the_updates(
    strategy: Any, scaled: bool
) -> Any:
    schedule = keras.optimizers.schedules.ExponentialDecay(**SCHEDULE)
    with strategy.scope():
        optimizer: Any = keras.optimizers.SGD(schedule)
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=2.0)
        model = model_of_one_weight(optimizer)
    rate = "optimizer/learning_rate"
    with replicas_of(model) as replicas:
        if replicas.rank == 1:
            replicas.propose(replicast.Update().scale(rate, 0.5), at_step=2)
            replicas.propose(replicast.Update().assign(rate, np.float32(0.125)), at_step=4)
            replicas.propose(replicast.Update().scale(rate, 2.0), at_step=6)
            replicas.propose(replicast.Update().assign(rate, np.float32(-1.0)), at_step=8)
        found = rates_of(model, 10, replicas.callback(audit_every=None))
    computed = [float(schedule(step)) for step in range(10)]
    expected = [*computed[:2], *(0.5 * c for c in computed[2:4]), 0.125, 0.125, 0.25, 0.25, *computed[8:]]
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    return found


@equal_on_all("pool2")
def test_a_rate_below_0_is_refused_where_there_is_no_schedule(strategy: Any) -> Any:
    with strategy.scope():
        model = model_of_one_weight(keras.optimizers.SGD(0.25))
    with replicas_of(model) as replicas:
        for update in (replicast.Update().assign, replicast.Update().add):
            with pytest.raises(replicast.UpdateRefused, match="has no schedule"):
                replicas.propose(update("optimizer/learning_rate", np.float32(-0.5))).result(timeout=30)
        found = rates_of(model, 2, replicas.callback(audit_every=None))
    assert found == [0.25, 0.25]
    return found


@equal_on_all("pool2")
def test_a_revert_gives_the_schedule_back(strategy: Any) -> Any:
    schedule = keras.optimizers.schedules.ExponentialDecay(**SCHEDULE)
    with strategy.scope():
        model = model_of_one_weight(keras.optimizers.SGD(schedule))
    rate = "optimizer/learning_rate"
    with replicas_of(model) as replicas:
        if replicas.rank == 0:
            replicas.propose(replicast.Update().assign(rate, np.float32(0.5)))
        replicas.sync()
        replaced = rates_of(model, 2, replicas.callback(audit_every=None))
        if replicas.rank == 0:
            replicas.revert(1)
        replicas.sync()
        given_back = rates_of(model, 2, replicas.callback(audit_every=None))
    assert replaced == [0.5, 0.5]
    np.testing.assert_allclose(given_back, [float(schedule(step)) for step in (2, 3)], rtol=1e-5)
    return replaced, given_back


@equal_on_all("pool2")
def test_a_restored_checkpoint_has_what_an_update_made_of_the_schedule(strategy: Any, tmp_path: Any) -> Any:
    def computed_by_a_function() -> keras.Model:
        with strategy.scope():
            return model_of_one_weight(keras.optimizers.SGD(lambda: 0.25))

    rate = "optimizer/learning_rate"
    model = computed_by_a_function()
    with replicas_of(model, run_dir=tmp_path, durability="disk") as replicas:
        if replicas.rank == 0:
            replicas.propose(replicast.Update().assign(rate, np.float32(0.5)))
        replicas.sync()
        callback = replicas.callback(save_every="epoch", audit_every=None)
        assert rates_of(model, 2, callback) == [0.5, 0.5]
    with replicas_of(computed_by_a_function(), run_dir=tmp_path, durability="disk") as replicas:
        restored = replicas.restore()
        assert restored is not None
        assert restored.step == 2
        assert replicas.read([rate])[rate] == np.float32(0.5)
