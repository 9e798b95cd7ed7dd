"""The workers of one attempt on this host: started together, watched, and ended together.

    RUNNING ── a worker fails ──→ SETTLING ── time is up ──→ STOPPING ── time is up ──→ KILLING
       └──────── Ctrl-C, SIGTERM, a signal on another host ─────↗    └── Ctrl-C again ────↗

When one fails, the others notice by themselves and exit with their own message, which is better than that of
a killed process: so they get some time first, how much depends on how the first one ended. Then they are
asked (SIGTERM: they may save), then killed. No stage is without a time limit, and nothing is left running.

A worker leads its own session, so that its whole process tree can be signalled; and the kernel kills it when
the launcher dies (`bootstrap.py`).
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from replicast.config import PEER_FAILED, TOLD_TO_END
from replicast.launcher.failure import GroupEnd, WorkerExit, first_cause, stopping_line, with_details
from replicast.launcher.hosts_link import Peers
from replicast.launcher.interruptions import STOP_SIGNALS, Interruptions
from replicast.launcher.plan import WorkerPlan, bootstrapped
from replicast.launcher.screen import LOG_LEVEL, Output, Screen
from replicast.processes import is_frozen

_POLL_SECS = 1.0  # How often the group looks for frozen workers.
_END_SECS = 10.0
_MAX_DELAY_SECS = 5.0  # A longer delay between two looks means that the launcher itself was stopped.


@dataclass(frozen=True, slots=True)
class EndTimeouts:
    settle_secs: float = 5.0
    settle_killed_secs: float = 1.0
    settle_blamed_secs: float = 15.0
    stop_secs: float = 30.0
    stop_failed_secs: float = 2.0
    stop_killed_secs: float = 0.25
    kill_secs: float = 10.0
    frozen_secs: float = 10.0


class FrozenWorkers:
    """Counts for how long each worker has been frozen. Pure: the caller looks at the processes.

    A group that is stopped as a whole has been paused on purpose and can be continued, so that does not
    count. Nor does a job of one worker, for which nobody waits. Nor does time in which the launcher was
    stopped too: when a suspended job is continued, the launcher may run again before the last worker does.
    """

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._looked: float | None = None

    def update(self, frozen: Collection[int], workers: int, now: float) -> None:
        alone = frozen if len(frozen) < workers else ()
        delay = 0.0 if self._looked is None else now - self._looked
        uncounted = delay if delay > _MAX_DELAY_SECS else 0.0
        since = {rank: begun + uncounted for rank, begun in self._since.items()}
        self._since = {rank: since.get(rank, now) for rank in alone}
        self._looked = now

    def for_at_least(self, secs: float, now: float) -> set[int]:
        return {rank for rank, since in self._since.items() if now - since >= secs}


class WorkerProcess:
    """A running worker.

    Only `close` reaps the process, at the end of the group: until then its pid is not reused, and a signal to
    its tree cannot reach an unrelated process.
    """

    def __init__(self, plan: WorkerPlan, output: Output, environ: Mapping[str, str]) -> None:
        self.plan = plan
        self.output = output
        self.stopped = False
        self.blamed_as_frozen = False  # The group ends because this worker was stopped by a signal.
        self._started = time.monotonic()
        self._process = subprocess.Popen(
            bootstrapped(plan.argv),
            env={**environ, **plan.env},
            stdin=subprocess.DEVNULL,
            stdout=output.writing_end,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output.hand_over()
            self.end_notice = os.pidfd_open(self._process.pid)  # Readable when the process has exited.
        except BaseException:  # For example too many open files. Nobody else knows the process yet.
            self._end(time.monotonic() + _END_SECS)
            raise

    def signal_tree(self, signum: signal.Signals, *, stops: bool = True) -> None:
        self.stopped = self.stopped or stops
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signum)

    def poll(self) -> WorkerExit | None:
        status = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if status is None:
            return None
        return WorkerExit(
            worker=self.plan.rank,
            code=status.si_status if status.si_code == os.CLD_EXITED else -status.si_status,
            ran_secs=time.monotonic() - self._started,
            log=str(self.plan.log),
            stopped=self.stopped,
            frozen=self.blamed_as_frozen,
        )

    def is_frozen(self) -> bool:
        return is_frozen(self._process.pid)

    def close(self, *, until: float) -> None:
        """Kills what is left of the process tree, reaps the worker and reads the rest of its output."""
        self._end(until)
        os.close(self.end_notice)
        self.output.close()

    def _end(self, until: float) -> None:
        self.signal_tree(signal.SIGKILL, stops=False)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=max(0.0, until - time.monotonic()))


class Ending(enum.IntEnum):
    RUNNING = 0  # No failure so far. A worker that exits with code 0 changes nothing.
    SETTLING = 1  # One failed. The others are told and may exit with their own message.
    STOPPING = 2  # The remaining workers were asked to exit.
    KILLING = 3  # The remaining workers were killed.


@dataclass(slots=True)
class Group:
    """The workers of one attempt. Use once; call `run` in the main thread."""

    plans: Sequence[WorkerPlan]
    screen: Screen
    tee: frozenset[int]
    timeouts: EndTimeouts
    interruptions: Interruptions
    peers: Peers | None = None

    _workers: dict[int, WorkerProcess] = field(default_factory=dict, init=False)
    _exits: dict[int, WorkerExit] = field(default_factory=dict, init=False)  # in the order of exit
    _frozen: FrozenWorkers = field(default_factory=FrozenWorkers, init=False)
    _ending: Ending = field(default=Ending.RUNNING, init=False)
    _deadline: float = field(default=math.inf, init=False)  # of the stage
    # The exit code of the worker, here or elsewhere, because of which the group ends.
    _first_code: int | None = field(default=None, init=False)
    _interrupted_by: signal.Signals | None = field(default=None, init=False)
    # The signal, or none, of the order of other hosts by which the group ends; such an order is repeated.
    _ends_for: tuple[int | None] | None = field(default=None, init=False)

    def run(self, environ: Mapping[str, str], started: Callable[[], None] = lambda: None) -> GroupEnd:
        """Runs the workers until all have exited. Has a time limit only after a failure or a signal."""
        with contextlib.closing(selectors.DefaultSelector()) as selector:
            try:
                self._start(selector, environ)
                started()
                while len(self._exits) < len(self.plans) and not self._is_late(Ending.KILLING):
                    self._wait_once(selector)
            finally:
                # All are killed before the first is waited for, so that many take no longer than one.
                for worker in self._workers.values():
                    worker.signal_tree(signal.SIGKILL, stops=False)
                until = time.monotonic() + self.timeouts.kill_secs
                for worker in self._workers.values():
                    worker.close(until=until)
        return GroupEnd(
            exits=tuple(self._detailed(ended) for ended in self._exits.values()),
            interrupted_by=self._interrupted_by,
            left_behind=tuple(rank for rank in self._workers if rank not in self._exits),
        )

    def _start(self, selector: selectors.BaseSelector, environ: Mapping[str, str]) -> None:
        selector.register(self.interruptions, selectors.EVENT_READ, self.interruptions)
        if self.peers is not None:
            selector.register(self.peers, selectors.EVENT_READ, self.peers)
        for plan in self.plans:
            teed = self.screen if plan.rank in self.tee else None
            live = teed is not None and plan.rank == self.screen.live_rank
            columns = self.screen.columns_for_live_worker() if live else None
            chatter = LOG_LEVEL in environ
            output = Output(plan.rank, plan.log, screen=teed, columns=columns, chatter=chatter)
            try:
                worker = WorkerProcess(plan, output, environ)
            except BaseException:
                output.close()
                raise
            self._workers[plan.rank] = worker
            selector.register(worker.end_notice, selectors.EVENT_READ, worker)
            selector.register(output.reading_end, selectors.EVENT_READ, output)

    def _wait_once(self, selector: selectors.BaseSelector) -> None:
        remaining = self._deadline - time.monotonic()
        ready = [key for key, _ in selector.select(max(0.0, min(_POLL_SECS, remaining)))]
        self._take_frozen()
        for key in ready:
            source = key.data
            if isinstance(source, Output):
                source.pump()
                if source.at_end:
                    selector.unregister(key.fileobj)
            elif isinstance(source, WorkerProcess):
                selector.unregister(key.fileobj)
                self._take_exit(source)
            elif source is self.interruptions:
                self._take_signals()
        self._take_end()
        if self._is_late(Ending.SETTLING):
            timeouts, killed = self.timeouts, self._first_code == -signal.SIGKILL
            secs = timeouts.stop_killed_secs if killed else timeouts.stop_failed_secs
            self._enter(Ending.STOPPING, min(secs, timeouts.stop_secs))
        elif self._is_late(Ending.STOPPING):
            self._enter(Ending.KILLING, self.timeouts.kill_secs)

    def _take_exit(self, worker: WorkerProcess) -> None:
        ended = worker.poll()
        if ended is None:
            return
        self._exits[worker.plan.rank] = ended
        if ended.code != 0:
            self._settle(ended.code)
            first = first_cause(self._exits.values())
            if self.peers is not None and first is not None:
                self.peers.tell_failure(self._detailed(first))

    def _detailed(self, ended: WorkerExit) -> WorkerExit:
        worker = self._workers[ended.worker or 0]
        return with_details(ended, worker.plan.log, list(worker.output.tail)) if ended.code else ended

    def _take_end(self) -> None:
        """Other hosts have failed or were told to stop: the group ends as it would because of one here."""
        end = None if self.peers is None else self.peers.to_end()
        if self.peers is None or end is None or self._ends_for == (end.signal,):
            return
        self._ends_for = (end.signal,)
        if end.signal is not None:
            if self._interrupted_by is None:
                self._stop_because_of(end.signal, self.peers.hosts.on(end.stopped_on))
            return
        for worker in self._rest():
            worker.blamed_as_frozen = worker.blamed_as_frozen or worker.is_frozen()
        # After the loss of a host, the others wait in vain as after that of a killed worker.
        failed = end.failure
        is_of_worker = failed is not None and failed.worker is not None
        self._settle(failed.code if failed and is_of_worker else -signal.SIGKILL)

    def _take_signals(self) -> None:
        for signum in self.interruptions.take():
            if signum not in STOP_SIGNALS:
                for worker in self._workers.values():
                    worker.output.resize(self.screen.columns_for_live_worker())
            elif self._interrupted_by is None:
                self._interrupted_by = signum
                if self.peers is not None:
                    self.peers.tell_signal(signum)
                self._stop_because_of(signum)
            elif signum is signal.SIGINT:
                self._enter(Ending.KILLING, self.timeouts.kill_secs)

    def _stop_because_of(self, signum: int, where: str = "") -> None:
        """Asks the workers to save and exit, also after Ctrl-C."""
        if self._ending < Ending.STOPPING:
            self.screen.tell(stopping_line(signum, self.timeouts.stop_secs, where))
            self._enter(Ending.STOPPING, self.timeouts.stop_secs)

    def _take_frozen(self) -> None:
        """Kills workers that have been frozen for too long: the others wait for them in vain."""
        rest = self._rest()
        frozen = [worker.plan.rank for worker in rest if worker.is_frozen()]
        self._frozen.update(frozen, len(self.plans), time.monotonic())
        if self._ending > Ending.SETTLING:
            return
        self._blame_frozen(self.timeouts.frozen_secs)
        for worker in rest:
            if worker.blamed_as_frozen:
                worker.signal_tree(signal.SIGKILL)

    def _blame_frozen(self, at_least_secs: float) -> None:
        """The group ends because of the workers that have been frozen for this long."""
        long = self._frozen.for_at_least(at_least_secs, time.monotonic())
        for worker in self._rest():
            worker.blamed_as_frozen = worker.blamed_as_frozen or worker.plan.rank in long

    def _rest(self) -> list[WorkerProcess]:
        return [worker for rank, worker in self._workers.items() if rank not in self._exits]

    def _settle(self, code: int) -> None:
        """A worker has exited with this code: the others may take some time to exit by themselves."""
        if self._ending > Ending.SETTLING:
            return
        if self._first_code is None:
            self._first_code = code
        # If the others already know, their time does not start again.
        self._enter(Ending.SETTLING, min(self._settle_secs(code), self._deadline - time.monotonic()))

    def _settle_secs(self, code: int) -> float:
        timeouts = self.timeouts
        # A heartbeat is missed after half of the timeout: what another worker fails of before is its own.
        self._blame_frozen(0.0 if code == PEER_FAILED else timeouts.frozen_secs / 2)
        if all(worker.is_frozen() for worker in self._rest()):  # None of them will exit by itself.
            return timeouts.settle_killed_secs
        if code == PEER_FAILED:
            return timeouts.settle_blamed_secs
        if code == TOLD_TO_END:  # The others are exiting too; one may still write the checkpoint.
            return max(timeouts.settle_secs, timeouts.stop_secs)
        if code == -signal.SIGKILL:
            return 0.0
        return timeouts.settle_killed_secs if code < 0 else timeouts.settle_secs

    def _enter(self, stage: Ending, at_most_secs: float) -> None:
        self._ending, self._deadline = stage, time.monotonic() + at_most_secs
        if stage > Ending.SETTLING:
            for worker in self._rest():
                worker.signal_tree(signal.SIGTERM if stage is Ending.STOPPING else signal.SIGKILL)

    def _is_late(self, stage: Ending) -> bool:
        return self._ending is stage and time.monotonic() >= self._deadline
