"""Keras' callbacks that write: one worker's files, every worker's decisions.

All callbacks run on all workers and keep all of their state, so that what they decide is the same everywhere.
Only the place differs: a log that worker 0 writes goes on the others to a place that nobody reads. What a
callback saves through the model is written as `writing.py` says.
"""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
import types
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from replicast.coordination import Coordination
from replicast.errors import JobFailed
from replicast.strategy.writing import WRITE_SECS, Writing

_NO_BACKUP = "no backup"


class Callbacks:
    """Prepares the callbacks of a call of `fit`, `evaluate` or `predict`, each callback once."""

    def __init__(self, coordination: Coordination, rank: int, size: int, writing: Writing) -> None:
        self._coordination = coordination
        self._rank = rank
        self._size = size
        self._writing = writing
        self._backups = 0

    def prepare(self, callbacks: Any) -> None:
        """Has each file that these callbacks write written by one worker.

        Args:
            callbacks: As `fit` takes them: one, a list, a `CallbackList` or None.
        """
        for callback in _each(callbacks):
            if not getattr(callback, "_replicast_prepared", False):
                callback._replicast_prepared = True
                self._prepare(callback)
        self._writing.claims_no_more("log")

    def _prepare(self, callback: keras.callbacks.Callback) -> None:
        match callback:
            case keras.callbacks.CSVLogger():
                if self._is_written_elsewhere(callback, callback.filename):
                    callback.filename = os.devnull
            case keras.callbacks.TensorBoard():
                if self._is_written_elsewhere(callback, callback.log_dir):
                    callback.log_dir = _scratch_directory(callback)
                    if callback.model is not None:  # of a CallbackList, which has told it already
                        callback.set_model(callback.model)
            case keras.callbacks.RemoteMonitor():
                if self._is_written_elsewhere(callback, callback.root + callback.path):
                    _replace(callback, "on_epoch_end", _nothing)
            case keras.callbacks.BackupAndRestore():
                _replace(callback, "on_train_begin", self._resume_together)
                # Private: it writes other files beside the weights, and nothing public is around all of it.
                _replace(callback, "_save_model", self._back_up_once)
                _replace(callback, "on_train_end", self._delete_together)
            case keras.callbacks.ModelCheckpoint():
                # Private: Keras looks whether the directory is there and makes it if not; two at once fail.
                _replace(callback, "_get_file_path", _path_in_a_directory)
            case _ if _is_orbax(callback):
                if self._is_written_elsewhere(callback, callback.directory):
                    # Private: which state it saves, and how, is in this method; the decisions are around it.
                    _replace(callback, "_save_checkpoint", _nothing)

    def _is_written_elsewhere(self, callback: keras.callbacks.Callback, path: Any) -> bool:
        """Whether another worker writes this log; then `fit` ends on this one when it is complete."""
        # Every worker calls `fit`, and worker 0 says when it has no more logs: no time has to be guessed.
        claim = self._writing.claim(path, "log", arrive_secs=WRITE_SECS)
        fits = itertools.count(1)

        def end_together(callback: Any, logs: Any = None) -> None:
            type(callback).on_train_end(callback, logs)
            complete = f"{claim.key}/complete/{next(fits)}"
            if claim.worker == self._rank:
                self._coordination.put(complete, "")
            else:
                self._writing.hear(complete, claim.worker, f"complete {path}")

        _replace(callback, "on_train_end", end_together)
        return claim.worker != self._rank

    def _resume_together(self, callback: Any, logs: Any = None) -> None:
        """Refuses to resume from a backup that not all workers see: they would go on at different epochs."""
        self._backups += 1
        # Private: where the callback notes the epoch; it must be compared before the callback acts on it.
        path = callback._training_metadata_path
        seen = ""
        if self._rank != 0:  # whatever worker 0 wrote before is complete when it comes here
            seen = self._writing.hear(f"replicast/backup/{self._backups}", 0, "begin its fit")
        mine = tf.io.gfile.GFile(path).read() if tf.io.gfile.exists(path) else _NO_BACKUP
        if self._rank == 0:
            self._coordination.put(f"replicast/backup/{self._backups}", mine)
        elif mine != seen:
            raise JobFailed(
                f"Worker {self._rank} does not see the backup that worker 0 sees in {callback.backup_dir}. "
                "BackupAndRestore needs a backup_dir on a file system that all workers share. "
                f"Received: {mine} on worker {self._rank}, {seen} on worker 0",
                worker=self._rank,
            )
        type(callback).on_train_begin(callback, logs)
        self._coordination.put(f"replicast/backup/{self._backups}/{self._rank}", "")

    def _back_up_once(self, callback: Any) -> None:
        def save() -> None:
            type(callback)._save_model(callback)

        self._writing.once(callback.backup_dir, save, kind="backup")

    def _delete_together(self, callback: Any, logs: Any = None) -> None:
        if self._rank == 0:
            for worker in range(1, self._size):  # a fit that had nothing left to do ends at once
                self._writing.hear(f"replicast/backup/{self._backups}/{worker}", worker, "read its backup")
        end = functools.partial(type(callback).on_train_end, callback, logs)
        self._writing.once(callback.backup_dir, end, kind="backup")


def _replace(callback: keras.callbacks.Callback, name: str, function: Callable[..., Any]) -> None:
    # On this one object, never on its class: Keras has no hook for who may write. As a method, so that a copy
    # of the callback has one of its own.
    setattr(callback, name, types.MethodType(function, callback))


def _each(callbacks: Any) -> Iterator[keras.callbacks.Callback]:
    for callback in keras.tree.flatten(callbacks):
        if isinstance(callback, keras.callbacks.CallbackList):
            yield from _each(callback.callbacks)
        elif isinstance(callback, keras.callbacks.Callback):
            yield callback


def _is_orbax(callback: keras.callbacks.Callback) -> bool:
    kind = getattr(keras.callbacks, "OrbaxCheckpoint", None)  # not in every Keras 3
    return kind is not None and isinstance(callback, kind)


def _scratch_directory(owner: Any) -> str:
    """A directory that is removed with its owner."""
    directory = tempfile.TemporaryDirectory(prefix="replicast-log-", ignore_cleanup_errors=True)
    weakref.finalize(owner, directory.cleanup)
    return directory.name


def _path_in_a_directory(callback: Any, *args: Any, **kwargs: Any) -> str:
    path: str = type(callback)._get_file_path(callback, *args, **kwargs)
    if "://" not in path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    return path


def _nothing(*_: Any, **__: Any) -> None:
    return None
