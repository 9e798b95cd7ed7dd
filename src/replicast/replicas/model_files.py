"""The model in the files of other tools: written and read by worker 0 alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import keras
import tensorflow as tf

from replicast.errors import CheckpointError
from replicast.runtime import Exchange

WRITE_SECS = 3600.0


def on_worker_0(exchange: Exchange, number: int, act: Callable[[], None]) -> None:
    """Has worker 0 act while the others wait for it, at most an hour; if it fails, all raise.

    Raises:
        CheckpointError: Worker 0 could not.
    """
    if exchange.rank == 0:
        said = ""
        try:
            act()
        except Exception as error:  # whatever Keras or TensorFlow find wrong, the others must hear of it
            said = f"{type(error).__name__}: {error}"
        exchange.tell(f"move/{number}", json.dumps(said))
    problem = json.loads(exchange.hear(f"move/{number}", WRITE_SECS))
    if problem:
        raise CheckpointError(f"Worker 0 could not read it into this model, or write it: {problem}")


def write_model(model: keras.Model, path: Path) -> None:
    """Writes a model in the format that the path's ending names. Called by one worker."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.name.endswith(".keras"):
        keras.saving.save_model(model, path)
    elif path.name.endswith(".weights.h5"):
        # The class' own: for all workers together, the model's is written once, and waits for that.
        type(model).save_weights(model, path, overwrite=True)
    else:
        _tracked(model).write(str(path))


def read_model(model: keras.Model, path: Path) -> None:
    """Gives one worker's replica the values in a file."""
    if path.name.endswith(".keras"):
        loaded = keras.saving.load_model(path, compile=False, safe_mode=True)
        model.set_weights(loaded.get_weights())
    elif path.name.endswith(".weights.h5"):
        type(model).load_weights(model, path)
    else:
        _tracked(model).read(str(path)).assert_existing_objects_matched()


def _tracked(model: keras.Model) -> tf.train.Checkpoint:
    optimizer = getattr(model, "optimizer", None)
    parts = {"model": model} if optimizer is None else {"model": model, "optimizer": optimizer}
    return tf.train.Checkpoint(**parts)
