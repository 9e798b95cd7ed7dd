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

import builtins
import contextlib
import functools
import inspect
import json
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import xxhash

# Private: `keras.saving.save_model` and `save_weights` call these by the names of their modules, however a
# script has imported them; there is no public function below them.
from keras.src.legacy.saving import legacy_h5_format
from keras.src.saving import saving_lib

# Private: `save_model(overwrite=False)` asks by it whether a file that exists is to be replaced.
from keras.src.utils import io_utils

from replicast.coordination import Coordination
from replicast.errors import JobFailed, ReplicastError
from replicast.lifetime import Lifetime

logger = logging.getLogger("replicast")

ARRIVE_SECS = 20.0
"""How much later than another worker worker 0 may reach the same write."""
WRITE_SECS = 3600.0
POLL_SECS = 0.5
REMIND_SECS = 30.0
POSITIONS_KEPT = 3
"""A worker deletes its keys of a position after this many later positions."""

_thread = threading.local()
_writing: Writing | None = None
"""Decides who writes what Keras writes in this process."""

_METHODS = (
    (keras.Model, ("save", "save_weights", "export")),
    (keras.export.ExportArchive, ("write_out",)),
)
_FUNCTIONS = (
    (saving_lib, "save_model"),
    (saving_lib, "save_weights_only"),
    (legacy_h5_format, "save_model_to_hdf5"),
)


@dataclass(frozen=True, slots=True)
class Claim:
    """Which worker writes a path at one position of the script.

    Attributes:
        key: The prefix of the key that the writing worker creates when it has finished.
        worker: The worker that writes.
    """

    key: str
    worker: int


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
        """Calls `write` on one of the workers that write this path; the others wait for it.

        Blocks until worker 0 has reached a write of its own, at most 20 s, and until the file is complete, at
        most an hour.

        Args:
            path: The path to write.
            write: Writes it.
            kind: Writes of different kinds are counted separately.

        Raises:
            JobFailed: The worker that writes has exited, or does not finish.
            Exception: The error of the write, of the same built-in type on all workers.
        """
        if getattr(_thread, "writes", False):  # part of a larger write
            return write()
        claim = self.claim(path, kind)
        if claim.worker == self.rank:
            return self._write(claim, str(path), write)
        text = self.wait_for_key(f"{claim.key}/done", claim.worker, f"write {path}")
        problem = json.loads(text or "null")
        if problem is not None:
            raise _failed_write(problem, claim.worker, str(path))
        if self.rank == 0 and kind == "file" and not Path(path).exists():
            with writing_alone():  # it is on another host's disk, and worker 0 needs what it saves on its own
                return write()
        return None

    def claim(self, path: Any, kind: str, arrive_secs: float = ARRIVE_SECS) -> Claim:
        """Decides which worker writes this path here: worker 0 if it claims it, else the first that does.

        Blocks until worker 0 has made a claim of its own, has passed this position, or the time is up.
        """
        # The absolute path: workers in different directories may use the same relative path.
        name = xxhash.xxh3_64(str(Path(path).absolute()).encode()).hexdigest()
        key, turn = self.next_key(name), self.next_key(kind)
        if self.rank != 0:
            self._let_worker_0_go_first(key, (turn, f"{self._where()}/{kind}/end"), str(path), arrive_secs)
        if self.put_key(key, str(self.rank)):
            worker = self.rank
        else:
            worker = int(self.wait_for_key(key, 0, f"write {path}"))
        if self.rank == 0:
            self.put_key(turn, str(path))
        return Claim(key, worker)

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
        """Writes a key that the others read before they leave this position; it is deleted later.

        Returns:
            Whether it was written; False if it exists already.
        """
        put = self._coordination.put(key, value)
        if put:
            with self._lock:
                self._put.append((self._lifetime.turns.position(), key))
        return put

    def wait_for_key(self, key: str, worker: int, what: str) -> str:
        """Waits for a key of another worker, at most an hour; logs every 30 s which worker it waits for.

        Returns:
            Its value; empty if that worker has passed this position without writing it.

        Raises:
            JobFailed: The job has failed, or the time is up.
        """
        began = reminded = time.monotonic()
        while (value := self._coordination.get(key, POLL_SECS)) is None:
            self._lifetime.check()
            if self._lifetime.has_gone_on(worker):
                return self._coordination.get(key, POLL_SECS) or ""
            reminded = self._remind(reminded, worker, what)
            if time.monotonic() - began > WRITE_SECS:
                raise JobFailed(f"worker {worker} did not {what} in {WRITE_SECS:.0f} s", worker=worker)
        return value

    def _let_worker_0_go_first(self, key: str, signs: tuple[str, ...], path: str, arrive_secs: float) -> None:
        began = reminded = time.monotonic()
        while self._coordination.get(key, POLL_SECS / 10) is None:
            if any(self._coordination.get(sign, POLL_SECS / 2) is not None for sign in signs):
                return
            self._lifetime.check()
            reminded = self._remind(reminded, 0, f"reach the point where it may write {path}")
            if self._lifetime.has_gone_on(0) or time.monotonic() - began > arrive_secs:
                logger.info("worker 0 does not write %s; worker %d does", path, self.rank)
                return

    def _remind(self, reminded: float, worker: int, what: str) -> float:
        """Logs every 30 s which worker this worker waits for; returns the time of the last log line."""
        if time.monotonic() - reminded < REMIND_SECS:
            return reminded
        logger.warning("worker %d waits for worker %d to %s", self.rank, worker, what)
        return time.monotonic()

    def _where(self) -> str:
        position = self._lifetime.turns.position()
        if position != self._position:
            self._position = position
            self._counts.clear()
            self._delete_old_keys(position)
        return f"replicast/write/{position[0]}-{position[1]}"

    def _write(self, claim: Claim, path: str, write: Callable[[], Any]) -> Any:
        try:
            with writing_alone(), self._lifetime.turns.alone(f"writing {path}"):
                result = write()
        except BaseException as error:  # also Ctrl-C: the others must not wait for this file
            self.put_key(f"{claim.key}/done", json.dumps(_described(error)))
            raise
        self.put_key(f"{claim.key}/done", json.dumps(None))
        return result

    def _delete_old_keys(self, position: tuple[int, int]) -> None:
        """Deletes this worker's keys of positions that all workers have passed.

        A transfer or turn ends only if all workers join it: once this worker is two positions further, all
        have left the first.
        """
        with self._lock:
            self._positions.append(position)
            old = []
            while self._put and self._put[0][0] < self._positions[0]:
                old.append(self._put.popleft()[1])
        for key in old:
            self._coordination.delete(key)


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


def _asked_by_first(ask: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Only worker 0 asks: a later worker finds the file that worker 0 has just written."""

    @functools.wraps(ask)
    def asked(path: Any) -> bool:
        follows = _writing is not None and _writing.rank != 0 and not getattr(_thread, "writes", False)
        return True if follows else ask(path)

    return asked


@contextlib.contextmanager
def writing_alone() -> Iterator[None]:
    """Inside, this worker writes what Keras writes, and no other worker waits for it."""
    before, _thread.writes = getattr(_thread, "writes", False), True
    try:
        yield
    finally:
        _thread.writes = before


def _written_once(write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def once(*args: Any, **kwargs: Any) -> Any:
        path = _bound(write, args, kwargs).arguments.get("filepath")
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
        bound = _bound(write, args, kwargs)
        path = bound.arguments.get("filepath")
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


def _bound(write: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return inspect.signature(write).bind_partial(*args, **kwargs)


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
