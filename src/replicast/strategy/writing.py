"""Files that one worker writes for all.

Every worker runs the same script, so every worker would save the model to the same path and append the same
line to the same log, all at once. Worker 0 writes; the others go on when it has finished, so that a file
that was saved is there on the next line of the script, on every worker.
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable
from typing import Any

import keras

from replicast.coordination import Coordination
from replicast.errors import JobFailed

logger = logging.getLogger("replicast")

ARRIVE_SECS = 60.0
WRITE_SECS = 3600.0
SAVING_METHODS = ("save", "save_weights", "export")

SILENT: dict[type[keras.callbacks.Callback], tuple[str, ...]] = {
    keras.callbacks.CSVLogger: ("on_train_begin", "on_epoch_end", "on_train_end"),
    keras.callbacks.RemoteMonitor: ("on_epoch_end",),
    keras.callbacks.BackupAndRestore: ("on_train_batch_end", "on_epoch_end", "on_train_end"),
    keras.callbacks.TensorBoard: (
        *("set_model", "on_train_begin", "on_train_end", "on_epoch_begin", "on_epoch_end"),
        *("on_train_batch_begin", "on_train_batch_end", "on_test_begin", "on_test_end"),
    ),
}
"""Callbacks that write files or send reports, and the methods in which they do."""


def silence(callbacks: Any) -> None:
    """Keeps these callbacks from writing on this worker. Decisions (stopping, learning rate) stay."""
    for callback in keras.tree.flatten(callbacks):
        for kind, methods in SILENT.items():
            if isinstance(callback, kind):
                for method in methods:
                    setattr(callback, method, _nothing)


def _nothing(*_: Any, **__: Any) -> None:
    return None


class Writing:
    """Lets worker 0 do the saving of a model, and the others wait for it.

    The n-th save of one worker is the n-th save of every worker. Worker 0 waits for nobody: a script in which
    only worker 0 saves works as well.
    """

    def __init__(self, coordination: Coordination, rank: int) -> None:
        self._coordination = coordination
        self._rank = rank
        self._saves = 0

    def guard(self, model: keras.Model) -> None:
        """Makes this model's saving methods safe to call on all workers, once."""
        if getattr(model, "_replicast_guarded", False):
            return
        # On this one object, not on its class: Keras has no hook for who may write.
        for name in SAVING_METHODS:
            object.__setattr__(model, name, self._once(getattr(model, name)))
        object.__setattr__(model, "_replicast_guarded", True)

    def _once(self, save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def once(filepath: Any, *args: Any, **kwargs: Any) -> Any:
            self._saves += 1
            if self._rank == 0:
                return self._save(f"replicast/save/{self._saves}", save, filepath, args, kwargs)
            return self._wait(f"replicast/save/{self._saves}", save, filepath, args, kwargs)

        return once

    def _save(self, key: str, save: Callable[..., Any], filepath: Any, args: Any, kwargs: Any) -> Any:
        self._coordination.put(f"{key}/begun", json.dumps(str(filepath)))
        try:
            result = save(filepath, *args, **kwargs)
        except Exception as error:
            self._coordination.put(f"{key}/done", json.dumps(f"{type(error).__name__}: {error}"))
            raise
        self._coordination.put(f"{key}/done", json.dumps(None))
        return result

    def _wait(self, key: str, save: Callable[..., Any], filepath: Any, args: Any, kwargs: Any) -> Any:
        begun = self._coordination.get(f"{key}/begun", ARRIVE_SECS)
        if begun is None or json.loads(begun) != str(filepath):
            if begun is None:
                logger.warning(
                    "worker 0 did not save anything within %.0f s; worker %d writes %s itself",
                    ARRIVE_SECS,
                    self._rank,
                    filepath,
                )
            return save(filepath, *args, **kwargs)  # a path of this worker's own: no race
        done = self._coordination.get(f"{key}/done", WRITE_SECS)
        if done is None:
            raise JobFailed(f"worker 0 did not finish writing {filepath} in {WRITE_SECS:.0f} s", worker=0)
        problem = json.loads(done)
        if problem is not None:
            raise JobFailed(f"worker 0 could not write {filepath}: {problem}", worker=0)
        return None
