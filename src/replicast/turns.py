"""Where each worker is in the script, compared through the coordination service.

A turn is a synchronization point that all workers reach between steps, in the same order: the start of a pass
over the data, or an exchange outside of a step. Transfers inside steps are counted by every worker alike. If
this worker has started more transfers than another worker had at its next turn, this worker waits for a
transfer that the other one will never join. This detection is certain, and needs no timeout.

Keys of the coordination service, each written once:

    turn/K        by the first worker at its K-th turn: its rank and its number of transfers
    turn/K/RANK   by each worker at its K-th turn: whether a given worker has passed is one lookup
    turn/K/all    by worker 0, if the workers meet at their K-th turn: what all of them say
    left          by the first worker at the end of its script: its rank, transfers and turns
    stands        by a worker that has waited for others at a boundary for a while; deleted when it continues
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from replicast.coordination import LOOK_SECS, Coordination, DirectExchange
from replicast.errors import JobFailed

logger = logging.getLogger("replicast")

NAME = "lifetime"
POLL_SECS = 0.3
REMIND_SECS = 30.0
TURNS_KEPT = 100  # The keys of a turn are deleted after this many later turns.


class JobKeys:
    """JSON values under this package's prefix in the coordination service."""

    def __init__(self, coordination: Coordination) -> None:
        self.coordination = coordination

    def put(self, key: str, value: dict[str, Any]) -> bool:
        """Returns whether it was written: not if it exists. A lost service is only logged: `get` raises."""
        try:
            return self.coordination.put(f"replicast/{NAME}/{key}", json.dumps(value))
        except JobFailed:
            logger.debug("could not publish %s", key, exc_info=True)
            return False

    def get(self, key: str, timeout_secs: float | None = None) -> dict[str, Any] | None:
        timeout = POLL_SECS if timeout_secs is None else timeout_secs
        text = self.coordination.get(f"replicast/{NAME}/{key}", timeout)
        return None if text is None else dict(json.loads(text))

    def delete(self, key: str) -> None:
        self.coordination.delete(f"replicast/{NAME}/{key}")


@dataclass(eq=False)
class Turns:
    """Counts this worker's turns and compares its position in the script with the other workers'."""

    _keys: JobKeys
    _rank: int
    _size: int
    _transfers_started: Callable[[], int]
    _check: Callable[[], None]

    def __post_init__(self) -> None:
        self._deleted = 0
        self._meetings: set[int] = set()
        self._alone: tuple[str, int] | None = None
        self._suspect: dict[str, Any] | None = None
        self._stands = False
        self.count = 0  # The number of turns that this worker has taken.

    def take(self, message: str = "") -> int:
        """Takes the next turn; returns its number. All workers do so in the same order, between steps."""
        self._check()
        if self._alone is not None:
            raise self._transfer_without_peers(self._alone[0])
        transfers = self._transfers_started()
        self.count += 1
        self._keys.put(f"turn/{self.count}", {"worker": self._rank, "transfers": transfers})
        self._keys.put(f"turn/{self.count}/{self._rank}", {"message": message})
        return self.count

    def meet(self, message: str = "") -> dict[int, str]:
        """Takes a turn and waits there for all other workers.

        Blocks while the others run, and logs every 30 s what it waits for; worker 0 names the late worker. If
        another worker never arrives because it waits for a transfer of this worker, that worker's `mismatch`
        detects it.
        """
        turn = self.take(message)
        self._meetings.add(turn)
        key = f"turn/{turn}"
        looks = itertools.count(1)

        def has_left(worker: int) -> bool:
            self._check()
            if next(looks) % (REMIND_SECS / LOOK_SECS) != 0:
                return False
            # Only worker 0 reads what each of the others has written.
            if self._rank == 0 or self._keys.get(f"{key}/0") is None:
                awaited = f"for worker {worker} to open its data, or to trace its first step"
            else:
                awaited = (
                    "until all workers have opened their data, or traced their first step: "
                    "worker 0's log names the late one"
                )
            logger.warning("worker %d waits %s", self._rank, awaited)
            return False  # `mismatch` of another worker detects it

        exchange = DirectExchange(self._keys.coordination, NAME, self._rank, self._size, has_left)
        said = exchange.agree(key, json.dumps({"message": message}), math.inf)
        return {worker: str(json.loads(text)["message"]) for worker, text in said.items()}

    def position(self) -> tuple[int, int]:
        """This worker's position in the script, in transfers and turns: equal on all workers at one line."""
        return self._transfers_started(), self.count

    def has_taken_next(self, worker: int) -> bool:
        return self._keys.get(f"turn/{self.count + 1}/{worker}") is not None

    @contextlib.contextmanager
    def alone(self, doing: str) -> Iterator[None]:
        """Inside, this worker does something that the others do not: a transfer fails, as none would join it.

        Has an effect only in the main thread: while another thread saves, the main thread may train.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._alone = (doing, self._transfers_started())
        try:
            yield
        finally:
            self._alone = None

    def report_wait(self, step: int | None) -> None:
        """Publishes that this worker waits at a boundary, where it starts no transfer; None: not any more."""
        if step is not None:
            value = {"worker": self._rank, "transfers": self._transfers_started(), "step": step}
            self._stands = self._keys.put("stands", value) or self._stands
        elif self._stands:  # not if the key is another worker's
            self._keys.delete("stands")
            self._stands = False

    def leave(self, *, interrupted: bool = False) -> int | None:
        """Publishes that this worker has reached the end of its script, or was interrupted by Ctrl-C."""
        transfers = self.transfers_or_none()
        if transfers is not None:
            left = {"worker": self._rank, "transfers": transfers, "turn": self.count}
            self._keys.put("left", {**left, "interrupted": interrupted})
        return transfers

    def mismatch(self) -> JobFailed | None:
        """Returns an error if this worker waits for a transfer that another worker will never join."""
        alone = self._alone
        if alone is not None and (self.transfers_or_none() or 0) > alone[1] and self._alone is alone:
            return self._transfer_without_peers(alone[0])
        count = self.count
        ahead = self._keys.get(f"turn/{count + 1}")
        if ahead is not None and self._waits_in_vain(ahead) and self.count == count:
            return JobFailed(
                f"worker {ahead['worker']} reached the end of its data, or left its loop, while worker "
                f"{self._rank} continued with another step. Every worker must get the same number of "
                "batches, and a callback must stop all workers or none",
                worker=ahead["worker"],
            )
        missed = self._missed_boundary()
        if missed is not None:
            return missed
        left = self._keys.get("left")
        if left is None or left["worker"] == self._rank:
            return None
        if self.count > left["turn"] or self._waits_in_vain(left):
            how = "was interrupted by Ctrl-C" if left["interrupted"] else "reached the end of its script"
            return JobFailed(
                f"worker {left['worker']} {how} while worker {self._rank} is still training",
                worker=left["worker"],
            )
        return None

    def _missed_boundary(self) -> JobFailed | None:
        """An error if this worker waits in a transfer for one that waits for it at a boundary.

        Must be observed twice, because the other worker may just be about to continue.
        """
        stands, suspect = self._keys.get("stands"), self._suspect
        in_vain = stands is not None and stands["worker"] != self._rank and self._waits_in_vain(stands)
        self._suspect = stands if in_vain else None
        if stands is None or not in_vain or stands != suspect:
            return None
        return JobFailed(
            f"worker {stands['worker']} waits for the others at the boundary of step {stands['step']}, and "
            f"worker {self._rank} continued with another step: one of them has missed a boundary, or had one "
            "too many. Every worker must call replicas.boundary() after each step, and make the same "
            "calls of replicast",
            worker=self._rank,
        )

    def delete_old_keys(self) -> None:
        """Deletes the keys of turns that all workers have taken: a worker is at most one turn behind."""
        while self._deleted < self.count - TURNS_KEPT:
            self._deleted += 1
            key = f"turn/{self._deleted}"
            self._keys.delete(f"{key}/{self._rank}")
            if self._rank == 0:
                self._keys.delete(key)
                if self._deleted in self._meetings:
                    self._keys.delete(f"{key}/all")
            self._meetings.discard(self._deleted)

    def transfers_or_none(self) -> int | None:
        """The number of transfers started, or None if TensorFlow is shutting down."""
        try:
            return self._transfers_started()
        except Exception:  # TensorFlow is shutting down: there is nothing left to compare
            logger.debug("the number of transfers cannot be read", exc_info=True)
            return None

    def _transfer_without_peers(self, doing: str) -> JobFailed:
        return JobFailed(
            f"worker {self._rank} started a transfer to all workers while it alone was {doing}. Nothing that "
            "a save calls may create variables in strategy.scope(), train, evaluate or reduce",
            worker=self._rank,
        )

    def _waits_in_vain(self, other: dict[str, Any]) -> bool:
        transfers = self.transfers_or_none()
        return transfers is not None and transfers > int(other["transfers"])
