"""More ways to save: by one worker, by some, in a larger script, with errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from tests.pool import Pool, WorkerFailed
from tests.pool.checks import assert_equal_on_all
from tests.scripts.compare import assert_same_as_plain_keras, files_opened_to_write, weights
from tests.scripts.test_saving import data, network, saved_by_one_worker_in_the_scope


@pytest.mark.parametrize("rank", [1, 2])
def test_any_worker_alone_may_save_in_the_scope(pool3: Pool, tmp_path: Path, rank: int) -> None:
    assert_equal_on_all(pool3.run(saved_by_one_worker_in_the_scope, tmp_path, rank))
    assert {file.name for file in tmp_path.iterdir()} == {"by function.keras", "by method.keras"}


def saved_in_every_form(strategy: Any, directory: Path) -> Any:
    directory = directory / f"{strategy.size}-workers"
    directory.mkdir(exist_ok=True)
    x, y = data()
    with strategy.scope():
        model = network()
        model.fit(x, y, batch_size=16, shuffle=False, verbose=0)
        model.save(directory / "zipped.keras")
        model.save(directory / "folder", zipped=False)
        model.save(directory / "legacy.h5")
        model.save_weights(directory / "sharded.weights.json", max_shard_size=1)
        loaded = [keras.models.load_model(directory / name) for name in ("zipped.keras", "folder")]
        loaded.append(keras.models.load_model(directory / "legacy.h5", compile=False))
        model.load_weights(directory / "sharded.weights.json")
    return {"predictions": [one.predict(x, verbose=0) for one in [*loaded, model]], "weights": weights(model)}


def test_every_form_of_a_saved_model_can_be_loaded_on_the_next_line(
    pool2: Pool, plain: Pool, tmp_path: Path
) -> None:
    assert_same_as_plain_keras(pool2, plain, saved_in_every_form, tmp_path)


class Coder(keras.Model):
    """A model that holds models, each of which scripts save by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = keras.Sequential([keras.Input((6,)), keras.layers.Dense(2)], name="encoder")
        self.decoder = keras.Sequential([keras.Input((2,)), keras.layers.Dense(6)], name="decoder")

    def call(self, x: Any) -> Any:
        return self.decoder(self.encoder(x))


def saved_by_parts(strategy: Any, directory: Path) -> Any:
    written = files_opened_to_write(directory)
    x, _ = data()
    with strategy.scope():
        model = Coder()
        model.compile("adam", "mse")
    model.fit(x, x, batch_size=16, shuffle=False, verbose=0)
    model.encoder.save(directory / "encoder.keras")
    model.decoder.save_weights(directory / "decoder.weights.h5")
    encoder = keras.models.load_model(directory / "encoder.keras")
    assert strategy.rank == 0 or not written
    return encoder.predict(x, verbose=0)


def test_a_model_in_a_model_is_saved_by_one_worker(pool2: Pool, tmp_path: Path) -> None:
    assert_equal_on_all(pool2.run(saved_by_parts, tmp_path))


class ChiefSaves(keras.callbacks.Callback):
    """As scripts for several workers write it: the others save where nobody looks."""

    def __init__(self, strategy: Any, directory: Path) -> None:
        super().__init__()
        name = "model.weights.h5" if strategy.rank == 0 else f"temporary-{strategy.rank}.weights.h5"
        self.path, self.remove = directory / name, strategy.rank != 0

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.model.save_weights(self.path)
        if self.remove:
            self.path.unlink()


def tuned(strategy: Any, directory: Path) -> Any:
    """What a tuner does: trial by trial a model, its best weights, and in the end the best of all."""
    x, y = data()
    losses = []

    def build(units: int) -> keras.Model:
        with strategy.scope():
            model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(units), keras.layers.Dense(1)])
            model.compile(keras.optimizers.Adam(0.05), "mse")
        return model

    for trial in range(3):
        place = directory / f"trial-{trial}"
        place.mkdir(exist_ok=True)
        model = build(2 + trial)
        history = model.fit(
            x, y, batch_size=16, epochs=3, shuffle=False, verbose=0, callbacks=[ChiefSaves(strategy, place)]
        )
        losses.append(history.history["loss"][-1])
    best = int(np.argmin(losses))
    model = build(2 + best)
    model.load_weights(directory / f"trial-{best}" / "model.weights.h5")
    return {"losses": losses, "weights": weights(model)}


def test_a_tuner_whose_other_workers_save_to_temporary_paths_gets_the_weights_back(
    pool2: Pool, tmp_path: Path
) -> None:
    assert_equal_on_all(pool2.run(tuned, tmp_path))


class CreatesAVariable(keras.layers.Layer):
    def call(self, x: Any) -> Any:
        return x

    def save_own_variables(self, store: Any) -> None:
        keras.Variable(0.0)  # a transfer in the scope, which the other workers do not join


def saved_with_a_transfer(strategy: Any, directory: Path) -> None:
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1), CreatesAVariable()])
        model.compile("sgd", "mse")
        model.save_weights(directory / "model.weights.h5")
        model.fit(*data(), batch_size=16, verbose=0)


def test_a_save_that_needs_the_other_workers_fails_at_once_on_all(pool2: Pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed) as failed:
        pool2.run(saved_with_a_transfer, tmp_path, deadline_secs=60.0)
    assert "started a transfer to all workers while it alone was writing" in str(failed.value)
    assert "was still running" not in str(failed.value)
