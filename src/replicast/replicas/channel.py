"""Messages between workers, as keys of the coordination service.

MultiWorkerMirroredStrategy runs that service in worker 0.

    down/17      the coordinator's log, read by every other worker in order
    up/2/5       the messages of worker 2 to the coordinator, in order

Each key holds the messages that were sent together. Messages of worker 0 to itself bypass the service, which
is slow when the cores are busy. A key is deleted once it has been read; a key of the log, once all workers
have read it. Each worker reports how far it has read with every message that it sends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from replicast.codec import Record, decode, encode
from replicast.coordination import LOOK_SECS, Coordination
from replicast.errors import JobFailed


class Note(Record):
    """The note of a worker that does not see the run directory. It is not for the coordinator."""

    text: str


@dataclass(eq=False, repr=False)
class Channel:
    """One worker's end. `send` and `broadcast` are for the event loop, the others for one reader each."""

    coordination: Coordination
    name: str
    rank: int
    size: int

    def __post_init__(self) -> None:
        self._prefix = f"replicast/{self.name}"
        self._sent = self._appended = self._deleted = self._read = 0
        self._read_from = [0] * self.size
        self._read_by = [0] * self.size

    def send(self, messages: Sequence[Any]) -> None:
        """Sends messages to the coordinator. For all workers but worker 0."""
        self._put(f"up/{self.rank}/{self._sent}", [self._read, *messages])
        self._sent += 1

    def broadcast(self, messages: Sequence[Any]) -> None:
        """Sends the coordinator's messages to all workers but worker 0; raises as `send`."""
        if self.size == 1:
            return
        self._put(f"down/{self._appended}", list(messages))
        self._appended += 1
        read_by_all = min(self._read_by[1:])
        while self._deleted < read_by_all:
            self.coordination.delete(f"{self._prefix}/down/{self._deleted}")
            self._deleted += 1

    def _put(self, key: str, messages: list[Any]) -> None:
        if not self.coordination.put(f"{self._prefix}/{key}", encode(messages)):
            raise JobFailed(
                f"Worker {self.rank} cannot send a message: the coordination service has another one under "
                f"its key ({key}). A call to the service failed before; see the log of this worker",
                worker=self.rank,
            )

    def receive(self) -> list[Any]:
        """The next messages of the coordinator; empty if none arrived in time."""
        text = self.coordination.get(f"{self._prefix}/down/{self._read}", LOOK_SECS)
        if text is None:
            return []
        self._read += 1
        messages: list[Any] = decode(text)
        return messages

    def receive_from(self, rank: int) -> list[Any]:
        """The next messages of a worker to the coordinator; empty if none arrived in time."""
        key = f"{self._prefix}/up/{rank}/{self._read_from[rank]}"
        text = self.coordination.get(key, LOOK_SECS)
        if text is None:
            return []
        self._read_from[rank] += 1
        self.coordination.delete(key)
        messages: list[Any] = decode(text)
        self._read_by[rank] = messages[0]
        return messages[1:]
