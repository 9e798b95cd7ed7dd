"""How a job ends: all workers together on success, all at once when one fails.

TensorFlow does not end a job cleanly. When worker 0 exits first, the coordination service goes with it and
the other workers abort. When a worker raises, the others wait in a transfer until a heartbeat is missed. When
one worker's loop ends a step early, the others wait for ever. So every worker has a thread that polls keys of
the coordination service: those of `replicast.turns`, and

    failed      by the first worker that raised: which worker, and its error
    end/RANK    by each worker at the end of its script
    left/RANK   by each worker when it has nothing left to do for the job
    here/RANK   by each worker's thread, which reads it to know that the service answers

When another worker has failed, or can never join the current transfer, the thread aborts that transfer, and
the training thread raises.

While worker 0, which hosts the service, is stopped (SIGSTOP) or its host is gone, a call to the service
blocks for ever or, if it has a timeout, finds nothing. So the thread also reads a key that exists, a second
thread, which calls nothing, notices when that is no longer answered, and a third one ends the process if it
does not exit by itself. docs/endings.md adds up the bounds.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

from replicast.causes import Causes, first, follows, place_in
from replicast.config import HEARTBEAT_SECS, PEER_FAILED
from replicast.coordination import Coordination, Loss, lost_text
from replicast.errors import JobFailed
from replicast.silence import ClockJumps, Pauses, on_silence, within
from replicast.turns import POLL_SECS, REMIND_SECS, JobKeys, Turns

logger = logging.getLogger("replicast")

GRACE_SECS = 10.0
"""How long a worker that was told to stop may take before its process is ended."""
SILENT_AFTER_HEARTBEAT_SECS = 2.0
"""How much longer than the heartbeat timeout the coordination service may not answer."""
CALL_SECS = 3.0
"""How long a worker that has failed waits for the service when it says so."""


class Lifetime:
    """Watches one worker's part in the job.

    `begin` starts its threads, which are daemons, and `leave` stops them. If the watching thread dies, the
    job fails.

    Args:
        coordination: The keys that all workers share.
        rank: This worker.
        size: The number of workers.
        transfers_started: Returns how many transfers this worker has started.
        end_process: Ends this process with an exit code.
        trained_alone: Whether this process trained a model outside the strategy.
        heartbeat_secs: After how long without a heartbeat TensorFlow considers a worker dead.
        pauses: Whether this process itself was stopped.
    """

    def __init__(
        self,
        coordination: Coordination,
        rank: int,
        size: int,
        transfers_started: Callable[[], int],
        end_process: Callable[[int], None] = os._exit,
        trained_alone: Callable[[], bool] = lambda: False,
        heartbeat_secs: float = HEARTBEAT_SECS,
        pauses: Pauses | None = None,
    ) -> None:
        self._coordination = coordination
        self._keys = JobKeys(coordination)
        self._rank = rank
        self._size = size
        self._silent_secs = heartbeat_secs + SILENT_AFTER_HEARTBEAT_SECS
        if pauses is None:
            pauses = Pauses(heartbeat_secs / 2)  # then the others may have missed a heartbeat
        jumps = ClockJumps(heartbeat_secs / 2)  # as old as a heartbeat may be at that moment
        recent_secs = self._silent_secs + GRACE_SECS
        self._causes = Causes(rank, coordination.chiefs, pauses, jumps, recent_secs)
        self._end_process = end_process
        self._trained_alone = trained_alone
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
        self.turns = Turns(
            self._keys,
            rank,
            size,
            transfers_started=transfers_started,
            check=self.check,
        )
        """This worker's position in the script."""
        self.polls = 0
        """How often the thread has polled all keys, and the service has answered."""
        self.dead_worker: Callable[[], int | None] = lambda: None
        """Returns a worker whose process has ended, if that can be seen from here."""
        self.failure: JobFailed | None = None
        """Why the job failed; None while it has not."""

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
        """Starts the threads."""
        self._thread.start()
        on_silence(
            lambda: self.polls, self._silent_secs, self._no_answers, until=self._stop, look=self._causes.look
        )

    def has_gone_on(self, worker: int) -> bool:
        """Whether another worker is known to have passed this worker's position in the script."""
        return self.turns.has_taken_next(worker) or self.has_left(worker)

    def before_leaving(self, act: Callable[[], None]) -> None:
        """Registers a function to call at the end of the script, unless the job failed; last in, first out.

        The other workers have been told by then that this worker left. If they still train, they fail, and
        `check` raises here.
        """
        self._before_leaving.insert(0, act)

    def at_exit(self, act: Callable[[], None]) -> None:
        """Registers a function to call when the process exits, in any case, after those of `before_leaving`.

        It must not wait for another worker.
        """
        self._at_exit.insert(0, act)

    def check(self) -> None:
        """Raises `JobFailed` if the job has failed; call it while waiting for another worker."""
        if self.failure is not None:
            raise self.failure
        if self._blamed_for is not None:
            raise first(self._rank, self._blamed_for)

    def has_left(self, worker: int) -> bool:
        """Whether a worker has reached the end of its script, where it waits for the others.

        Raises:
            JobFailed: The job has failed.
        """
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
        """Sets why the job failed, unless it is known; returns what is known now."""
        with self._one_failure:
            self.failure = self.failure or failure
            return self.failure

    def _report(self) -> None:
        """Writes because of whom this worker exits, once; not if that is the error that its script raised."""
        if self.failure is not None and not self._causes.is_own_error(self.failure) and not self._reported:
            self._reported = True
            sys.stderr.write(f"replicast: {self.failure}\n")

    def _is_because_of_another(self, error: BaseException) -> bool:
        """Whether an error only follows from another worker's failure: its traceback explains nothing."""
        blamed = None if self.failure is None else self.failure.worker
        return follows(error) and (blamed not in (None, self._rank) or self._causes.pause() is not None)

    def _publish_failure(self, failure: JobFailed) -> JobFailed | None:
        """Publishes a failure unless there is one; returns the first one, if the service answers."""
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
            self._keys.put(f"end/{self._rank}", {})
        if not self._interrupted and self.failure is None:
            for act in self._before_leaving:
                act()
        for act in self._at_exit:
            act()
        self.dead_worker = lambda: None  # a worker ends once it knows that all have left
        if self.failure is None:
            self._keys.put(f"left/{self._rank}", {})
        else:
            within(CALL_SECS, lambda: self._keys.put(f"left/{self._rank}", {}))
        self._has_left = True
        if not self._interrupted and (self._rank == 0 or self.failure is None):
            self._wait_for_the_others()
        self._stop.set()
        self._thread.join(timeout=3 * POLL_SECS + 1.0)
        self._exit_on_failure(transfers)

    def _exit_on_failure(self, transfers: int | None) -> None:
        """Ends the process if it trained by itself, or if another worker failed; else it exits normally."""
        if self.failure is None and not self._interrupted and transfers == 0 and self.turns.count == 0:
            sys.stderr.write(
                f"replicast: worker {self._rank} exchanged nothing with the other workers: if it trained, it "
                "trained by itself. Build and compile the model inside 'with strategy.scope():'\n"
            )
            if self._trained_alone():
                self._end_process(1)
        if self.failure is None or self._causes.is_own_error(self.failure):
            return  # as Python does
        self._report()
        sys.stderr.flush()
        sys.stdout.flush()
        self._end_process(self._exit_code(self.failure))

    def _exit_code(self, failure: JobFailed) -> int:
        return 1 if failure.worker == self._rank else PEER_FAILED

    def _wait_for_the_others(self) -> None:
        began = reminded = time.monotonic()
        for worker in (w for w in range(self._size) if w != self._rank):
            while not self._waited_enough(worker, began):
                try:
                    if self._keys.get(f"left/{worker}", 1.0) is not None:
                        break
                except JobFailed as error:
                    self._service_lost(worker, error)
                    return
                if self._rank == 0 and time.monotonic() - reminded >= REMIND_SECS:
                    reminded = time.monotonic()
                    sys.stderr.write(f"replicast: worker 0 waits for worker {worker} to finish\n")

    def _waited_enough(self, worker: int, began: float) -> bool:
        """Whether to wait no longer for another worker, because the job has failed."""
        if self.failure is None:
            return False
        return self._rank != 0 or worker == self.failure.worker or time.monotonic() - began >= GRACE_SECS

    def _service_lost(self, worker: int, error: JobFailed) -> None:
        """Handles the loss of the service while waiting: normal unless this is worker 0, which hosts it.

        Worker 0 exits, and ends the service, when all workers have left.
        """
        if self._rank == 0:
            lost = f"worker {worker} was lost while worker 0 waited for it to finish: {error}"
            self._set_failure(JobFailed(lost, worker=worker))

    def _watch(self) -> None:
        try:
            self._keys.put(f"here/{self._rank}", {})
            while not self._stop.is_set():
                failure = self._poll()
                self.turns.delete_old_keys()
                if failure is not None:
                    self._end(failure)
                    return
                if self._keys.get(f"here/{self._rank}") is not None:
                    self.polls += 1
        except JobFailed as error:
            if self._rank != 0 and self._has_left:  # worker 0 may have exited, and the service with it
                self._stop.set()
            else:
                self._end(self._causes.noticed(str(error), error.worker))
        except Exception as error:
            logger.exception("The thread that watches the job died")
            message = f"worker {self._rank} failed: the thread that watches the job has died ({error!r})"
            self._end(JobFailed(message, worker=self._rank))

    def _poll(self) -> JobFailed | None:
        failed = self._keys.get("failed")
        if failed is None:
            return self._lost_peer() or (
                None if self._has_left else self.turns.mismatch() or self._dead_peer()
            )
        if failed["worker"] == self._rank:
            self._blamed_for = str(failed["message"])
            self._stop.wait(POLL_SECS)
            return None
        return first(failed["worker"], failed["message"])

    def _lost_peer(self) -> JobFailed | None:
        """On worker 0: an error if the service has lost a worker. Transfers notice that, waits do not."""
        lost = self._coordination.find_lost(self._size) if self._rank == 0 else None
        return None if lost is None else self._causes.noticed(lost_text(lost), lost.worker)

    def _dead_peer(self) -> JobFailed | None:
        """An error if the process of a worker of this host has ended without a word.

        A transfer of TensorFlow notices a broken connection at once, one through shared memory has none.
        """
        worker = self.dead_worker()
        if worker is None or self._keys.get("failed") is not None:  # the next poll says why
            return None
        message = self._causes.witnessed(lost_text(Loss(worker, "its process has ended")))
        return JobFailed(message, worker=worker)

    def _no_answers(self) -> None:
        message = (
            f"worker 0, which hosts the coordination service, has not answered worker {self._rank} for "
            f"{self._silent_secs:.0f} s: it is stopped (SIGSTOP), or its host is unreachable"
        )
        self._end(self._causes.pause() or JobFailed(message, worker=0))

    def _end(self, failure: JobFailed) -> None:
        """Makes the training thread raise, and ends the process if it has not exited after `GRACE_SECS`.

        The timer starts first, because the calls to the service that follow may never return.
        """
        if not self._only_once.acquire(blocking=False):
            return
        first = self._set_failure(failure)
        threading.Thread(
            target=self._end_after_grace, args=(first,), name="replicast-end", daemon=True
        ).start()
        self._coordination.abort(str(failure))
        blamed = self._rank if failure.worker is None else failure.worker
        self._keys.put("failed", {"worker": blamed, "message": str(failure)})

    def _end_after_grace(self, failure: JobFailed) -> None:
        if not self._stop.wait(GRACE_SECS):
            sys.stderr.write(f"replicast: {failure}. Worker {self._rank} did not stop by itself\n")
            sys.stderr.flush()
            self._end_process(self._exit_code(failure))
