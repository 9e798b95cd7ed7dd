"""How messages travel: keys of the coordination service, which MultiWorkerMirroredStrategy runs in worker 0.

    down/17      the coordinator's log, read by every other worker in order
    up/2/5       what worker 2 has sent to the coordinator, in order

Each key holds the messages of one moment. Worker 0 talks to itself without the service, which takes a dozen
thread switches when the cores are busy. A key is deleted when it was read: of the log, when all workers have;
each of them says how far it has read with whatever it sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from replicast.coordination import Coordination
from replicast.runtime.codec import decode, encode

LOOK_SECS = 1.0
"""How long one question to the service waits, so that a reader soon notices that it has to stop."""


class Channel:
    """One worker's end. `send` and `broadcast` are for the event loop, the others for one reader each.

    Args:
        coordination: Where the keys are.
        name: In front of all of them.
        rank: Which worker this is.
        size: The number of workers.
    """

    def __init__(self, coordination: Coordination, name: str, rank: int, size: int) -> None:
        self._coordination = coordination
        self._prefix = f"replicast/{name}"
        self.rank = rank
        self.size = size
        self._sent = 0
        self._appended = 0
        self._deleted = 0
        self._read = 0
        self._read_from = [0] * size
        self._read_by = [0] * size

    def send(self, messages: Sequence[Any]) -> None:
        """To the coordinator, from another worker than its own."""
        self._coordination.put(f"{self._prefix}/up/{self.rank}/{self._sent}", encode([self._read, *messages]))
        self._sent += 1

    def broadcast(self, messages: Sequence[Any]) -> None:
        """To all workers but the coordinator's own."""
        if self.size == 1:
            return
        self._coordination.put(f"{self._prefix}/down/{self._appended}", encode(list(messages)))
        self._appended += 1
        read_by_all = min(self._read_by[1:])
        while self._deleted < read_by_all:
            self._coordination.delete(f"{self._prefix}/down/{self._deleted}")
            self._deleted += 1

    def receive(self) -> list[Any]:
        """The next messages of the coordinator; empty when none came for a while."""
        text = self._coordination.get(f"{self._prefix}/down/{self._read}", LOOK_SECS)
        if text is None:
            return []
        self._read += 1
        messages: list[Any] = decode(text)
        return messages

    def receive_from(self, rank: int) -> list[Any]:
        """The next messages of a worker, for the coordinator; empty when none came for a while."""
        key = f"{self._prefix}/up/{rank}/{self._read_from[rank]}"
        text = self._coordination.get(key, LOOK_SECS)
        if text is None:
            return []
        self._read_from[rank] += 1
        self._coordination.delete(key)
        messages: list[Any] = decode(text)
        self._read_by[rank] = messages[0]
        return messages[1:]
