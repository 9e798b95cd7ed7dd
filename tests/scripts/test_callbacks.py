"""Keras' callbacks: one worker writes the files, and every worker makes the decisions of plain Keras."""

from __future__ import annotations

import copy
import csv
import pickle
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from tests.pool import Pool
from tests.scripts.compare import same_as_plain_keras, weights
from tests.scripts.files import files_opened_to_write


def data() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(7)
    return random.normal(size=(60, 6)).astype("float32"), random.normal(size=(60, 1)).astype("float32")


def network(strategy: Any, **optimizer: Any) -> keras.Model:
    with strategy.scope():
        model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        model.compile(keras.optimizers.Adam(0.05, **optimizer), "mse", metrics=["mae"])
    return model


def fitted(model: keras.Model, callbacks: Any, **options: Any) -> Any:
    """Trains with validation, as scripts with callbacks do."""
    x, y = data()
    options = {"batch_size": 16, "epochs": 4, "shuffle": False, "verbose": 0, **options}
    history = model.fit(x[:45], y[:45], validation_data=(x[45:], y[45:]), callbacks=callbacks, **options)
    return {"history": history.history, "weights": weights(model)}


def events(directory: Path) -> dict[str, int]:
    """How often each tag was written into the event files below a directory, and how many files there are."""
    found: dict[str, int] = {"files": 0}
    for file in sorted(directory.rglob("events.out.tfevents*")):
        found["files"] += 1
        for record in tf.compat.v1.train.summary_iterator(str(file)):
            for value in record.summary.value:
                found[value.tag] = found.get(value.tag, 0) + 1
    return found


@same_as_plain_keras("pool2")
def test_logs_and_checkpoints_of_a_fit_with_validation_are_those_of_plain_keras(
    strategy: Any, tmp_path: Path
) -> Any:
    tmp_path = tmp_path / f"{strategy.size}-workers"
    written = files_opened_to_write(tmp_path)
    tmp_path.mkdir(exist_ok=True)
    callbacks = [
        keras.callbacks.TensorBoard(tmp_path / "board", update_freq=2, write_steps_per_second=True),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
        keras.callbacks.ModelCheckpoint(tmp_path / "new" / "{epoch}.keras", save_freq=2),
    ]
    result = fitted(network(strategy), callbacks)
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))  # complete, on the very next line
    assert strategy.rank == 0 or not written
    return {**result, "rows": [float(row["val_loss"]) for row in rows], "events": events(tmp_path / "board")}


class Interrupted(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        raise InterruptedError


def logged_again_and_again(strategy: Any, directory: Path) -> Any:
    """One callback with another path for each fit, then a copy of it; one fit is interrupted."""
    directory = directory / f"{strategy.size}-workers"
    written = files_opened_to_write(directory)
    directory.mkdir(exist_ok=True)
    model, log = network(strategy), keras.callbacks.CSVLogger(directory / "a.csv")
    board = keras.callbacks.TensorBoard(directory / "board", profile_batch=2)
    fitted(model, [log, board], epochs=2)
    assert (Path(log.filename), Path(board.log_dir)) == (directory / "a.csv", directory / "board")
    log.filename = str(directory / "b.csv")
    try:
        fitted(model, [log, Interrupted()], epochs=2)
    except InterruptedError:
        log.filename = str(directory / "c.csv")
    fitted(model, [log], epochs=2)
    saved = keras.callbacks.ModelCheckpoint(directory / "{epoch}.keras")
    copied = copy.copy(log)
    copied.filename = str(directory / "d.csv")
    fitted(model, [copied, saved], epochs=2)
    saved.set_model(None)
    fitted(model, [pickle.loads(pickle.dumps(saved))], epochs=3)
    assert (directory / "3.keras").exists()
    assert strategy.rank == 0 or not written
    profiles = len(list(directory.rglob("*.xplane.pb")))
    return {"profiles": profiles, **{file.name: len(file.read_text()) for file in directory.glob("*.csv")}}


def test_a_log_that_is_given_another_path_or_copied_is_written_by_one_worker(
    pool2: Pool, tmp_path: Path
) -> None:
    rows = pool2.run(logged_again_and_again, tmp_path)
    assert rows[0] == rows[1]
    assert {name for name, size in rows[0].items() if size} >= {"profiles", *(f"{n}.csv" for n in "abcd")}
