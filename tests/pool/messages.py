"""The pickled messages between a pool and its workers: calls in one direction, outcomes in the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SOCKET = "REPLICAST_TEST_SOCKET"
"""Names the environment variable with the worker's end of the socket."""
STACKS = "REPLICAST_TEST_STACKS"
"""Names the one with the file into which SIGUSR1 writes where each thread stands."""
PARENT = "REPLICAST_TEST_PARENT"
"""Names the one with the process whose end is the worker's end too."""
WITH_STRATEGY = "REPLICAST_TEST_WITH_STRATEGY"
"""Names the one with the strategy that the worker is to build."""


@dataclass(frozen=True, slots=True)
class Call:
    """Run this function. Functions travel by name: module level only."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Returned:
    """The function returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """The function raised, or its result could not be sent."""

    traceback: str


@dataclass(frozen=True, slots=True)
class Died:
    """The process is gone. Made by the pool, not sent."""

    how: str


@dataclass(frozen=True, slots=True)
class Stuck:
    """The function was still running when time was up. Made by the pool, not sent."""

    stacks: str


Outcome = Returned | Raised | Died | Stuck
