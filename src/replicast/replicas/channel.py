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
from typing import Any

from replicast.codec import Record, decode, encode
from replicast.coordination import Coordination
from replicast.errors import JobFailed

# A worker's note on its way to worker 0, which writes it where a worker cannot write it itself.


class Note(Record):
    """The note of a worker that does not see the run directory. It is not for the coordinator."""

    text: str


LOOK_SECS = 1.0  # Timeout of one request to the service, so that a reader soon notices that it has to stop.


class Channel:
    """One worker's end. `send` and `broadcast` are for the event loop, the others for one reader each."""

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
            self._coordination.delete(f"{self._prefix}/down/{self._deleted}")
            self._deleted += 1

    def _put(self, key: str, messages: list[Any]) -> None:
        if not self._coordination.put(f"{self._prefix}/{key}", encode(messages)):
            raise JobFailed(
                f"Worker {self.rank} cannot send a message: the coordination service has another one under "
                f"its key ({key}). A call to the service failed before; see the log of this worker",
                worker=self.rank,
            )

    def receive(self) -> list[Any]:
        """The next messages of the coordinator; empty if none arrived in time."""
        text = self._coordination.get(f"{self._prefix}/down/{self._read}", LOOK_SECS)
        if text is None:
            return []
        self._read += 1
        messages: list[Any] = decode(text)
        return messages

    def receive_from(self, rank: int) -> list[Any]:
        """The next messages of a worker to the coordinator; empty if none arrived in time."""
        key = f"{self._prefix}/up/{rank}/{self._read_from[rank]}"
        text = self._coordination.get(key, LOOK_SECS)
        if text is None:
            return []
        self._read_from[rank] += 1
        self._coordination.delete(key)
        messages: list[Any] = decode(text)
        self._read_by[rank] = messages[0]
        return messages[1:]
