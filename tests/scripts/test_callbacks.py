"""Keras' callbacks: one worker writes the files, and every worker makes the decisions of plain Keras."""

from __future__ import annotations

import copy
import csv
import errno
import pickle
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.pool import Pool
from tests.pool.checks import assert_equal_on_all, digest
from tests.scripts.compare import files_opened_to_write, same_as_plain_keras, weights
from tests.workers.recipes import arrays, perceptron


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


# What every worker would write is complete when the others continue, and fails on all of them.


def trained_with(
    strategy: Any, directory: Path, callbacks: list[Any], **options: Any
) -> tuple[Any, set[str]]:
    written = files_opened_to_write(directory)
    model = perceptron(strategy)
    model.fit(*arrays(), batch_size=30, epochs=3, verbose=0, callbacks=callbacks, **options)
    return model, written


def saved_where_it_cannot_be(strategy: Any, directory: Path) -> str:
    model = perceptron(strategy)
    model.fit(*arrays(), verbose=0)
    with pytest.raises(FileNotFoundError) as error:
        model.save(directory / "no such folder" / "model.keras")
    assert error.value.errno == errno.ENOENT
    with pytest.raises(ValueError, match="end in"):
        model.save_weights(directory / "no weights")
    model.fit(*arrays(), verbose=0)
    return str(error.value)


def test_a_save_that_fails_can_be_caught_on_all_workers(pool2: Pool, tmp_path: Path) -> None:
    _, of_second = pool2.run(saved_where_it_cannot_be, tmp_path)
    assert "worker 0 could not write" in of_second
    assert "no such folder" in of_second


class StopAfterTwo(keras.callbacks.Callback):
    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == 1:
            raise InterruptedError("as if the job was ended here")


def interrupted_and_resumed(strategy: Any, directory: Path) -> dict[str, Any]:
    backup = keras.callbacks.BackupAndRestore(directory / "backup", delete_checkpoint=True)
    with pytest.raises(InterruptedError):
        trained_with(strategy, directory, [backup, StopAfterTwo()])
    model = perceptron(strategy)
    again = keras.callbacks.BackupAndRestore(directory / "backup", delete_checkpoint=True)
    history = model.fit(*arrays(), batch_size=30, epochs=3, verbose=0, callbacks=[again])
    return {
        "epochs": history.epoch,
        "digest": digest(model),
        "iterations": int(model.optimizer.iterations.numpy()),
    }


def test_backup_and_restore_continues_where_it_was_on_every_worker(pool2: Pool, tmp_path: Path) -> None:
    results = pool2.run(interrupted_and_resumed, tmp_path)
    assert_equal_on_all(results)
    assert results[0]["iterations"] == 15
    assert results[0]["epochs"] == [2]
    assert not (tmp_path / "backup").exists()
