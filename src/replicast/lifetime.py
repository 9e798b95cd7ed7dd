"""The end of a job: together when all is well, at once when a worker fails.

TensorFlow gives a job no end of its own. When worker 0 leaves first, it takes the coordination service with
it and the others abort; when a worker raises, the others wait in a transfer until a heartbeat is missed; when
one worker's loop ends a step early, the others wait for ever. So every worker has one thread that watches
three keys of the coordination service:

    failed      a worker raised: what and where
    left        a worker reached the end of its script, and after how many transfers
    turn/K      a worker came to its K-th turn, and after how many transfers

Each is put by the first worker only. For itself a worker puts `turn/K/RANK` and `end/RANK`: whether a given
worker has gone on is one lookup.

A turn is what all workers do between steps, in the same order: meet before a pass over the data, exchange
something outside of a step. Transfers inside steps are counted by every worker alike. A worker that has
started more of them than another one had at its next turn waits for something that will never come: that is
certain, no time limit has to be guessed. In each case the thread aborts the transfer under way: the training
thread raises.

A call into the service has no time limit when worker 0, which hosts it, is stopped (SIGSTOP) or its host is
gone: also a question with a timeout blocks. So a second thread, which calls nothing, notices when the first
one gets no answers, and a third ends the process if it does not end by itself.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from replicast.config import FAILED_BECAUSE_OF_ANOTHER
from replicast.coordination import Coordination, lost_worker
from replicast.errors import JobFailed
from replicast.silence import on_silence

logger = logging.getLogger("replicast")

PREFIX = "replicast/lifetime"
LOOK_SECS = 0.3
GRACE_SECS = 10.0
"""How long a worker that was told to stop may take before its process is ended."""
SILENT_SECS = 15.0
"""How long the coordination service may give no answer. TensorFlow takes a worker for dead after 10 s."""
REMIND_SECS = 30.0
PASSED_TURNS = 100
"""The keys of a turn are removed when so many others have been taken."""


class Lifetime:
    """Watches over one worker's part in the job.

    Its threads are started by `begin`, stopped by `leave`, and are daemons. Should the watching thread die,
    the next turn raises.
    """

    def __init__(
        self,
        coordination: Coordination,
        rank: int,
        size: int,
        transfers_started: Callable[[], int],
        end_process: Callable[[int], None] = os._exit,
        trained_alone: Callable[[], bool] = lambda: False,
    ) -> None:
        self._coordination = coordination
        self._rank = rank
        self._size = size
        self._transfers_started = transfers_started
        self._end_process = end_process
        self._trained_alone = trained_alone
        self._turn = 0
        self._forgotten = 0
        self._alone: tuple[str, int] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="replicast-lifetime", daemon=True)
        self._only_once = threading.Lock()
        self._leaves = False
        self._interrupted = False
        self._before_leaving: list[Callable[[], None]] = []
        self._at_the_end: list[Callable[[], None]] = []
        self._blamed = False
        self.looks = 0
        """How often the thread has looked at all keys."""
        self.failure: JobFailed | None = None
        """Why the job ended, once it has."""

    def begin(self) -> None:
        """Starts watching, and makes the process tell the others when it raises or ends."""
        self.watch()
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            previous(kind, error, trace)
            self.failed(error)

        sys.excepthook = hook
        atexit.register(self.leave)

    def watch(self) -> None:
        """Starts the threads."""
        self._thread.start()
        on_silence(lambda: self.looks, SILENT_SECS, self._no_answers, until=self._stop)

    def watching(self) -> bool:
        """Whether the watching thread is alive."""
        return self._thread.is_alive()

    def turn(self) -> int:
        """To be called by all workers in the same order, between steps; gives the number of the turn."""
        return self._take_turn("")

    def _take_turn(self, said: str) -> int:
        self.check()
        if not self.watching():
            raise JobFailed("The thread that watches over the job has died; its error is above in the log.")
        if self._alone is not None:
            raise self._nobody_joins(self._alone[0])
        transfers = self._transfers_started()
        self._turn += 1
        self._put(f"turn/{self._turn}", {"worker": self._rank, "transfers": transfers})
        self._put(f"turn/{self._turn}/{self._rank}", {"said": said})
        return self._turn

    def meet(self, said: str = "") -> dict[int, str]:
        """A turn at which all workers wait for each other, so that none goes on while another is elsewhere.

        Blocks as long as the others run, and says every 30 s who is waited for. One that will never come,
        because it waits for a transfer of this worker's, is noticed by its own watching thread.

        Args:
            said: What this worker tells the others.

        Returns:
            By worker: what it said.
        """
        turn = self._take_turn(said)
        heard = {self._rank: said}
        waited = 0.0
        for worker in (w for w in range(self._size) if w != self._rank):
            while (text := self._coordination.get(f"{PREFIX}/turn/{turn}/{worker}", 1.0)) is None:
                self.check()
                waited += 1.0
                if waited % REMIND_SECS == 0:
                    logger.warning("worker %d waits for worker %d to open its data", self._rank, worker)
            heard[worker] = str(json.loads(text)["said"])
        return heard

    def position(self) -> tuple[int, int]:
        """Where in the script this worker is, in transfers and turns: the same on all workers at one line."""
        return self._transfers_started(), self._turn

    def has_gone_on(self, worker: int) -> bool:
        """Whether it is known that another worker has passed this worker's position in the script."""
        return self._get(f"turn/{self._turn + 1}/{worker}") is not None or self.has_left(worker)

    @contextlib.contextmanager
    def alone(self, doing: str) -> Iterator[None]:
        """Inside, this worker does what the others do not: a transfer fails, since nobody would join it.

        Only in the main thread: while another thread saves, the main thread may train.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._alone = (doing, self._transfers_started())
        try:
            yield
        finally:
            self._alone = None

    def before_leaving(self, act: Callable[[], None]) -> None:
        """Has `act` called at the end of the script, unless the job has failed; the last given comes first.

        The others have been told by then that this worker left: should they still train, they fail, and
        `check` raises here.
        """
        self._before_leaving.insert(0, act)

    def at_the_end(self, act: Callable[[], None]) -> None:
        """Has `act` called at the end of the process in any case, after those of `before_leaving`.

        It must wait for nobody.
        """
        self._at_the_end.insert(0, act)

    def check(self) -> None:
        """Raises when the job has failed, so that waiting for another worker is in vain."""
        if self.failure is not None:
            raise self.failure
        if self._blamed:
            raise JobFailed(f"worker {self._rank} failed, or left before the others", worker=self._rank)

    def has_left(self, worker: int) -> bool:
        """Whether a worker has reached the end of its script: it waits for the others there.

        Raises:
            JobFailed: The job has failed.
        """
        self.check()
        return self._get(f"end/{worker}") is not None

    def failed(self, error: BaseException) -> None:
        """To be called when this worker's script raised: tells the others, the first one to fail wins."""
        if isinstance(error, KeyboardInterrupt) and self.failure is None:
            self._interrupted = True
            return
        if self.failure is None:
            lines = traceback.format_exception_only(error)
            said, blamed = lines[-1].strip() if lines else type(error).__name__, self._rank
            if isinstance(error, JobFailed) and error.worker is not None:  # it waited for that one in vain
                said, blamed = str(error), error.worker
            elif (lost := lost_worker(str(error))) is not None:
                said, blamed = f"worker {lost} was lost: it sent no heartbeats", lost
            self._put("failed", {"worker": blamed, "said": said})
            self.failure = self._first_failure() or _first(blamed, said)
        if self.failure.worker != self._rank:
            sys.stderr.write(f"replicast: {self.failure}\n")

    def _first_failure(self) -> JobFailed | None:
        try:
            failed = self._get("failed")
        except JobFailed:
            return None
        return None if failed is None else _first(failed["worker"], failed["said"])

    def leave(self) -> None:
        """Ends this worker's part when all have come to their end.

        Waits for the others as long as they run and TensorFlow's heartbeats say that they are alive; worker 0
        says every 30 s for whom. A worker that went first would be reported as crashed after 10 s. After a
        failure only worker 0, which hosts the coordination service, waits, and at most 10 s.
        """
        position = self._position_or_none()
        if position is not None and self.failure is None:
            self._put("left", {"worker": self._rank, "transfers": position, "turn": self._turn})
            self._put(f"end/{self._rank}", {})
        if not self._interrupted and self.failure is None:
            for act in self._before_leaving:
                act()
        for act in self._at_the_end:
            act()
        self._leaves = True
        self._put(f"left/{self._rank}", {})
        if not self._interrupted and (self._rank == 0 or self.failure is None):
            self._wait_for_the_others()
        self._stop.set()
        self._thread.join(timeout=3 * LOOK_SECS + 1.0)
        if self.failure is None and not self._interrupted and position == 0 and self._turn == 0:
            sys.stderr.write(
                f"replicast: worker {self._rank} exchanged nothing with the other workers: if it trained, it "
                "trained for itself. Build and compile the model inside 'with strategy.scope():'\n"
            )
            if self._trained_alone():
                self._end_process(1)
        if self.failure is not None and self.failure.worker != self._rank:
            sys.stderr.flush()
            sys.stdout.flush()
            self._end_process(FAILED_BECAUSE_OF_ANOTHER)

    def _wait_for_the_others(self) -> None:
        waited = 0.0
        for worker in (w for w in range(self._size) if w != self._rank):
            while True:
                try:
                    if self._coordination.get(f"{PREFIX}/left/{worker}", 1.0) is not None:
                        break
                except JobFailed as error:
                    self._lost(worker, error)
                    return
                waited += 1.0
                if self.failure is not None and (self._rank != 0 or waited >= GRACE_SECS):
                    return
                if self._rank == 0 and waited % REMIND_SECS == 0:
                    sys.stderr.write(f"replicast: worker 0 waits for worker {worker} to finish\n")

    def _lost(self, worker: int, error: JobFailed) -> None:
        """The service is gone while we wait. It goes with worker 0, which goes when all have left."""
        if self._rank == 0:
            self.failure = self.failure or JobFailed(
                f"worker {worker} was lost while worker 0 waited for it to finish: {error}", worker=worker
            )
            sys.stderr.write(f"replicast: {self.failure}\n")

    def _watch(self) -> None:
        try:
            while not self._stop.is_set():
                failure = self._look()
                self._forget_turns()
                self.looks += 1
                if failure is not None:
                    self._end(failure)
                    return
        except JobFailed as error:
            if not self._leaves:  # else worker 0 may have left, and taken the service with it
                self._end(error)
        except Exception:
            logger.exception("The thread that watches over the job died")

    def _no_answers(self) -> None:
        if not self.watching():  # then nobody has asked, and the next turn raises
            return
        said = (
            f"worker 0, which hosts the coordination service, has given worker {self._rank} no answer for "
            f"{SILENT_SECS:.0f} s: it is stopped (SIGSTOP), or its host cannot be reached"
        )
        self._end(JobFailed(said, worker=0))

    def _forget_turns(self) -> None:
        """Removes the keys of turns that all have taken: nobody is more than one behind, all wait at each."""
        while self._forgotten < self._turn - PASSED_TURNS:
            self._forgotten += 1
            if self._rank == 0:
                self._coordination.delete(f"{PREFIX}/turn/{self._forgotten}")
            self._coordination.delete(f"{PREFIX}/turn/{self._forgotten}/{self._rank}")

    def _look(self) -> JobFailed | None:
        failed = self._get("failed")
        if failed is not None:
            if failed["worker"] == self._rank:
                self._blamed = True
                self._stop.wait(LOOK_SECS)
                return None
            return _first(failed["worker"], failed["said"])
        alone = self._alone
        if alone is not None and (self._position_or_none() or 0) > alone[1] and self._alone is alone:
            return self._nobody_joins(alone[0])
        turn = self._turn
        ahead = self._get(f"turn/{turn + 1}")
        if ahead is not None and self._waits_for_nothing(ahead) and self._turn == turn:
            return JobFailed(
                f"worker {ahead['worker']} came to the end of its data, or left its loop, while worker "
                f"{self._rank} went on to another step. Every worker must be given the same number of "
                "batches, and a callback must stop all workers or none",
                worker=ahead["worker"],
            )
        left = self._get("left")
        if left is None or left["worker"] == self._rank:
            return None
        if self._turn > left["turn"] or self._waits_for_nothing(left):
            return JobFailed(
                f"worker {left['worker']} reached the end of its script while worker {self._rank} "
                "still trains",
                worker=left["worker"],
            )
        return None

    def _nobody_joins(self, doing: str) -> JobFailed:
        return JobFailed(
            f"worker {self._rank} started a transfer to all workers while it alone was {doing}. Nothing that "
            "a save calls may create variables in strategy.scope(), train, evaluate or reduce",
            worker=self._rank,
        )

    def _waits_for_nothing(self, other: dict[str, Any]) -> bool:
        position = self._position_or_none()
        return position is not None and position > int(other["transfers"])

    def _end(self, failure: JobFailed) -> None:
        """Makes the training thread raise; if it does not within the grace period, ends the process.

        That is prepared first: what follows calls the service, which may never return.
        """
        if not self._only_once.acquire(blocking=False):
            return
        self.failure = self.failure or failure
        threading.Thread(
            target=self._end_after_grace, args=(self.failure,), name="replicast-end", daemon=True
        ).start()
        self._coordination.abort(str(failure))
        blamed = self._rank if failure.worker is None else failure.worker
        self._put("failed", {"worker": blamed, "said": str(failure)})

    def _end_after_grace(self, failure: JobFailed) -> None:
        if not self._stop.wait(GRACE_SECS):
            sys.stderr.write(f"replicast: {failure}. Worker {self._rank} did not stop by itself\n")
            sys.stderr.flush()
            self._end_process(FAILED_BECAUSE_OF_ANOTHER)

    def _position_or_none(self) -> int | None:
        try:
            return self._transfers_started()
        except Exception:  # TensorFlow is being taken down: there is nothing left to compare
            logger.debug("the number of transfers cannot be read", exc_info=True)
            return None

    def _put(self, key: str, value: dict[str, Any]) -> None:
        try:
            self._coordination.put(f"{PREFIX}/{key}", json.dumps(value))
        except JobFailed:
            logger.debug("could not publish %s", key, exc_info=True)

    def _get(self, key: str) -> dict[str, Any] | None:
        text = self._coordination.get(f"{PREFIX}/{key}", LOOK_SECS)
        return None if text is None else dict(json.loads(text))


def _first(worker: int, said: str) -> JobFailed:
    named = said if said.startswith(f"worker {worker} ") else f"worker {worker} failed first: {said}"
    return JobFailed(named, worker=worker)
