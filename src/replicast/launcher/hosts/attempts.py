"""The attempts of a job on several hosts, as the launcher of one of them sees them."""

from __future__ import annotations

import selectors
import signal
from dataclasses import replace
from typing import TypeVar

from replicast.config import PEER_FAILED
from replicast.errors import ClusterError, LaunchRefused
from replicast.launcher.attempts import Begin, Verdict, nothing_ran
from replicast.launcher.group import GroupEnd, Peers
from replicast.launcher.hosts.events import Broken, Event, NotWelcome, Tell
from replicast.launcher.hosts.link import Link
from replicast.launcher.hosts.member import End, Over, Restart, Start, Waiting
from replicast.launcher.hosts.messages import MAX_COLUMNS, MAX_LINES, Failure, Order, Phase, Told
from replicast.launcher.interruptions import STOP_SIGNALS, Interruptions
from replicast.launcher.plan import Job
from replicast.launcher.screen import Screen
from replicast.launcher.states import exception_of, last_lines
from replicast.launcher.worker import WorkerExit
from replicast.paths import below

_POLL_SECS = 1.0
_Awaited = TypeVar("_Awaited", Start, Restart, Told)


class HostsAttempts:
    """Decides together with the launchers of the other hosts. Only in the main thread.

    Also what a group sees of them (`Peers`).
    """

    def __init__(self, link: Link, job: Job, screen: Screen, interruptions: Interruptions) -> None:
        self.peers: Peers | None = self
        self._link, self._job, self._screen, self._interruptions = link, job, screen, interruptions
        first = "" if job.endpoint is None else job.endpoint[0]
        # The addresses of the others are known when all have come.
        self._names = job.hosts or (first, *(f"host {node}" for node in range(1, job.nodes)))
        self._events: list[Event] = []
        self._stopped_by: signal.Signals | None = None

    def ask_run_name(self) -> str | Verdict:
        """Waits until the first launcher has told the name of the run directory, at most the time to join."""
        found = self._wait_for(Told)
        if isinstance(found, Over):
            return self._verdict(nothing_ran(), found.order)
        came = [one for one in self._interruptions.take() if one in STOP_SIGNALS]
        stopped_by = next(iter(came), self._stopped_by)  # At the same time: nobody will see it later.
        if stopped_by is not None:
            return self._verdict(nothing_ran(), self._interrupted(stopped_by))
        return found.run_name

    def begin(self) -> Begin | Verdict:
        """Waits until all hosts are ready, at most the time to join."""
        found = self._wait_for(Start)
        order = found.order
        if isinstance(found, Over):
            return self._verdict(nothing_ran(), order)
        if not self._job.hosts:
            self._names = order.hosts
        return Begin(order.attempt, order.restarts, order.restarts >= order.max_restarts, order.hosts)

    def decide(self, end: GroupEnd) -> Verdict:
        """Waits until the workers of all hosts have exited."""
        failure = None if end.first_failure is None else self._failure(end.first_failure)
        left = bool(end.left_behind)
        self._link.post(lambda member, now: member.on_group_end(failure, now, left_behind=left))
        return self._verdict(end, self._wait_for(Restart).order)

    def fileno(self) -> int:
        """A descriptor that is readable when something came from the others."""
        return self._link.fileno()

    def take_ends(self) -> list[End]:
        """Why the group of this host must end, if it must."""
        ends = []
        for event in self._link.take():
            if isinstance(event, End):
                ends += [] if self._is_known(event) else [event]
            elif isinstance(event, Broken | NotWelcome):
                ends.append(End(Failure(host=self._job.node_rank)))
                self._events.append(event)
            elif not self._tell(event):
                self._events.append(event)
        return ends

    def _is_known(self, end: End) -> bool:
        """Whether the group of this host ends already, because one of its own workers failed."""
        failure = end.failure
        if failure is None or failure.worker is None or end.stopped_by is not None:
            return False
        return failure.host == self._job.node_rank

    def tell_failure(self, failure: WorkerExit) -> None:
        """A worker of this host has failed."""
        told = self._failure(failure)
        self._link.post(lambda member, _: member.on_failure(told))

    def tell_signal(self, signum: signal.Signals) -> None:
        """This launcher was told to stop."""
        self._stopped_by = signum
        self._link.post(lambda member, _: member.on_signal(signum))

    def _wait_for(self, kind: type[_Awaited]) -> _Awaited | Over:
        """Waits for an event or the end of the job; a second Ctrl-C does not wait."""
        with selectors.PollSelector() as selector:
            selector.register(self._link, selectors.EVENT_READ)
            selector.register(self._interruptions, selectors.EVENT_READ)
            while True:
                while self._events:
                    event = self._events.pop(0)
                    if isinstance(event, (kind, Over)):
                        self._link.put_back(self._events)  # An `End`, for the group that is started now.
                        self._events = []
                        return event
                    self._tell(event)
                selector.select(_POLL_SECS)
                self._events += self._link.take()
                for signum in self._interruptions.take():
                    if signum is signal.SIGINT and self._stopped_by is not None:
                        return Over(self._interrupted(signum), alone=True)
                    if signum in STOP_SIGNALS:
                        self.tell_signal(signum)

    def _interrupted(self, signum: signal.Signals) -> Order:
        return Order(
            session="",
            phase=Phase.OVER,
            attempt=0,
            restarts=0,
            max_restarts=0,
            hosts=self._names,
            signal=signum,
            stopped_on=self._job.node_rank,
            code=128 + signum,
        )

    def _tell(self, event: Event) -> bool:
        """Shows what is meant for people only; returns whether it was."""
        if isinstance(event, Broken):
            raise ClusterError(f"The connection between the launchers has failed ({event.error!r})")
        if isinstance(event, NotWelcome):
            same = "--hosts in the same order" if self._job.hosts else "another --node-rank on each"
            raise LaunchRefused(
                f"{event.by} has refused this one: {event.why}",
                remedy=f"Start the same command on all hosts, with {same}",
            )
        if isinstance(event, Tell):
            self._screen.tell(f"replicast: {event.text}")
        elif isinstance(event, Waiting):
            self._screen.tell(f"replicast: {self._waiting(event)}")
        else:
            return False
        return True

    def _waiting(self, event: Waiting) -> str:
        if not event.missing:
            return f"waiting for the workers of the other hosts to exit, {event.secs:.0f} s so far"
        missing = ", ".join(self._names[node] for node in event.missing)
        whom = f"the launcher{'s' if len(event.missing) > 1 else ''} of {missing}"
        why = f" ({event.why})" if event.why else ""
        return f"waiting for {whom}, {event.secs:.0f} s of at most {event.at_most_secs:g} s{why}"

    def _verdict(self, end: GroupEnd, order: Order) -> Verdict:
        is_over = order.phase is Phase.OVER
        interrupted = end.interrupted_by
        if interrupted is None and order.signal is not None:
            interrupted = signal.Signals(order.signal)
        elsewhere = order.signal is not None and order.stopped_on != self._job.node_rank
        return Verdict(
            replace(end, first_failure=self._exit(end, order.failure), interrupted_by=interrupted),
            order.code if is_over else None,
            order.attempt,
            order.restarts,
            order.max_restarts,
            stopped_on=self._names[order.stopped_on] if elsewhere else "",
            unreached=tuple(self._names[node] for node in order.unreached),
        )

    def _failure(self, ended: WorkerExit) -> Failure:
        lines = (
            ended.tail if ended.code == PEER_FAILED else last_lines(ended)
        )  # The tail names the other one.
        return Failure(
            host=self._job.node_rank,
            worker=ended.rank,
            code=ended.code,
            frozen=ended.frozen,
            ran_secs=ended.ran_secs,
            log=str(ended.log),
            why=exception_of(ended)[:MAX_COLUMNS],
            lines=tuple(line[:MAX_COLUMNS] for line in lines[-MAX_LINES:]),
            reported_by=self._job.node_rank,
        )

    def _exit(self, end: GroupEnd, failure: Failure | None) -> WorkerExit | None:
        """The first failure of all hosts, in the words of this one."""
        if failure is None:
            return end.first_failure
        is_here = failure.host == self._job.node_rank
        if is_here and failure.worker is not None:
            return next((one for one in end.exits if one.rank == failure.worker), end.first_failure)
        rank = failure.host * self._job.workers if failure.worker is None else failure.worker
        reporter = failure.reported_by != self._job.node_rank
        return WorkerExit(
            rank=rank,
            code=failure.code,
            ran_secs=failure.ran_secs,
            log=below(failure.log),
            tail=failure.lines,
            frozen=failure.frozen,
            host=self._names[failure.host],
            reason=failure.why,
            lost=failure.why if failure.worker is None else "",
            said_by=self._names[failure.reported_by] if reporter else "",
        )
