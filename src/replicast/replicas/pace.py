"""How fast a worker trains, how far it has to go, and its memory: for its note."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path
from typing import Any

from replicast.replicas.position import Position

_LOOKS = 10
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Pace:
    """The mean time of the last steps. Looked at about once a second, by one thread at a time."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=_LOOKS)
        self._step_secs: float | None = None
        self._stepped_at: float | None = None

    def look(self, step: int, now: float, *, training: bool) -> dict[str, Any]:
        """The fields of a note: the mean time of a step, and when the last one was finished, roughly.

        Args:
            step: The last step that was finished.
            now: In seconds since 1970.
            training: Whether it is inside a training loop. A pause between two of them is no slow step.
        """
        if not training or (self._seen and step < self._seen[-1][1]):  # A restored state is an earlier step.
            self._seen.clear()
        if training and (not self._seen or step != self._seen[-1][1]):
            self._stepped_at = now if self._seen else self._stepped_at
            self._seen.append((now, step))
        if len(self._seen) > 1:
            (first_at, first), (last_at, last) = self._seen[0], self._seen[-1]
            self._step_secs = max(0.0, last_at - first_at) / (last - first)
        return {"step_secs": self._step_secs, "stepped_at": self._stepped_at}


def progress(position: Position | None, *, training: bool) -> dict[str, Any]:
    """The fields of a note that say where in its epochs a training is, as far as that is known."""
    if not training or position is None:
        return {}
    if position.inside != "fit" or not position.fits:
        return {"epoch": position.epoch}
    fit = position.fits[-1]
    left = {}
    if fit.batches is not None:
        left["steps_left"] = max(0, (fit.epochs - position.epoch) * fit.batches - position.batch)
    return {"epoch": min(position.epoch, fit.epochs - 1), "epochs": fit.epochs, **left}


def memory_bytes() -> int | None:
    """The resident memory of this process; None where the system does not tell."""
    try:
        return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * _PAGE_BYTES
    except (OSError, ValueError, IndexError):
        return None
