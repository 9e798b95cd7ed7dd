"""Messages between workers, as keys of the coordination service.

MultiWorkerMirroredStrategy runs that service in worker 0.

    down/17      the coordinator's log, read by every other worker in order
    up/2/5       the messages of worker 2 to the coordinator, in order

Each key holds the messages that were sent together. Messages of worker 0 to itself bypass the service, which
is slow when the cores are busy. A key is deleted once it has been read; a key of the log, once all workers
have read it. Each worker reports how far it has read with every message that it sends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from replicast.codec import Record, decode, encode
from replicast.coordination import Coordination, Wait
from replicast.errors import ClusterError, JobFailed


class Note(Record):
    """The note of a worker that does not see the run directory. It is not for the coordinator."""

    text: str


LOOK_SECS = 1.0  # Timeout of one request to the service, so that a reader soon notices that it has to stop.


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


@dataclass(eq=False, repr=False)
class DirectExchange:
    """Values between training threads that are all at the same line of the script. Any thread may call it.

    Joining and restoring happen before the first boundary: every worker makes the same call and waits for the
    others' values. Each wait has a deadline, and the error names the worker that is missing.
    """

    coordination: Coordination
    name: str
    rank: int
    size: int
    has_left: Callable[[int], bool] = lambda worker: False

    def __post_init__(self) -> None:
        self._prefix = f"replicast/{self.name}"

    def tell(self, what: str, value: str) -> None:
        self.coordination.put(f"{self._prefix}/told/{what}", value)

    def hear(self, what: str, timeout_secs: float, worker: int = 0) -> str:
        """The value that a worker has published. Blocks at most `timeout_secs`."""
        return self._wait(what, timeout_secs).value(f"{self._prefix}/told/{what}", worker)

    def agree(self, what: str, value: str, timeout_secs: float) -> dict[int, str]:
        """Every worker gives its value and gets everyone's. Blocks until all have, at most `timeout_secs`.

        Workers other than 0 wait some seconds longer for what worker 0 says about a missing one.
        """
        key = f"{self._prefix}/agree/{what}"
        self.coordination.put(f"{key}/{self.rank}", value)
        return self._wait(what, timeout_secs).collect(key, self.rank, self.size)

    def require_same(self, what: str, value: str, timeout_secs: float, *, problem: str, remedy: str) -> None:
        """As `agree`; raises on all workers if one has another value than worker 0."""
        said = self.agree(what, value, timeout_secs)
        for worker, theirs in said.items():
            if theirs != said[0]:
                raise ClusterError(
                    f"{problem.format(worker)} worker 0",
                    remedy=remedy,
                    received=f"{theirs[:200]}, worker 0: {said[0][:200]}",
                )

    def forget_agreed(self, what: str) -> None:
        """Removes this worker's value, once all workers are known to have read it."""
        key = f"{self._prefix}/agree/{what}"
        self.coordination.delete(f"{key}/{self.rank}")
        if self.rank == 0:
            self.coordination.delete(f"{key}/all")

    def check_nobody_left(self) -> None:
        """Raises if another worker has reached the end of its script and will not arrive here."""
        for worker in range(self.size):
            if worker != self.rank and self.has_left(worker):
                raise self._gone(worker)

    def _wait(self, what: str, timeout_secs: float) -> Wait:
        def late(worker: int) -> JobFailed:
            return JobFailed(
                f"worker {self.rank} waited {timeout_secs:.0f} s for worker {worker}, which did not send "
                f"its {what}",
                worker=worker,
            )

        return Wait(self.coordination, timeout_secs, late, self._check_not_left)

    def _check_not_left(self, key: str, worker: int) -> None:
        # What it wrote before it left has arrived by now.
        if self.has_left(worker) and self.coordination.get(key, LOOK_SECS) is None:
            raise self._gone(worker)

    def _gone(self, worker: int) -> JobFailed:
        return JobFailed(
            f"worker {worker} reached the end of its script while worker {self.rank} waits for it. Every "
            "worker must make the same calls to replicast",
            worker=worker,
        )
