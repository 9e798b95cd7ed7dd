"""How a job ends: all workers together on success, all at once when one fails, or is elsewhere in the script.

TensorFlow does not end a job cleanly. When worker 0 exits first, the coordination service goes with it and
the other workers abort. When a worker raises, the others wait in a transfer until a heartbeat is missed. When
one worker's loop ends a step early, the others wait for ever. So every worker has a thread that polls keys of
the coordination service, each written once:

    failed        by the first worker that raised: which worker, and its error
    end/RANK      by each worker at the end of its script
    left/RANK     by each worker when it has nothing left to do for the job
    left/all      by worker 0 when all have
    here/RANK     by each worker's thread, which reads it to know that the service answers
    turn/K        by the first worker at its K-th turn: its rank and its number of transfers
    turn/K/RANK   by each worker at its K-th turn: whether a given worker has passed is one lookup
    turn/K/all    by worker 0, if the workers meet at their K-th turn: what all of them say
    left          by the first worker at the end of its script: its rank, transfers and turns
    stands        by a worker that has waited for others at a boundary for a while; deleted when it continues

When another worker has failed, or can never join the current transfer, the thread aborts that transfer, and
the training thread raises. The latter is certain, and needs no timeout: a turn is a synchronization point
that all workers reach between steps, in the same order, such as the start of a pass over the data, and the
transfers inside steps are counted by every worker alike. If this worker has started more transfers than
another one had at its next turn, it waits for a transfer that the other one will never join.

While worker 0, which hosts the service, is stopped (SIGSTOP) or its host is gone, a call to the service
blocks for ever or, if it has a timeout, finds nothing. So the thread also reads a key that exists, a second
thread, which calls nothing, notices when that is no longer answered, and a third one ends the process if it
does not exit by itself. docs/endings.md adds up the bounds.

    lifetime    polls the keys; if it dies, the job fails                  `leave` stops it
    silence     calls nothing: notices pauses, and missing answers         `leave` stops it
    end         ends the process after `GRACE_SECS`                        ends with the process
    within      one call to the service that may never return              nobody: it is a daemon

Any thread may call `check` and `failed`; `leave` is for the main thread at exit.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from replicast.config import HEARTBEAT_SECS, PEER_FAILED
from replicast.coordination import LOOK_SECS, Coordination, DirectExchange, Loss, lost_text, lost_worker
from replicast.errors import JobFailed, exception_sentence, logger

Result = TypeVar("Result")

GRACE_SECS = 10.0  # how long a worker that was told to stop may take before its process is ended
SILENT_AFTER_HEARTBEAT_SECS = 2.0  # how much longer than the heartbeat timeout the service may not answer
CALL_SECS = 3.0  # how long a worker that has failed waits for the service when it says so
NAME = "lifetime"
POLL_SECS = 0.3
REMIND_SECS = 30.0
TURNS_KEPT = 100  # The keys of a turn are deleted after this many later turns.
_SILENCE_POLL_SECS = 0.2
_MAX_DELAY_SECS = 5.0  # a longer delay between two looks means that this process itself was stopped
_TURNS_PER_SEC = 5  # who waits for Python's lock looks for it 200 times a second, less on a busy machine
_INSTALLED = ("site-packages", str(Path(__file__).parent))


def turns_of(thread: int) -> int | None:
    """How often a thread of this process has waited and run again; None if the system does not tell."""
    try:
        text = Path(f"/proc/self/task/{thread}/status").read_text()
        return int(text.partition("\nvoluntary_ctxt_switches:")[2].split()[0])
    except (OSError, IndexError, ValueError):
        return None


class Pauses:
    """Notices when this process was paused. Any thread may ask.

    One thread must call `look` often. A long time between two looks is a pause (SIGSTOP, a machine that was
    suspended) if that thread hardly ran in it: while a call holds Python's lock, it runs often, to look for
    the lock. Pauses shorter than `shortest_secs`, or longer ago than `recent_secs`, do not count.
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
        """How long this process was paused, if it was a short time ago."""
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


def within(limit_secs: float, act: Callable[[], Result]) -> Result | None:
    results: list[Result] = []
    thread = threading.Thread(target=lambda: results.append(act()), name="replicast-within", daemon=True)
    thread.start()
    thread.join(limit_secs)
    return results[0] if results else None


def follows(error: BaseException) -> bool:
    return isinstance(error, JobFailed) or type(error).__module__.startswith("tensorflow.")


def first(worker: int, message: str) -> JobFailed:
    """The first failure of the job: whose it is, and the message that says so."""
    named = message if message.startswith(f"worker {worker} ") else f"worker {worker} failed first: {message}"
    return JobFailed(named, worker=worker)


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
        self._silent_secs = self.heartbeat_secs + SILENT_AFTER_HEARTBEAT_SECS
        half_secs = self.heartbeat_secs / 2  # as old as a heartbeat may be; a pause may have missed one
        self._pauses = self.pauses or Pauses(half_secs, self._silent_secs + GRACE_SECS)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="replicast-lifetime", daemon=True)
        self._only_once = threading.Lock()
        self._one_failure = threading.Lock()
        self._has_left = False
        self._interrupted = False
        self._before_leaving: list[Callable[[], None]] = []
        self._at_exit: list[Callable[[], None]] = []
        self._own_error: str | None = None  # what this worker's script raised, if that is the cause
        self._blamed_for: str | None = None
        self._reported = False
        self.turns = 0  # the number of turns that this worker has taken
        self._deleted_turns = 0
        self._meetings: set[int] = set()
        self._alone: tuple[str, int] | None = None
        self._suspect: dict[str, Any] | None = None
        self._stands = False
        self.polls = 0  # how often the thread has polled all keys, and the service has answered
        # Returns a worker whose process has ended. The all-reduce of this host sees that, once it is open.
        self.dead_worker: Callable[[], int | None] = lambda: None
        self.failure: JobFailed | None = None  # why the job failed

    def begin(self) -> None:
        """Starts watching, and tells the other workers when this process raises or exits."""
        self.watch()
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            blamed = None if self.failure is None else self.failure.worker
            # A traceback that only follows from another worker's failure, or from a pause, explains nothing.
            if follows(error) and (blamed not in (None, self.rank) or self._own_pause() is not None):
                # Where the user's script was: the innermost line that is not in an installed package.
                frames = traceback.extract_tb(trace)
                own = [one for one in frames if not any(part in one.filename for part in _INSTALLED)]
                where = [f"at {one.filename}:{one.lineno}, in {one.name}" for one in own or frames]
                sys.stderr.write(f"replicast: this worker was stopped {where[-1] if where else ''}\n")
            else:
                previous(kind, error, trace)
            self.failed(error)

        sys.excepthook = hook
        atexit.register(self.leave)

    def watch(self) -> None:
        self._thread.start()
        threading.Thread(target=self._watch_silence, name="replicast-silence", daemon=True).start()

    def has_gone_on(self, worker: int) -> bool:
        """Whether another worker is known to have passed this worker's position in the script."""
        return self._get(f"turn/{self.turns + 1}/{worker}") is not None or self.has_left(worker)

    def before_leaving(self, act: Callable[[], None], always: Callable[[], None]) -> None:
        """As `before_leaving` of a `StrategyJob`: last in, first out."""
        self._before_leaving.insert(0, act)
        self._at_exit.insert(0, always)

    def exchange(self, name: str) -> DirectExchange:
        return DirectExchange(self.coordination, name, self.rank, self.size, self.has_left)

    def check(self) -> None:
        """Raises `JobFailed` if the job has failed; call it while waiting for another worker."""
        if self.failure is not None:
            raise self.failure
        if self._blamed_for is not None:
            raise first(self.rank, self._blamed_for)

    def has_left(self, worker: int) -> bool:
        """Whether a worker has reached the end of its script, where it waits for the others."""
        self.check()
        return self._get(f"end/{worker}") is not None

    # --- This worker's position in the script --------------------------------------------------------------

    def take_turn(self, message: str = "") -> int:
        """Takes the next turn; returns its number. All workers do so in the same order, between steps."""
        self.check()
        if self._alone is not None:
            raise self._transfer_without_peers(self._alone[0])
        transfers = self.transfers_started()
        self.turns += 1
        self._put(f"turn/{self.turns}", {"worker": self.rank, "transfers": transfers})
        self._put(f"turn/{self.turns}/{self.rank}", {"message": message})
        return self.turns

    def meet(self, message: str = "") -> dict[int, str]:
        """Takes a turn and waits there for all other workers.

        Blocks while the others run, and logs every 30 s what it waits for; worker 0 names the late worker. If
        another worker never arrives because it waits for a transfer of this worker, that worker's `_mismatch`
        detects it.
        """
        turn = self.take_turn(message)
        self._meetings.add(turn)
        key = f"turn/{turn}"
        looks = itertools.count(1)

        def has_left(worker: int) -> bool:
            self.check()
            if next(looks) % (REMIND_SECS / LOOK_SECS) != 0:
                return False
            # Only worker 0 reads what each of the others has written.
            if self.rank == 0 or self._get(f"{key}/0") is None:
                awaited = f"for worker {worker} to open its data, or to trace its first step"
            else:
                awaited = (
                    "until all workers have opened their data, or traced their first step: "
                    "worker 0's log names the late one"
                )
            logger.warning("worker %d waits %s", self.rank, awaited)
            return False  # `_mismatch` of another worker detects it

        exchange = DirectExchange(self.coordination, NAME, self.rank, self.size, has_left)
        said = exchange.agree(key, json.dumps({"message": message}), math.inf)
        return {worker: str(json.loads(text)["message"]) for worker, text in said.items()}

    def position(self) -> tuple[int, int]:
        """This worker's position in the script, in transfers and turns: equal on all workers at one line."""
        return self.transfers_started(), self.turns

    @contextlib.contextmanager
    def alone(self, doing: str) -> Iterator[None]:
        """Inside, this worker does something that the others do not: a transfer fails, as none would join it.

        Has an effect only in the main thread: while another thread saves, the main thread may train.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._alone = (doing, self.transfers_started())
        try:
            yield
        finally:
            self._alone = None

    def report_wait(self, step: int | None) -> None:
        """Publishes that this worker waits at a boundary, where it starts no transfer; None: not any more."""
        if step is not None:
            value = {"worker": self.rank, "transfers": self.transfers_started(), "step": step}
            self._stands = self._put("stands", value) or self._stands
        elif self._stands:  # not if the key is another worker's
            self._delete("stands")
            self._stands = False

    def _mismatch(self) -> JobFailed | None:
        """Returns an error if this worker waits for a transfer that another worker will never join."""
        alone = self._alone
        if alone is not None and (self._transfers_or_none() or 0) > alone[1] and self._alone is alone:
            return self._transfer_without_peers(alone[0])
        turns = self.turns
        ahead = self._get(f"turn/{turns + 1}")
        if ahead is not None and self._waits_in_vain(ahead) and self.turns == turns:
            return JobFailed(
                f"worker {ahead['worker']} reached the end of its data, or left its loop, while worker "
                f"{self.rank} continued with another step. Every worker must get the same number of "
                "batches, and a callback must stop all workers or none",
                worker=ahead["worker"],
            )
        stands, suspect = self._get("stands"), self._suspect
        in_vain = stands is not None and stands["worker"] != self.rank and self._waits_in_vain(stands)
        self._suspect = stands if in_vain else None
        # It waits in a transfer for one that waits for it at a boundary. Observed twice, because the other
        # worker may just be about to continue.
        if stands is not None and in_vain and stands == suspect:
            return JobFailed(
                f"worker {stands['worker']} waits for the others at the boundary of step {stands['step']}, "
                f"and worker {self.rank} continued with another step: one of them has missed a boundary, or "
                "had one too many. Every worker must call replicas.boundary() after each step, and make the "
                "same calls of replicast",
                worker=self.rank,
            )
        left = self._get("left")
        if left is None or left["worker"] == self.rank:
            return None
        if self.turns > left["turn"] or self._waits_in_vain(left):
            how = "was interrupted by Ctrl-C" if left["interrupted"] else "reached the end of its script"
            return JobFailed(
                f"worker {left['worker']} {how} while worker {self.rank} is still training",
                worker=left["worker"],
            )
        return None

    def _delete_old_keys(self) -> None:
        """Deletes the keys of turns that all workers have taken: a worker is at most one turn behind."""
        while self._deleted_turns < self.turns - TURNS_KEPT:
            self._deleted_turns += 1
            key = f"turn/{self._deleted_turns}"
            self._delete(f"{key}/{self.rank}")
            if self.rank == 0:
                self._delete(key)
                if self._deleted_turns in self._meetings:
                    self._delete(f"{key}/all")
            self._meetings.discard(self._deleted_turns)

    def _transfers_or_none(self) -> int | None:
        """The number of transfers started, or None if TensorFlow is shutting down."""
        try:
            return self.transfers_started()
        except Exception:  # TensorFlow is shutting down: there is nothing left to compare
            logger.debug("the number of transfers cannot be read", exc_info=True)
            return None

    def _transfer_without_peers(self, doing: str) -> JobFailed:
        return JobFailed(
            f"worker {self.rank} started a transfer to all workers while it alone was {doing}. Nothing that "
            "a save calls may create variables in strategy.scope(), train, evaluate or reduce",
            worker=self.rank,
        )

    def _waits_in_vain(self, other: dict[str, Any]) -> bool:
        transfers = self._transfers_or_none()
        return transfers is not None and transfers > int(other["transfers"])

    # --- The end -------------------------------------------------------------------------------------------

    def failed(self, error: BaseException) -> None:
        """Tells the others that this worker's script raised; the first failure of the job counts."""
        if isinstance(error, KeyboardInterrupt) and self.failure is None:
            self._interrupted = True
            return
        own = self._cause_of(error)
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
        if self.failure is not None and str(self.failure) != self._own_error and not self._reported:
            self._reported = True
            sys.stderr.write(f"replicast: {self.failure}\n")

    def _cause_of(self, error: BaseException) -> JobFailed:
        """Why this worker's script raised, and because of which worker."""
        if follows(error) and (pause := self._own_pause()) is not None:
            return pause
        if isinstance(error, JobFailed) and error.worker is not None:  # it waited for that one in vain
            return first(error.worker, str(error))
        lost = lost_worker(str(error), self.coordination.chiefs)
        if lost is not None and lost.worker != self.rank:
            return first(lost.worker, self._witnessed(lost_text(lost)))
        lines = "".join(traceback.format_exception_only(error)).splitlines()
        own = first(self.rank, exception_sentence(lines))
        self._own_error = str(own)
        return own

    def _noticed(self, message: str, worker: int | None) -> JobFailed:
        """A loss that this worker has noticed: of another one, unless this one was paused."""
        return self._own_pause() or JobFailed(self._witnessed(message), worker=worker)

    def _witnessed(self, message: str) -> str:
        return f"{message} (reported by worker {self.rank})"

    def _own_pause(self) -> JobFailed | None:
        """An error if this process was paused a short time ago: that explains what it sees since."""
        secs = self._pauses.pause_secs()
        if secs is None:
            return None
        message = (
            f"worker {self.rank} did not run for {secs:.0f} s: it was stopped (SIGSTOP), its machine was "
            "suspended, or it got no CPU time. The other workers treated it as lost"
        )
        return JobFailed(message, worker=self.rank)

    def _publish_failure(self, failure: JobFailed) -> JobFailed | None:
        """Returns the first failure that was published, if the service answers."""
        self._put("failed", {"worker": failure.worker, "message": str(failure)})
        try:
            failed = self._get("failed")
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
        transfers = self._transfers_or_none() if self.failure is None else None
        if transfers is not None:
            position = {"worker": self.rank, "transfers": transfers, "turn": self.turns}
            self._put("left", {**position, "interrupted": self._interrupted})
            self._put(f"end/{self.rank}", {})
        if not self._interrupted and self.failure is None:
            for act in self._before_leaving:
                act()
        for act in self._at_exit:
            act()
        self.dead_worker = lambda: None  # a worker ends once it knows that all have left
        if self.failure is None:
            self._put(f"left/{self.rank}", {})
        else:
            within(CALL_SECS, lambda: self._put(f"left/{self.rank}", {}))
        self._has_left = True
        if not self._interrupted and (self.rank == 0 or self.failure is None):
            self._wait_for_the_others()
        self._stop.set()
        self._thread.join(timeout=3 * POLL_SECS + 1.0)
        if self.failure is None and not self._interrupted and transfers == 0 and self.turns == 0:
            sys.stderr.write(
                f"replicast: worker {self.rank} exchanged nothing with the other workers: if it trained, it "
                "trained on its own. Build and compile the model inside 'with strategy.scope():'\n"
            )
            if self.trained_alone():
                self.end_process(1)
        if self.failure is None or str(self.failure) == self._own_error:
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
                    if self._get(key, 1.0) is not None:
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
            self._put("left/all", {})

    def _watch(self) -> None:
        try:
            self._put(f"here/{self.rank}", {})
            while not self._stop.is_set():
                failure = self._poll()
                self._delete_old_keys()
                if failure is not None:
                    self._end(failure)
                    return
                if self._get(f"here/{self.rank}") is not None:
                    self.polls += 1
        except JobFailed as error:
            if self.rank != 0 and self._has_left:  # worker 0 may have exited, and the service with it
                self._stop.set()
            else:
                self._end(self._noticed(str(error), error.worker))
        except Exception as error:
            logger.exception("The thread that watches the job died")
            message = f"worker {self.rank} failed: the thread that watches the job has died ({error!r})"
            self._end(JobFailed(message, worker=self.rank))

    def _poll(self) -> JobFailed | None:
        failed = self._get("failed")
        if failed is not None and failed["worker"] == self.rank:
            self._blamed_for = str(failed["message"])
            self._stop.wait(POLL_SECS)
            return None
        if failed is not None:
            return first(failed["worker"], failed["message"])
        # A transfer notices that the service has lost a worker, a wait does not.
        lost = self.coordination.find_lost(self.size) if self.rank == 0 else None
        if lost is not None:
            return self._noticed(lost_text(lost), lost.worker)
        if self._has_left:
            return None
        if (mismatch := self._mismatch()) is not None:
            return mismatch
        # A transfer of TensorFlow notices a broken connection at once, one through shared memory has none.
        dead = self.dead_worker()
        if dead is None or self._get("failed") is not None:  # the next poll says why
            return None
        return JobFailed(self._witnessed(lost_text(Loss(dead, "its process has ended"))), worker=dead)

    def _watch_silence(self) -> None:
        """Ends this worker's part when the service has not answered for `_silent_secs`.

        On a busy machine a wait takes longer than asked for, so the thread reads a clock. Time during which
        this process itself was stopped does not count.
        """
        last, silent_secs, looked = self.polls, 0.0, time.monotonic()
        while silent_secs < self._silent_secs:
            if self._stop.wait(_SILENCE_POLL_SECS):
                return
            self._pauses.look()
            now, polls = time.monotonic(), self.polls
            silent_secs = silent_secs + min(now - looked, _MAX_DELAY_SECS) if polls == last else 0.0
            last, looked = polls, now
        message = (
            f"worker 0, which hosts the coordination service, has not answered worker {self.rank} for "
            f"{self._silent_secs:.0f} s: it is stopped (SIGSTOP), or its host is unreachable"
        )
        self._end(self._own_pause() or JobFailed(message, worker=0))

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
        self._put("failed", {"worker": blamed, "message": str(failure)})

    def _end_after_grace(self, failure: JobFailed) -> None:
        if not self._stop.wait(GRACE_SECS):
            sys.stderr.write(f"replicast: {failure}. Worker {self.rank} did not stop by itself\n")
            sys.stderr.flush()
            self.end_process(self._exit_code(failure))

    # --- JSON values under this package's prefix in the coordination service -------------------------------

    def _put(self, key: str, value: dict[str, Any]) -> bool:
        """Returns whether it was written: not if it exists. A lost service is only logged: `get` raises."""
        try:
            return self.coordination.put(f"replicast/{NAME}/{key}", json.dumps(value))
        except JobFailed:
            logger.debug("could not publish %s", key, exc_info=True)
            return False

    def _get(self, key: str, timeout_secs: float | None = None) -> dict[str, Any] | None:
        timeout = POLL_SECS if timeout_secs is None else timeout_secs
        text = self.coordination.get(f"replicast/{NAME}/{key}", timeout)
        return None if text is None else dict(json.loads(text))

    def _delete(self, key: str) -> None:
        self.coordination.delete(f"replicast/{NAME}/{key}")
