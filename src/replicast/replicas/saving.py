"""The user's view of checkpoints: when to save, which ones to keep, and the one being written."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from replicast.errors import CheckpointError
from replicast.storage.checkpoint import Manifest

SaveEvery = int | timedelta | Literal["epoch"]
WhenBusy = Literal["wait", "skip"]
LOOK_SECS = 0.5


@dataclass(frozen=True, slots=True)
class Keeping:
    """Which checkpoints to keep.

    Attributes:
        last: The number of latest checkpoints to keep.
        best: A metric and "min" or "max": the best checkpoint by this metric is kept too.
    """

    last: int = 3
    best: tuple[str, Literal["min", "max"]] | None = None

    def __post_init__(self) -> None:
        if type(self.last) is not int or self.last < 1:  # `type`, since True is an int to isinstance
            raise ValueError(f"keep is a number of checkpoints, at least 1. Received: {self.last!r}")
        pair = isinstance(self.best, tuple | list) and len(self.best) == 2 and isinstance(self.best[0], str)
        if self.best is not None and not (pair and self.best[1] in ("min", "max")):
            raise ValueError(
                f'keep_best is a metric and "min" or "max", as in ("loss", "min"). Received: {self.best!r}'
            )


@dataclass(frozen=True, slots=True)
class SavePlan:
    """When to make checkpoints, and which of them to keep.

    Attributes:
        every: A number of steps, a time, or "epoch"; None for never.
        keeping: Which ones to keep.
        when_busy: What happens to a checkpoint that is due while the previous one is still being written.
    """

    every: SaveEvery | None = None
    keeping: Keeping = field(default_factory=Keeping)
    when_busy: WhenBusy = "wait"

    def __post_init__(self) -> None:
        wrong = isinstance(self.every, bool) or (isinstance(self.every, int) and self.every < 1)
        wrong = wrong or (isinstance(self.every, timedelta) and self.every < timedelta(0))
        if wrong or not (
            self.every is None or self.every == "epoch" or isinstance(self.every, int | timedelta)
        ):
            raise ValueError(
                f'save_every is a number of steps, a datetime.timedelta or "epoch". Received: {self.every!r}'
            )
        if self.when_busy not in ("wait", "skip"):
            raise ValueError(f'when_busy must be "wait" or "skip". Received: {self.when_busy!r}')


class Saving:
    """A checkpoint that is being written. On all workers but worker 0 it is done immediately.

    Args:
        id_: That of the operation that saves it: no other checkpoint of this attempt has it.
        check: Raises if the checkpoint can no longer be written.
    """

    def __init__(self, id_: str, check: Callable[[], None] = lambda: None) -> None:
        self.id = id_
        self._check = check
        self._done = threading.Event()
        self._manifest: Manifest | None = None
        self._error: Exception | None = None
        self.told = False
        """Whether the caller of `result` has received its failure."""
        self._lock = threading.Lock()
        self.is_writing = False
        """Whether writing has begun. Until then another checkpoint may replace it."""

    def done(self) -> bool:
        """Whether it is written, or never will be."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Blocks until it is done, at most `timeout` seconds. Returns whether it is.

        Raises:
            JobFailed: The job ended before that.
        """
        ends = math.inf if timeout is None else time.monotonic() + timeout
        while not self._done.wait(max(0.0, min(LOOK_SECS, ends - time.monotonic()))):
            self._check()
            if time.monotonic() >= ends:
                return False
        return True

    def result(self, timeout: float | None = None) -> Manifest | None:
        """Blocks until the checkpoint is durable, at most `timeout` seconds.

        Returns:
            Its manifest; None on the workers that do not write, and if it was skipped.

        Raises:
            ReplicasDiverged: The workers' states differ; nothing was saved.
            CheckpointError: It could not be written, or is not written yet.
            JobFailed: The job ended before it was written.
        """
        if not self.wait(timeout):
            raise CheckpointError("The checkpoint is still being written", received=f"after {timeout} s")
        if self._error is not None:
            self.told = True
            raise self._error
        return self._manifest

    def failure(self) -> str:
        """Why it was not written; empty if it was, or is not done yet."""
        return "" if self._error is None else str(self._error)

    def begin_writing(self) -> bool:
        """Marks that writing begins. Returns False if the checkpoint was replaced before."""
        with self._lock:
            self.is_writing = not self.done()
            return self.is_writing

    def replace(self) -> None:
        """Settles it because another checkpoint replaces it, unless it is being written."""
        with self._lock:
            if not self.is_writing:
                self.finish()

    def finish(self, manifest: Manifest | None = None, error: Exception | None = None) -> None:
        """Settles it. The first outcome is final."""
        if not self.done():
            self._manifest, self._error = manifest, error
            self._done.set()
