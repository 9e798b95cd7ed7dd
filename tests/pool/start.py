"""What was seen while a worker of the pool built its strategy: calls into the service, SIGTERM and SIGINT."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from replicast.coordination import ServiceCoordination

unwatched_calls: list[str] = []
"""Calls into the service that were made before the thread that watches the job ran."""
watched_calls: list[str] = []
"""The other ones."""
catches_sigterm: list[bool] = []
"""Whether the process had a handler for SIGTERM, of whomever, when the strategy was built."""
keeps_sigint: list[bool] = []
"""Whether SIGINT did the same as before when the strategy was built."""


@contextlib.contextmanager
def observed() -> Iterator[None]:
    """Fills the lists while the strategy is built here."""
    before = is_caught(signal.SIGINT)
    with contextlib.ExitStack() as stack:
        for name in ("put", "get", "delete", "find_lost"):
            stack.enter_context(mock.patch.object(ServiceCoordination, name, _noting(name)))
        yield
    catches_sigterm.append(is_caught(signal.SIGTERM))
    keeps_sigint.append(is_caught(signal.SIGINT) == before)


def _noting(name: str) -> Any:
    real = getattr(ServiceCoordination, name)

    def call(self: ServiceCoordination, *arguments: Any) -> Any:
        watches = any(thread.name == "replicast-lifetime" for thread in threading.enumerate())
        (watched_calls if watches else unwatched_calls).append(f"{name}{arguments}")
        return real(self, *arguments)

    return call


def is_caught(signum: int) -> bool:
    """Whether this process has a handler for a signal: also one that Python does not know."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (caught,) = [int(line.split()[1], 16) for line in lines if line.startswith("SigCgt")]
    return bool(caught >> (signum - 1) & 1)
