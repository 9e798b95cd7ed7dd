"""`Replicas` of every kind of model on TensorFlow's own strategies, with one replica per device.

The table at the end of docs/promises.md names these tests.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import replicast
from replicast.training import Source, TensorFlowState
from replicast.training.variables import components
from replicast.update.digest import digest_array
from tests.pool import Pool
from tests.scripts.compare import heard
from tests.workers.any_model import FEATURES, KINDS, OUTPUTS, Trained, trained

WAIT_SECS = 60.0
HALVES = np.full((FEATURES, OUTPUTS), 0.5, np.float32)
UNUSED = np.eye(FEATURES, OUTPUTS, dtype=np.float32) * np.eye(FEATURES, 1, dtype=np.float32)
"""A change of the first row of a kernel only."""


class Loop:
    """A custom training loop with `Replicas`, on one worker."""

    def __init__(self, strategy: Any, kind: str, run_dir: Path, **options: Any) -> None:
        self.trained = trained(strategy, kind)
        self.replicas = replicas_of(self.trained, run_dir, **options)

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.replicas.boundary(logs={"loss": self.trained.step()})

    def parts(self, name: str = "") -> list[bytes]:
        """The bits of a variable on each device of this worker; of a weight if none is named."""
        return [one.numpy().tobytes() for one in self.components(name or self.trained.weight)]

    def all_parts(self) -> dict[str, list[bytes]]:
        return {one.name: self.parts(one.name) for one in self.replicas.schema}

    def components(self, name: str) -> Any:
        """TensorFlow's variables behind a name, one for each device."""
        return self.replicas._worker.state._components[self.replicas.schema.resolve(name).name]

    def flip(self, name: str, device: int) -> None:
        """Changes one bit on one device of this worker."""
        one = self.components(name)[device]
        value = one.numpy()
        value.reshape(-1).view("u4")[1] ^= 1
        one.assign(value)

    def settle(self) -> None:
        """Until all that is proposed has happened."""
        assert self.replicas.sync(variables=[self.trained.weight]) is None


def replicas_of(model: Trained, run_dir: Path, **options: Any) -> replicast.Replicas:
    timeouts = replicast.Timeouts(join_secs=60)
    return replicast.Replicas(
        model.model, optimizer=model.optimizer, run_dir=run_dir, timeouts=timeouts, **options
    )


def life(strategy: Any, kind: str, run_dir: Path) -> dict[str, Any]:
    """All that can be done with replicas, once."""
    strategy = strategy or tf.distribute.get_strategy()
    loop = Loop(strategy, kind, run_dir)
    replicas, weight, slot = loop.replicas, loop.trained.weight, loop.trained.slot
    last = replicas.rank == replicas.size - 1
    seen: dict[str, Any] = {"names": [replicas.schema.resolve(name).name for name in (weight, slot)]}
    loop.train(2)
    if last:
        replicas.propose(replicast.Update().assign(weight, HALVES))
    loop.settle()
    seen["updated"] = loop.parts()
    if replicas.rank == 0:
        replicas.propose(lambda values: {weight: values[weight] * 4})
    loop.settle()
    seen["computed"] = loop.parts()
    if replicas.rank == 0:
        replicas.revert(2)
    loop.settle()
    seen["reverted"] = loop.parts()

    before = loop.all_parts()
    if last and strategy.num_replicas_in_sync > 1:
        loop.flip(weight, -1)
    if replicas.rank == 0 and strategy.num_replicas_in_sync > 2:
        loop.flip(slot, 0)
    report = replicas.audit(on_divergence="heal")
    seen["audit"] = [str(one) for one in report.differences]
    seen["deviations"] = [one.differing for one in report.differences]
    seen["healed"] = report.outcome, loop.all_parts() == before

    if last:  # which fails: no loss is that much smaller
        update, trial = (
            replicast.Update().assign(weight, 100 * HALVES),
            replicast.Trial(steps=1, max_increase=-2.0),
        )
        replicas.propose(update, trial=trial, at_step=replicas.step + 2)
    loop.settle()  # all know of it
    loop.train(1)
    loss = loop.trained.step()
    before = loop.all_parts()
    replicas.boundary(logs={"loss": loss})
    seen["on trial"] = loop.parts()
    loop.train(1)
    seen["taken back"] = loop.all_parts() == before

    replicas.save().result(WAIT_SECS)
    seen["saved"] = loop.all_parts()
    loop.train(1)
    seen["history"] = [len(set(receipt.digests.values())) for receipt in replicas.history]
    replicas.close()
    again = replicas_of(loop.trained, run_dir)
    loop.replicas = again
    restored = again.restore()
    seen["restored"] = loop.all_parts()
    seen["restored step"] = restored is not None and restored.step == again.step
    again.close()
    return seen


def assert_all_held(kind: str, workers: list[dict[str, Any]], devices: int) -> None:
    """What `life` has seen on each worker."""
    replicas = len(workers) * devices
    halves, fours = [HALVES.tobytes()] * devices, [(4 * HALVES).tobytes()] * devices
    for seen in workers:
        assert (seen["updated"], seen["computed"], seen["reverted"]) == (halves, fours, halves)
        assert seen["on trial"] == [(100 * HALVES).tobytes()] * devices
        assert seen["taken back"]
        assert set(seen["history"]) == {1}
        assert seen["healed"] == ("healed" if replicas > 1 else "equal", True)
        assert seen["audit"] == workers[0]["audit"]
        assert seen["restored step"]
    (weight, slot), first = workers[0]["names"], workers[0]["audit"]
    if replicas > 1:
        last = f"worker {len(workers) - 1}" + (f" (CPU:{devices - 1})" if devices > 1 else "")
        why = "majority" if replicas > 2 else "no majority: worker 0's value counts"
        assert first[0] == f"{weight}: {last} differs from worker 0 ({why})"
        (found,) = workers[0]["deviations"][0].values()
        assert (found.count, found.of) == (1, FEATURES * OUTPUTS)
    if replicas > 2:
        assert first[1].startswith(f"{slot}: worker 0 (CPU:0) differs from worker ")
    for name in workers[0]["saved"]:
        everywhere = {value for seen in workers for value in seen["saved"][name]}
        restored = {value for seen in workers for value in seen["restored"][name]}
        if "moving" in name:  # each replica's own: their mean is saved
            assert (len(everywhere), len(restored)) == (replicas, 1)
        else:
            assert everywhere == restored, name
            assert len(everywhere) == 1, name


@pytest.mark.parametrize("kind", KINDS)
def test_every_feature_with_two_workers_of_two_devices(kind: str, stock2x2: Pool, tmp_path: Path) -> None:
    assert_all_held(kind, stock2x2.run(life, kind, tmp_path), devices=2)


@pytest.mark.parametrize("kind", KINDS)
def test_every_feature_without_a_strategy(kind: str, plain: Pool, tmp_path: Path) -> None:
    assert_all_held(kind, plain.run(life, kind, tmp_path), devices=1)


@pytest.mark.parametrize("kind", KINDS)
def test_every_feature_with_a_mirrored_strategy(kind: str, mirrored: Pool, tmp_path: Path) -> None:
    assert_all_held(kind, mirrored.run(life, kind, tmp_path), devices=2)


@pytest.mark.parametrize("kind", ["tf.Module", "tf.train.Checkpoint", "dict"])
def test_every_feature_with_our_strategy(kind: str, pool2: Pool, tmp_path: Path) -> None:
    assert_all_held(kind, pool2.run(life, kind, tmp_path), devices=1)


# Names, and what has one without being part of the state.

NAMES = {
    "keras 3": ["net/out/kernel", "net/out/bias", "net/norm/gamma", "net/norm/beta", "net/norm/moving_mean"],
    "tf_keras": [
        "out/kernel",
        "out/bias",
        "norm/gamma",
        "norm/beta",
        "norm/moving_mean",
        "norm/moving_variance",
    ],
    "tf.Module": ["bias", "layers/0", "optimizer/iteration", "optimizer/m/b", "optimizer/m/w"],
    "tf.train.Checkpoint": [
        "net/bias",
        "net/layers/0",
        "optimizer/iteration",
        "optimizer/m/b",
        "optimizer/m/w",
    ],
    "dict": ["w", "b", "optimizer/iteration", "optimizer/m/w", "optimizer/m/b", "optimizer/learning_rate"],
}


@pytest.mark.parametrize("kind", KINDS)
def test_variables_have_names_and_weights_know_what_the_optimizer_keeps_for_them(kind: str) -> None:
    model = trained(tf.distribute.get_strategy(), kind)
    source = Source(model.model, model.optimizer)
    source.build_optimizers()
    schema = TensorFlowState(*source.variables()).schema
    names = [variable.name for variable in schema]
    assert set(NAMES[kind]) <= set(names)
    assert {"optimizer/learning_rate", model.slot} <= set(names)
    assert model.slot in dict(schema.resolve(model.weight).slots)
    again = Source(model.model, model.optimizer)
    assert [one.name for one in again.variables()[0]] == names


@pytest.mark.parametrize(
    ("kind", "name", "reason"),
    [
        ("dict", "scale", "it is a constant, which nothing can change"),
        ("tf.Module", "scale", "it is a constant, which nothing can change"),
        ("tf.Module", "seen", "it is a sum to which each replica adds its part"),
    ],
)
def test_an_update_of_what_is_not_part_of_the_state_is_refused(kind: str, name: str, reason: str) -> None:
    schema = TensorFlowState(*Source(trained(tf.distribute.get_strategy(), kind).model).variables()).schema
    with pytest.raises(replicast.UpdateRefused, match=reason):
        schema.resolve(name)


def test_a_legacy_optimizer_of_tf_keras_has_slots_too() -> None:
    import tf_keras

    weight, optimizer = tf.Variable([1.0, 2.0], name="w"), tf_keras.optimizers.legacy.Adam(0.5)
    source = Source({"w": weight}, optimizer)
    source.build_optimizers()
    state = TensorFlowState(*source.variables())
    assert dict(state.schema.resolve("w").slots) == {"optimizer/w/m": 0.0, "optimizer/w/v": 0.0}
    assert state.read(["optimizer/learning_rate"]) == {"optimizer/learning_rate": np.float32(0.5)}


def test_the_scale_of_a_loss_is_part_of_the_state() -> None:
    import tf_keras

    optimizer = tf_keras.mixed_precision.LossScaleOptimizer(tf_keras.optimizers.SGD(0.5))
    source = Source({"w": tf.Variable([1.0, 2.0], name="w")}, optimizer)
    source.build_optimizers()
    names = {one.name for one in source.variables()[0]}
    assert {"optimizer/learning_rate", "optimizer/current_loss_scale", "optimizer/good_steps"} <= names


# What is wrong with a model is said.


def different(strategy: Any, run_dir: Path) -> list[str]:
    model = trained(strategy, "dict")
    behind = model.model["b"].values[1]
    if strategy.extended._task_id == 1:  # the rank; no public way without a `Replicas`
        behind.assign([3.0, 3.0])
    with heard() as said:
        replicas = replicas_of(model, run_dir)
    replicas.sync(source=0)
    replicas.close()
    return said


def test_what_differs_at_the_start_is_named_with_its_digests(stock2x2: Pool, tmp_path: Path) -> None:
    first, second = stock2x2.run(different, tmp_path)
    assert not second
    (said,) = first
    wrong = digest_array(np.full(2, 3.0, np.float32))
    assert (
        f"b ({digest_array(np.zeros(2, np.float32))} on workers 0 (CPU:0), 0 (CPU:1) and 1 (CPU:0), " in said
    )
    assert f"{wrong} on worker 1 (CPU:1))" in said


def boundaries(replicas: replicast.Replicas, until: Callable[[], Any]) -> None:
    """Looking for changes takes a thousandth of the time: without steps, not every boundary looks."""
    for _ in range(100_000):
        if until():
            return
        replicas.boundary()


def changed(strategy: Any, run_dir: Path) -> list[str]:
    model = trained(strategy, "dict")
    replicas = replicas_of(model, run_dir)
    said = []
    model.step()
    replicas.boundary()
    with strategy.scope():
        model.model["new"] = tf.Variable(1.0)
    with heard() as warned:
        boundaries(replicas, until=lambda: warned)
    said += warned
    del model.model["b"]
    with pytest.raises(replicast.NotSupported) as lost:
        boundaries(replicas, until=lambda: False)
    said.append(str(lost.value))
    replicas.close()
    return said


def test_a_model_that_was_changed_is_noticed_at_a_boundary(mirrored: Pool, tmp_path: Path) -> None:
    ((new, lost),) = mirrored.run(changed, tmp_path)
    assert "new variables, which its Replicas does not update, save or compare: new" in new
    assert "A model that has lost b is not supported here" in lost


# `fit`.


def fitted(strategy: Any, run_dir: Path) -> Any:
    """`fit` of tf_keras with an update in it and a bit that flips, and what another `fit` continues with."""
    import tf_keras

    strategy = strategy or tf.distribute.get_strategy()

    def compiled() -> Any:
        tf_keras.utils.set_random_seed(3)
        with strategy.scope():
            layers = [tf_keras.layers.Input((FEATURES,)), tf_keras.layers.Dense(OUTPUTS, name="out")]
            model = tf_keras.Sequential(layers)
            model.compile("sgd", "mse")
        return model

    x = np.random.default_rng(1).normal(size=(24, FEATURES)).astype("float32")
    x[:, 0] = 0.0  # so that training does not depend on when the first row of the kernel is healed
    data = tf.data.Dataset.from_tensor_slices((x, x[:, :OUTPUTS])).batch(8)

    class Acts(tf_keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            last = replicas.rank == replicas.size - 1
            if replicas.step == 7 and last:  # after the checkpoint of step 6, before the audit at the end
                kernel = components(self.model.layers[0].kernel)[-1]
                kernel.assign(kernel + UNUSED)

    model = compiled()
    replicas = replicast.Replicas(model, run_dir=run_dir)
    if replicas.rank == replicas.size - 1:
        replicas.propose(replicast.Update().assign("out/bias", HALVES[0]), at_step=5)
    callback = replicas.callback(save_every="epoch", audit_every=1)
    model.fit(data, epochs=3, verbose=0, callbacks=[callback, Acts()])
    audits = [str(one) for report in replicas.audits for one in report.differences]
    applied = [(receipt.id.startswith("heal"), receipt.step) for receipt in replicas.history]
    digests, steps = replicas.digests(), replicas.step
    replicas.close()
    again = compiled()
    replicas = replicast.Replicas(again, run_dir=run_dir)
    restored = replicas.restore(step=6)
    with heard() as said:
        again.fit(data, epochs=3, verbose=0, callbacks=[replicas.callback(), Acts()])
    same = replicas.digests() == digests, replicas.step == steps
    replicas.close()
    return audits, applied, steps, restored is not None and restored.position.epoch, same, said


def assert_fitted(workers: list[Any], found: list[str]) -> None:
    for audits, applied, steps, epoch, same, said in workers:
        assert audits == found
        assert (False, 5) in applied
        assert any(heals for heals, _ in applied) == bool(found)
        assert (steps, epoch) == (9, 2)
        assert same == (True, True)
        assert len([one for one in said if "on data from its start" in one]) <= 1


def test_fit_of_tf_keras_has_updates_audits_and_checkpoints(stock2x2: Pool, tmp_path: Path) -> None:
    found = "out/kernel: worker 1 (CPU:1) differs from worker 0 (majority)"
    assert_fitted(stock2x2.run(fitted, tmp_path), [found])


def test_fit_of_tf_keras_with_a_mirrored_strategy(mirrored: Pool, tmp_path: Path) -> None:
    found = "out/kernel: worker 0 (CPU:1) differs from worker 0 (no majority: worker 0's value counts)"
    assert_fitted(mirrored.run(fitted, tmp_path), [found])


def test_fit_of_tf_keras_without_a_strategy(plain: Pool, tmp_path: Path) -> None:
    assert_fitted(plain.run(fitted, tmp_path), [])


def keras_3_fit(strategy: Any) -> str:
    model = trained(strategy, "keras 3").model
    with strategy.scope():
        model.compile("sgd", "mse")
    replicas = replicast.Replicas(model)
    callback = replicast.callbacks.ReplicasCallback(replicas)
    callback.set_model(model)
    with pytest.raises(replicast.NotSupported) as refused:
        callback.on_train_begin()
    replicas.close()
    return str(refused.value)


def test_fit_of_keras_3_on_a_stock_strategy_says_what_to_use(stock2x2: Pool) -> None:
    for said in stock2x2.run(keras_3_fit):
        assert "Write 'strategy = replicast.Strategy()' instead" in said


def in_one_process(strategy: Any, run_dir: Path) -> Any:
    """`fit` of Keras 3 without our strategy: an update, a checkpoint, and where a restart continues."""
    x = np.random.default_rng(1).normal(size=(24, FEATURES)).astype("float32")

    def compiled() -> Any:
        keras.utils.set_random_seed(3)
        with strategy.scope() if strategy else contextlib.nullcontext():
            layers = [keras.Input((FEATURES,)), keras.layers.Dense(OUTPUTS, name="out")]
            model = keras.Sequential(layers, name="net")
            model.compile("adam", "mse")
        return model, replicast.Replicas(model, run_dir=run_dir)

    model, replicas = compiled()
    replicas.propose(replicast.Update().assign("out/kernel", HALVES), at_step=3)
    callbacks = [replicas.callback(save_every=4, keep=9)]
    model.fit(x, x[:, :OUTPUTS], batch_size=8, epochs=3, verbose=0, shuffle=False, callbacks=callbacks)
    digests, steps = replicas.digests(), [receipt.step for receipt in replicas.history]
    report = replicas.audit()
    replicas.close()
    model, replicas = compiled()
    restored = replicas.restore(step=4)
    model.fit(
        x, x[:, :OUTPUTS], batch_size=8, epochs=3, verbose=0, shuffle=False, callbacks=[replicas.callback()]
    )
    same = replicas.digests() == digests
    replicas.close()
    return steps, report.equal, restored is not None and restored.step, same, replicas.step


def test_fit_of_keras_3_without_a_strategy_continues_at_the_batch(plain: Pool, tmp_path: Path) -> None:
    assert plain.run(in_one_process, tmp_path) == [([3], True, 4, True, 9)]


def test_fit_of_keras_3_with_a_mirrored_strategy_continues_at_the_batch(
    mirrored: Pool, tmp_path: Path
) -> None:
    assert mirrored.run(in_one_process, tmp_path) == [([3], True, 4, True, 9)]


def of_tf_keras(strategy: Any) -> str:
    import tf_keras

    with strategy.scope():
        model = tf_keras.Sequential([tf_keras.layers.Input((FEATURES,)), tf_keras.layers.Dense(OUTPUTS)])
    with pytest.raises(replicast.NotSupported) as refused:
        replicast.Replicas(model)
    return str(refused.value)


def test_a_tf_keras_model_in_the_scope_of_our_strategy_is_refused(pool1: Pool) -> None:
    (said,) = pool1.run(of_tf_keras)
    assert "Create it in the scope of a tf.distribute.MultiWorkerMirroredStrategy" in said


def exported(strategy: Any, kind: str, path: Path) -> bool:
    loop = Loop(strategy, kind, path / "run")
    loop.train(2)
    file = path / ("model.weights.h5" if kind == "keras 3" else "model")
    loop.replicas.export(file)
    before = loop.all_parts()
    loop.train(1)
    receipt = loop.replicas.import_weights(file)
    strict = [
        name for name in before if "moving" not in name and (kind != "keras 3" or "optimizer" not in name)
    ]
    same = all(loop.parts(name) == before[name] for name in strict)
    loop.replicas.close()
    return same and receipt is not None


@pytest.mark.parametrize("kind", ["keras 3", "tf_keras", "tf.train.Checkpoint"])
def test_a_model_is_written_and_read_for_other_tools(kind: str, stock2x2: Pool, tmp_path: Path) -> None:
    assert stock2x2.run(exported, kind, tmp_path) == [True, True]
