"""Files that one worker writes for all.

Every worker runs the same script, so every worker would save the model to the same path, all at once. Instead
each file is written by one worker, and the others go on when it is complete. Which worker, is decided without
waiting for anyone who may not come:

    The workers' n-th writes between two steps belong together. Worker 0 goes first. Whoever puts the key of a
    path writes it; whoever finds the key there waits until that worker has finished.

So the same path on all workers is written by worker 0. A path that worker 0 does not write here is written at
once by the worker that asks for it: a directory of its own, a save behind `if strategy.rank == 1`.
"""

from __future__ import annotations

import functools
import json
import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import xxhash

from replicast.coordination import Coordination
from replicast.errors import JobFailed
from replicast.lifetime import Lifetime

logger = logging.getLogger("replicast")

ARRIVE_SECS = 20.0
"""How long worker 0 may be behind another worker in coming to the same write."""
WRITE_SECS = 3600.0
LOOK_SECS = 0.5
REMIND_SECS = 30.0
SAVING_METHODS = ("save", "save_weights", "export")


@dataclass(frozen=True, slots=True)
class Claim:
    """Who writes a path at one position of the script.

    Attributes:
        key: Where the worker that writes says when it has finished.
        worker: The worker that writes.
    """

    key: str
    worker: int


class Writing:
    """Decides for each file which worker writes it, and lets the others wait for it."""

    def __init__(self, coordination: Coordination, rank: int, lifetime: Lifetime) -> None:
        self._coordination = coordination
        self._rank = rank
        self._lifetime = lifetime
        self._position = (-1, -1)
        self._counts: Counter[str] = Counter()
        self._put: deque[tuple[int, str]] = deque()
        self._writes = False

    def guard(self, model: keras.Model) -> None:
        """Has one worker write what this model, or a model in it, saves."""
        if not getattr(model, "_replicast_guarded", False):
            # On this one object, not on its class: Keras has no hook for who may write.
            for name in SAVING_METHODS:
                object.__setattr__(model, name, self._written_once(getattr(model, name)))
            object.__setattr__(model, "_replicast_guarded", True)
        for layer in model.layers:
            if isinstance(layer, keras.Model):
                self.guard(layer)

    def once(self, path: Any, write: Callable[[], Any], kind: str = "file") -> Any:
        """Calls `write` on one of the workers that come here with this path; the others wait for it.

        Blocks until worker 0 has come to a write of its own, at most 20 s, and until the file is complete, at
        most an hour.

        Args:
            path: What is written.
            write: Writes it.
            kind: Only writes of one kind are counted together.

        Raises:
            JobFailed: The worker that writes has failed, or does not finish.
        """
        if self._writes:  # part of a larger write
            return write()
        claim = self.claim(path, kind)
        if claim.worker == self._rank:
            return self._write(claim, str(path), write)
        problem = json.loads(self.hear(f"{claim.key}/done", claim.worker, f"write {path}") or "null")
        if problem is not None:
            raise JobFailed(f"worker {claim.worker} could not write {path}: {problem}", worker=claim.worker)
        if self._rank == 0 and kind == "file" and not Path(path).exists():
            return write()  # it is on another host's disk, and what worker 0 saves must be on its own
        return None

    def claim(self, path: Any, kind: str, arrive_secs: float = ARRIVE_SECS) -> Claim:
        """Decides which worker writes this path here: worker 0 if it does, else the first to ask.

        Blocks until worker 0 has come to a claim of its own, has passed this position, or the time is up.
        """
        where = self._where()
        # The whole path: workers in different directories may give the same relative one.
        name = xxhash.xxh3_64(str(Path(path).absolute()).encode()).hexdigest()
        self._counts.update([name, kind])
        key, turn = f"{where}/{name}/{self._counts[name]}", f"{where}/{kind}/{self._counts[kind]}"
        if self._rank != 0:
            self._let_worker_0_go_first(key, (turn, f"{where}/{kind}/end"), str(path), arrive_secs)
        if self._remember(key, str(self._rank)):
            worker = self._rank
        else:
            worker = int(self.hear(key, 0, f"write {path}"))
        if self._rank == 0:
            self._remember(turn, str(path))
        return Claim(key, worker)

    def claims_no_more(self, kind: str) -> None:
        """Worker 0 has made all of its claims of this kind here: the others need not wait for more."""
        if self._rank == 0:
            self._remember(f"{self._where()}/{kind}/end", "")

    def hear(self, key: str, worker: int, what: str) -> str:
        """Waits for a key of another worker, at most an hour, and says every 30 s for whom.

        Returns:
            Its value; empty if that worker has gone on without it.

        Raises:
            JobFailed: The job has failed, or the time is up.
        """
        began = reminded = time.monotonic()
        while (value := self._coordination.get(key, LOOK_SECS)) is None:
            self._lifetime.check()
            if self._lifetime.has_gone_on(worker):
                return self._coordination.get(key, LOOK_SECS) or ""
            reminded = self._remind(reminded, worker, what)
            if time.monotonic() - began > WRITE_SECS:
                raise JobFailed(f"worker {worker} did not {what} in {WRITE_SECS:.0f} s", worker=worker)
        return value

    def _let_worker_0_go_first(self, key: str, signs: tuple[str, ...], path: str, arrive_secs: float) -> None:
        began = reminded = time.monotonic()
        while self._coordination.get(key, LOOK_SECS / 10) is None:
            if any(self._coordination.get(sign, LOOK_SECS / 2) is not None for sign in signs):
                return
            self._lifetime.check()
            reminded = self._remind(reminded, 0, f"come to where it may write {path}")
            if self._lifetime.has_gone_on(0) or time.monotonic() - began > arrive_secs:
                logger.info("worker 0 does not write %s; worker %d does", path, self._rank)
                return

    def _remind(self, reminded: float, worker: int, what: str) -> float:
        """Says for whom this worker waits, if it was not said for 30 s; gives when it was said last."""
        if time.monotonic() - reminded < REMIND_SECS:
            return reminded
        logger.warning("worker %d waits for worker %d to %s", self._rank, worker, what)
        return time.monotonic()

    def _where(self) -> str:
        position = self._lifetime.position()
        if position != self._position:
            self._position = position
            self._counts.clear()
        self._forget()
        return f"replicast/write/{position[0]}-{position[1]}"

    def _written_once(self, save: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(save)
        def once(filepath: Any, *args: Any, **kwargs: Any) -> Any:
            return self.once(filepath, lambda: save(filepath, *args, **kwargs))

        return once

    def _write(self, claim: Claim, path: str, write: Callable[[], Any]) -> Any:
        self._writes = True
        try:
            with self._lifetime.alone(f"writing {path}"):
                result = write()
        except BaseException as error:  # also Ctrl-C: the others must not wait for this file
            self._remember(f"{claim.key}/done", json.dumps(f"{type(error).__name__}: {error}"))
            raise
        finally:
            self._writes = False
        self._remember(f"{claim.key}/done", json.dumps(None))
        return result

    def _remember(self, key: str, value: str) -> bool:
        put = self._coordination.put(key, value)
        if put:
            self._put.append((self._position[1], key))
        return put

    def _forget(self) -> None:
        """Removes this worker's keys of before the last turn: all workers have passed it."""
        while self._put and self._put[0][0] <= self._position[1] - 2:
            self._coordination.delete(self._put.popleft()[1])
