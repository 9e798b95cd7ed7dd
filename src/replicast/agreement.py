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

from replicast.coordination import PEEK_SECS, Coordination
from replicast.errors import JobFailed

# A longer wait is made of several calls: during a call to the service, no signal handler of Python runs.
LOOK_SECS = 1.0
# The others wait longer than worker 0, which may have come later and has to find out who is missing.
LIST_SECS = 5.0


class Wait:
    """Waits for keys until a time that is the same for all of them."""

    def __init__(
        self,
        coordination: Coordination,
        secs: float,
        late: Callable[[int], JobFailed],
        look: Callable[[str, int], None] = lambda key, worker: None,
    ) -> None:
        self.coordination = coordination
        self.late = late
        self._until = time.monotonic() + secs
        self._look = look

    def value(self, key: str, worker: int) -> str:
        """The value of a key, once a worker has written it."""
        value = self.value_or_none(key, worker)
        if value is None:
            raise self.late(worker)
        return value

    def value_or_none(self, key: str, worker: int, longer_secs: float = 0.0) -> str | None:
        """As `value`, and waits this much longer; None if it is late."""
        until = self._until + longer_secs
        while (value := self.coordination.get(key, _look_secs(until))) is None:
            if time.monotonic() >= until:
                return None
            self._look(key, worker)
        return value


def _look_secs(until: float) -> float:
    return max(PEEK_SECS, min(LOOK_SECS, until - time.monotonic()))


def collect(wait: Wait, key: str, rank: int, size: int) -> dict[int, str]:
    """The values of all workers, by rank. All of them call it, each when it has written its own."""
    if rank == 0:
        return _publish(wait, key, size)
    told = wait.value_or_none(f"{key}/all", 0, LIST_SECS)
    if told is None:  # Worker 0 has not come, or came later and has not given up yet.
        return _read_without_list(wait, key, size)
    return _listed(told)


def _publish(wait: Wait, key: str, size: int) -> dict[int, str]:
    listed = f"{key}/all"
    try:
        values = {worker: wait.value(f"{key}/{worker}", worker) for worker in range(size)}
    except JobFailed as error:
        with contextlib.suppress(JobFailed):  # the service is gone
            wait.coordination.put(listed, json.dumps({"missing": error.worker, "problem": str(error)}))
        raise
    if wait.coordination.put(listed, json.dumps({"values": list(values.values())})):
        return values
    return _listed(wait.value(listed, 0))  # of an earlier call, which the others have read


def _listed(text: str) -> dict[int, str]:
    told = json.loads(text)
    if "missing" in told:
        raise JobFailed(told["problem"], worker=told["missing"])
    return dict(enumerate(told["values"]))


def _read_without_list(wait: Wait, key: str, size: int) -> dict[int, str]:
    until = time.monotonic() + LIST_SECS
    values: dict[int, str] = {}
    for worker in range(size):
        value = wait.coordination.peek(f"{key}/{worker}")
        if value is None:
            raise wait.late(worker)
        if time.monotonic() > until:
            raise wait.late(0)
        values[worker] = value
    return values


def forget(coordination: Coordination, key: str, rank: int) -> None:
    """Removes this worker's keys, once all workers are known to have read them."""
    coordination.delete(f"{key}/{rank}")
    if rank == 0:
        coordination.delete(f"{key}/all")
