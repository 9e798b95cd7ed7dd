"""The background threads of one worker: all are stopped together, and the death of one is noticed."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from replicast.errors import JobFailed, ReplicastError

T = TypeVar("T")
logger = logging.getLogger("replicast")

LOOK_SECS = 0.5
"""How long a thread waits for work before it looks whether it is to stop."""


class Threads:
    """Daemon threads that run until `stop`. One that dies ends them all, and `check` raises its error.

    Args:
        on_death: Called, in the dying thread, so that whoever waits wakes up.
    """

    def __init__(self, on_death: Callable[[], None] = lambda: None) -> None:
        self.stopping = threading.Event()
        self._on_death = on_death
        self._threads: list[threading.Thread] = []
        self._death: ReplicastError | None = None

    def start(self, name: str, target: Callable[[], None]) -> None:
        """Starts a thread; `target` must return soon after `stopping` is set."""
        thread = threading.Thread(
            target=self._run, args=(name, target), name=f"replicast-{name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def take(self, work: queue.Queue[T] | queue.SimpleQueue[T]) -> T | None:
        """The next piece of work, or None when there was none for a while."""
        try:
            return work.get(timeout=LOOK_SECS)
        except queue.Empty:
            return None

    def check(self) -> None:
        """Raises when one of them has died."""
        if self._death is not None:
            raise self._death

    def stop(self, timeout_secs: float) -> None:
        """Asks all to end and waits for them, at most `timeout_secs` each. Not for one of them to call."""
        self.stopping.set()
        for thread in self._threads:
            thread.join(timeout_secs)
            if thread.is_alive():
                logger.warning("the thread %s did not end within %.0f s", thread.name, timeout_secs)

    def _run(self, name: str, target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            if self.stopping.is_set():
                logger.debug("the thread %s ended while stopping", name, exc_info=True)
                return
            if not isinstance(error, JobFailed):  # that one is the training thread's to tell
                logger.exception("the background thread %r died", name)
            said = f"{type(error).__name__}: {error}"
            self._death = (
                error
                if isinstance(error, JobFailed)
                else JobFailed(f"The background thread {name!r} of replicast died: {said}")
            )
            self.stopping.set()
            self._on_death()
