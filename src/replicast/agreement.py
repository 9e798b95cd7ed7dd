"""What every worker has said, told to all: worker 0 reads each value once and publishes all of them together.

If every worker read the value of every other one, the number of reads would grow with the square of the
workers, and all of them go to worker 0. Keys of the coordination service:

    KEY/RANK    by each worker: its value
    KEY/all     by worker 0: the values of all workers, or which of them is missing
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable

from replicast.coordination import Coordination
from replicast.errors import JobFailed

LOOK_SECS = 1.0
"""A longer wait is made of several calls: during a call to the service, no signal handler of Python runs."""

Wait = Callable[[str, int], str]
"""Returns the value of a key once a worker has written it; raises `JobFailed`, which names that worker."""


def collect(coordination: Coordination, key: str, rank: int, size: int, wait: Wait) -> dict[int, str]:
    """The values of all workers, by rank. All of them call it, each when it has written its own.

    Args:
        coordination: The keys that all workers share.
        key: The prefix of the keys.
        rank: This worker.
        size: The number of workers.
        wait: How to wait for a key; it sets how long.

    Raises:
        JobFailed: A value is missing. The error names the worker that did not write it, on every worker.
    """
    if rank == 0:
        return _publish(coordination, key, size, wait)
    try:
        told = json.loads(wait(f"{key}/all", 0))
    except JobFailed:  # Worker 0 is missing, or still waits, because it came later than this worker.
        return _read(key, size, wait)
    if "missing" in told:
        raise JobFailed(told["problem"], worker=told["missing"])
    return dict(enumerate(told["values"]))


def _publish(coordination: Coordination, key: str, size: int, wait: Wait) -> dict[int, str]:
    try:
        values = _read(key, size, wait)
    except JobFailed as error:
        with contextlib.suppress(JobFailed):  # the service is gone
            coordination.put(f"{key}/all", json.dumps({"missing": error.worker, "problem": str(error)}))
        raise
    coordination.put(f"{key}/all", json.dumps({"values": list(values.values())}))
    return values


def _read(key: str, size: int, wait: Wait) -> dict[int, str]:
    return {worker: wait(f"{key}/{worker}", worker) for worker in range(size)}


def forget(coordination: Coordination, key: str, rank: int) -> None:
    """Removes this worker's keys, once all workers are known to have read them."""
    coordination.delete(f"{key}/{rank}")
    if rank == 0:
        coordination.delete(f"{key}/all")


def waiting(
    coordination: Coordination,
    until: float,
    late: Callable[[int], JobFailed],
    look: Callable[[str, int], None] = lambda key, worker: None,
) -> Wait:
    """Waits for keys until a time.

    Args:
        coordination: The keys that all workers share.
        until: When to give up, as `time.monotonic` counts.
        late: The error about a worker that has not written its key by then.
        look: Called about once a second with the key and the worker; raises to end the wait.
    """

    def wait(key: str, worker: int) -> str:
        while (value := coordination.get(key, _look_secs(until))) is None:
            if time.monotonic() >= until:
                raise late(worker)
            look(key, worker)
        return value

    return wait


def _look_secs(until: float) -> float:
    return max(0.001, min(LOOK_SECS, until - time.monotonic()))
