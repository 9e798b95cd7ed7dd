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
import os
import tempfile
import threading
import time
import types
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf
import xxhash

# Private: `keras.saving.save_model` and `save_weights` call these by the names of their modules, however a
# script has imported them; there is no public function below them.
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib

from replicast.errors import JobFailed, ReplicastError, logger
from replicast.lifetime import Lifetime
from replicast.training.keras_call import replaced

ARRIVE_SECS = 20.0  # how much later than another worker worker 0 may reach the same write
WRITE_SECS = 3600.0
POLL_SECS = 0.5
REMIND_SECS = 30.0
POSITIONS_KEPT = 3  # a worker deletes its keys of a position after this many later positions
_METHODS = {"save": keras.Model, "save_weights": keras.Model, "export": keras.Model}
_FUNCTIONS = (
    (saving_lib, "save_model"),
    (saving_lib, "save_weights_only"),
    (legacy_h5_format, "save_model_to_hdf5"),
)
_WRITE = (
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.ModelCheckpoint,
    getattr(keras.callbacks, "OrbaxCheckpoint", ()),  # not in every Keras 3
)
# Packages whose own callbacks report elsewhere and do nothing else; a script's subclass runs on all workers.
_LOGGERS = {"aim", "comet_ml", "dvclive", "mlflow", "neptune", "wandb"}
_HOOKS = tuple(name for name in dir(keras.callbacks.Callback) if name.startswith("on_"))
# By method of a model: the last method that Keras calls on its callbacks. Others are parts of `fit`.
_ENDS = {"evaluate": "on_test_end", "predict": "on_predict_end"}


_thread = threading.local()  # `writes`: whether what it writes is part of a larger write
_writing: Writing | None = None  # decides who writes what Keras writes in this process


class Writing:
    """Decides which worker writes each file, and makes the others wait for it."""

    def __init__(self, lifetime: Lifetime) -> None:
        self._lifetime = lifetime
        self._coordination = lifetime.coordination
        self.rank = lifetime.rank
        self.meet = lifetime.meet
        self._position = (-1, -1)
        self._counts: Counter[str] = Counter()
        self._put: deque[tuple[tuple[int, int], str]] = deque()
        self._positions: deque[tuple[int, int]] = deque(maxlen=POSITIONS_KEPT)
        self._lock = threading.Lock()

    def once(self, path: Any, write: Callable[[], Any], kind: str = "file") -> Any:
        """Calls `write` on one of the workers that write this path; the others wait for it, at most 1 h."""
        if getattr(_thread, "writes", False):
            return write()
        # Worker 0 writes the path if it claims it, else the first worker that does. So the others wait until
        # worker 0 has claimed this path or written another one, has passed this position, or is too late.
        key, turn = self.next_key(_digest(path)), self.next_key(kind)
        if self.rank != 0:
            waits = self._waits(0, f"reach the point where it may write {path}")
            while self._coordination.get(key, POLL_SECS / 10) is None:
                if self._coordination.get(turn, POLL_SECS / 2) is not None:
                    break
                if next(waits) > ARRIVE_SECS or self._lifetime.has_gone_on(0):
                    logger.info("worker 0 does not write %s; worker %d does", path, self.rank)
                    break
        mine = self.put_key(key, str(self.rank))
        worker = self.rank if mine else int(self.wait_for_key(key, 0, f"write {path}"))
        if self.rank == 0:
            self.put_key(turn, str(path))
        if worker == self.rank:
            try:
                with writing_alone(), self._lifetime.alone(f"writing {path}"):
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

    def next_key(self, name: str) -> str:
        """A key of this position in the script; the n-th key of a name is the same on all workers."""
        position = self._lifetime.position()
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
        self._counts[name] += 1
        return f"replicast/write/{position[0]}-{position[1]}/{name}/{self._counts[name]}"

    def put_key(self, key: str, value: str) -> bool:
        """Writes a key that the others read before they leave this position; it is deleted later."""
        put = self._coordination.put(key, value)
        if put:
            with self._lock:
                self._put.append((self._lifetime.position(), key))
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


def write_once(writing: Writing) -> None:
    """From now on, one worker writes each file that Keras writes, as `writing` decides.

    Keras has no hook to choose who writes. So its methods that save, and below them the functions that write
    the files, are replaced: methods first, because they look whether the file exists before they write it.
    """
    global _writing
    first, _writing = _writing is None, writing
    if first:
        # In Keras 3.15 `ExportArchive()` returns an object of another class, with a `write_out` of its own.
        for name, owner in {**_METHODS, "write_out": type(keras.export.ExportArchive())}.items():
            setattr(owner, name, _written_once(getattr(owner, name), whole=False))
        for module, name in _FUNCTIONS:
            setattr(module, name, _written_once(getattr(module, name), whole=True))


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


@contextlib.contextmanager
def writing_alone() -> Iterator[None]:
    """Inside, this worker writes what Keras writes, and no other worker waits for it."""
    before, _thread.writes = getattr(_thread, "writes", False), True
    try:
        yield
    finally:
        _thread.writes = before


def _written_once(write: Callable[..., Any], *, whole: bool) -> Callable[..., Any]:
    """Lets one worker write a file. `whole`: it writes beside its place and renames, so nobody sees a part.

    A model that Keras writes as several files or as a directory has no such moment.
    """

    @functools.wraps(write)
    def once(*args: Any, **kwargs: Any) -> Any:
        bound = inspect.signature(write).bind_partial(*args, **kwargs)
        path = bound.arguments.get("filepath")
        if _writing is None or not isinstance(path, str | os.PathLike):  # Keras also writes to open files
            return write(*args, **kwargs)
        is_sharded = bound.arguments.get("max_shard_size") is not None
        is_one_file = str(path).endswith((".keras", ".h5", ".hdf5")) and "://" not in str(path)
        if not whole or is_sharded or not is_one_file or not Path(path).absolute().parent.is_dir():
            return _writing.once(path, functools.partial(write, *args, **kwargs))
        place = Path(path).resolve()  # a link stays a link
        # Keras looks at the suffix. What a crash leaves behind is replaced by the next save of this worker.
        part = place.with_name(f".part-{_writing.rank}-{place.name}")

        def write_and_rename() -> Any:
            part.unlink(missing_ok=True)  # also a link
            try:
                result = write(*bound.args, **bound.kwargs)
                part.replace(place)
            finally:
                part.unlink(missing_ok=True)
            return result

        bound.arguments["filepath"] = str(part)
        return _writing.once(path, write_and_rename)

    return once


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
    Only the output differs: of the workers with the same target, the first one writes, and the others write
    to the null device or a temporary directory. `Writing` decides who writes what a callback saves through
    the model.

    A callback belongs to the user: attributes that are replaced for a call of `fit` are restored when the
    call ends. The callback can then be copied, pickled, given another path and used again.
    """

    def __init__(self, writing: Writing) -> None:
        self._writing = writing
        self._changes: dict[Any, contextlib.ExitStack] = {}  # by callback

    def prepare(self, callbacks: Any, method: str) -> None:
        """Makes one worker write each file that these callbacks write. All workers call it, for each call."""
        if method == "validation":  # a part of `fit`
            return
        prepared = [*_callbacks_that_write(callbacks)]
        for callback in prepared:
            self._restore(callback)  # the previous call may have raised before it restored it
        own = {callback: _target_of(callback) for callback in prepared}
        heard = self._writing.meet(json.dumps([*own.values()]))
        said = {worker: json.loads(text) for worker, text in heard.items()}
        for callback, target in own.items():
            self._changes[callback] = contextlib.ExitStack()
            is_backup = isinstance(callback, keras.callbacks.BackupAndRestore)
            if is_backup and any(target not in targets for targets in said.values()):
                raise JobFailed(
                    f"The workers do not see the same backup in {callback.backup_dir}. BackupAndRestore "
                    "needs a backup_dir on a file system that all workers share, and is needed on all of them"
                )
            writer = min(worker for worker, targets in said.items() if target in targets)
            self._prepare(callback, is_elsewhere=writer != self._writing.rank)
            log = ""
            if isinstance(callback, (keras.callbacks.CSVLogger, keras.callbacks.TensorBoard)):
                log = self._writing.next_key(_digest(target))
            self._restore_at(callback, _ENDS.get(method, "on_train_end"), log, writer, target)

    def _prepare(self, callback: Any, *, is_elsewhere: bool) -> None:
        match callback:
            case keras.callbacks.CSVLogger():
                if is_elsewhere:
                    self._set(callback, "filename", os.devnull)
            case keras.callbacks.TensorBoard():
                if is_elsewhere:
                    scratch = tempfile.TemporaryDirectory(prefix="replicast-log-", ignore_cleanup_errors=True)
                    self._set(callback, "log_dir", self._changes[callback].enter_context(scratch))
                    # Private: nobody reads this worker's profile, and exporting it can crash the process.
                    self._set(callback, "_should_trace", False)
                    if callback.model is not None:  # a CallbackList has already set it
                        callback.set_model(callback.model)
            case keras.callbacks.BackupAndRestore():
                # Private: it writes other files beside the weights, and no public method covers all of them.
                self._replace(callback, "_save_model", self._back_up_once)
                self._replace(callback, "on_train_end", self._delete_together)
            case keras.callbacks.ModelCheckpoint():
                # Private: Keras checks for the directory and then creates it; two workers at once fail.
                self._replace(callback, "_get_file_path", _path_in_a_directory)
            case _:  # reports and does nothing else
                for name in _HOOKS if is_elsewhere else ():
                    self._replace(callback, name, lambda *_, **__: None)

    def _restore_at(self, callback: Any, end: str, log: str, writer: int, target: str) -> None:
        """Restores the callback after Keras has called its method `end`, and its log is complete."""
        own = getattr(callback, end)

        def ended(callback: Any, logs: Any = None) -> None:
            own(logs)
            if log and writer == self._writing.rank:
                self._writing.put_key(log, "")
            elif log:
                self._writing.wait_for_key(log, writer, f"complete {target}")
            self._restore(callback)

        self._replace(callback, end, ended)

    def _replace(self, callback: Any, name: str, function: Callable[..., Any]) -> None:
        # On this object, never on its class: Keras has no hook to choose who writes.
        self._set(callback, name, types.MethodType(function, callback))

    def _set(self, callback: Any, name: str, value: Any) -> None:
        self._changes[callback].enter_context(replaced(callback, name, value))

    def _restore(self, callback: Any) -> None:
        self._changes.pop(callback, contextlib.ExitStack()).close()

    def _back_up_once(self, callback: Any) -> None:
        save = functools.partial(type(callback)._save_model, callback)
        self._writing.once(callback.backup_dir, save, kind="backup")

    def _delete_together(self, callback: Any, logs: Any = None) -> None:
        # Others may still be reading it: a fit that has nothing left to do ends at once.
        self._writing.meet("")
        end = functools.partial(type(callback).on_train_end, callback, logs)
        self._writing.once(callback.backup_dir, end, kind="backup")


def _callbacks_that_write(callbacks: Any) -> Iterator[keras.callbacks.Callback]:
    for callback in keras.tree.flatten(callbacks):
        if isinstance(callback, keras.callbacks.CallbackList):
            yield from _callbacks_that_write(callback.callbacks)
        elif isinstance(callback, _WRITE) or type(callback).__module__.partition(".")[0] in _LOGGERS:
            yield callback


def _target_of(callback: Any) -> str:
    """What a callback writes to: the same for two that would write one file. And the backup that it sees."""
    match callback:
        case keras.callbacks.CSVLogger():
            return str(Path(callback.filename).absolute())
        case keras.callbacks.TensorBoard():
            return str(Path(callback.log_dir).absolute())
        case keras.callbacks.BackupAndRestore():
            # Private: where it keeps the epoch from which it continues.
            path = callback._training_metadata_path
            seen = tf.io.gfile.GFile(path).read() if tf.io.gfile.exists(path) else "no backup"
            return f"backup: {seen}"
    return type(callback).__qualname__


def _digest(path: Any) -> str:
    # Of the absolute path: workers in different directories may use the same relative path.
    return xxhash.xxh3_64(str(Path(path).absolute()).encode()).hexdigest()


def _path_in_a_directory(callback: Any, *args: Any, **kwargs: Any) -> str:
    path: str = type(callback)._get_file_path(callback, *args, **kwargs)
    if "://" not in path:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    return path
