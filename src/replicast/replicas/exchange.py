"""Direct exchange of values between training threads that are all at the same line of the script.

Joining and restoring happen before the first boundary: every worker makes the same call and waits for the
others' values. Each wait has a deadline, and the error names the worker that is missing.
"""

from __future__ import annotations

from collections.abc import Callable

from replicast import agreement
from replicast.agreement import LOOK_SECS
from replicast.coordination import Coordination
from replicast.errors import ClusterError, JobFailed


class Exchange:
    """One worker's end. Any thread may call any method."""

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
        """The value that a worker has published. Blocks at most `timeout_secs`."""
        return self._wait(what, timeout_secs).value(f"{self._prefix}/told/{what}", worker)

    def agree(self, what: str, value: str, timeout_secs: float) -> dict[int, str]:
        """Every worker gives its value and gets everyone's. Blocks until all have, at most `timeout_secs`.

        Workers other than 0 wait some seconds longer for what worker 0 says about a missing one.
        """
        key = f"{self._prefix}/agree/{what}"
        self._coordination.put(f"{key}/{self.rank}", value)
        return agreement.collect(self._wait(what, timeout_secs), key, self.rank, self.size)

    def require_same(self, what: str, value: str, timeout_secs: float, *, problem: str, remedy: str) -> None:
        """As `agree`; raises on all workers if one has another value than worker 0."""
        said = self.agree(what, value, timeout_secs)
        for worker, theirs in said.items():
            if theirs != said[0]:
                raise ClusterError(
                    f"{problem.format(worker)} worker 0",
                    remedy=remedy,
                    received=f"{theirs[:200]}, worker 0: {said[0][:200]}",
                )

    def forget_agreed(self, what: str) -> None:
        """Removes this worker's value, once all workers are known to have read it."""
        agreement.forget(self._coordination, f"{self._prefix}/agree/{what}", self.rank)

    def check_nobody_left(self) -> None:
        """Raises if another worker has reached the end of its script and will not arrive here."""
        for worker in range(self.size):
            if worker != self.rank and self._has_left(worker):
                raise self._gone(worker)

    def _wait(self, what: str, timeout_secs: float) -> agreement.Wait:
        def late(worker: int) -> JobFailed:
            return JobFailed(
                f"worker {self.rank} waited {timeout_secs:.0f} s for worker {worker}, which did not send "
                f"its {what}",
                worker=worker,
            )

        return agreement.Wait(self._coordination, timeout_secs, late, self._check_not_left)

    def _check_not_left(self, key: str, worker: int) -> None:
        # What it wrote before it left has arrived by now.
        if self._has_left(worker) and self._coordination.get(key, LOOK_SECS) is None:
            raise self._gone(worker)

    def _gone(self, worker: int) -> JobFailed:
        return JobFailed(
            f"worker {worker} reached the end of its script while worker {self.rank} waits for it. Every "
            "worker must make the same calls to replicast",
            worker=worker,
        )
