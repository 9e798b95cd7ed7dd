"""Keras' callbacks that write: one worker's files, every worker's decisions.

All callbacks run on all workers and keep all of their state, so that what they decide is the same everywhere.
Only the place differs: a log that worker 0 writes goes on the others to a place that nobody reads. What a
callback saves through the model is written as `writing.py` says.

A callback is the user's object: what is set on it for a call of `fit` is restored when the call ends. It can
then be copied, pickled, given another path and used again.
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
"""By method of a model: what Keras calls last on its callbacks."""


class Callbacks:
    """Prepares the callbacks of a call of `fit`, `evaluate` or `predict`, until that call ends."""

    def __init__(self, rank: int, size: int, writing: Writing) -> None:
        self._rank = rank
        self._size = size
        self._writing = writing
        # By callback and attribute: its value before, and what was set if that is a path.
        self._changes: weakref.WeakKeyDictionary[Any, dict[str, tuple[Any, str | None]]]
        self._changes = weakref.WeakKeyDictionary()
        self._scratch: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def prepare(self, callbacks: Any, method: str) -> None:
        """Has each file that these callbacks write written by one worker.

        Args:
            callbacks: As `fit` takes them: one, a list, a `CallbackList` or None.
            method: What was called: "fit", "evaluate" or "predict"; "validation" for the validation of a fit,
                whose callbacks are prepared already.
        """
        for callback in filter(_writes, _each(callbacks)):
            if method != "validation":
                self._restore(callback)  # if its last call raised, that call did not end it
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
                    # Private: nobody reads the profile of this worker, and TensorFlow's export of a profile
                    # can crash the process.
                    self._set(callback, "_should_trace", False)
                    if callback.model is not None:  # of a CallbackList, which has told it already
                        callback.set_model(callback.model)
            case keras.callbacks.RemoteMonitor():
                if self._is_written_elsewhere(callback, callback.root + callback.path, end):
                    self._replace(callback, "on_epoch_end", _nothing)
            case keras.callbacks.BackupAndRestore():
                self._replace(callback, "on_train_begin", self._resume_together)
                # Private: it writes other files beside the weights, and nothing public is around all of it.
                self._replace(callback, "_save_model", self._back_up_once)
                self._replace(callback, "on_train_end", self._delete_together)
                self._restore_at(callback, end)
            case keras.callbacks.ModelCheckpoint():
                # Private: Keras looks whether the directory is there and makes it if not; two at once fail.
                self._replace(callback, "_get_file_path", _path_in_a_directory)
                self._restore_at(callback, end)
            case _:  # OrbaxCheckpoint
                if self._is_written_elsewhere(callback, callback.directory, end):
                    # Private: which state it saves, and how, is in this method; the decisions are around it.
                    self._replace(callback, "_save_checkpoint", _nothing)

    def _is_written_elsewhere(self, callback: Any, path: Any, end: str) -> bool:
        """Whether another worker writes this log; then the call ends on this one when it is complete."""
        # Every worker calls `fit`, and worker 0 says when it has no more logs: no time has to be guessed.
        claim = self._writing.claim(path, "log", arrive_secs=WRITE_SECS)
        self._restore_at(callback, end, functools.partial(self._complete, claim, path))
        return claim.worker != self._rank

    def _complete(self, claim: Claim, path: Any) -> None:
        if claim.worker == self._rank:
            self._writing.put_key(f"{claim.key}/complete", "")
        else:
            self._writing.wait_for_key(f"{claim.key}/complete", claim.worker, f"complete {path}")

    def _restore_at(self, callback: Any, end: str, last: Callable[[], None] = lambda: None) -> None:
        """Restores the callback when Keras has called its method `end`, and `last` was called."""
        own = getattr(callback, end)

        def ended(callback: Any, logs: Any = None) -> None:
            own(logs)
            last()
            self._restore(callback)

        self._replace(callback, end, ended)

    def _replace(self, callback: Any, name: str, function: Callable[..., Any]) -> None:
        # On this one object, never on its class: Keras has no hook for who may write.
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
        """A directory that is removed with the callback."""
        if callback not in self._scratch:
            directory = tempfile.TemporaryDirectory(prefix="replicast-log-", ignore_cleanup_errors=True)
            weakref.finalize(callback, directory.cleanup)
            self._scratch[callback] = directory.name
        return self._scratch[callback]

    def _resume_together(self, callback: Any, logs: Any = None) -> None:
        """Refuses to resume from a backup that not all workers see: they would go on at different epochs."""
        key = self._writing.next_key("backup-begins")
        # Private: where the callback notes the epoch; it must be compared before the callback acts on it.
        path = callback._training_metadata_path
        seen = ""
        if self._rank != 0:  # whatever worker 0 wrote before is complete when it comes here
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
        else:  # the others may still read: a fit that had nothing left to do ends at once
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
