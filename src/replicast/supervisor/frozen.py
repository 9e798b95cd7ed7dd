"""Which workers are frozen: stopped by a signal such as SIGSTOP while others of the group run."""

from __future__ import annotations

from collections.abc import Collection


class FrozenWorkers:
    """Counts for how long each worker has been frozen. Pure: the caller looks at the processes.

    A group that is stopped as a whole has been paused on purpose and can be continued, so that does not
    count. Nor does a job of one worker, for which nobody waits.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}

    def update(self, frozen: Collection[int], workers: int, now: float) -> None:
        """Takes note of which workers are frozen now.

        Args:
            frozen: The frozen workers.
            workers: The number of workers in the group, including those that have exited.
            now: The time in seconds.
        """
        alone = frozen if len(frozen) < workers else ()
        self._since = {rank: self._since.get(rank, now) for rank in alone}

    def for_at_least(self, secs: float, now: float) -> set[int]:
        """The workers that have been frozen for this long."""
        return {rank for rank, since in self._since.items() if now - since >= secs}
