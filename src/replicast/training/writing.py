"""Files that one worker writes for all.

Every worker runs the same script, so every worker would save the model to the same path at the same time.
Instead, one worker writes each file, and the others continue when it is complete. Which worker writes is
decided without waiting for a worker that may not come:

    The workers' n-th writes between two steps belong together. Worker 0 goes first. The worker that creates
    the path's key writes the file; the others wait until it has finished.

So worker 0 writes a path that is the same on all workers. A path that worker 0 does not write here is written
by the worker that asks for it: a separate directory, or a save behind `if strategy.rank == 1`.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import functools
import importlib.util
import inspect
import json
import logging
import os
import tempfile
import threading
import time
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, MutableMapping
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
import xxhash

# Private: `keras.saving.save_model` and `save_weights` call these by the names of their modules, however a
# script has imported them; there is no public function below them. `save_model(overwrite=False)` asks by
# `io_utils` whether a file that exists is to be replaced.
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib
from keras.src.utils import io_utils

from replicast.coordination import Coordination
from replicast.errors import JobFailed, ReplicastError
from replicast.lifetime import Lifetime

logger = logging.getLogger("replicast")

ARRIVE_SECS = 20.0  # how much later than another worker worker 0 may reach the same write
WRITE_SECS = 3600.0
POLL_SECS = 0.5
REMIND_SECS = 30.0
POSITIONS_KEPT = 3  # a worker deletes its keys of a position after this many later positions
_METHODS = (
    (keras.Model, ("save", "save_weights", "export")),
    (keras.export.ExportArchive, ("write_out",)),
)
_FUNCTIONS = (
    (saving_lib, "save_model"),
    (saving_lib, "save_weights_only"),
    (legacy_h5_format, "save_model_to_hdf5"),
)
_LOGS = (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard, keras.callbacks.RemoteMonitor)
_ORBAX = getattr(keras.callbacks, "OrbaxCheckpoint", ())  # not in every Keras 3
_WRITE = (*_LOGS, keras.callbacks.BackupAndRestore, keras.callbacks.ModelCheckpoint, _ORBAX)
# Packages whose own callbacks report elsewhere and do nothing else; a script's subclass runs on all workers.
_LOGGERS = {"aim", "comet_ml", "dvclive", "mlflow", "neptune", "wandb"}
_HOOKS = tuple(name for name in dir(keras.callbacks.Callback) if name.startswith("on_"))
_NO_BACKUP = "no backup"
_UNSET = object()
# By method of a model: the last method that Keras calls on its callbacks. Others are parts of `fit`.
_ENDS = {"evaluate": "on_test_end", "predict": "on_predict_end"}


class _Thread(threading.local):
    writes = False  # part of a larger write


_thread = _Thread()
_writing: Writing | None = None  # decides who writes what Keras writes in this process


class Writing:
    """Decides which worker writes each file, and makes the others wait for it."""

    def __init__(self, coordination: Coordination, rank: int, lifetime: Lifetime) -> None:
        self._coordination = coordination
        self.rank = rank
        self._lifetime = lifetime
        self._position = (-1, -1)
        self._counts: Counter[str] = Counter()
        self._put: deque[tuple[tuple[int, int], str]] = deque()
        self._positions: deque[tuple[int, int]] = deque(maxlen=POSITIONS_KEPT)
        self._lock = threading.Lock()

    def once(self, path: Any, write: Callable[[], Any], kind: str = "file") -> Any:
        """Calls `write` on one of the workers that write this path; the others wait for it, at most 1 h."""
        if _thread.writes:
            return write()
        key, worker = self.claim(path, kind)
        if worker == self.rank:
            try:
                with writing_alone(), self._lifetime.turns.alone(f"writing {path}"):
                    result = write()
            except BaseException as error:  # also Ctrl-C: the others must not wait for this file
                self.put_key(f"{key}/done", json.dumps(_described(error)))
                raise
            self.put_key(f"{key}/done", json.dumps(None))
            return result
        problem = json.loads(self.wait_for_key(f"{key}/done", worker, f"write {path}") or "null")
        if problem is not None:
            raise _failed_write(problem, worker, str(path))
        if self.rank == 0 and kind == "file" and not Path(path).exists():
            with writing_alone():  # it is on another host's disk, and worker 0 needs what it saves on its own
                return write()
        return None

    def claim(self, path: Any, kind: str, arrive_secs: float = ARRIVE_SECS) -> tuple[str, int]:
        """Decides which worker writes this path here: worker 0 if it claims it, else the first that does.

        Returns the key of the path at this position, and the worker. Blocks until worker 0 has made a claim
        of its own, has passed this position, or the time is up.
        """
        # The absolute path: workers in different directories may use the same relative path.
        name = xxhash.xxh3_64(str(Path(path).absolute()).encode()).hexdigest()
        key, turn = self.next_key(name), self.next_key(kind)
        if self.rank != 0:
            signs = (turn, f"{self._where()}/{kind}/end")
            waits = self._waits(0, f"reach the point where it may write {path}")
            while self._coordination.get(key, POLL_SECS / 10) is None:
                if any(self._coordination.get(sign, POLL_SECS / 2) is not None for sign in signs):
                    break
                if next(waits) > arrive_secs or self._lifetime.has_gone_on(0):
                    logger.info("worker 0 does not write %s; worker %d does", path, self.rank)
                    break
        mine = self.put_key(key, str(self.rank))
        worker = self.rank if mine else int(self.wait_for_key(key, 0, f"write {path}"))
        if self.rank == 0:
            self.put_key(turn, str(path))
        return key, worker

    def end_claims(self, kind: str) -> None:
        """Publishes that worker 0 has made all of its claims of this kind here: nobody waits for more."""
        if self.rank == 0:
            self.put_key(f"{self._where()}/{kind}/end", "")

    def next_key(self, name: str) -> str:
        """A key of this position in the script; the n-th key of a name is the same on all workers."""
        where = self._where()
        self._counts[name] += 1
        return f"{where}/{name}/{self._counts[name]}"

    def put_key(self, key: str, value: str) -> bool:
        """Writes a key that the others read before they leave this position; it is deleted later."""
        put = self._coordination.put(key, value)
        if put:
            with self._lock:
                self._put.append((self._lifetime.turns.position(), key))
        return put

    def wait_for_key(self, key: str, worker: int, what: str) -> str:
        """Waits for a key of another worker, at most an hour; logs every 30 s which worker it waits for."""
        waits = self._waits(worker, what)
        while (value := self._coordination.get(key, POLL_SECS)) is None:
            if next(waits) > WRITE_SECS:
                raise JobFailed(f"worker {worker} did not {what} in {WRITE_SECS:.0f} s", worker=worker)
            if self._lifetime.has_gone_on(worker):
                return self._coordination.get(key, POLL_SECS) or ""
        return value

    def _waits(self, worker: int, what: str) -> Iterator[float]:
        """Yields how long it has waited, and logs every 30 s for whom; raises if the job has failed."""
        began = reminded = time.monotonic()
        while True:
            self._lifetime.check()
            now = time.monotonic()
            if now - reminded >= REMIND_SECS:
                logger.warning("worker %d waits for worker %d to %s", self.rank, worker, what)
                reminded = now
            yield now - began

    def _where(self) -> str:
        position = self._lifetime.turns.position()
        if position != self._position:
            self._position = position
            self._counts.clear()
            # Delete the keys of a position that all workers have left. A transfer or turn ends only if all
            # join it: once this worker is two positions further, all have left the first.
            with self._lock:
                self._positions.append(position)
                old = []
                while self._put and self._put[0][0] < self._positions[0]:
                    old.append(self._put.popleft()[1])
            for key in old:
                self._coordination.delete(key)
        return f"replicast/write/{position[0]}-{position[1]}"


def write_once(writing: Writing) -> None:
    """From now on, one worker writes each file that Keras writes, as `writing` decides.

    Keras has no hook to choose who writes. So its methods that save, and below them the functions that write
    the files, are replaced: methods first, because they look whether the file exists before they write it.
    """
    global _writing
    first, _writing = _writing is None, writing
    if first:
        for owner, names in _METHODS:
            for name in names:
                setattr(owner, name, _written_once(getattr(owner, name)))
        for module, name in _FUNCTIONS:
            setattr(module, name, _written_once(_written_whole(getattr(module, name))))
        io_utils.ask_to_proceed_with_overwrite = _asked_by_first(io_utils.ask_to_proceed_with_overwrite)


def report_from_first_worker(rank: int) -> None:
    """Makes one run of a job in W&B and MLflow, also of a script that starts a run on every worker.

    On the other workers W&B is off, and MLflow has a store of its own that is removed at exit: it cannot be
    turned off, and two processes that create one database crash.
    """
    if rank == 0:
        return
    os.environ["WANDB_MODE"] = "disabled"
    if importlib.util.find_spec("mlflow") is not None:
        directory = tempfile.TemporaryDirectory(prefix="replicast-mlflow-", ignore_cleanup_errors=True)
        atexit.register(directory.cleanup)
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{directory.name}/mlflow.db"


def _asked_by_first(ask: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Only worker 0 asks: a later worker finds the file that worker 0 has just written."""

    @functools.wraps(ask)
    def asked(path: Any) -> bool:
        return (_writing is not None and _writing.rank != 0 and not _thread.writes) or ask(path)

    return asked


@contextlib.contextmanager
def writing_alone() -> Iterator[None]:
    """Inside, this worker writes what Keras writes, and no other worker waits for it."""
    before, _thread.writes = _thread.writes, True
    try:
        yield
    finally:
        _thread.writes = before


def _written_once(write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def once(*args: Any, **kwargs: Any) -> Any:
        path = inspect.signature(write).bind_partial(*args, **kwargs).arguments.get("filepath")
        if _writing is None or not isinstance(path, str | os.PathLike):  # Keras also writes to open files
            return write(*args, **kwargs)
        return _writing.once(path, functools.partial(write, *args, **kwargs))

    return once


def _written_whole(write: Callable[..., Any]) -> Callable[..., Any]:
    """Writes one file beside its place and renames it: nobody ever sees a part of it.

    A model that Keras writes as several files or as a directory has no such moment.
    """

    @functools.wraps(write)
    def whole(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(write).bind_partial(*args, **kwargs)
        path: Any = bound.arguments.get("filepath")
        one_file = isinstance(path, str | os.PathLike) and str(path).endswith((".keras", ".h5", ".hdf5"))
        shards = bound.arguments.get("max_shard_size") is not None
        if not one_file or shards or "://" in str(path) or not Path(path).absolute().parent.is_dir():
            return write(*args, **kwargs)
        place = Path(path).resolve()  # a link stays a link
        # Keras looks at the suffix. What a crash leaves behind is replaced by the next save of this worker.
        part = place.with_name(f".part-{0 if _writing is None else _writing.rank}-{place.name}")
        part.unlink(missing_ok=True)  # also a link
        bound.arguments["filepath"] = str(part)
        try:
            result = write(*bound.args, **bound.kwargs)
            part.replace(place)
        finally:
            part.unlink(missing_ok=True)
        return result

    return whole


def _described(error: BaseException) -> dict[str, Any]:
    """An error as JSON values: its nearest built-in type and its message."""
    kind = next(kind for kind in type(error).__mro__ if kind.__module__ == "builtins")
    number = error.errno if isinstance(error, OSError) else None
    message = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return {"kind": kind.__name__, "name": type(error).__name__, "errno": number, "message": message}


def _failed_write(problem: dict[str, Any], worker: int, path: str) -> Exception:
    """The error of another worker's write, with the same built-in type, so that scripts can catch it."""
    kind = getattr(builtins, problem["kind"])
    message = f"worker {worker} could not write {path}: {problem['name']}: {problem['message']}"
    if not issubclass(kind, Exception):  # that worker was interrupted
        return JobFailed(message, worker=worker)
    if issubclass(kind, OSError) and problem["errno"] is not None:
        return OSError(problem["errno"], message, path)  # Python picks the subclass
    try:
        return ReplicastError(message) if kind is Exception else kind(message)
    except TypeError:  # the type needs more than a message
        return ReplicastError(message)


class Callbacks:
    """Prepares the callbacks of a call of `fit`, `evaluate` or `predict`, until that call ends.

    All callbacks run on all workers and keep all of their state, so that they decide the same everywhere.
    Only the output path differs: a log that worker 0 writes goes to the null device or a temporary directory
    on the others. `Writing` decides who writes what a callback saves through the model.

    A callback belongs to the user: attributes that are replaced for a call of `fit` are restored when the
    call ends. The callback can then be copied, pickled, given another path and used again.
    """

    def __init__(self, rank: int, size: int, writing: Writing) -> None:
        self._rank = rank
        self._size = size
        self._writing = writing
        # By callback and attribute: the value before, and the new value if it is a path.
        self._changes: MutableMapping[Any, dict[str, tuple[Any, str | None]]] = weakref.WeakKeyDictionary()
        self._scratch: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()

    def prepare(self, callbacks: Any, method: str) -> None:
        """Makes one worker write each file that these callbacks write."""
        for callback in _callbacks_that_write(callbacks):
            if method != "validation":
                self._restore(callback)  # the previous call may have raised before it restored it
            if callback not in self._changes:
                self._changes[callback] = {}
                self._prepare(callback, _ENDS.get(method, "on_train_end"))
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
            case _ if _is_logger(callback):
                for name in _HOOKS if self._rank != 0 else ():
                    self._replace(callback, name, _nothing)
                self._restore_at(callback, end)
            case _:  # OrbaxCheckpoint
                if self._is_written_elsewhere(callback, callback.directory, end):
                    # Private: this method only saves; the decision when to save is outside of it.
                    self._replace(callback, "_save_checkpoint", _nothing)

    def _is_written_elsewhere(self, callback: Any, path: Any, end: str) -> bool:
        """Whether another worker writes this log; the call then ends here once that log is complete."""
        # Every worker calls `fit`, and worker 0 tells when it has no more logs, so no timeout is needed.
        key, worker = self._writing.claim(path, "log", arrive_secs=WRITE_SECS)

        def complete() -> None:
            if worker == self._rank:
                self._writing.put_key(f"{key}/complete", "")
            else:
                self._writing.wait_for_key(f"{key}/complete", worker, f"complete {path}")

        self._restore_at(callback, end, complete)
        return worker != self._rank

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
        save = functools.partial(type(callback)._save_model, callback)
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


def _callbacks_that_write(callbacks: Any) -> Iterator[keras.callbacks.Callback]:
    for callback in keras.tree.flatten(callbacks):
        if isinstance(callback, keras.callbacks.CallbackList):
            yield from _callbacks_that_write(callback.callbacks)
        elif isinstance(callback, _WRITE) or _is_logger(callback):
            yield callback


def _is_logger(callback: Any) -> bool:
    return type(callback).__module__.partition(".")[0] in _LOGGERS


def _path_in_a_directory(callback: Any, *args: Any, **kwargs: Any) -> str:
    path: str = type(callback)._get_file_path(callback, *args, **kwargs)
    if "://" not in path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    return path


def _nothing(*_: Any, **__: Any) -> None: ...
