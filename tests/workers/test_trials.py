"""Trials on real workers that train: kept or reverted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import replicast
from replicast.errors import CheckpointError, UpdateRefused
from replicast.replicas.callback import ReplicasCallback
from replicast.storage.checkpoints import CheckpointStore
from replicast.training import Source, TensorFlowState
from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all, digest
from tests.pool.scripts import equal_on_all
from tests.workers.recipes import arrays, perceptron
from tests.workers.test_updates import AtStep, adam, custom_step, replicas_of

BATCHES, EPOCHS, BATCH_SIZE = 10, 5, 8
PROPOSED, APPLIED, STEPS = 6, 12, 15
WORSE = replicast.Update(id="worse").scale("dense_1/kernel", -3.0).scale("optimizer/learning_rate", 0.1)
HELPS = replicast.Update(id="helps").scale("optimizer/learning_rate", 2.0)
UPDATES = {"worse": WORSE, "helps": HELPS}


class Looks:
    """The bits of the whole state right before and right after each boundary."""

    def __init__(self, replicas: replicast.Replicas, which: str) -> None:
        self._replicas = replicas
        self._which = which
        self.before: dict[int, dict[str, str]] = {}
        self.after: dict[int, dict[str, str]] = {}
        self.ticket: Any = None
        self.refusals: list[str] = []

    def look_before(self, steps: int) -> None:
        self.before[self._replicas.step + steps] = digest(self._replicas.model)

    def look_after(self) -> None:
        replicas, step = self._replicas, self._replicas.step
        self.after[step] = digest(replicas.model)
        if step == PROPOSED and replicas.rank == replicas.size - 1:
            trial = replicast.Trial(steps=STEPS, max_increase=0.1)
            self.ticket = replicas.propose(UPDATES[self._which], at_step=APPLIED, trial=trial)
        if step == PROPOSED:
            replicas.sync()  # all stand here until it is committed
        if step == APPLIED + 3:
            self._try_what_cannot_be_done()

    def _try_what_cannot_be_done(self) -> None:
        for act, error in ((self._replicas.sync, UpdateRefused), (self._replicas.save, CheckpointError)):
            with pytest.raises(error) as caught:
                act()
            self.refusals.append(str(caught.value))

    def told(self) -> dict[str, Any]:
        (receipt,) = (one for one in self._replicas.history if one.id == self._which)
        trial = receipt.trial
        assert trial is not None
        if self.ticket is not None:
            assert self.ticket.result(120).trial == trial
        return {
            "outcome": trial.outcome,
            "applied": receipt.step,
            "ended": trial.step,
            "measured": (trial.before, trial.during),
            "before": self.before,
            "after": self.after,
            "refusals": self.refusals,
        }


def by_fit(
    replicas: replicast.Replicas, looks: Looks, callback: ReplicasCallback, per_execution: int
) -> None:
    x, y = arrays(BATCHES * BATCH_SIZE)
    before, after = AtStep(lambda _: looks.look_before(per_execution)), AtStep(lambda _: looks.look_after())
    callbacks = [before, callback, after]
    replicas.model.fit(x, y, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=0, callbacks=callbacks)


def by_custom_loop(replicas: replicast.Replicas, looks: Looks) -> None:
    step, strategy = custom_step(replicas.model), replicas.model.distribute_strategy
    for _ in range(BATCHES * EPOCHS):
        loss = strategy.experimental_local_results(step())[0]
        looks.look_before(1)
        replicas.boundary(logs={"loss": loss})
        looks.look_after()


def tried(strategy: Any, way: str, which: str, directory: Path) -> dict[str, Any]:
    keras.utils.set_random_seed(3)
    # The statistics of a custom loop are each worker's own.
    extra = (
        () if way == "custom loop" else (lambda: keras.layers.Dropout(0.1), keras.layers.BatchNormalization)
    )
    per_execution = 3 if way == "executions" else 1
    model = perceptron(strategy, adam, extra, steps_per_execution=per_execution)
    with replicas_of(model, run_dir=directory) as replicas:
        looks = Looks(replicas, which)
        if way == "custom loop":
            by_custom_loop(replicas, looks)
        else:
            by_fit(replicas, looks, replicas.callback(save_every=4, keep=99), per_execution)
        replicas.model.distribute_strategy.lifetime.check()
        return looks.told()


@pytest.mark.parametrize("way", ["fit", "executions", "custom loop"])
def test_a_trial_that_makes_the_loss_worse_ends_with_the_bits_of_before(
    pool2: Pool, pool3: Pool, tmp_path: Path, way: str
) -> None:
    results = (pool3 if way == "fit" else pool2).run(tried, way, "worse", tmp_path)
    assert_equal_on_all(results)
    told = results[0]
    applied, ended = told["applied"], told["ended"]
    assert (told["outcome"], applied, ended) == ("reverted", APPLIED, APPLIED + STEPS)
    assert told["after"][applied] != told["before"][applied]
    assert told["before"][ended] != told["after"][ended]
    assert told["after"][ended] == told["before"][applied], "not the bits of before the update"
    assert min(step for step in told["after"] if step > ended) in told["before"]
    before, during = told["measured"]
    assert during > 1.5 * before
    sync, save = told["refusals"]
    assert "The trial of worse runs until step 27" in sync
    assert "The trial of worse runs until step 27" in save


def test_a_trial_that_helps_stays_and_no_checkpoint_is_of_its_middle(pool2: Pool, tmp_path: Path) -> None:
    results = pool2.run(tried, "fit", "helps", tmp_path)
    assert_equal_on_all(results)
    told = results[0]
    assert told["outcome"] == "kept"
    assert told["after"][told["ended"]] == told["before"][told["ended"]]
    assert told["after"][told["ended"]] != told["before"][told["applied"]]
    made = [manifest.step for manifest in CheckpointStore(tmp_path).manifests()]
    assert made == [4, 8, 27, 28, 32, 36, 40, 44, 48]


class ReturnsTheLoss(keras.Sequential):
    """As many models of Keras' guides: its own train_step, and no metric."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=y, y_pred=self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables), self.trainable_variables)
        return {"loss": loss}


def measured_alone(strategy: Any, kind: str) -> dict[str, Any]:
    """What is known of each step of a fit whose last batch is short, and what each batch's loss is."""
    keras.utils.set_random_seed(3)
    x, y = arrays(4 * BATCH_SIZE + 3)
    with strategy.scope():
        layers = [keras.Input((x.shape[1],)), keras.layers.Dense(4, activation="softmax")]
        model = (ReturnsTheLoss if kind == "custom step" else keras.Sequential)(layers)
        metrics = (
            []
            if kind == "custom step"
            else ["accuracy", keras.metrics.AUC(name="auc"), "RootMeanSquaredError"]
        )
        outputs = {"metrics": metrics, "loss": "categorical_crossentropy"}
        model.compile(
            keras.optimizers.SGD(0.0), steps_per_execution=2 if kind == "executions" else 1, **outputs
        )
    labels = keras.utils.to_categorical(y, 4).astype("float32")
    data = tf.data.Dataset.from_tensor_slices((x, labels)).batch(BATCH_SIZE)
    if kind == "unknown length":
        data = data.filter(lambda *_: True)
    with replicas_of(model) as replicas:
        callback = replicas.callback()
        model.fit(data, epochs=2, verbose=0, callbacks=[callback])
        measures = callback._worker.session.replica.measures
        history, means = measures.history(), measures.means
        parts = [slice(at, at + BATCH_SIZE) for at in range(0, len(x), BATCH_SIZE)]
        alone = [model.compute_loss(y=labels[part], y_pred=model(x[part])) for part in parts]
        try:
            measures.before("auc", 1)
            refused = ""
        except UpdateRefused as error:
            refused = str(error)
    steps = [steps for _, steps, _ in history]
    losses = [values["loss"] for _, _, values in history]
    return {
        "steps": steps,
        "losses": losses,
        "alone": [float(one) for one in alone],
        "means": means,
        "refused": refused,
    }


class Level(keras.layers.Layer):
    """Measures with means of its own: one counts batches, and one begins with the second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.level, self.late = keras.metrics.Mean(name="level"), keras.metrics.Mean(name="late")
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")

    def call(self, x: Any) -> Any:
        self.calls.assign_add(1.0)
        self.level.update_state(keras.ops.mean(x))
        self.late.update_state(keras.ops.mean(x), sample_weight=tf.cast(self.calls > 1.0, "float32"))
        return x


class TellsABatch(keras.Model):
    def train_step(self, data: Any) -> dict[str, Any]:
        return {**super().train_step(data), "kl_loss": keras.ops.mean(data[0])}


@equal_on_all("pool1")
def test_each_metric_of_fit_is_known_for_each_step_by_what_it_counts(strategy: Any) -> None:
    x = np.arange(1, 45, dtype="float32").reshape(-1, 1) / 10
    y, weights = (
        (np.arange(44) // 8).reshape(-1, 1).astype("float32"),
        np.where(np.arange(44) < 32, 1.0, 0.01),
    )
    with strategy.scope():
        inputs = keras.Input((1,))
        level = Level()(inputs)
        zeros = [keras.layers.Dense(1, kernel_initializer="zeros", name=name)(level) for name in "ab"]
        model = TellsABatch(inputs, dict(zip("ab", zeros, strict=True)))
        of_each = {"metrics": {"a": ["mae"], "b": ["mae"]}, "weighted_metrics": {"a": ["mae"]}}
        model.compile(keras.optimizers.SGD(0.0), {"a": "mae", "b": "mae"}, **of_each)
    with replicas_of(model) as replicas:
        callback = replicas.callback()
        model.fit(
            x, {"a": y, "b": y}, sample_weight={"a": weights, "b": weights},
            batch_size=8, shuffle=False, verbose=0, callbacks=[callback],
        )  # fmt: skip
        measures = callback._worker.session.replica.measures
        told = [values for _, _, values in measures.history()]
    means = [float(x[at : at + 8].mean()) for at in range(0, 44, 8)]
    for name in ("level", "kl_loss"):
        assert [values[name] for values in told] == pytest.approx(means, rel=1e-4), name
    assert [values["late"] for values in told] == pytest.approx([0.0, *means[1:]], rel=1e-4)
    for name in ("a_mae", "b_mae", "a_weighted_mae"):
        assert [values[name] for values in told] == pytest.approx(range(6), rel=1e-3), name
    assert "kl_loss" not in measures.means


@pytest.mark.parametrize("kind", ["plain", "executions", "unknown length", "custom step"])
def test_each_step_of_fit_is_known_also_the_last_of_an_epoch_whose_batch_is_short(
    pool2: Pool, kind: str
) -> None:
    results = pool2.run(measured_alone, kind)
    assert_equal_on_all(results)
    alone = results[0]["alone"]
    if kind == "executions":
        pairs = [np.mean(alone[:2]), np.mean(alone[2:4]), alone[4]]
        assert results[0]["losses"] == pytest.approx(2 * pairs, rel=1e-4)
    else:
        assert results[0]["losses"] == pytest.approx(2 * alone, rel=1e-4)
    if kind == "custom step":
        return
    no_means = {"auc": False, "RootMeanSquaredError": False}
    assert results[0]["means"] == {"loss": True, "accuracy": True, **no_means}
    assert "must be a mean" in results[0]["refused"]


@equal_on_all("pool1")
def test_a_snapshot_is_restored_to_the_last_bit_and_shares_no_memory_with_variables(strategy: Any) -> None:
    """Of values that a careless copy would change."""
    odd = np.array([[np.nan, -0.0, np.inf], [1e-45, -1.5, 3.0]], np.float32)
    odd.view(np.uint32)[0, 0] |= 7
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(3, dtype="bfloat16"), keras.layers.Dropout(0.5)]
        )
        model.add(keras.layers.Dense(3))
        model.compile("adam", "mse")
    with replicas_of(model):
        state = TensorFlowState(*Source(model).variables())
        names = [variable.name for variable in state.schema]
        for variable in model.layers[0].variables:
            variable.assign(
                tf.cast(odd[: variable.shape[0]] if len(variable.shape) == 2 else odd[0], variable.dtype)
            )
        model.layers[-1].kernel.assign(np.tile(odd, (2, 1))[:3])
        before = state.digests(names)
        copy: dict[str, Any] = {}
        state.snapshot(copy)
        kept = {name: value.tobytes() for name, value in copy.items()}
        for variable in (*model.variables, *model.optimizer.variables):
            variable.assign(tf.zeros_like(variable.value))
        state.restore_snapshot(copy)
        assert state.digests(names) == before
        model.layers[-1].kernel.assign_add(np.ones((3, 3), np.float32))  # in place, as training does
        assert all(copy[name].tobytes() == value for name, value in kept.items())
        assert len(names) > 5
