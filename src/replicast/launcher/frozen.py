"""Which workers are frozen: stopped by a signal such as SIGSTOP while others of the group run."""

from __future__ import annotations

from collections.abc import Collection

_MAX_DELAY_SECS = 5.0
"""A longer delay than this between two looks means that the launcher itself was stopped."""


class FrozenWorkers:
    """Counts for how long each worker has been frozen. Pure: the caller looks at the processes.

    A group that is stopped as a whole has been paused on purpose and can be continued, so that does not
    count. Nor does a job of one worker, for which nobody waits. Nor does time in which the launcher was
    stopped too: when a suspended job is continued, the launcher may run again before the last worker does.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._looked: float | None = None

    def update(self, frozen: Collection[int], workers: int, now: float) -> None:
        """Takes note of which workers are frozen now."""
        alone = frozen if len(frozen) < workers else ()
        delay = 0.0 if self._looked is None else now - self._looked
        uncounted = delay if delay > _MAX_DELAY_SECS else 0.0
        since = {rank: begun + uncounted for rank, begun in self._since.items()}
        self._since = {rank: since.get(rank, now) for rank in alone}
        self._looked = now

    def for_at_least(self, secs: float, now: float) -> set[int]:
        """The workers that have been frozen for this long."""
        return {rank for rank, since in self._since.items() if now - since >= secs}
