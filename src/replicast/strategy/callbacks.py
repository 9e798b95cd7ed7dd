"""Keras callbacks that write files: one worker writes, all workers decide.

All callbacks run on all workers and keep all of their state, so that they decide the same everywhere. Only
the output path differs: a log that worker 0 writes goes to the null device or a temporary directory on the
others. `writing.py` decides who writes what a callback saves through the model.

A callback belongs to the user: attributes that are replaced for a call of `fit` are restored when the call
ends. The callback can then be copied, pickled, given another path and used again.
"""

from __future__ import annotations

import functools
import os
import tempfile
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from replicast.errors import JobFailed
from replicast.strategy.writing import WRITE_SECS, Claim, Writing

_NO_BACKUP = "no backup"
_UNSET = object()
_ENDS = {
    "fit": "on_train_end",
    "validation": "on_train_end",
    "evaluate": "on_test_end",
    "predict": "on_predict_end",
}
"""By method of a model: the last method that Keras calls on its callbacks."""


class Callbacks:
    """Prepares the callbacks of a call of `fit`, `evaluate` or `predict`, until that call ends."""

    def __init__(self, rank: int, size: int, writing: Writing) -> None:
        self._rank = rank
        self._size = size
        self._writing = writing
        # By callback and attribute: the value before, and the new value if it is a path.
        self._changes: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, str | None]]]
        self._changes = weakref.WeakKeyDictionary()
        self._scratch: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def prepare(self, callbacks: Any, method: str) -> None:
        """Makes one worker write each file that these callbacks write.

        Args:
            callbacks: As passed to `fit`: one, a list, a `CallbackList` or None.
            method: The method called: "fit", "evaluate" or "predict"; "validation" for the validation of a
                fit, whose callbacks are already prepared.
        """
        for callback in filter(_writes, _each(callbacks)):
            if method != "validation":
                self._restore(callback)  # the previous call may have raised before it restored it
            if callback not in self._changes:
                self._changes[callback] = {}
                self._prepare(callback, _ENDS[method])
        self._writing.end_claims("log")

    def _prepare(self, callback: Any, end: str) -> None:
        match callback:
            case keras.callbacks.CSVLogger():
                if self._is_written_elsewhere(callback, callback.filename, end):
                    self._set(callback, "filename", os.devnull)
            case keras.callbacks.TensorBoard():
                if self._is_written_elsewhere(callback, callback.log_dir, end):
                    self._set(callback, "log_dir", self._scratch_directory(callback))
                    # Private: nobody reads this worker's profile, and exporting it can crash the process.
                    self._set(callback, "_should_trace", False)
                    if callback.model is not None:  # a CallbackList has already set it
                        callback.set_model(callback.model)
            case keras.callbacks.RemoteMonitor():
                if self._is_written_elsewhere(callback, callback.root + callback.path, end):
                    self._replace(callback, "on_epoch_end", _nothing)
            case keras.callbacks.BackupAndRestore():
                self._replace(callback, "on_train_begin", self._resume_together)
                # Private: it writes other files beside the weights, and no public method covers all of them.
                self._replace(callback, "_save_model", self._back_up_once)
                self._replace(callback, "on_train_end", self._delete_together)
                self._restore_at(callback, end)
            case keras.callbacks.ModelCheckpoint():
                # Private: Keras checks for the directory and then creates it; two workers at once fail.
                self._replace(callback, "_get_file_path", _path_in_a_directory)
                self._restore_at(callback, end)
            case _:  # OrbaxCheckpoint
                if self._is_written_elsewhere(callback, callback.directory, end):
                    # Private: this method only saves; the decision when to save is outside of it.
                    self._replace(callback, "_save_checkpoint", _nothing)

    def _is_written_elsewhere(self, callback: Any, path: Any, end: str) -> bool:
        """Whether another worker writes this log; the call then ends here once that log is complete."""
        # Every worker calls `fit`, and worker 0 tells when it has no more logs, so no timeout is needed.
        claim = self._writing.claim(path, "log", arrive_secs=WRITE_SECS)
        self._restore_at(callback, end, functools.partial(self._complete, claim, path))
        return claim.worker != self._rank

    def _complete(self, claim: Claim, path: Any) -> None:
        if claim.worker == self._rank:
            self._writing.put_key(f"{claim.key}/complete", "")
        else:
            self._writing.wait_for_key(f"{claim.key}/complete", claim.worker, f"complete {path}")

    def _restore_at(self, callback: Any, end: str, last: Callable[[], None] = lambda: None) -> None:
        """Restores the callback after Keras has called its method `end`; calls `last` before that."""
        own = getattr(callback, end)

        def ended(callback: Any, logs: Any = None) -> None:
            own(logs)
            last()
            self._restore(callback)

        self._replace(callback, end, ended)

    def _replace(self, callback: Any, name: str, function: Callable[..., Any]) -> None:
        # On this object, never on its class: Keras has no hook to choose who writes.
        self._set(callback, name, types.MethodType(function, callback))

    def _set(self, callback: Any, name: str, value: Any) -> None:
        before = vars(callback).get(name, _UNSET)
        self._changes[callback].setdefault(name, (before, value if isinstance(value, str) else None))
        setattr(callback, name, value)

    def _restore(self, callback: Any) -> None:
        for name, (before, path) in self._changes.pop(callback, {}).items():
            if path is not None and getattr(callback, name) != path:
                continue  # the script has set another path since
            if before is _UNSET:
                vars(callback).pop(name, None)
            else:
                setattr(callback, name, before)

    def _scratch_directory(self, callback: Any) -> str:
        """A temporary directory that is removed with the callback."""
        if callback not in self._scratch:
            directory = tempfile.TemporaryDirectory(prefix="replicast-log-", ignore_cleanup_errors=True)
            weakref.finalize(callback, directory.cleanup)
            self._scratch[callback] = directory.name
        return self._scratch[callback]

    def _resume_together(self, callback: Any, logs: Any = None) -> None:
        """Refuses to resume from a backup that not all workers see: they would resume at different epochs."""
        key = self._writing.next_key("backup-begins")
        # Private: where the callback stores the epoch; it must be compared before the callback uses it.
        path = callback._training_metadata_path
        seen = ""
        if self._rank != 0:  # when worker 0 gets here, everything it wrote before is complete
            seen = self._writing.wait_for_key(key, 0, "begin its fit")
        mine = tf.io.gfile.GFile(path).read() if tf.io.gfile.exists(path) else _NO_BACKUP
        if self._rank == 0:
            self._writing.put_key(key, mine)
        elif mine != seen:
            raise JobFailed(
                f"Worker {self._rank} does not see the backup that worker 0 sees in {callback.backup_dir}. "
                "BackupAndRestore needs a backup_dir on a file system that all workers share. "
                f"Received: {mine} on worker {self._rank}, {seen} on worker 0",
                worker=self._rank,
            )
        type(callback).on_train_begin(callback, logs)

    def _back_up_once(self, callback: Any) -> None:
        def save() -> None:
            type(callback)._save_model(callback)

        self._writing.once(callback.backup_dir, save, kind="backup")

    def _delete_together(self, callback: Any, logs: Any = None) -> None:
        key = self._writing.next_key("backup-ends")
        if self._rank != 0:
            self._writing.put_key(f"{key}/{self._rank}", "")
        else:  # the others may still be reading: a fit that has nothing left to do ends at once
            for worker in range(1, self._size):
                self._writing.wait_for_key(f"{key}/{worker}", worker, "read its backup")
        end = functools.partial(type(callback).on_train_end, callback, logs)
        self._writing.once(callback.backup_dir, end, kind="backup")


def _each(callbacks: Any) -> Iterator[keras.callbacks.Callback]:
    for callback in keras.tree.flatten(callbacks):
        if isinstance(callback, keras.callbacks.CallbackList):
            yield from _each(callback.callbacks)
        elif isinstance(callback, keras.callbacks.Callback):
            yield callback


def _writes(callback: keras.callbacks.Callback) -> bool:
    kinds = keras.callbacks
    orbax = getattr(kinds, "OrbaxCheckpoint", ())  # not in every Keras 3
    logs = (kinds.CSVLogger, kinds.TensorBoard, kinds.RemoteMonitor)
    return isinstance(callback, (*logs, kinds.BackupAndRestore, kinds.ModelCheckpoint, orbax))


def _path_in_a_directory(callback: Any, *args: Any, **kwargs: Any) -> str:
    path: str = type(callback)._get_file_path(callback, *args, **kwargs)
    if "://" not in path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    return path


def _nothing(*_: Any, **__: Any) -> None:
    return None
