"""Scripts that save and load: inside the scope, before any training, each worker to its own path."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all
from tests.scripts.compare import assert_same_as_plain_keras, weights
from tests.scripts.files import files_opened_to_write


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(7)
    return random.normal(size=(60, 6)).astype("float32"), random.normal(size=(60, 1)).astype("float32")


def network() -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


def everything_in_the_scope(strategy: Any, directory: Path) -> Any:
    """As in Keras' guide to distributed training, where all of the script stands inside the scope."""
    directory = directory / f"{strategy.size}-workers"
    directory.mkdir(exist_ok=True)
    x, y = data()
    with strategy.scope():
        model = network()
        model.save(directory / "untrained.keras")
        model = keras.models.load_model(directory / "untrained.keras")
        callbacks = [
            keras.callbacks.ModelCheckpoint(directory / "epochs" / "{epoch}.keras"),
            keras.callbacks.BackupAndRestore(directory / "backup"),
        ]
        history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        model.save_weights(directory / "final.weights.h5")
        model.export(directory / "exported", verbose=False)
        again = keras.models.load_model(directory / "epochs" / "2.keras")
        again.load_weights(directory / "final.weights.h5")
        more = again.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
    return {"history": history.history, "more": more.history, "weights": weights(again)}


def test_a_script_that_stands_in_the_scope_saves_and_loads_as_in_plain_keras(
    pool2: Pool, plain: Pool, tmp_path: Path
) -> None:
    assert_same_as_plain_keras(pool2, plain, everything_in_the_scope, tmp_path)


def saved_by_one_worker_in_the_scope(strategy: Any, directory: Path, rank: int) -> Any:
    x, y = data()
    with strategy.scope():
        model = network()
        if strategy.rank == rank:
            keras.saving.save_model(model, directory / "by function.keras")
            model.save(directory / "by method.keras")
        history = model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
    return history.history


def test_one_worker_alone_may_save_in_the_scope(pool2: Pool, tmp_path: Path) -> None:
    assert_equal_on_all(pool2.run(saved_by_one_worker_in_the_scope, tmp_path, 0))
    assert {file.name for file in tmp_path.iterdir()} == {"by function.keras", "by method.keras"}


def saved_to_a_path_of_its_own(strategy: Any) -> Any:
    x, y = data()
    with strategy.scope():
        model = network()
    directory = Path(tempfile.mkdtemp())
    for trial in range(2):
        path = directory / f"trial-{trial}" / "best.weights.h5"
        saved = keras.callbacks.ModelCheckpoint(
            path, monitor="loss", save_best_only=True, save_weights_only=True
        )
        log = keras.callbacks.CSVLogger(directory / f"{trial}.csv")
        model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=[saved, log])
        model.load_weights(path)
    return {"weights": weights(model), "log": (directory / "1.csv").read_text()}


def test_each_worker_may_save_to_a_path_of_its_own_and_read_it_back(pool2: Pool) -> None:
    results = pool2.run(saved_to_a_path_of_its_own)
    assert_equal_on_all(results)
    assert results[0]["log"].count("\n") == 3


def saved_by_worker_0_before_all(strategy: Any, directory: Path) -> set[str]:
    written = files_opened_to_write(directory)
    with strategy.scope():
        model = network()
    if strategy.rank == 0:
        model.save(directory / "worker 0.keras")
    model.save(directory / "all.keras")
    keras.models.load_model(directory / "all.keras")
    return written


def test_a_file_has_one_writer_also_when_worker_0_saves_more_than_the_others(
    pool2: Pool, tmp_path: Path
) -> None:
    by_worker = pool2.run(saved_by_worker_0_before_all, tmp_path)
    assert sorted([*by_worker[0], *by_worker[1]]) == ["all.keras", "worker 0.keras"]


class Counted(keras.layers.Dense):
    """Counts how often it is saved."""

    saves = 0

    def save_own_variables(self, store: Any) -> None:
        self.saves += 1
        super().save_own_variables(store)


def saved_after_a_loop(strategy: Any, path: Path) -> tuple[int, bool]:
    with strategy.scope():
        layer = Counted(1)
        model = keras.Sequential([keras.Input((3,)), layer])
        optimizer = keras.optimizers.SGD(0.1)
    x = tf.ones((4, 3))
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(model(x) ** 2)
    optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
    model.save(path)
    loaded = keras.models.load_model(path, custom_objects={"Counted": Counted})
    return layer.saves, bool(np.all(loaded(x) == model(x)))


def test_a_model_that_only_a_custom_loop_trains_is_saved_by_one_worker(pool2: Pool, tmp_path: Path) -> None:
    results = pool2.run(saved_after_a_loop, tmp_path / "model.keras")
    assert results == [(1, True), (0, True)]


class SavesByDefault(keras.Sequential):
    def save(self, path: Path | None = None, **options: Any) -> None:
        assert path is None or "own" not in path.name
        super().save(path or self.default, **options)


def saved_by_a_method_of_its_own(strategy: Any, directory: Path) -> set[str]:
    written = files_opened_to_write(directory)
    with strategy.scope():
        model = SavesByDefault([keras.Input((6,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    object.__setattr__(model, "default", directory / f"own {strategy.rank}.keras")
    model.save()
    model.save(path=directory / "named.keras")
    model.save_weights(filepath=directory / "all.weights.h5")
    return written


def test_a_model_may_have_a_save_method_with_other_arguments(pool2: Pool, tmp_path: Path) -> None:
    by_worker = pool2.run(saved_by_a_method_of_its_own, tmp_path)
    assert {"own 0.keras", "named.keras"} <= by_worker[0]
    assert by_worker[1] == {"own 1.keras"}
