"""Scripts that save and load: inside the scope, before any training, each worker to its own path."""

from __future__ import annotations

import contextlib
import io
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.saving import save_model

from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all
from tests.pool.scripts import equal_on_all
from tests.scripts.compare import files_opened_to_write, same_as_plain_keras, weights


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(7)
    return random.normal(size=(60, 6)).astype("float32"), random.normal(size=(60, 1)).astype("float32")


def network() -> keras.Model:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=["mae"])
    return model


@same_as_plain_keras("pool2")
def test_a_script_that_stands_in_the_scope_saves_and_loads_as_in_plain_keras(
    strategy: Any, tmp_path: Path
) -> Any:
    """As in Keras' guide to distributed training, where all of the script stands inside the scope."""
    tmp_path = tmp_path / f"{strategy.size}-workers"
    tmp_path.mkdir(exist_ok=True)
    x, y = data()
    with strategy.scope():
        model = network()
        model.save(tmp_path / "untrained.keras")
        model = keras.models.load_model(tmp_path / "untrained.keras")
        callbacks = [
            keras.callbacks.ModelCheckpoint(tmp_path / "epochs" / "{epoch}.keras"),
            keras.callbacks.BackupAndRestore(tmp_path / "backup"),
        ]
        history = model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0, callbacks=callbacks)
        model.save_weights(tmp_path / "final.weights.h5")
        model.export(tmp_path / "exported", verbose=False)
        again = keras.models.load_model(tmp_path / "epochs" / "2.keras")
        again.load_weights(tmp_path / "final.weights.h5")
        more = again.fit(x, y, batch_size=16, epochs=1, shuffle=False, verbose=0)
    return {"history": history.history, "more": more.history, "weights": weights(again)}


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


@equal_on_all("pool2")
def test_a_model_that_only_a_custom_loop_trains_is_saved_by_one_worker(strategy: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.keras"
    with strategy.scope():
        layer = Counted(1)
        model = keras.Sequential([keras.Input((3,)), layer])
        optimizer = keras.optimizers.SGD(0.1)
    x = tf.ones((4, 3))

    def step() -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    tf.function(lambda: strategy.run(step))()
    model.save(path)
    loaded = keras.models.load_model(path, custom_objects={"Counted": Counted})
    assert layer.saves == (strategy.rank == 0)
    assert np.all(loaded(x) == model(x))


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


@keras.saving.register_keras_serializable()
class Noted(Counted):
    """Counts whatever Keras asks of it to save it: variables, configuration, graphs."""

    def get_config(self) -> Any:
        self.saves += 1
        return super().get_config()

    def call(self, inputs: Any) -> Any:
        self.saves += 1
        return super().call(inputs)


def saved_without_being_compiled(strategy: Any, directory: Path) -> dict[str, Any]:
    with strategy.scope():
        inputs, layer = keras.Input((6,)), Noted(3)
        code = layer(inputs)
        encoder = keras.Model(inputs, code)  # a part of the model, which is never compiled
        model = keras.Model(inputs, keras.layers.Dense(1)(code))
    ways = {
        "method.keras": encoder.save,
        "function.keras": lambda path: keras.saving.save_model(encoder, path),
        "imported.h5": lambda path: save_model(encoder, path),
        "a.weights.h5": encoder.save_weights,
        "folder": lambda path: save_model(model, path, zipped=False),
        "shards.weights.json": lambda path: model.save_weights(path, max_shard_size=1),
        "exported": lambda path: encoder.export(path, verbose=False),
    }
    asked = {}
    for name, save in ways.items():
        for number in range(3):
            layer.saves = 0
            save(directory / f"{number} {name}")
            asked[name] = layer.saves
            if name.endswith((".keras", "imported.h5")) or name == "folder":  # at once, on every worker
                loaded = keras.models.load_model(directory / f"{number} {name}", compile=False)
                assert np.array_equal(loaded.get_weights()[0], encoder.get_weights()[0])
    encoder.load_weights(directory / "2 a.weights.h5")
    model.load_weights(directory / "2 shards.weights.json")
    archive = keras.export.ExportArchive()
    archive.add_endpoint("serve", encoder.__call__, [tf.TensorSpec((None, 6))])
    archive.track(encoder)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        archive.write_out(directory / "archive")
    asked["archive"] = len(said.getvalue())  # only the worker that writes it says so
    for name in ("2 exported", "archive"):
        loaded = tf.saved_model.load(directory / name)
        assert loaded.serve(np.zeros((2, 6), "float32")).shape == (2, 3)
    return asked


def test_a_model_that_was_never_compiled_is_saved_by_one_worker_by_every_way_of_keras(
    pool2: Pool, tmp_path: Path
) -> None:
    first, second = pool2.run(saved_without_being_compiled, tmp_path)
    assert len(first) == 8
    assert all(asked > 0 for asked in first.values()), first
    assert not any(second.values()), second
    assert list(tmp_path.glob(".part*")) == []


class Breaks(keras.layers.Dense):
    """Fails while it is saved, when the file is half written."""

    broken = False

    def save_own_variables(self, store: Any) -> None:
        super().save_own_variables(store)
        if self.broken:
            raise RuntimeError("the disk is full")


def saved_while_it_breaks(strategy: Any, directory: Path) -> list[bytes]:
    with strategy.scope():
        layer = Breaks(1)
        model = keras.Sequential([keras.Input((3,)), layer])
    files = [directory / name for name in ("a.keras", "a.weights.h5")]
    for file in files:
        (model.save if file.suffix == ".keras" else model.save_weights)(file)
    first = [file.read_bytes() for file in files]
    layer.broken = True
    for file in files:
        with pytest.raises(RuntimeError, match="the disk is full"):
            (model.save if file.suffix == ".keras" else model.save_weights)(file)
    assert [file.read_bytes() for file in files] == first
    return first


def test_a_save_that_fails_leaves_the_file_of_before_whole(pool2: Pool, tmp_path: Path) -> None:
    pool2.run(saved_while_it_breaks, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.keras", "a.weights.h5"]
