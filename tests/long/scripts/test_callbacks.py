"""Every callback that Keras ships, with every option that writes or keeps state."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import keras
import numpy as np
import pytest

from tests.pool import Pool, WorkerFailed
from tests.scripts.compare import assert_same_as_plain_keras, weights
from tests.scripts.test_callbacks import data, events, fitted, network

SCRIPTS: dict[str, Callable[[Any, Path], Any]] = {}


def script(function: Callable[[Any, Path], Any]) -> Callable[[Any, Path], Any]:
    SCRIPTS[function.__name__] = function
    return function


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_with_callbacks_gives_the_numbers_and_files_of_plain_keras(
    pool2: Pool, plain: Pool, tmp_path: Path, name: str
) -> None:
    assert_same_as_plain_keras(pool2, plain, in_a_directory, name, tmp_path)


def in_a_directory(strategy: Any, name: str, directory: Path) -> Any:
    directory = directory / f"{strategy.size}-workers"
    directory.mkdir(exist_ok=True)
    return {"result": SCRIPTS[name](strategy, directory), "files": files(directory)}


def files(directory: Path) -> list[str]:
    """What lies below a directory, but for the names that TensorFlow makes of time and process."""
    paths = [path.relative_to(directory) for path in directory.rglob("*") if path.is_file()]
    return sorted(str(path) for path in paths if "tfevents" not in path.name and "plugins" not in path.parts)


@script
def decisions(strategy: Any, directory: Path) -> Any:
    seen: list[float] = []
    callbacks = [
        keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True, start_from_epoch=1),
        keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=0, cooldown=1),
        keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.9),
        keras.callbacks.TerminateOnNaN(),
        keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["val_loss"])),
    ]
    return {**fitted(network(strategy), callbacks, epochs=12), "seen": seen}


@script
def nan(strategy: Any, directory: Path) -> Any:
    x, y = data()
    y[40] = np.nan  # in the rows of one worker
    model = network(strategy)
    history = model.fit(
        *(x, y), batch_size=16, epochs=5, shuffle=False, verbose=0, callbacks=keras.callbacks.TerminateOnNaN()
    )
    return {"epochs": history.epoch, "steps": int(keras.ops.convert_to_numpy(model.optimizer.iterations))}


@script
def ema_swapped_on_epochs(strategy: Any, directory: Path) -> Any:
    model = network(strategy, use_ema=True, ema_momentum=0.5)
    callbacks = [
        keras.callbacks.SwapEMAWeights(swap_on_epoch=True),
        keras.callbacks.ModelCheckpoint(directory / "{epoch}.weights.h5", save_weights_only=True),
    ]
    result = fitted(model, callbacks)
    model.load_weights(directory / "2.weights.h5")
    return {**result, "second": weights(model)}


@script
def ema_swapped_for_tests(strategy: Any, directory: Path) -> Any:
    model = network(strategy, use_ema=True, ema_momentum=0.5)
    result = fitted(model, [keras.callbacks.SwapEMAWeights()])
    x, y = data()
    evaluated = model.evaluate(x, y, verbose=0, callbacks=[keras.callbacks.SwapEMAWeights()])
    predicted = model.predict(x, verbose=0, callbacks=[keras.callbacks.SwapEMAWeights()])
    return {**result, "evaluated": evaluated, "predicted": predicted}


@script
def best_checkpoints(strategy: Any, directory: Path) -> Any:
    kinds = {
        "best": {"save_best_only": True},
        "weights": {"save_best_only": True, "save_weights_only": True},
        "never": {"save_best_only": True, "initial_value_threshold": 0.0},
        "often": {"save_freq": 2, "save_weights_only": True},
        "often-best": {"save_freq": 2, "save_best_only": True, "monitor": "loss"},
    }
    names = {
        "best": "best.keras",
        "weights": "{epoch}/best.weights.h5",
        "never": "never.keras",
        "often": "{epoch}-{batch}.weights.h5",
        "often-best": "{epoch}/{batch}/often.keras",
    }
    callbacks = [keras.callbacks.ModelCheckpoint(directory / names[k], **kinds[k]) for k in kinds]
    result = fitted(network(strategy), callbacks)
    with strategy.scope():
        best = keras.models.load_model(directory / "best.keras")
    return {**result, "best": weights(best), "values": [callback.best for callback in callbacks]}


class StopAfter(keras.callbacks.Callback):
    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == self.epoch:
            raise InterruptedError("as if the job was ended here")


@script
def backups(strategy: Any, directory: Path) -> Any:
    results = []
    for number, options in enumerate([{"save_freq": 2}, {"double_checkpoint": True}, {}]):
        place = directory / str(number)
        with pytest.raises(InterruptedError):
            fitted(network(strategy), [keras.callbacks.BackupAndRestore(place, **options), StopAfter(number)])
        for _ in range(2):  # the second one goes on from the end of the first, and has nothing to do
            backup = keras.callbacks.BackupAndRestore(place, delete_checkpoint=False, **options)
            model = network(strategy)
            fitted(model, [backup])
            results.append(weights(model))
    last = keras.callbacks.BackupAndRestore(directory / "2")
    fitted(network(strategy), last)
    return results


@script
def csv_appended(strategy: Any, directory: Path) -> Any:
    model = network(strategy)
    tables = []
    for _ in range(2):
        log = keras.callbacks.CSVLogger(directory / "log.csv", separator=";", append=True)
        fitted(model, [log], epochs=2)
        tables.append([line.split(";")[0] for line in (directory / "log.csv").read_text().splitlines()])
    return tables


@script
def board_in_a_callback_list(strategy: Any, directory: Path) -> Any:
    model = network(strategy)
    board = keras.callbacks.TensorBoard(directory / "board", update_freq="batch", write_graph=False)
    listed = keras.callbacks.CallbackList([board], add_history=True, model=model, epochs=4)
    result = fitted(model, listed)
    return {**result, "events": events(directory / "board")}


@script
def board_with_everything(strategy: Any, directory: Path) -> Any:
    x = np.random.default_rng(7).integers(0, 9, (60, 5))
    y = x.sum(axis=1, keepdims=True).astype("float32")
    with strategy.scope():
        layers = [keras.layers.Embedding(9, 4, name="words"), keras.layers.Flatten(), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((5,), dtype="int32"), *layers])
        model.compile("adam", "mse")
    board = keras.callbacks.TensorBoard(
        directory / "board",
        histogram_freq=1,
        write_images=True,
        write_steps_per_second=True,
        update_freq=2,
        profile_batch=(2, 3),
        embeddings_freq=1,
        embeddings_metadata={"words": "words.tsv"},
    )
    saved = keras.callbacks.ModelCheckpoint(directory / "{epoch}.keras")
    history = model.fit(
        x,
        y,
        batch_size=16,
        epochs=2,
        validation_split=0.25,
        shuffle=False,
        verbose=0,
        callbacks=[board, saved],
    )
    found = events(directory / "board")
    evaluated = model.evaluate(x, y, verbose=0, callbacks=board)
    return {"history": history.history, "evaluated": evaluated, "events": found}


class Posts(http.server.BaseHTTPRequestHandler):
    received: ClassVar[list[int]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.received.append(json.loads(body)["epoch"])
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Not into the output of the tests."""


@pytest.fixture
def monitor() -> Iterator[str]:
    Posts.received.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Posts) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def reported(strategy: Any, root: str) -> None:
    monitor = keras.callbacks.RemoteMonitor(root=root, send_as_json=True)
    fitted(network(strategy), [monitor], epochs=3)


def test_a_remote_monitor_is_told_once(pool2: Pool, monitor: str) -> None:
    pool2.run(reported, monitor)
    assert Posts.received == [0, 1, 2]


def resumed_from(strategy: Any, directory: Path) -> None:
    fitted(network(strategy), [keras.callbacks.BackupAndRestore(directory)])


def test_a_backup_that_only_one_worker_sees_is_refused(pool2: Pool, tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "training_metadata.json").write_text(json.dumps({"epoch": 2, "batch": 0}))
    with pytest.raises(WorkerFailed) as failed:
        pool2.run_each(resumed_from, [[tmp_path / "0"], [tmp_path / "1"]])
    assert "backup_dir on a file system that all workers share" in str(failed.value)


def logged_by_others(strategy: Any, directory: Path) -> Any:
    logs = [keras.callbacks.CSVLogger(directory / f"{number}.csv") for number in range(2)]
    result = fitted(network(strategy), [] if strategy.rank == 0 else logs)
    return {**result, "rows": [log.read_text().count("\n") for log in sorted(directory.glob("*.csv"))]}


def test_a_log_that_worker_0_does_not_have_is_written_by_one_of_the_others(
    pool3: Pool, tmp_path: Path
) -> None:
    results = pool3.run(logged_by_others, tmp_path)
    assert results[1]["rows"] == results[2]["rows"] == [5, 5]
