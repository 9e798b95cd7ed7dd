"""When an attempt starts, and whether another one follows: decided on this host alone, or with others."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from typing import Protocol

from replicast.config import TOLD_TO_END
from replicast.launcher.group import GroupEnd, Peers

_UNKILLABLE = 1


@dataclass(frozen=True, slots=True)
class Begin:
    """An attempt begins."""

    attempt: int
    restarts: int
    is_last: bool
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of the job after an attempt."""

    end: GroupEnd
    code: int | None
    attempt: int
    restarts: int
    max_restarts: int
    stopped_on: str = ""
    unreached: tuple[str, ...] = ()


class Attempts(Protocol):
    """Decides about the attempts of a job. Only in the main thread."""

    peers: Peers | None

    def begin(self) -> Begin | Verdict:
        """Waits until the next attempt may start; a verdict if the job is over before."""

    def decide(self, end: GroupEnd) -> Verdict:
        """Waits until it is known what follows an attempt whose workers have all exited."""


class LocalAttempts:
    """The attempts of a job on one host."""

    peers: Peers | None = None

    def __init__(self, first: int, max_restarts: int) -> None:
        self._first, self._max_restarts, self._restarts = first, max_restarts, 0

    def begin(self) -> Begin | Verdict:
        """The next attempt, at once."""
        is_last = self._restarts == self._max_restarts
        return Begin(self._first + self._restarts, self._restarts, is_last)

    def decide(self, end: GroupEnd) -> Verdict:
        """Another attempt after a failure, if a restart is left."""
        code = exit_code(end)
        if may_restart(end) and self._restarts < self._max_restarts:
            self._restarts, code = self._restarts + 1, None
        return Verdict(end, code, self._first + self._restarts, self._restarts, self._max_restarts)


def exit_code(end: GroupEnd) -> int | None:
    """The launcher's own exit code."""
    if end.interrupted_by is not None:
        return 128 + end.interrupted_by
    if end.first_failure is not None:
        return end.first_failure.shell_code
    return _UNKILLABLE if end.left_behind else 0


def may_restart(end: GroupEnd) -> bool:
    """Whether to restart. Not after SIGTERM: the workers have saved their state, the machine is needed."""
    if end.first_failure is None or end.interrupted_by is not None or end.left_behind:
        return False
    return end.first_failure.code != TOLD_TO_END


def nothing_ran(signum: signal.Signals | None = None) -> GroupEnd:
    """The end of an attempt that was never started."""
    return GroupEnd(exits=(), first_failure=None, interrupted_by=signum)
