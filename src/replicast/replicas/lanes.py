"""The background threads of one worker, and the one loop in which anything of ours waits for them.

All are daemons, started here and stopped together by `WorkerThreads.stop`. If one dies, all stop, and the
training thread raises the error at its next boundary, or from the call in which it waits.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from replicast.deadline import Deadline
from replicast.errors import FileDamaged, JobFailed

logger = logging.getLogger("replicast")

LOOK_SECS = 0.5


def wait_for(event: threading.Event, secs: float | None, check: Callable[[], None]) -> bool:
    """Blocks until the event is set, and returns True; False after `secs`.

    Meanwhile `check` is called twice a second. It raises when nobody is left who could set the event.
    """
    deadline = Deadline(secs)
    while not event.wait(deadline.left(LOOK_SECS)):
        check()
        if deadline.has_passed():
            return event.is_set()
    return True


class Lane:
    def __init__(self) -> None:
        self._tasks: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()

    def do(self, task: Callable[[], object]) -> None:
        """Queues a task and returns at once. Any thread or signal handler."""
        self._tasks.put(task)

    def flushed(self) -> threading.Event:
        """Is set when all tasks are done that were queued before."""
        done = threading.Event()
        self.do(done.set)
        return done

    def end(self) -> None:
        """Stops the lane after the tasks that are already queued."""
        self._tasks.put(None)

    def run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
            del task  # what it holds, such as values of variables, is free while the lane waits for the next


class WorkerThreads:
    def __init__(self, on_death: Callable[[], None] = lambda: None) -> None:
        self.stopping = threading.Event()
        self._on_death = on_death
        self._threads: list[threading.Thread] = []
        self._lanes: list[Lane] = []
        self._death: JobFailed | FileDamaged | None = None

    def start(self, name: str, target: Callable[[], None]) -> None:
        """Starts a thread; `target` must return soon after `stopping` is set."""
        thread = threading.Thread(
            target=self._run, args=(name, target), name=f"replicast-{name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def lane(self, name: str) -> Lane:
        lane = Lane()
        self._lanes.append(lane)
        self.start(name, lane.run)
        return lane

    def check(self) -> None:
        if self._death is not None:
            raise self._death

    def stop(self, timeout_secs: float) -> None:
        """Stops all threads and waits at most `timeout_secs` in total. Must not be called by one of them."""
        self._stop_soon()
        deadline = Deadline(timeout_secs)
        for thread in self._threads:
            thread.join(deadline.left(timeout_secs))
            if thread.is_alive():
                logger.debug("thread %s did not exit within %.0f s", thread.name, timeout_secs)

    def have_ended(self) -> bool:
        return self.stopping.is_set() and not any(thread.is_alive() for thread in self._threads)

    def _stop_soon(self) -> None:
        self.stopping.set()
        for lane in self._lanes:
            lane.end()

    def _run(self, name: str, target: Callable[[], None]) -> None:
        try:
            target()
        except BaseException as error:
            if self.stopping.is_set():
                logger.debug("thread %s failed while stopping", name, exc_info=error)
                return
            if isinstance(error, JobFailed | FileDamaged):
                self._death = error  # the training thread reports it
            else:
                logger.error("the background thread %r died", name, exc_info=error)
                said = f"{type(error).__name__}: {error}"
                self._death = JobFailed(f"The background thread {name!r} of replicast died: {said}")
                self._death.__cause__ = error
            self._stop_soon()
            self._on_death()
