"""Files that one worker writes for all.

Every worker runs the same script, so every worker would save the model to the same path and append the same
line to the same log, all at once. Worker 0 writes; the others go on when it has finished, so that a file
that was saved is there on the next line of the script, on every worker.
"""

from __future__ import annotations

import functools
import json
import logging
from collections import Counter
from collections.abc import Callable
from typing import Any

import keras

from replicast.coordination import Coordination
from replicast.errors import JobFailed

logger = logging.getLogger("replicast")

ARRIVE_SECS = 20.0
"""How long worker 0 may be behind another worker in coming to the same save."""
NEXT_SECS = 1.0
"""How long worker 0 may take from one save to the next, before a worker takes its path for its own."""
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

    A save is known by where in the script it is (`Lifetime.position`) and by its path. Worker 0 waits for
    nobody: a script in which only worker 0 saves, or each worker to a path of its own, works as well.
    """

    def __init__(self, coordination: Coordination, rank: int, position: Callable[[], str]) -> None:
        self._coordination = coordination
        self._rank = rank
        self._position = position
        self._looked_at: Counter[str] = Counter()

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
            if self._rank == 0:
                return self._announced(str(filepath), lambda: save(filepath, *args, **kwargs))
            if self._saved_by_worker_0(str(filepath)):
                return None
            return save(filepath, *args, **kwargs)

        return once

    def _next_key(self) -> str:
        position = self._position()
        self._looked_at[position] += 1
        return f"replicast/save/{position}/{self._looked_at[position]}"

    def _announced(self, path: str, save: Callable[[], Any]) -> Any:
        key = self._next_key()
        self._coordination.put(f"{key}/begun", path)
        try:
            result = save()
        except Exception as error:
            self._coordination.put(f"{key}/done", json.dumps(f"{type(error).__name__}: {error}"))
            raise
        self._coordination.put(f"{key}/done", json.dumps(None))
        return result

    def _saved_by_worker_0(self, path: str) -> bool:
        """Waits until worker 0 has saved to `path`; False if it saves elsewhere, or not at all."""
        patience = ARRIVE_SECS
        while True:
            key = self._next_key()
            begun = self._coordination.get(f"{key}/begun", patience)
            if begun is None:
                self._looked_at[self._position()] -= 1
                logger.info("worker 0 does not save %s; worker %d does it itself", path, self._rank)
                return False
            done = self._coordination.get(f"{key}/done", WRITE_SECS)
            if done is None:
                raise JobFailed(f"worker 0 did not finish writing {begun} in {WRITE_SECS:.0f} s", worker=0)
            if begun == path:
                problem = json.loads(done)
                if problem is not None:
                    raise JobFailed(f"worker 0 could not write {path}: {problem}", worker=0)
                return True
            patience = NEXT_SECS
