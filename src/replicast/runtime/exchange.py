"""Direct exchange of values between training threads that are all at the same line of the script.

Joining and restoring happen before the first boundary: every worker makes the same call and waits for the
others' values. Each wait has a deadline, and the error names the worker that is missing.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from replicast.coordination import Coordination
from replicast.errors import JobFailed

LOOK_SECS = 1.0


class Exchange:
    """One worker's end. Any thread may call any method.

    Args:
        coordination: Holds the keys.
        name: Prefix of all keys.
        rank: Which worker this is.
        size: The number of workers.
        has_left: Whether a worker has reached the end of its script and will send nothing more. Raises if the
            job has failed.
    """

    def __init__(
        self,
        coordination: Coordination,
        name: str,
        rank: int,
        size: int,
        has_left: Callable[[int], bool] = lambda worker: False,
    ) -> None:
        self._coordination = coordination
        self._has_left = has_left
        self._prefix = f"replicast/{name}"
        self.name = name
        self.rank = rank
        self.size = size

    def tell(self, what: str, value: str) -> None:
        """Publishes a value for the others, once."""
        self._coordination.put(f"{self._prefix}/told/{what}", value)

    def hear(self, what: str, timeout_secs: float, worker: int = 0) -> str:
        """The value that a worker has published. Blocks at most `timeout_secs`.

        Raises:
            JobFailed: The value did not arrive in time, or that worker has left.
        """
        return self._wait_for(f"told/{what}", what, time.monotonic() + timeout_secs, timeout_secs, worker)

    def agree(self, what: str, value: str, timeout_secs: float) -> dict[int, str]:
        """Every worker gives its value and gets everyone's. Blocks until all have, at most `timeout_secs`.

        Raises:
            JobFailed: A worker did not arrive in time, or has left. The error names it.
        """
        self._coordination.put(f"{self._prefix}/agree/{what}/{self.rank}", value)
        ends = time.monotonic() + timeout_secs
        return {
            worker: self._wait_for(f"agree/{what}/{worker}", what, ends, timeout_secs, worker)
            for worker in range(self.size)
        }

    def forget_agreed(self, what: str) -> None:
        """Removes this worker's value, once all workers are known to have read it."""
        self._coordination.delete(f"{self._prefix}/agree/{what}/{self.rank}")

    def check_nobody_left(self) -> None:
        """Raises if another worker has reached the end of its script and will not arrive here."""
        for worker in range(self.size):
            if worker != self.rank and self._has_left(worker):
                raise self._gone(worker)

    def _wait_for(self, key: str, what: str, ends: float, timeout_secs: float, worker: int) -> str:
        # Polls, because the process cannot handle signals during a call to the service.
        while (text := self._get(key, ends)) is None:
            if time.monotonic() >= ends:
                raise JobFailed(
                    f"worker {self.rank} waited {timeout_secs:.0f} s for worker {worker}, which did not send "
                    f"its {what}",
                    worker=worker,
                )
            if self._has_left(worker):
                # Anything it sent before it left has arrived by now.
                text = self._get(key, time.monotonic() + LOOK_SECS)
                if text is None:
                    raise self._gone(worker)
                return text
        return text

    def _get(self, key: str, ends: float) -> str | None:
        timeout_secs = max(0.001, min(LOOK_SECS, ends - time.monotonic()))
        return self._coordination.get(f"{self._prefix}/{key}", timeout_secs)

    def _gone(self, worker: int) -> JobFailed:
        return JobFailed(
            f"worker {worker} reached the end of its script while worker {self.rank} waits for it. Every "
            "worker must make the same calls to replicast",
            worker=worker,
        )
