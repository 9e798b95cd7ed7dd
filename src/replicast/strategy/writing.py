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
import functools
import inspect
import json
import logging
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import xxhash

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
SAVING_METHODS = ("save", "save_weights", "export")


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
        self._rank = rank
        self._lifetime = lifetime
        self._position = (-1, -1)
        self._counts: Counter[str] = Counter()
        self._put: deque[tuple[tuple[int, int], str]] = deque()
        self._positions: deque[tuple[int, int]] = deque(maxlen=POSITIONS_KEPT)
        self._lock = threading.Lock()
        self._thread = threading.local()

    def guard(self, model: keras.Model) -> None:
        """Makes one worker write what this model, or a model in it, saves."""
        if not getattr(model, "_replicast_guarded", False):
            # On this object, not on its class: Keras has no hook to choose who writes.
            for name in SAVING_METHODS:
                object.__setattr__(model, name, self._written_once(getattr(model, name)))
            object.__setattr__(model, "_replicast_guarded", True)
        for layer in model.layers:
            if isinstance(layer, keras.Model):
                self.guard(layer)

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
        if getattr(self._thread, "writes", False):  # part of a larger write
            return write()
        claim = self.claim(path, kind)
        if claim.worker == self._rank:
            return self._write(claim, str(path), write)
        text = self.wait_for_key(f"{claim.key}/done", claim.worker, f"write {path}")
        problem = json.loads(text or "null")
        if problem is not None:
            raise _failed_write(problem, claim.worker, str(path))
        if self._rank == 0 and kind == "file" and not Path(path).exists():
            return write()  # it is on another host's disk, and worker 0 needs what it saves on its own
        return None

    def claim(self, path: Any, kind: str, arrive_secs: float = ARRIVE_SECS) -> Claim:
        """Decides which worker writes this path here: worker 0 if it claims it, else the first that does.

        Blocks until worker 0 has made a claim of its own, has passed this position, or the time is up.
        """
        # The absolute path: workers in different directories may use the same relative path.
        name = xxhash.xxh3_64(str(Path(path).absolute()).encode()).hexdigest()
        key, turn = self.next_key(name), self.next_key(kind)
        if self._rank != 0:
            self._let_worker_0_go_first(key, (turn, f"{self._where()}/{kind}/end"), str(path), arrive_secs)
        if self.put_key(key, str(self._rank)):
            worker = self._rank
        else:
            worker = int(self.wait_for_key(key, 0, f"write {path}"))
        if self._rank == 0:
            self.put_key(turn, str(path))
        return Claim(key, worker)

    def end_claims(self, kind: str) -> None:
        """Publishes that worker 0 has made all of its claims of this kind here: nobody waits for more."""
        if self._rank == 0:
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
                logger.info("worker 0 does not write %s; worker %d does", path, self._rank)
                return

    def _remind(self, reminded: float, worker: int, what: str) -> float:
        """Logs every 30 s which worker this worker waits for; returns the time of the last log line."""
        if time.monotonic() - reminded < REMIND_SECS:
            return reminded
        logger.warning("worker %d waits for worker %d to %s", self._rank, worker, what)
        return time.monotonic()

    def _where(self) -> str:
        position = self._lifetime.turns.position()
        if position != self._position:
            self._position = position
            self._counts.clear()
            self._delete_old_keys(position)
        return f"replicast/write/{position[0]}-{position[1]}"

    def _written_once(self, save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def once(*args: Any, **kwargs: Any) -> Any:
            write = functools.partial(save, *args, **kwargs)
            path = _path_of(save, args, kwargs)
            return write() if path is None else self.once(path, write)

        return once

    def _write(self, claim: Claim, path: str, write: Callable[[], Any]) -> Any:
        self._thread.writes = True
        try:
            with self._lifetime.turns.alone(f"writing {path}"):
                result = write()
        except BaseException as error:  # also Ctrl-C: the others must not wait for this file
            self.put_key(f"{claim.key}/done", json.dumps(_described(error)))
            raise
        finally:
            self._thread.writes = False
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


def _path_of(save: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """The path of a call of `save`; None if it has none, as in an override with a default path."""
    parameter = next(iter(inspect.signature(save).parameters), "")
    path = args[0] if args else kwargs.get("filepath", kwargs.get(parameter))
    return os.fspath(path) if isinstance(path, str | os.PathLike) else None


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
