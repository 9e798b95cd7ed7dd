"""How a job ends: all workers together on success, all at once when one fails.

TensorFlow does not end a job cleanly. When worker 0 exits first, the coordination service goes with it and
the other workers abort. When a worker raises, the others wait in a transfer until a heartbeat is missed. When
one worker's loop ends a step early, the others wait for ever. So every worker has a thread that polls keys of
the coordination service: those of `replicast.turns`, and

    failed      by the first worker that raised: which worker, and its error
    end/RANK    by each worker at the end of its script
    left/RANK   by each worker when it has nothing left to do for the job
    left/all    by worker 0 when all have
    here/RANK   by each worker's thread, which reads it to know that the service answers

When another worker has failed, or can never join the current transfer, the thread aborts that transfer, and
the training thread raises.

While worker 0, which hosts the service, is stopped (SIGSTOP) or its host is gone, a call to the service
blocks for ever or, if it has a timeout, finds nothing. So the thread also reads a key that exists, a second
thread, which calls nothing, notices when that is no longer answered, and a third one ends the process if it
does not exit by itself. docs/endings.md adds up the bounds.

    lifetime    polls the keys; if it dies, the job fails                          `leave` stops it
    silence     calls nothing: notices pauses, and no answers    `leave` stops it
    end         ends the process after `GRACE_SECS`; started first of all          ends with the process
    within      one call to the service that may never return                      nobody: it is a daemon

Any thread may call `check`, `failed` and what `Causes` has; `leave` is for the main thread at exit.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from replicast.config import HEARTBEAT_SECS, PEER_FAILED
from replicast.coordination import Coordination, Loss, lost_text, lost_worker
from replicast.errors import JobFailed, exception_sentence
from replicast.turns import POLL_SECS, REMIND_SECS, JobKeys, Turns

logger = logging.getLogger("replicast")

Result = TypeVar("Result")

GRACE_SECS = 10.0  # how long a worker that was told to stop may take before its process is ended
SILENT_AFTER_HEARTBEAT_SECS = 2.0  # how much longer than the heartbeat timeout the service may not answer
CALL_SECS = 3.0  # how long a worker that has failed waits for the service when it says so
_POLL_SECS = 0.2
_MAX_DELAY_SECS = 5.0  # a longer delay between two looks means that this process itself was stopped
_TURNS_PER_SEC = 5  # who waits for Python's lock looks for it 200 times a second, less on a busy machine
_HERE = str(Path(__file__).parent)


def turns_of(thread: int) -> int | None:
    """How often a thread of this process has waited and run again; None if the system does not tell."""
    try:
        text = Path(f"/proc/self/task/{thread}/status").read_text()
        return int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    except (OSError, IndexError, ValueError):
        return None


class Pauses:
    """Notices when this process stood still. Any thread may ask.

    One thread must call `look` often. A long time between two looks is a pause (SIGSTOP, a machine that was
    suspended) if that thread hardly ran in it: while a call holds Python's lock, it runs often, to look for
    the lock. Shorter ones than `shortest_secs` do not count, and none counts longer than `recent_secs`.
    """

    def __init__(
        self,
        shortest_secs: float,
        recent_secs: float,
        clock: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
        turns: Callable[[int], int | None] = turns_of,
    ) -> None:
        self._shortest_secs, self._recent_secs = shortest_secs, recent_secs
        self._clock, self._turns = clock, turns
        self._lock = threading.Lock()
        self._thread: int | None = None  # the one that looks
        self._looked: tuple[float, int | None] = (clock(), None)
        self._pause: tuple[float, float] | None = None  # when it ended, and how long it was

    def look(self) -> None:
        """Always called by the same thread."""
        self._thread = threading.get_native_id()
        self._compare()

    def pause_secs(self) -> float | None:
        """How long this process stood still, if it did a short time ago."""
        self._compare()
        is_recent = self._pause is not None and self._clock() - self._pause[0] <= self._recent_secs
        return self._pause[1] if self._pause is not None and is_recent else None

    def _compare(self) -> None:
        with self._lock:
            if self._thread is None:
                return
            now, turns = self._clock(), self._turns(self._thread)
            secs, turned = now - self._looked[0], self._looked[1]
            self._looked = (now, turns)
            ran = None if turns is None or turned is None else turns - turned
            if ran is not None and secs >= self._shortest_secs and ran < _TURNS_PER_SEC * secs:
                self._pause = (now, secs)


def on_silence(
    count: Callable[[], int],
    limit_secs: float,
    act: Callable[[], None],
    *,
    until: threading.Event,
    look: Callable[[], None],
) -> None:
    """Starts a daemon thread that calls `act` once, when `count` has not changed for `limit_secs`.

    On a busy machine a wait takes longer than asked for, so the thread reads a clock. Time during which this
    process itself was stopped does not count.
    """

    def watch() -> None:
        last, silent_secs, looked = count(), 0.0, time.monotonic()
        while silent_secs < limit_secs:
            if until.wait(_POLL_SECS):
                return
            look()
            now, before = time.monotonic(), looked
            looked = now
            current = count()
            silent_secs = silent_secs + min(now - before, _MAX_DELAY_SECS) if current == last else 0.0
            last = current
        act()

    threading.Thread(target=watch, name="replicast-silence", daemon=True).start()


def within(limit_secs: float, act: Callable[[], Result]) -> Result | None:
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(act()), name="replicast-within", daemon=True)
    thread.start()
    thread.join(limit_secs)
    return results[0] if results else None


@dataclass(eq=False, repr=False)
class Causes:
    """Why a job failed, as this worker sees it: its own error, a worker that it lost, or its own pause."""

    rank: int
    chiefs: int
    pauses: Pauses
    own_error: str | None = None

    def of(self, error: BaseException) -> JobFailed:
        """Why this worker's script raised, and because of which worker."""
        pause = self.pause() if follows(error) else None
        if pause is not None:
            return pause
        if isinstance(error, JobFailed) and error.worker is not None:  # it waited for that one in vain
            return first(error.worker, str(error))
        lost = lost_worker(str(error), self.chiefs)
        if lost is not None and lost.worker != self.rank:
            return first(lost.worker, self.witnessed(lost_text(lost)))
        own = first(
            self.rank, exception_sentence("".join(traceback.format_exception_only(error)).splitlines())
        )
        self.own_error = str(own)
        return own

    def noticed(self, message: str, worker: int | None) -> JobFailed:
        """A loss that this worker has noticed: of another one, unless it stood still itself."""
        return self.pause() or JobFailed(self.witnessed(message), worker=worker)

    def witnessed(self, message: str) -> str:
        return f"{message} (reported by worker {self.rank})"

    def pause(self) -> JobFailed | None:
        """An error if this process itself stood still a short time ago: that explains what it sees since."""
        secs = self.pauses.pause_secs()
        if secs is None:
            return None
        message = (
            f"worker {self.rank} did not run for {secs:.0f} s: it was stopped (SIGSTOP), its machine was "
            "suspended, or it got no CPU time. The other workers took it for lost"
        )
        return JobFailed(message, worker=self.rank)


def follows(error: BaseException) -> bool:
    return isinstance(error, JobFailed) or type(error).__module__.startswith("tensorflow.")


def first(worker: int, message: str) -> JobFailed:
    """The first failure of the job: whose it is, and the message that says so."""
    named = message if message.startswith(f"worker {worker} ") else f"worker {worker} failed first: {message}"
    return JobFailed(named, worker=worker)


def place_in(trace: TracebackType | None) -> str:
    """Where the user's script was: the innermost line that is not in an installed package."""
    frames = traceback.extract_tb(trace)
    own = [frame for frame in frames if "site-packages" not in frame.filename and _HERE not in frame.filename]
    frame = next(iter(reversed(own or frames)), None)
    return "" if frame is None else f"at {frame.filename}:{frame.lineno}, in {frame.name}"


@dataclass(eq=False, repr=False)
class Lifetime:
    """Watches one worker's part in the job. `begin` starts its threads, and `leave` stops them."""

    coordination: Coordination
    rank: int
    size: int
    transfers_started: Callable[[], int]
    end_process: Callable[[int], None] = os._exit
    trained_alone: Callable[[], bool] = lambda: False
    heartbeat_secs: float = HEARTBEAT_SECS
    pauses: Pauses | None = None

    def __post_init__(self) -> None:
        self._keys = JobKeys(self.coordination)
        self._silent_secs = self.heartbeat_secs + SILENT_AFTER_HEARTBEAT_SECS
        half_secs = self.heartbeat_secs / 2  # as old as a heartbeat may be; a pause may have missed one
        pauses = self.pauses or Pauses(half_secs, self._silent_secs + GRACE_SECS)
        self._causes = Causes(self.rank, self.coordination.chiefs, pauses)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="replicast-lifetime", daemon=True)
        self._only_once = threading.Lock()
        self._one_failure = threading.Lock()
        self._has_left = False
        self._interrupted = False
        self._before_leaving: list[Callable[[], None]] = []
        self._at_exit: list[Callable[[], None]] = []
        self._blamed_for: str | None = None
        self._reported = False
        # This worker's position in the script.
        self.turns = Turns(self._keys, self.rank, self.size, self.transfers_started, self.check)
        self.polls = 0  # how often the thread has polled all keys, and the service has answered
        # Returns a worker whose process has ended. The all-reduce of this host sees that, once it is open.
        self.dead_worker: Callable[[], int | None] = lambda: None
        self.failure: JobFailed | None = None  # why the job failed

    def begin(self) -> None:
        """Starts watching, and tells the other workers when this process raises or exits."""
        self.watch()
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            if self._is_because_of_another(error):
                sys.stderr.write(f"replicast: this worker was stopped {place_in(trace)}\n")
            else:
                previous(kind, error, trace)
            self.failed(error)

        sys.excepthook = hook
        atexit.register(self.leave)

    def watch(self) -> None:
        self._thread.start()
        secs, look = self._silent_secs, self._causes.pauses.look
        on_silence(lambda: self.polls, secs, self._no_answers, until=self._stop, look=look)

    def has_gone_on(self, worker: int) -> bool:
        """Whether another worker is known to have passed this worker's position in the script."""
        return self.turns.has_taken_next(worker) or self.has_left(worker)

    def before_leaving(self, act: Callable[[], None]) -> None:
        """Registers a function for the end of the script, unless the job failed; last in, first out."""
        self._before_leaving.insert(0, act)

    def at_exit(self, act: Callable[[], None]) -> None:
        """As `before_leaving`, in any case and after those. It must not wait for another worker."""
        self._at_exit.insert(0, act)

    def check(self) -> None:
        """Raises `JobFailed` if the job has failed; call it while waiting for another worker."""
        if self.failure is not None:
            raise self.failure
        if self._blamed_for is not None:
            raise first(self.rank, self._blamed_for)

    def has_left(self, worker: int) -> bool:
        """Whether a worker has reached the end of its script, where it waits for the others."""
        self.check()
        return self._keys.get(f"end/{worker}") is not None

    def failed(self, error: BaseException) -> None:
        """Tells the others that this worker's script raised; the first failure of the job counts."""
        if isinstance(error, KeyboardInterrupt) and self.failure is None:
            self._interrupted = True
            return
        own = self._causes.of(error)
        # Before the others are told: worker 0 then exits, and the service that this worker loses is no cause.
        if self._set_failure(own) is own:
            self.failure = within(CALL_SECS, lambda: self._publish_failure(own)) or own
        self._report()

    def _set_failure(self, failure: JobFailed) -> JobFailed:
        with self._one_failure:
            self.failure = self.failure or failure
            return self.failure

    def _report(self) -> None:
        """Writes because of whom this worker exits, once; not if that is the error that its script raised."""
        if self.failure is not None and str(self.failure) != self._causes.own_error and not self._reported:
            self._reported = True
            sys.stderr.write(f"replicast: {self.failure}\n")

    def _is_because_of_another(self, error: BaseException) -> bool:
        """Whether an error only follows from another worker's failure: its traceback explains nothing."""
        blamed = None if self.failure is None else self.failure.worker
        return follows(error) and (blamed not in (None, self.rank) or self._causes.pause() is not None)

    def _publish_failure(self, failure: JobFailed) -> JobFailed | None:
        """Returns the first failure that was published, if the service answers."""
        self._keys.put("failed", {"worker": failure.worker, "message": str(failure)})
        try:
            failed = self._keys.get("failed")
        except JobFailed:
            return None
        return None if failed is None else first(failed["worker"], failed["message"])

    def leave(self) -> None:
        """Ends this worker's part in the job once all workers have reached the end of their scripts.

        Waits for the others as long as they run and send TensorFlow's heartbeats; worker 0 prints every 30 s
        which worker it waits for. A worker that exited first would be reported as crashed after 10 s. After a
        failure only worker 0, which hosts the coordination service, waits, at most 10 s, and not for the
        worker that failed.
        """
        transfers = self.turns.leave(interrupted=self._interrupted) if self.failure is None else None
        if transfers is not None:
            self._keys.put(f"end/{self.rank}", {})
        if not self._interrupted and self.failure is None:
            for act in self._before_leaving:
                act()
        for act in self._at_exit:
            act()
        self.dead_worker = lambda: None  # a worker ends once it knows that all have left
        if self.failure is None:
            self._keys.put(f"left/{self.rank}", {})
        else:
            within(CALL_SECS, lambda: self._keys.put(f"left/{self.rank}", {}))
        self._has_left = True
        if not self._interrupted and (self.rank == 0 or self.failure is None):
            self._wait_for_the_others()
        self._stop.set()
        self._thread.join(timeout=3 * POLL_SECS + 1.0)
        self._exit_on_failure(transfers)

    def _exit_on_failure(self, transfers: int | None) -> None:
        """Ends the process if it trained by itself, or if another worker failed; else it exits normally."""
        if self.failure is None and not self._interrupted and transfers == 0 and self.turns.count == 0:
            sys.stderr.write(
                f"replicast: worker {self.rank} exchanged nothing with the other workers: if it trained, it "
                "trained by itself. Build and compile the model inside 'with strategy.scope():'\n"
            )
            if self.trained_alone():
                self.end_process(1)
        if self.failure is None or str(self.failure) == self._causes.own_error:
            return  # as Python does
        self._report()
        sys.stderr.flush()
        sys.stdout.flush()
        self.end_process(self._exit_code(self.failure))

    def _exit_code(self, failure: JobFailed) -> int:
        return 1 if failure.worker == self.rank else PEER_FAILED

    def _wait_for_the_others(self) -> None:
        """Worker 0 waits for each of them, and says when all have left; the others wait for that."""
        began = reminded = time.monotonic()
        for worker in range(1, self.size) if self.rank == 0 else [0]:
            key = f"left/{worker}" if self.rank == 0 else "left/all"
            while True:
                failure, waited = self.failure, time.monotonic() - began
                if failure and (self.rank != 0 or worker == failure.worker or waited >= GRACE_SECS):
                    break
                try:
                    if self._keys.get(key, 1.0) is not None:
                        break
                except JobFailed as error:
                    # Worker 0 exits, and ends the service that it hosts, when all workers have left.
                    if self.rank == 0:
                        lost = f"worker {worker} was lost while worker 0 waited for it to finish: {error}"
                        self._set_failure(JobFailed(lost, worker=worker))
                    return
                if self.rank == 0 and time.monotonic() - reminded >= REMIND_SECS:
                    reminded = time.monotonic()
                    sys.stderr.write(f"replicast: worker 0 waits for worker {worker} to finish\n")
        if self.rank == 0:
            self._keys.put("left/all", {})

    def _watch(self) -> None:
        try:
            self._keys.put(f"here/{self.rank}", {})
            while not self._stop.is_set():
                failure = self._poll()
                self.turns.delete_old_keys()
                if failure is not None:
                    self._end(failure)
                    return
                if self._keys.get(f"here/{self.rank}") is not None:
                    self.polls += 1
        except JobFailed as error:
            if self.rank != 0 and self._has_left:  # worker 0 may have exited, and the service with it
                self._stop.set()
            else:
                self._end(self._causes.noticed(str(error), error.worker))
        except Exception as error:
            logger.exception("The thread that watches the job died")
            message = f"worker {self.rank} failed: the thread that watches the job has died ({error!r})"
            self._end(JobFailed(message, worker=self.rank))

    def _poll(self) -> JobFailed | None:
        failed = self._keys.get("failed")
        if failed is not None and failed["worker"] == self.rank:
            self._blamed_for = str(failed["message"])
            self._stop.wait(POLL_SECS)
            return None
        if failed is not None:
            return first(failed["worker"], failed["message"])
        # A transfer notices that the service has lost a worker, a wait does not.
        lost = self.coordination.find_lost(self.size) if self.rank == 0 else None
        if lost is not None:
            return self._causes.noticed(lost_text(lost), lost.worker)
        if self._has_left:
            return None
        if (mismatch := self.turns.mismatch()) is not None:
            return mismatch
        # A transfer of TensorFlow notices a broken connection at once, one through shared memory has none.
        dead = self.dead_worker()
        if dead is None or self._keys.get("failed") is not None:  # the next poll says why
            return None
        message = self._causes.witnessed(lost_text(Loss(dead, "its process has ended")))
        return JobFailed(message, worker=dead)

    def _no_answers(self) -> None:
        message = (
            f"worker 0, which hosts the coordination service, has not answered worker {self.rank} for "
            f"{self._silent_secs:.0f} s: it is stopped (SIGSTOP), or its host is unreachable"
        )
        self._end(self._causes.pause() or JobFailed(message, worker=0))

    def _end(self, failure: JobFailed) -> None:
        """Makes the training thread raise, and ends the process if it has not exited after `GRACE_SECS`.

        The timer starts first, because the calls to the service that follow may never return.
        """
        if not self._only_once.acquire(blocking=False):
            return
        counts = (self._set_failure(failure),)
        threading.Thread(target=self._end_after_grace, args=counts, name="replicast-end", daemon=True).start()
        self.coordination.abort(str(failure))
        blamed = self.rank if failure.worker is None else failure.worker
        self._keys.put("failed", {"worker": blamed, "message": str(failure)})

    def _end_after_grace(self, failure: JobFailed) -> None:
        if not self._stop.wait(GRACE_SECS):
            sys.stderr.write(f"replicast: {failure}. Worker {self.rank} did not stop by itself\n")
            sys.stderr.flush()
            self.end_process(self._exit_code(failure))
