"""How the sentences travel: two sequences of keys in the coordination service.

`proposals` has many writers, who compete for the next free number, and one reader, the coordinator. `log` has
one writer, the coordinator, and every worker reads all of it in order: what happens to updates happens in one
order everywhere because there is one log. Answers to an entry have a key per worker.

The coordinator lives in worker 0. What that worker says to itself does not leave the process: a question to
the service costs a dozen threads' turns, and comes when every core is busy with the bytes.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from replicast import faults
from replicast.coordination import Coordination
from replicast.errors import JobFailed
from replicast.protocol.messages import Answer, Applied, Computed, decode, encode

LOOK_SECS = 1.0
"""How long one question to the service may wait, so that a thread sees soon that it is to stop."""


COORDINATOR = 0
"""The rank of the worker in which the coordinator lives."""


class Notes:
    """Words between threads of one process, by key, until they are taken."""

    def __init__(self) -> None:
        self._words: dict[str, str] = {}
        self._changed = threading.Condition()

    def leave(self, key: str, word: str) -> None:
        """Leaves a word."""
        with self._changed:
            self._words[key] = word
            self._changed.notify_all()

    def take(self, key: str, timeout_secs: float) -> str | None:
        """Takes a word away; None when it did not come in time."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._words, timeout_secs)
            return self._words.pop(key, None)


class Channel:
    """One job's keys. Any thread may call any method; only the coordinator appends and asks.

    Args:
        coordination: Where the keys are.
        name: In front of all of them.
        rank: Which worker this is.
        size: The number of workers.
        has_left: Whether a worker has come to the end of its script, so that it says nothing more; raises
            when the job has failed.
    """

    def __init__(
        self,
        coordination: Coordination,
        name: str,
        rank: int,
        size: int,
        has_left: Callable[[int], bool] = lambda worker: False,
    ) -> None:
        self._coordination = coordination
        self._has_left = has_left
        self._prefix = f"replicast/{name}"
        self.name = name
        self.rank = rank
        self.size = size
        self.posted_here: queue.Queue[Any] = queue.Queue()
        """What this worker has posted, if it is the coordinator's."""
        self.on_applied: Callable[[int], None] = lambda sequence: None
        """Told of each update that this worker has applied, by its sequence number."""
        self._here = Notes() if rank == COORDINATOR else None
        self._posting = threading.Lock()
        self._next_proposal = 0
        self._appending = threading.Lock()
        self._next_entry = 0
        self._proposals_read = 0
        self._answered: list[int] = []
        self._forgotten = 0
        self._proposals_known = 0
        self._proposals_forgotten = 0

    def post(self, message: Any) -> None:
        """Adds to the proposals."""
        text = encode(message)
        if self._here is not None:
            self.posted_here.put(decode(text))
            return
        with self._posting:
            while not self._put(f"proposal/{self._next_proposal}", text):
                self._next_proposal += 1
            self._next_proposal += 1

    def next_proposal(self) -> Any | None:
        """Another worker's next proposal; None when none came for a while. One thread of the coordinator."""
        text = self._get(f"proposal/{self._proposals_read}", LOOK_SECS)
        if text is None:
            return None
        self._proposals_read += 1
        return decode(text)

    def append(self, message: Any) -> int:
        """Adds to the log and gives the entry's number. Coordinator only.

        An entry also says how many proposals were read: a worker that has proposed nothing for a long time
        need not try all numbers since, and numbers that everyone knows to be taken can be removed.
        """
        with self._appending:
            number = self._next_entry
            text = f"{self._proposals_read} {encode(message)}"
            self._put(f"log/{number}", text)
            if self._here is not None:  # after the others: it must not act on what they may never hear
                self._here.leave(f"log/{number}", text)
            self._next_entry += 1
            return number

    def entry(self, number: int) -> Any | None:
        """The log's entry with this number, or None when it did not come for a while. One thread, once."""
        key = f"log/{number}"
        text = self._get(key, LOOK_SECS) if self._here is None else self._here.take(key, LOOK_SECS)
        if text is None:
            return None
        read, _, message = text.partition(" ")
        with self._posting:
            self._next_proposal = max(self._next_proposal, int(read))
        return decode(message)

    def answer(self, number: int, answer: Answer) -> None:
        """Answers an entry of the log, once."""
        key, text = f"answer/{number}/{self.rank}", encode(answer)
        if self._here is None:
            self._put(key, text)
        else:
            self._here.leave(key, text)

    def answers(
        self, number: int, timeout_secs: float, is_over: Callable[[], bool] = lambda: False
    ) -> dict[int, Answer]:
        """The answers to an entry that came in time, by worker. Coordinator only.

        Raises:
            JobFailed: `is_over` said that nobody will answer any more.
        """
        ends = time.monotonic() + timeout_secs
        answers: dict[int, Answer] = {}
        for worker in range(self.size):
            key = f"answer/{number}/{worker}"
            ask = self._here.take if self._here is not None and worker == self.rank else self._get
            while (text := ask(key, _a_while(ends))) is None and time.monotonic() < ends:
                if is_over():
                    raise JobFailed("The job ended while workers were asked")
            if text is not None:
                answers[worker] = decode(text)
        return answers

    def applied(self, sequence: int, applied: Applied) -> None:
        """Reports that this worker has applied an update."""
        faults.point("ack")
        self._put(f"applied/{sequence}/{self.rank}", encode(applied))
        self.on_applied(sequence)

    def applied_by(self, sequence: int, worker: int) -> Applied | None:
        """What a worker reported, or None when it did not for a while. Coordinator only."""
        text = self._get(f"applied/{sequence}/{worker}", LOOK_SECS)
        return None if text is None else decode(text)

    def forget_applied(self, sequence: int, worker: int) -> None:
        """Removes what a worker reported. Coordinator only."""
        self._delete(f"applied/{sequence}/{worker}")

    def computed(self, round_: int, computed: Computed) -> None:
        """Reports what came of a function."""
        self._put(f"computed/{round_}", encode(computed))

    def what_was_computed(self, round_: int) -> Computed | None:
        """What came of a function, or None when nothing did for a while. Coordinator only."""
        text = self._get(f"computed/{round_}", LOOK_SECS / 10)  # somebody may park meanwhile
        if text is None:
            return None
        self._delete(f"computed/{round_}")
        computed: Computed = decode(text)
        return computed

    def tell(self, what: str, value: str) -> None:
        """Leaves a word for the others, once."""
        self._put(f"told/{what}", value)

    def hear(self, what: str, timeout_secs: float) -> str | None:
        """A word that somebody has left; None when it did not come in time."""
        return self._wait_for(f"told/{what}", time.monotonic() + timeout_secs)

    def forget_told(self, what: str) -> None:
        """Removes a word that nobody needs any more."""
        self._delete(f"told/{what}")

    def say(self, key: str, message: Any) -> None:
        """Leaves a message for the coordinator, once, where it looks for it."""
        self._put(f"said/{key}", encode(message))

    def said(self, key: str, timeout_secs: float) -> Any | None:
        """A message that was left; None when it did not come in time. Coordinator only."""
        text = self._get(f"said/{key}", timeout_secs)
        return None if text is None else decode(text)

    def forget_said(self, key: str) -> None:
        """Removes a message that was read. Coordinator only."""
        self._delete(f"said/{key}")

    def agree(self, what: str, value: str, timeout_secs: float) -> dict[int, str]:
        """Every worker says its value and hears everyone's. Blocks until all have, at most `timeout_secs`.

        Raises:
            JobFailed: A worker did not come in time, or has left; it is named.
        """
        self._put(f"agree/{what}/{self.rank}", value)
        ends = time.monotonic() + timeout_secs
        values: dict[int, str] = {}
        for worker in range(self.size):
            text = self._wait_for(f"agree/{what}/{worker}", ends, worker)
            if text is None:
                raise JobFailed(
                    f"worker {self.rank} waited {timeout_secs:.0f} s for worker {worker}, which did not say "
                    f"its {what}",
                    worker=worker,
                )
            values[worker] = text
        return values

    def check_nobody_left(self) -> None:
        """Raises when another worker has come to the end of its script, and so will not come here."""
        for worker in range(self.size):
            if worker != self.rank and self._has_left(worker):
                raise self._gone(worker)

    def forget_agreed(self, what: str) -> None:
        """Removes what this worker said, when all are known to have heard it."""
        self._delete(f"agree/{what}/{self.rank}")

    def all_have_read(self, number: int, proposals: int) -> None:
        """Notes that all workers have read entry `number`, and so all before it. Coordinator only.

        Args:
            number: The entry.
            proposals: How many proposals had been read when it was written.
        """
        known = self._answered[-1] if self._answered else self._forgotten - 1
        if number > known:
            self._answered.append(number)
            self._proposals_known = proposals

    def forget_read(self, at_least: int = 1) -> None:
        """Removes from the service what all workers have read, if it is so many entries. Coordinator only."""
        if not self._answered or self._answered[-1] + 1 - self._forgotten < at_least:
            return
        for entry in range(self._forgotten, self._answered[-1] + 1):
            self._delete(f"log/{entry}")
        for entry in self._answered:
            for worker in set(range(self.size)) - {self.rank}:
                self._delete(f"answer/{entry}/{worker}")
        for proposal in range(self._proposals_forgotten, self._proposals_known):
            self._delete(f"proposal/{proposal}")
        self._forgotten = self._answered[-1] + 1
        self._answered = []
        self._proposals_forgotten = self._proposals_known

    @property
    def proposals_read(self) -> int:
        """How many proposals the coordinator has read."""
        return self._proposals_read

    def _wait_for(self, key: str, ends: float, worker: int | None = None) -> str | None:
        """A word, of this worker if one is given; None when its time is up.

        Asks again and again: a question to the service lets no signal of the process through.
        """
        while (text := self._get(key, _a_while(ends))) is None:
            if time.monotonic() >= ends:
                return None
            if worker is not None and self._has_left(worker):
                # What it said before it left is there by now.
                text = self._get(key, LOOK_SECS)
                if text is None:
                    raise self._gone(worker)
                return text
        return text

    def _gone(self, worker: int) -> JobFailed:
        return JobFailed(
            f"worker {worker} reached the end of its script while worker {self.rank} waits for it. Every "
            "worker must come to the same calls of replicast",
            worker=worker,
        )

    def _delete(self, key: str) -> None:
        self._coordination.delete(f"{self._prefix}/{key}")

    def _put(self, key: str, value: str) -> bool:
        return self._coordination.put(f"{self._prefix}/{key}", value)

    def _get(self, key: str, timeout_secs: float) -> str | None:
        return self._coordination.get(f"{self._prefix}/{key}", timeout_secs)


def _a_while(ends: float) -> float:
    return max(0.001, min(LOOK_SECS, ends - time.monotonic()))
