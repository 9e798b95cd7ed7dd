"""Export and import of the model in the file formats of other tools. Only worker 0 reads and writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import keras
import tensorflow as tf

from replicast.errors import CheckpointError
from replicast.runtime import Exchange
from replicast.strategy.writing import writing_alone

WRITE_SECS = 3600.0


def on_worker_0(exchange: Exchange, number: int, act: Callable[[], None]) -> None:
    """Runs `act` on worker 0 while the others wait for it, at most an hour. If it fails, all raise.

    Raises:
        CheckpointError: `act` failed on worker 0.
    """
    if exchange.rank == 0:
        said = ""
        try:
            act()
        except Exception as error:  # any error of Keras or TensorFlow must reach the others
            said = f"{type(error).__name__}: {error}"
        exchange.tell(f"move/{number}", json.dumps(said))
    problem = json.loads(exchange.hear(f"move/{number}", WRITE_SECS))
    if problem:
        raise CheckpointError(f"Worker 0 could not read or write the model file: {problem}")


def write_model(model: keras.Model, path: Path) -> None:
    """Writes a model in the format given by the path's suffix. Called by one worker."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with writing_alone():  # the others do not save here
        if path.name.endswith(".keras"):
            model.save(path)
        elif path.name.endswith(".weights.h5"):
            model.save_weights(path)
        else:
            _tracked(model).write(str(path))


def read_model(model: keras.Model, path: Path) -> None:
    """Loads the values in a file into one worker's replica."""
    if path.name.endswith(".keras"):
        loaded = keras.saving.load_model(path, compile=False, safe_mode=True)
        model.set_weights(loaded.get_weights())
    elif path.name.endswith(".weights.h5"):
        model.load_weights(path)
    else:
        _tracked(model).read(str(path)).assert_existing_objects_matched()


def _tracked(model: keras.Model) -> tf.train.Checkpoint:
    optimizer = getattr(model, "optimizer", None)
    parts = {"model": model} if optimizer is None else {"model": model, "optimizer": optimizer}
    return tf.train.Checkpoint(**parts)
