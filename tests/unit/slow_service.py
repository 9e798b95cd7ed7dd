"""A twin of the coordination service on a busy machine."""

from __future__ import annotations

import time

from replicast.coordination import MemoryCoordination

ANSWER_SECS = 0.002


class SlowService(MemoryCoordination):
    """Needs 2 ms for every answer. A shorter wait finds nothing, also if there is a key."""

    def get(self, key: str, timeout_secs: float) -> str | None:
        time.sleep(min(timeout_secs, ANSWER_SECS))
        return None if timeout_secs <= ANSWER_SECS else super().get(key, timeout_secs - ANSWER_SECS)
