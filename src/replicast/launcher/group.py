"""All local workers of one attempt: started, watched and ended together.

    RUNNING ── a worker fails ──→ SETTLING ── settle_secs ──→ STOPPING ── stop_secs ──→ KILLING
       └────────── Ctrl-C, SIGTERM ──────────────────────────────↑    second Ctrl-C ───────↑

Every stage ends when the last worker has exited. A worker that is stopped by a signal (SIGSTOP) while others
run is killed after `frozen_secs`, which is a failure like any other.
"""

from __future__ import annotations

import contextlib
import enum
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from replicast.config import PEER_FAILED, TOLD_TO_END
from replicast.launcher.chatter import wants_chatter
from replicast.launcher.frozen import FrozenWorkers
from replicast.launcher.hosts.member import End
from replicast.launcher.interruptions import STOP_SIGNALS, Interruptions
from replicast.launcher.output import Output
from replicast.launcher.plan import WorkerPlan
from replicast.launcher.screen import Screen
from replicast.launcher.standby import StandbySet
from replicast.launcher.worker import Worker, WorkerExit

_POLL_SECS = 1.0
"""How often the group looks for frozen workers."""


class Ending(enum.IntEnum):
    """How a group is being ended."""

    RUNNING = 0  # No failure so far. A worker that exits with code 0 changes nothing.
    SETTLING = 1  # One failed. The others are told and may exit with their own message.
    STOPPING = 2  # The remaining workers were asked to exit.
    KILLING = 3  # The remaining workers were killed.


@dataclass(frozen=True, slots=True)
class EndTimeouts:
    """The time limit of each stage."""

    settle_secs: float = 5.0
    settle_killed_secs: float = 1.0
    settle_blamed_secs: float = 15.0
    stop_secs: float = 30.0
    stop_failed_secs: float = 2.0
    stop_killed_secs: float = 0.25
    kill_secs: float = 10.0
    frozen_secs: float = 10.0


@dataclass(frozen=True, slots=True)
class GroupEnd:
    """How a group ended."""

    exits: tuple[WorkerExit, ...]
    first_failure: WorkerExit | None
    interrupted_by: signal.Signals | None
    left_behind: tuple[int, ...] = ()


def first_failure(exits: Sequence[WorkerExit]) -> WorkerExit | None:
    """The worker to report: a frozen one, the first that failed by itself, or the first that failed."""
    frozen = [ended for ended in exits if ended.frozen]
    failed = [ended for ended in exits if ended.code != 0 and not ended.stopped]
    by_itself = [ended for ended in failed if ended.code != PEER_FAILED]
    return next(iter(frozen or by_itself or failed), None)


class Peers(Protocol):
    """The launchers of the other hosts, as the group of this host sees them."""

    def fileno(self) -> int:
        """A descriptor that is readable when something came from them."""

    def take_ends(self) -> list[End]:
        """Why this group must end, if it must. Does not block."""

    def tell_failure(self, failure: WorkerExit) -> None:
        """A worker of this host has failed."""

    def tell_signal(self, signum: signal.Signals) -> None:
        """This launcher was told to stop."""


def stopping_line(signum: signal.Signals, secs: float, host: str = "") -> str:
    """One line: what the first Ctrl-C or SIGTERM does, and on which other host it came."""
    if host:
        return (
            f"replicast: {_name(signum)} on {host}: the workers save a checkpoint and exit, within {secs:g} s"
        )
    again = "; Ctrl-C again ends them at once" if signum is signal.SIGINT else ""
    return f"replicast: {_name(signum)}: the workers save a checkpoint and exit, within {secs:g} s{again}"


def _name(signum: signal.Signals) -> str:
    return "Ctrl-C" if signum is signal.SIGINT else signum.name


class Group:
    """The workers of one attempt. Use once; call `run` in the main thread."""

    def __init__(
        self,
        plans: Sequence[WorkerPlan],
        *,
        screen: Screen,
        tee: frozenset[int],
        timeouts: EndTimeouts,
        interruptions: Interruptions,
        standbys: StandbySet | None = None,
        peers: Peers | None = None,
    ) -> None:
        self._plans = plans
        self._screen = screen
        self._tee = tee
        self._timeouts = timeouts
        self._interruptions = interruptions
        self._standbys = standbys
        self._peers = peers
        self._first_code: int | None = None
        """The exit code of the worker, here or elsewhere, because of which the group ends."""
        self._workers: list[Worker] = []
        self._exits: dict[int, WorkerExit] = {}
        self._frozen = FrozenWorkers()
        self._ending = Ending.RUNNING
        self._deadline: float | None = None
        self._interrupted_by: signal.Signals | None = None

    def run(self, environ: Mapping[str, str], started: Callable[[], None] = lambda: None) -> GroupEnd:
        """Runs the workers until all have exited. Has a time limit only after a failure or a signal."""
        with contextlib.closing(selectors.DefaultSelector()) as selector:
            try:
                self._start(selector, environ)
                started()
                while len(self._exits) < len(self._plans) and not self._gave_up():
                    self._wait_once(selector)
            finally:
                self._close()
        return self._end()

    def _start(self, selector: selectors.BaseSelector, environ: Mapping[str, str]) -> None:
        selector.register(self._interruptions, selectors.EVENT_READ)
        if self._peers is not None:
            selector.register(self._peers, selectors.EVENT_READ, self._peers)
        for plan in self._plans:
            teed = self._screen if plan.rank in self._tee else None
            live = teed is not None and plan.rank == self._screen.live_rank
            columns = self._screen.columns_for_live_worker() if live else None
            chatter = wants_chatter(environ)
            output = Output(plan.rank, plan.log, screen=teed, columns=columns, chatter=chatter)
            try:
                worker = Worker(plan, output, environ, self._standbys)
            except BaseException:
                output.close()
                raise
            self._workers.append(worker)
            selector.register(worker.end_notice, selectors.EVENT_READ, worker)
            selector.register(output.reading_end, selectors.EVENT_READ, output)

    def _wait_once(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        remaining = _POLL_SECS if self._deadline is None else min(_POLL_SECS, self._deadline - now)
        ready = [key for key, _ in selector.select(max(0.0, remaining))]
        self._take_frozen()
        if self._standbys is not None and self._ending is Ending.RUNNING:
            self._standbys.poll()
        for key in ready:
            source = key.data
            if isinstance(source, Output):
                source.pump()
                if source.at_end:
                    selector.unregister(key.fileobj)
            elif isinstance(source, Worker):
                selector.unregister(key.fileobj)
                self._take_exit(source)
            elif source is not None:
                self._take_ends()
            else:
                self._take_signals()
        if self._deadline is not None and time.monotonic() >= self._deadline:
            self._next_stage()

    def _take_exit(self, worker: Worker) -> None:
        ended = worker.poll()
        if ended is None:
            return
        self._exits[ended.rank] = ended
        if ended.code != 0:
            self._settle(ended.code)
            first = first_failure(tuple(self._exits.values()))
            if self._peers is not None and first is not None:
                self._peers.tell_failure(first)

    def _take_ends(self) -> None:
        """Other hosts have failed or were told to stop: the group ends as it would because of one here."""
        for end in self._peers.take_ends() if self._peers is not None else ():
            if end.stopped_by is not None:
                if self._interrupted_by is None and self._ending < Ending.STOPPING:
                    secs = self._timeouts.stop_secs
                    self._screen.tell(stopping_line(end.stopped_by, secs, end.stopped_where))
                    self._stop(signal.SIGTERM, secs)
            else:
                for worker in self._rest():
                    worker.blamed_as_frozen = worker.blamed_as_frozen or worker.is_frozen()
                is_of_worker = end.failure is not None and end.failure.worker is not None
                # After the loss of a host, the others wait in vain as after that of a killed worker.
                self._settle(end.failure.code if end.failure and is_of_worker else -signal.SIGKILL)

    def _settle(self, code: int) -> None:
        """A worker has exited with this code: the others may take some time to exit by themselves."""
        if self._ending > Ending.SETTLING:
            return
        if self._first_code is None:
            self._first_code = code
        secs = self._settle_secs(code)
        if self._deadline is not None:  # The others already know: their time does not start again.
            secs = min(secs, self._deadline - time.monotonic())
        self._enter(Ending.SETTLING, secs)

    def _rest(self) -> list[Worker]:
        return [worker for worker in self._workers if worker.plan.rank not in self._exits]

    def _take_frozen(self) -> None:
        """Kills workers that have been frozen for too long: the others wait for them in vain."""
        rest = self._rest()
        frozen = [worker.plan.rank for worker in rest if worker.is_frozen()]
        self._frozen.update(frozen, len(self._plans), time.monotonic())
        if self._ending > Ending.SETTLING:
            return
        self._blame_frozen(self._timeouts.frozen_secs)
        for worker in rest:
            if worker.blamed_as_frozen:
                worker.signal_tree(signal.SIGKILL)

    def _blame_frozen(self, at_least_secs: float) -> None:
        """The group ends because of the workers that have been frozen for this long."""
        long = self._frozen.for_at_least(at_least_secs, time.monotonic())
        for worker in self._rest():
            worker.blamed_as_frozen = worker.blamed_as_frozen or worker.plan.rank in long

    def _settle_secs(self, code: int) -> float:
        timeouts = self._timeouts
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

    def _take_signals(self) -> None:
        for signum in self._interruptions.take():
            if signum not in STOP_SIGNALS:
                self._resize()
            elif self._interrupted_by is None:
                self._interrupted_by = signum
                if self._peers is not None:
                    self._peers.tell_signal(signum)
                if self._ending < Ending.STOPPING:
                    self._screen.tell(stopping_line(signum, self._timeouts.stop_secs))
                    self._stop(signal.SIGTERM, self._timeouts.stop_secs)  # also after Ctrl-C: they save
            elif signum is signal.SIGINT:
                self._kill()

    def _next_stage(self) -> None:
        if self._ending is Ending.SETTLING:
            self._stop(signal.SIGTERM, min(self._stop_failed_secs(), self._timeouts.stop_secs))
        elif self._ending is Ending.STOPPING:
            self._kill()

    def _stop_failed_secs(self) -> float:
        killed = self._first_code == -signal.SIGKILL
        return self._timeouts.stop_killed_secs if killed else self._timeouts.stop_failed_secs

    def _stop(self, signum: signal.Signals, within_secs: float) -> None:
        self._enter(Ending.STOPPING, within_secs)
        self._signal_the_rest(signum)

    def _kill(self) -> None:
        self._enter(Ending.KILLING, self._timeouts.kill_secs)
        self._signal_the_rest(signal.SIGKILL)

    def _enter(self, stage: Ending, at_most_secs: float) -> None:
        self._ending = stage
        self._deadline = time.monotonic() + at_most_secs

    def _gave_up(self) -> bool:
        return (
            self._ending is Ending.KILLING
            and self._deadline is not None
            and time.monotonic() >= self._deadline
        )

    def _signal_the_rest(self, signum: signal.Signals) -> None:
        for worker in self._rest():
            worker.signal_tree(signum)

    def _resize(self) -> None:
        for worker in self._workers:
            worker.output.resize(self._screen.columns_for_live_worker())

    def _close(self) -> None:
        """Kills all workers before waiting for the first, so that many take no longer than one."""
        for worker in self._workers:
            worker.kill()
        until = time.monotonic() + self._timeouts.kill_secs
        for worker in self._workers:
            worker.close(until=until)

    def _end(self) -> GroupEnd:
        tails = {worker.plan.rank: tuple(worker.output.tail) for worker in self._workers}
        exits = {rank: replace(ended, tail=tails[rank]) for rank, ended in self._exits.items()}
        return GroupEnd(
            exits=tuple(exits.values()),
            first_failure=first_failure(tuple(exits.values())),
            interrupted_by=self._interrupted_by,
            left_behind=tuple(rank for rank in tails if rank not in exits),
        )
