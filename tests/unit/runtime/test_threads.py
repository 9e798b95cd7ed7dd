"""Lanes: what they hold."""

from __future__ import annotations

import gc
import threading
import weakref

from replicast.replicas.lanes import WorkerThreads


class Value:
    """What a task holds."""


def test_a_lane_that_waits_holds_nothing_of_its_last_task() -> None:
    threads = WorkerThreads()
    lane = threads.lane("test")
    value, done = Value(), threading.Event()
    gone = threading.Event()
    weakref.finalize(value, gone.set)
    lane.do(lambda kept=value: kept and done.set())  # type: ignore[misc]
    del value
    assert done.wait(120)
    gc.collect()
    assert gone.wait(120)
    threads.stop(10)
