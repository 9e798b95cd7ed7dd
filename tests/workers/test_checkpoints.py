"""Checkpoints of real workers: when they are written, by which worker, of which state; and restored bits."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf

import replicast
from replicast.errors import CheckpointError, JobFailed, UpdateRefused
from replicast.replicas import job_checkpoints as restoring
from replicast.replicas.job_checkpoints import Checkpoints
from replicast.replicas.position import Training
from replicast.storage import inbox
from replicast.storage.checkpoints import CheckpointStore, open_checkpoint, patch
from replicast.storage.journal import committed_updates
from replicast.training.variables import component
from replicast.update.digest import digest_state
from replicast.update.edits import DTYPES
from replicast.update.update import Update
from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all
from tests.pool.scripts import equal_on_all
from tests.threads import Job, Worker, start_values
from tests.workers.changing import scramble
from tests.workers.recipes import CLASSES, FEATURES, arrays, perceptron
from tests.workers.test_update_edits import values_of
from tests.workers.test_updates import WAIT_SECS, Meeting, adam, change_here_only, mark, quietly, replicas_of


def steps_in(run_dir: Path) -> list[int]:
    store = CheckpointStore(run_dir)
    assert store.problems() == []
    return [manifest.step for manifest in store.manifests()]


def places_in(run_dir: Path) -> list[tuple[int, int, int]]:
    return [(found.step, found.epoch, found.batch) for found in CheckpointStore(run_dir).manifests()]


class Driven:
    """A training of no steps at all: calls the callback as `fit` does, whenever a test says so."""

    def __init__(self, replicas: replicast.Replicas, length: int = 100, **saves: Any) -> None:
        self._callback = replicas.callback(**saves)
        self._callback.set_model(replicas.model)
        self._callback.set_params({"steps": length, "epochs": 100})
        self._callback.on_train_begin()
        self._callback.on_epoch_begin(0)
        self._batch = 0

    def go_on(self) -> None:
        """All callbacks are done with the last step: its checkpoint can be written."""
        self._callback.on_train_batch_begin(self._batch)

    def step(self, **logs: float) -> None:
        self.go_on()
        self._batch += 1
        self._callback.on_train_batch_end(self._batch - 1, logs)

    def end(self) -> None:
        self._callback.on_train_end()


# Saving.


def noisy(strategy: Any) -> keras.Model:
    """With a seed, moving statistics and an optimizer that remembers."""
    extra = (lambda: keras.layers.Dropout(0.3), keras.layers.BatchNormalization)
    return perceptron(strategy, adam, extra=extra)


def saved_by_all(strategy: Any, directory: Path) -> dict[str, Any]:
    model = noisy(strategy)
    run_dir = directory / f"run-{strategy.rank}"
    x, y = arrays(48)
    with replicas_of(model, run_dir=run_dir, durability="disk") as replicas:
        model.fit(x, y, batch_size=12, verbose=0, callbacks=[replicas.callback()])
        manifest = replicas.save().result(WAIT_SECS)
        found = replicas.digests()
    return {"digests": found, "manifest": manifest}


def test_a_checkpoint_has_the_digests_of_every_worker_and_is_written_by_worker_0_alone(
    pool3: Pool, tmp_path: Path
) -> None:
    results = pool3.run(saved_by_all, tmp_path)
    assert_equal_on_all([result["digests"] for result in results])
    manifest = results[0]["manifest"]
    assert [result["manifest"] for result in results[1:]] == [None, None]
    path = tmp_path / "run-0" / "checkpoints" / "00000004-1"
    assert sorted(file.name for file in path.iterdir()) == ["manifest.json", "state.safetensors"]
    with open_checkpoint(path) as reader:
        reader.verify()
        assert reader.manifest == manifest
        values = {name: reader.read(name) for name in manifest.digests}
    assert manifest.digests == results[0]["digests"]
    assert manifest.state_digest == digest_state(values)
    assert (manifest.step, manifest.epoch, manifest.batch, manifest.workers) == (4, 1, 0, 3)
    assert [name for name in manifest.digests if "seed" in name], "the seeds are not in it"
    assert {"loss", "accuracy"} <= set(manifest.metrics)
    assert {"replicast", "keras", "numpy"} <= set(manifest.versions)
    assert not [path for rank in (1, 2) for path in (tmp_path / f"run-{rank}").glob("**/checkpoints")]


def saved_in_fit(strategy: Any, run_dir: Path, every: Any, per_execution: int) -> None:
    model = perceptron(strategy, steps_per_execution=per_execution)
    x, y = arrays(6 * 8)
    with replicas_of(model, run_dir=run_dir) as replicas:
        callback = replicas.callback(save_every=every, keep=10)
        model.fit(x, y, batch_size=8, epochs=2, verbose=0, callbacks=[callback])


@pytest.mark.parametrize(
    ("every", "per_execution", "places"),
    [
        (5, 1, [(5, 0, 5), (10, 1, 4)]),
        ("epoch", 1, [(6, 1, 0), (12, 2, 0)]),
        (3, 2, [(4, 0, 4), (6, 1, 0), (10, 1, 4), (12, 2, 0)]),
    ],
    ids=["steps", "epochs", "steps within executions"],
)
def test_fit_saves_when_it_was_asked_to(
    pool2: Pool, tmp_path: Path, every: Any, per_execution: int, places: list[tuple[int, int, int]]
) -> None:
    pool2.run(saved_in_fit, tmp_path, every, per_execution)
    assert places_in(tmp_path) == places


def saved_in_time(strategy: Any, run_dir: Path) -> None:
    with replicas_of(perceptron(strategy), run_dir=run_dir) as replicas:
        for fewest in (1, 2):  # a second training goes on with it
            training = Driven(replicas, save_every=timedelta(seconds=0), keep=10)
            enough = lambda fewest=fewest: strategy.rank != 0 or len(steps_in(run_dir)) >= fewest  # noqa: E731
            quietly(replicas, lambda step: None, enough)
            training.end()


def test_a_checkpoint_is_made_after_a_time_at_one_boundary(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(saved_in_time, tmp_path)
    assert len(steps_in(tmp_path)) >= 2


def trained_until_told(training: Driven) -> replicast.ReplicasDiverged:
    for _ in range(2000):
        try:
            training.step()
        except replicast.ReplicasDiverged as error:
            return error
        time.sleep(0.005)
    raise AssertionError("it was never told")


def saved_although_told_again(replicas: replicast.Replicas) -> Any:
    """More than one checkpoint may have found the difference, and all workers are told each time."""
    for _ in range(100):
        with contextlib.suppress(replicast.ReplicasDiverged):
            return replicas.save()
    raise AssertionError("it is told again and again")


def diverged(strategy: Any, run_dir: Path) -> tuple[Any, ...]:
    model = perceptron(strategy, adam)
    by_hand = ""
    with replicas_of(model, run_dir=run_dir, durability="disk") as replicas:
        training = Driven(replicas, save_every=2, audit_every=None)
        training.step()
        if strategy.rank == strategy.size - 1:
            change_here_only(model, model.layers[1].name, "bias", 1.0)
        told = trained_until_told(training)
        saving = saved_although_told_again(replicas)
        if strategy.rank == 0:
            with pytest.raises(replicast.ReplicasDiverged) as caught:
                saving.result(WAIT_SECS)
            by_hand = str(caught.value)
            assert not list(run_dir.glob("checkpoints/*"))
        replicas.sync(source=0)  # and what was told already is not raised here, nor later
        for _ in range(2):
            training.step()
        training.end()
        found = replicas.digests()
    return (told.worker, told.step, str(told)), by_hand, found


def test_a_state_that_is_not_the_same_everywhere_is_not_saved_and_the_variable_worker_and_step_are_named(
    pool3: Pool, tmp_path: Path
) -> None:
    results = pool3.run(diverged, tmp_path)
    assert_equal_on_all([told for told, _, _ in results])
    assert_equal_on_all([found for _, _, found in results])
    (worker, step, said), by_hand, _ = results[0]
    assert worker == 2
    assert "sequential/dense_1/bias: worker 2 differs from workers 0 and 1" in said
    assert "The state is not saved. Worker 2 differs from worker 0 at step " in by_hand
    (saved,) = steps_in(tmp_path)
    assert saved > step, "once they are equal again, it is saved"


# What is asked for.


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"keep": 0}, "keep is a number of checkpoints, at least 1. Received: 0"),
        ({"keep": -1}, "Received: -1"),
        ({"keep": True}, "Received: True"),
        ({"keep_best": "loss"}, 'as in ("loss", "min"). Received: \'loss\''),
        ({"keep_best": ("loss", "bogus")}, "Received: ('loss', 'bogus')"),
        ({"when_busy": "x"}, 'when_busy must be "wait" or "skip". Received: \'x\''),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        replicast.callbacks.ReplicasCallback(mock.Mock(), **asked)


# A checkpoint among updates.


def doubled(id_: str) -> Update:
    """An update of which one time more or less is seen."""
    some = np.arange(CLASSES, dtype="float32")
    return Update(id=id_).scale("dense_1/kernel", 1.5).scale("dense_1/bias", 2).add("dense_1/bias", some)


def trained(replicas: replicast.Replicas, steps: int, **options: Any) -> dict[str, str]:
    """The digests after so many steps."""
    training = Driven(replicas, **options)
    for _ in range(steps):
        training.step()
    training.end()
    return replicas.digests()


def among_updates(strategy: Any, run_dir: Path) -> dict[str, Any]:
    """The first life saves at step 5. The second begins there and saves at step 6, where the third begins."""
    model, lives = perceptron(strategy, adam), []
    last = strategy.rank == strategy.size - 1

    def propose(number: int, at_step: int | None = None) -> None:
        if last:
            replicas.propose(doubled(f"number-{number}"), at_step=at_step)
        replicas.sync()

    with replicas_of(model, run_dir=run_dir, durability="disk") as replicas:
        trained(replicas, 1)
        for number, at_step in enumerate((9, 5, None, 7), 1):
            propose(number, at_step)
        trained(replicas, 9, save_every=5)
        lives.append({one.id: one.step for one in replicas.history})
    scramble(model, strategy.rank)
    with replicas_of(model, run_dir=run_dir, durability="disk") as replicas:
        second = replicas.restore(5)
        trained(replicas, 1)
        propose(5)
        replicas.save().result(WAIT_SECS)
        lived = trained(replicas, 4)
        lives.append({one.id: one.step for one in replicas.history})
    scramble(model, strategy.rank)
    with replicas_of(model, run_dir=run_dir, durability="disk") as replicas:
        third = replicas.restore(6)
        again = trained(replicas, 4)
        lives.append({one.id: one.step for one in replicas.history})
    holds = [sorted(one.holds) for one in (second, third)]
    return {"lived": lived, "again": again, "holds": holds, "lives": lives}


def test_of_the_updates_around_a_checkpoint_those_in_it_are_not_applied_again_and_the_others_are(
    pool2: Pool, tmp_path: Path
) -> None:
    results = pool2.run(among_updates, tmp_path)
    assert_equal_on_all(results)
    found = results[0]
    steps = [(record.id, record.step) for record in committed_updates(tmp_path)]
    in_order = [("number-3", 1), ("number-2", 5), ("number-4", 7), ("number-1", 9), ("number-5", 6)]
    assert steps == in_order
    manifest = CheckpointStore(tmp_path).manifest(6)
    assert (manifest.sequence, manifest.missing) == (5, (3, 4))
    assert found["holds"] == [[1, 2], [1, 2, 5]]
    assert found["lives"] == [
        dict(in_order[:4]),
        {"number-5": 6, "number-4": 7, "number-1": 9},
        {"number-4": 7, "number-1": 9},
    ]
    assert found["again"] == found["lived"]


NOTHING_FOR_REVERTS = mock.patch("replicast.storage.journal.REVERTIBLE_BYTES", 0)


def payloads(run_dir: Path) -> int:
    return len([*run_dir.glob("groups/**/*.safetensors")])


def needed_no_more(strategy: Any, run_dir: Path) -> dict[str, Any]:
    """One update before a checkpoint, one for a step behind it; of two checkpoints, the last one stays."""
    model = perceptron(strategy, adam)
    with NOTHING_FOR_REVERTS, replicas_of(model, run_dir=run_dir, durability="disk") as replicas:
        if strategy.rank == 1:
            replicas.propose(doubled("before"))
            replicas.propose(doubled("behind"), at_step=3)
        replicas.sync()
        for _ in range(2):
            trained(replicas, 1, save_every=1, keep=1)
        lived = trained(replicas, 2)
    left = payloads(run_dir)
    scramble(model, strategy.rank)
    with replicas_of(model, run_dir=run_dir, durability="disk") as replicas:
        assert replicas.restore().step == 2
        again = trained(replicas, 2)
    return {"left": left, "lived": lived, "again": again}


def test_the_bytes_of_an_update_go_when_every_checkpoint_holds_it_and_a_later_start_does_without_them(
    pool2: Pool, tmp_path: Path
) -> None:
    first, second = pool2.run(needed_no_more, tmp_path)
    assert first["left"] == 1
    assert first["lived"] == first["again"] == second["lived"] == second["again"]
    assert [record.id for record in committed_updates(tmp_path)] == ["before", "behind"]


def inbox_first(strategy: Any, run_dir: Path) -> dict[str, Any]:
    """Something waits in the inbox when a job starts, and the job takes its time before it restores."""
    model = perceptron(strategy)
    with replicas_of(model, run_dir=run_dir, durability="disk") as replicas:
        Driven(replicas).step()
        replicas.save().result(WAIT_SECS)
        saved = replicas.read(["sequential/dense_1/bias"])
    scramble(replicas.model, strategy.rank)
    if strategy.rank == 0:
        inbox.submit(run_dir, mark(0))
    with replicas_of(model, run_dir=run_dir, durability="disk") as replicas:
        ends = time.monotonic() + 1.0  # if the inbox is left alone until then, all is well
        while strategy.rank == 0 and not committed_updates(run_dir) and time.monotonic() < ends:
            time.sleep(0.01)
        replicas.restore()
        training = Driven(replicas)
        quietly(replicas, lambda step: None, lambda: bool(replicas.history))
        training.end()
        after = replicas.read(["sequential/dense_1/bias"])
    return {"saved": saved, "after": after}


def test_what_waits_in_the_inbox_is_applied_after_the_restore_however_late_that_comes(
    pool2: Pool, tmp_path: Path
) -> None:
    results = pool2.run(inbox_first, tmp_path)
    assert_equal_on_all(results)
    change = results[0]["after"]["sequential/dense_1/bias"] - results[0]["saved"]["sequential/dense_1/bias"]
    assert change.tolist() == [100.0, 0.0, 0.0, 0.0]


# Restoring.


TRANSFERRED = frozenset({"bool", "float16", "float32", "float64", "int32", "int64"})
"""TensorFlow can make variables of no other dtypes on several workers: it has to send their first values."""


class OfEach(keras.layers.Layer):
    """A variable of each of these dtypes."""

    def __init__(self, dtypes: frozenset[str]) -> None:
        super().__init__()
        self._dtypes = sorted(dtypes)

    def build(self, shape: Any) -> None:
        for place, dtype in enumerate(self._dtypes):
            value = values_of(dtype, place)
            held = self.add_weight(shape=value.shape, dtype=dtype, name=dtype, trainable=False)
            component(held).assign(value)

    def call(self, x: Any) -> Any:
        return x


def restored_bits(strategy: Any, run_dir: Path, dtypes: frozenset[str]) -> dict[str, Any]:
    extra = (lambda: keras.layers.Dropout(0.3), keras.layers.BatchNormalization, lambda: OfEach(dtypes))
    model = perceptron(strategy, adam, extra=extra)
    with replicas_of(model, run_dir=run_dir) as replicas:
        assert replicas.restore() is None, "there is nothing yet"
        saved = {}
        for step in (1, 2):
            replicas.boundary()
            replicas.save().result(WAIT_SECS)
            saved[step] = replicas.digests()
            component(model.optimizer.iterations).assign_add(step)
    found = {}
    for step in (None, 1, 2):
        with replicas_of(model, run_dir=run_dir) as replicas:
            scramble(replicas.model, strategy.rank)
            restored = replicas.restore(step)
            found[step] = (restored.step, replicas.step, replicas.digests())
    return {"saved": saved, "found": found}


def test_all_workers_have_the_bits_of_the_checkpoint_also_those_that_cannot_see_it(
    pool3: Pool, tmp_path: Path
) -> None:
    (tmp_path / "a file").touch()
    nowhere = tmp_path / "a file" / "run"  # it cannot even be made
    places = [tmp_path / "run", nowhere, nowhere]
    results = pool3.run_each(restored_bits, [(place, TRANSFERRED) for place in places])
    assert_equal_on_all(results)
    assert_bits_came_back(results[0], tmp_path / "run", TRANSFERRED)


def test_variables_of_every_dtype_come_back_bit_for_bit(pool1: Pool, tmp_path: Path) -> None:
    (found,) = pool1.run(restored_bits, tmp_path, DTYPES)
    assert_bits_came_back(found, tmp_path, DTYPES)


def assert_bits_came_back(result: dict[str, Any], run_dir: Path, dtypes: frozenset[str]) -> None:
    saved, found = result["saved"], result["found"]
    assert saved[1] != saved[2]
    assert found == {None: (2, 2, saved[2]), 1: (1, 1, saved[1]), 2: (2, 2, saved[2])}
    variables = list(CheckpointStore(run_dir).manifest(2).schema)
    assert dtypes <= {variable.dtype for variable in variables}
    for part in ("seed", "moving_variance", "velocity", "iteration", "learning_rate"):
        assert [variable for variable in variables if part in variable.name], part


def other_model(strategy: Any) -> keras.Model:
    """As `perceptron`, but for the width of its hidden layer."""
    with strategy.scope():
        layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(CLASSES)]
        model = keras.Sequential([keras.Input((FEATURES,)), *layers])
        model.compile(adam(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def refused(strategy: Any, run_dir: Path) -> dict[str, Any]:
    model = perceptron(strategy, adam)
    with replicas_of(model, run_dir=run_dir) as replicas:
        replicas.boundary()
        replicas.save().result(WAIT_SECS)
        saved = replicas.digests()
    keras.utils.clear_session()
    with replicas_of(other_model(strategy), run_dir=run_dir) as replicas:
        scramble(replicas.model, strategy.rank)
        before = replicas.digests()
        said = []
        for given in ({}, {"step": 7}):
            with pytest.raises(CheckpointError) as caught:
                replicas.restore(**given)
            said.append(str(caught.value))
        assert replicas.digests() == before, "nothing is changed by what is refused"
        restored = replicas.restore(partial=True)
        after = replicas.digests()
    left_out = set(restored.left_out)
    taken = {name: digest for name, digest in after.items() if name not in left_out}
    return {
        "said": said,
        "step": restored.step,
        "left_out": sorted(left_out),
        "taken": taken,
        "expected": {name: saved[name] for name in taken},
        "left_as_they_were": all(after[name] == before[name] for name in left_out if name in before),
    }


def test_a_checkpoint_of_another_model_is_refused_with_the_list_and_taken_in_part_when_asked(
    pool2: Pool, tmp_path: Path
) -> None:
    results = pool2.run(refused, tmp_path)
    assert_equal_on_all(results)
    found = results[0]
    other, absent = found["said"]
    changed = ["sequential/dense/bias", "sequential/dense/kernel", "sequential/dense_1/kernel"]
    for name in changed:
        assert f"{name}: expected float32" in other
    assert "dense_1/bias" not in other.replace("dense_1_bias", "")
    assert "partial=True" in other
    assert "There is no checkpoint of this step" in absent
    assert "Expected: one of 1. Received: 7." in absent
    assert found["left_out"] == sorted(
        changed
        + [
            f"optimizer/{name.replace('/', '_')}_{kind}"
            for name in changed
            for kind in ("momentum", "velocity")
        ]
    )
    assert found["step"] == 1
    assert found["taken"] == found["expected"]
    assert "optimizer/learning_rate" in found["taken"]
    assert found["left_as_they_were"]


def correction() -> Update:
    """One of each operation, on weights and on what the optimizer remembers."""
    random = np.random.default_rng(5)

    def some(*shape: int) -> np.ndarray:
        return random.standard_normal(shape).astype("float32")

    update = Update(id="correction", reset_slots=True)
    update = update.add("dense/kernel", some(FEATURES, 16)).scale("dense/kernel", 1 / 3)
    update = update.add_low_rank("dense/kernel", some(FEATURES, 2), some(2, 16))
    update = update.assign_rows("dense_1/kernel", [3, 1], some(2, CLASSES))
    update = update.add_rows("dense_1/kernel", [0, 3], some(2, CLASSES))
    return update.blend("dense/bias", some(16), 0.3).scale("optimizer/learning_rate", 0.7)


def patched(strategy: Any, directory: Path, how: str) -> dict[str, Any]:
    model = perceptron(strategy, adam)
    x, y = arrays(48)
    with replicas_of(model, run_dir=directory, durability="disk") as replicas:
        model.fit(x, y, batch_size=16, verbose=0, callbacks=[replicas.callback(save_every=3)])
        if how == "live" and strategy.rank == strategy.size - 1:
            replicas.propose(correction())
        replicas.sync()
        live = replicas.digests()
    if how == "live":
        return {"digests": live}
    run_dir = directory / "beside" if how == "patched beside" else directory
    if strategy.rank == 0 and how == "patched beside":
        source, target = (CheckpointStore(each).path(3).as_path() for each in (directory, run_dir))
        patch(source, correction(), target)
    elif strategy.rank == 0:
        inbox.submit(directory, correction())
    Meeting(strategy).all_say()
    scramble(replicas.model, strategy.rank)
    with replicas_of(model, run_dir=run_dir, durability="disk") as replicas:
        assert replicas.restore().step == 3
        training = Driven(replicas)
        digests = replicas.digests()
        training.end()
        return {"digests": digests}


def test_a_patched_checkpoint_gives_the_bits_of_the_live_update_at_its_step(
    pool2: Pool, tmp_path: Path
) -> None:
    ways = ("live", "pushed for the next start")
    results = {how: pool2.run(patched, tmp_path / how, how) for how in (*ways, "patched beside")}
    digests = set()
    for how, result in results.items():
        assert_equal_on_all(result)
        assert result[0]["digests"] == results["live"][0]["digests"], how
    assert results["live"][0]["digests"] != CheckpointStore(tmp_path / "live").manifest(3).digests
    for how in ways:
        (record,) = committed_updates(tmp_path / how)
        assert (record.id, record.step) == ("correction", 3)
        digests |= {digest for receipt in record.receipts for digest in receipt.digests.values()}
    assert len(digests) == 1


def imported(strategy: Any, directory: Path) -> dict[str, Any]:
    """A script that imports weights before it trains, with an update that waits for it."""
    model = perceptron(strategy)
    with replicas_of(model) as replicas:
        replicas.export(directory / "weights.h5")
        scramble(replicas.model, 0)
    if strategy.rank == 0:
        inbox.submit(directory / "run", mark(0))
    Meeting(strategy).all_say()
    with replicas_of(model, run_dir=directory / "run", durability="disk") as replicas:
        assert replicas.restore() is None
        replicas.import_weights(directory / "weights.h5")
        before = replicas.read(["sequential/dense_1/bias"])
        training = Driven(replicas)
        after = replicas.read(["sequential/dense_1/bias"])
        training.end()
        return {"before": before, "after": after}


def test_what_waits_is_applied_after_what_a_script_does_before_it_trains(pool2: Pool, tmp_path: Path) -> None:
    results = pool2.run(imported, tmp_path)
    assert_equal_on_all(results)
    change = results[0]["after"]["sequential/dense_1/bias"] - results[0]["before"]["sequential/dense_1/bias"]
    assert change.tolist() == [100.0, 0.0, 0.0, 0.0]
    assert [(record.step, record.id) for record in committed_updates(tmp_path / "run")][-1][0] == 0


# A damaged checkpoint is refused by every worker; all use the same other one.


def flip(run_dir: Path, step: int, strategy: Any) -> None:
    if strategy.rank == 0:
        state = CheckpointStore(run_dir).path(step).as_path() / "state.safetensors"
        content = bytearray(state.read_bytes())
        content[-3] ^= 1
        state.write_bytes(content)


def damaged(strategy: Any, run_dir: Path) -> dict[str, Any]:
    """Two checkpoints, of which first the last is damaged, then both."""
    model = perceptron(strategy, adam)
    with replicas_of(model, run_dir=run_dir) as replicas:
        replicas.save().result(60)
        saved = replicas.digests()
        replicas.boundary()
        replicas.save().result(60)
        with pytest.raises(CheckpointError, match=r"restore\(\) must be called before training"):
            replicas.restore()
    with replicas_of(model, run_dir=run_dir) as replicas, mock.patch.object(restoring, "logger") as logger:
        flip(run_dir, 1, strategy)
        scramble(model, strategy.rank)
        before = replicas.digests()
        said = []
        with pytest.raises(CheckpointError) as refused:
            replicas.restore(step=1)
        said.append(str(refused.value))
        assert replicas.digests() == before
        restored = replicas.restore()
        fell_back = restored.step == replicas.step == 0 and replicas.digests() == saved
        warned = [call.args[0] % call.args[1:] for call in logger.warning.call_args_list]
        with pytest.raises(CheckpointError, match="no other restored checkpoint"):
            replicas.restore()
        flip(run_dir, 0, strategy)
    with replicas_of(model, run_dir=run_dir) as replicas:
        scramble(model, strategy.rank)
        before = replicas.digests()
        with pytest.raises(CheckpointError) as refused:
            replicas.restore()
        said.append(str(refused.value))
        return {
            "said": said,
            "changed": before != replicas.digests(),
            "fell back": fell_back,
            "warned": warned,
        }


def begun_again(strategy: Any, run_dir: Path, restores: bool) -> list[str]:
    """What is warned of when the training of a run with a checkpoint begins once more."""
    model = perceptron(strategy, adam)
    with replicas_of(model, run_dir=run_dir) as replicas:
        replicas.save().result(60)
        replicas.boundary()
    with mock.patch("replicast.replicas.joined_worker.logger") as logger:
        with replicas_of(model, run_dir=run_dir) as replicas:
            if restores:
                replicas.restore()
            replicas.boundary()
        return [call.args[0] % call.args[1:] for call in logger.warning.call_args_list]


@pytest.mark.parametrize("restores", [False, True])
def test_a_script_that_forgets_to_restore_is_told_before_its_checkpoints_are_lost(
    pool2: Pool, tmp_path: Path, restores: bool
) -> None:
    first, second = pool2.run(begun_again, tmp_path, restores)
    assert second == []
    assert (len(first), "does not call replicas.restore()" in "".join(first)) == (
        (0, False) if restores else (1, True)
    )


@pytest.mark.parametrize("seen_by", ["all workers", "worker 0"])
def test_one_flipped_bit_is_found_by_all_who_go_back_to_a_whole_checkpoint_together(
    pool3: Pool, tmp_path: Path, seen_by: str
) -> None:
    (tmp_path / "a file").touch()
    elsewhere = tmp_path / "run" if seen_by == "all workers" else tmp_path / "a file" / "run"
    results = pool3.run_each(damaged, [(tmp_path / "run",), (elsewhere,), (elsewhere,)])
    for result in results:
        asked_for, none_is_whole = result["said"]
        assert "not those that were written" in asked_for
        assert "replicast checkpoint verify tells which are intact" in asked_for
        assert "No checkpoint is intact" in none_is_whole
        assert not result["changed"]
        assert result["fell back"]
    (warning,), *others = (result["warned"] for result in results)
    assert warning.startswith("THE CHECKPOINT OF STEP 1 IS DAMAGED; step 0 is restored instead. ")
    assert others == [[], []]


def restored_by(worker: Worker, run_dir: Path, number: int = 1) -> restoring.Restored | None:
    """Only worker 0 sees the run directory; variables are sent in parcels of one."""
    store = CheckpointStore(run_dir if worker.rank == 0 else run_dir / "not" / "here")
    return restoring.Restore(worker.session, store).run(number, None, False)


def checkpoint_of_ones(run_dir: Path) -> None:
    ones = {name: np.ones_like(value) for name, value in start_values().items()}
    with Job(1, values=ones) as job:
        worker = job.workers[0]
        training = Training(worker.session)
        checkpoints = Checkpoints(worker.session, training, CheckpointStore(run_dir))
        worker.hooks.take_snapshot = checkpoints.take_snapshot
        worker.hooks.write_checkpoint = checkpoints.write
        assert job.on_all(lambda _: checkpoints.save_here())[0].result(120) is not None


@pytest.mark.parametrize("problem", ["other values", "nothing"])
def test_a_restore_that_one_worker_cannot_finish_ends_the_job_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: str
) -> None:
    monkeypatch.setattr(restoring, "PARCEL_BYTES", 1)
    checkpoint_of_ones(tmp_path)
    with Job(3, begins=False) as job:
        transport, received = job.workers[1].transport, itertools.count(1)
        receive = transport.receive

        def receive_badly(parcel: Any, timeout_secs: float, *look: Any) -> Any:
            values = receive(parcel, timeout_secs, *look)
            if next(received) == 3:
                if problem == "nothing":
                    raise UpdateRefused("The bytes did not arrive")
                values[0].reshape(-1).view(np.uint8)[0] ^= 1
            return values

        monkeypatch.setattr(transport, "receive", receive_badly)
        said = job.on_all(failed_restore(tmp_path))
        assert all(each.startswith("Worker 1 has not received the checkpoint intact") for each in said)


def failed_restore(run_dir: Path) -> Callable[[Worker], str]:
    def act(worker: Worker) -> str:
        with pytest.raises(JobFailed) as caught:
            restored_by(worker, run_dir)
        return str(caught.value)

    return act


def test_a_restore_by_parcels_gives_every_worker_the_checkpoint_and_leaves_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restoring, "PARCEL_BYTES", 1)
    checkpoint_of_ones(tmp_path)
    with Job(3, begins=False) as job:
        job.on_all(lambda worker: restored_by(worker, tmp_path))
        assert all(np.all(value == 1) for worker in job.workers for value in worker.state.values.values())
        assert not job.files()


def test_a_restore_for_which_worker_0_has_no_memory_ends_the_job_on_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoint_of_ones(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with Job(2, begins=False) as job:
        said = job.on_all(failed_restore(tmp_path))
        assert all("Worker 0 could not send the checkpoint" in each for each in said)


# Files of a model: exported by one worker, imported by all.

FILES = ["model.keras", "model.weights.h5", "tensorflow/checkpoint"]


@pytest.mark.parametrize("name", FILES)
@equal_on_all("pool2")
def test_a_model_comes_back_from_the_file_that_one_worker_wrote(
    strategy: Any, tmp_path: Path, name: str
) -> dict[str, str]:
    """Exports, changes every replica, imports; the digests of the weights before and after are the same."""
    model = perceptron(strategy)
    weights = [variable.path for variable in model.variables]
    with replicas_of(model) as replicas:
        model.fit(*arrays(), batch_size=30, verbose=0, callbacks=[replicas.callback()])
        before = replicas.digests(weights)
        replicas.export(tmp_path / name)
        if strategy.rank == 1:
            replicas.propose(Update().add("dense_1/bias", np.ones(CLASSES, np.float32)))
        replicas._active().end_training()
        assert replicas.digests(weights) != before
        assert replicas.import_weights(tmp_path / name) is not None
        assert replicas.digests(weights) == before
        assert replicas.import_weights(tmp_path / name) is None  # nothing differs any more
    return before


def nothing_there(strategy: Any, directory: Path) -> None:
    with replicas_of(perceptron(strategy)) as replicas:
        for name in FILES:
            with pytest.raises(replicast.CheckpointError, match="Worker 0 could not read"):
                replicas.import_weights(directory / name)


def test_a_file_that_is_not_there_is_told_to_every_worker(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(nothing_there, tmp_path)


def batches_used(strategy: Any, directory: Path, attempt: int, stop_after: int) -> list[int]:
    """A custom loop over a shuffled dataset of 5 batches, three epochs; a checkpoint after each step."""
    model = perceptron(strategy)
    data = tf.data.Dataset.range(5).shuffle(5, seed=7)
    used = []
    with replicas_of(model, run_dir=directory, durability="disk") as replicas:
        restored = replicas.restore()
        assert (restored is not None) == (attempt > 0)
        for _ in range(replicas.step // 5, 3):
            for batch in replicas.resume(data):
                used.append(int(batch))
                replicas.boundary()
                replicas.save().result(60.0)
                if replicas.step == stop_after:
                    return used
    return used


def custom_loop(strategy: Any, run_dir: Path, before: str, updates: bool) -> dict[str, str]:
    """Four steps, of which the first two are in a checkpoint; `updates` of the third are not."""
    model = perceptron(strategy)
    bias = component(model.layers[-1].bias)
    with replicas_of(model, run_dir=run_dir, durability="disk") as replicas:
        replicas.restore()
        if before == "audit":
            replicas.audit()
        if before == "resume":
            replicas.resume([])
        while replicas.step < 4:
            bias.assign(0.5 * bias + 1.0)
            replicas.boundary()
            if updates and replicas.step == 2:
                replicas.save().result(WAIT_SECS)
                replicas.propose(doubled("behind"))
                replicas.sync()
        return replicas.digests()


@pytest.mark.parametrize("before", ["nothing", "audit", "resume"])
def test_what_a_custom_loop_begins_with_is_recorded_at_the_step_of_its_state(
    pool1: Pool, tmp_path: Path, before: str
) -> None:
    """An update that the checkpoint of its step lacks, and one that waits in the inbox of a start."""
    undisturbed = pool1.run(custom_loop, tmp_path, before, True)
    assert pool1.run(custom_loop, tmp_path, before, False) == undisturbed
    inbox.submit(tmp_path, mark(0))
    took = pool1.run(custom_loop, tmp_path, before, False)
    assert took != undisturbed
    assert pool1.run(custom_loop, tmp_path, before, False) == took
    steps = [(record.id, record.step) for record in committed_updates(tmp_path)]
    assert steps == [("behind", 2), (mark(0).id, 2 if before == "resume" else 3)]


def test_a_custom_loop_continues_with_the_batch_after_the_last_one(pool1: Pool, tmp_path: Path) -> None:
    (whole,) = pool1.run(batches_used, tmp_path / "undisturbed", 0, -1)
    assert len(whole) == 15
    assert [sorted(whole[first : first + 5]) for first in (0, 5, 10)] == [[0, 1, 2, 3, 4]] * 3
    (first,) = pool1.run(batches_used, tmp_path / "stopped", 0, 7)
    (second,) = pool1.run(batches_used, tmp_path / "stopped", 1, -1)
    assert first + second == whole
