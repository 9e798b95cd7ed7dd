"""The threads of one worker: lanes that do one thing after the other, and readers of the channel.

All are daemons, stopped together by `Threads.stop`. One that dies ends them all, and the training thread
raises its error at the next boundary, or out of what it waits in.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

from replicast.errors import JobFailed

logger = logging.getLogger("replicast")


class Threads:
    """Daemon threads that run until `stop`.

    Args:
        on_death: Called, in the dying thread, so that whoever waits wakes up.
    """

    def __init__(self, on_death: Callable[[], None] = lambda: None) -> None:
        self.stopping = threading.Event()
        self._on_death = on_death
        self._threads: list[threading.Thread] = []
        self._lanes: list[Lane] = []
        self._death: JobFailed | None = None

    def start(self, name: str, target: Callable[[], None]) -> None:
        """Starts a thread; `target` must return soon after `stopping` is set."""
        thread = threading.Thread(
            target=self._run, args=(name, target), name=f"replicast-{name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def lane(self, name: str) -> Lane:
        """A thread that does what it is given, one thing after the other."""
        lane = Lane()
        self._lanes.append(lane)
        self.start(name, lane.run)
        return lane

    def check(self) -> None:
        """Raises when one of them has died."""
        if self._death is not None:
            raise self._death

    def stop(self, timeout_secs: float) -> None:
        """Asks all to end and waits for them, at most `timeout_secs` in all. Not for one of them to call."""
        self.stopping.set()
        for lane in self._lanes:
            lane.end()
        ends = time.monotonic() + timeout_secs
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))
            if thread.is_alive():
                logger.debug("the thread %s did not end within %.0f s", thread.name, timeout_secs)

    def have_ended(self) -> bool:
        """Whether all were told to end, and have."""
        return self.stopping.is_set() and not any(thread.is_alive() for thread in self._threads)

    def fail(self, name: str, error: BaseException) -> None:
        """A thread cannot go on: all end, and `check` raises why."""
        if self.stopping.is_set():
            logger.debug("the thread %s ended while stopping", name, exc_info=error)
            return
        if isinstance(error, JobFailed):
            self._death = error  # the training thread's to report
        else:
            logger.error("the background thread %r died", name, exc_info=error)
            said = f"{type(error).__name__}: {error}"
            self._death = JobFailed(f"The background thread {name!r} of replicast died: {said}")
            self._death.__cause__ = error
        self.stopping.set()
        for lane in self._lanes:
            lane.end()
        self._on_death()

    def _run(self, name: str, target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            self.fail(name, error)


class Lane:
    """Does what it is given in order, in one thread. A signal handler may call `do`."""

    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()

    def do(self, task: Callable[[], object]) -> None:
        """Returns at once."""
        self._tasks.put(task)

    def end(self) -> None:
        """What it was given before is done first."""
        self._tasks.put(None)

    def run(self) -> None:
        """The thread's loop."""
        while (task := self._tasks.get()) is not None:
            task()
