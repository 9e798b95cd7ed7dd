"""The launchers of one job on several hosts: what they tell each other, and what each of them decides. Pure.

    launcher of host 1 ─┐  reports: what runs here, what has failed here
    launcher of host 2 ─┼─────────────────────────────────────────────→  launcher of host 0, with the `Leader`
    launcher of host 3 ─┘  ←─────────────────────────────────────────────
                              orders: wait, run attempt K, end it, the job is over

A report and an order hold the whole state of their side, and are sent again every second: a lost connection
needs no repetition, and silence is noticed. The first launcher has a `Leader`, and every launcher, the first
one included, a `Member`, so that all hosts act alike. What holds, whatever is lost, cut or started again:

- No two attempts run at the same time: the leader starts one when every host has said that nothing runs
  there, and a member that loses the leader ends its workers by itself.
- No attempt starts twice on a host: its number is one of which no host has logs.
- A launcher that was started again has another session, and does not pass for the one before it.

There are no clocks, sockets, threads or files in this module: the caller has the time. `hosts_link.py` has
the sockets; tests/unit/launchers.py runs these machines in virtual time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from replicast.config import PEER_FAILED
from replicast.launcher.failure import (
    MAX_LINES,
    Index,
    LaunchOrder,
    Phase,
    StopSignal,
    WorkerExit,
    first_cause,
    order_after,
)

_MAX_SENT_COLUMNS = 400
_IN_USE_SECS = 5.0  # A launcher that was heard within this time lives: another one of its host is refused.


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTimeouts:
    join_secs: float = 600.0
    beat_secs: float = 1.0
    silent_secs: float = 30.0
    reconnect_secs: float = 2.0
    redial_secs: float = 5.0
    leave_secs: float = 5.0


# --- Messages --------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The first message of a launcher to the first one. One of another version can be read too."""

    node: int
    session: str
    address: str
    identity: dict[str, str]  # What must be the same on all hosts, by the words for it.


class Report(msgspec.Struct, frozen=True, kw_only=True, tag="report"):
    next_attempt: Index
    attempt: Index | None = None
    restarts: Index = 0
    running: bool = False
    failure: WorkerExit | None = None
    signal: StopSignal | None = None
    left_behind: bool = False


class RefusedHost(msgspec.Struct, frozen=True, kw_only=True, tag="refused"):
    """The first launcher's answer to one that does not belong to the job."""

    why: str


Message = Hello | Report | LaunchOrder | RefusedHost


def sent_from(host: int, failure: WorkerExit) -> WorkerExit:
    """A failure as it goes to the other hosts: short enough for a message, whatever its lines hold."""
    lines = tuple(line[:_MAX_SENT_COLUMNS] for line in failure.lines[-MAX_LINES:])
    return replace(failure, host=host, reported_by=host, lines=lines)


def difference(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """The first thing in which two launchers differ; empty if they belong together."""
    for what, mine in ours.items():
        other = theirs.get(what, "")
        if mine != other:
            shown = f"{mine[:200] or 'none'} on the first host, {other[:200] or 'none'} on the other"
            return f"a different {what}: {shown}"
    return ""


# --- Whether the other side is there ---------------------------------------------------------------------


class Presence:
    """When the other side was last heard from, and whether it counts as lost."""

    def __init__(self, timeouts: HostTimeouts) -> None:
        self._timeouts = timeouts
        self._closed_at: float | None = None
        self.connected = False
        self.heard_at: float | None = None

    def hear(self, now: float) -> None:
        self.connected, self.heard_at, self._closed_at = True, now, None

    def close(self, now: float) -> None:
        self.connected = False
        if self._closed_at is None:
            self._closed_at = now

    def why_lost(self, now: float, *, is_stopping: bool = False) -> str:
        """What happened if the other side counts as lost; empty if it does not."""
        if self.heard_at is None:
            return "it has not joined"
        at_most_secs = self._timeouts.leave_secs if is_stopping else self._timeouts.silent_secs
        silent_secs = now - self.heard_at
        if silent_secs >= at_most_secs:
            return f"no message from it for {silent_secs:.0f} s"
        if self._closed_at is not None and now - self._closed_at >= self._timeouts.reconnect_secs:
            return "its connection was closed: its process or machine has ended"
        return ""


# --- The first launcher ----------------------------------------------------------------------------------


class _Host(Presence):
    def __init__(self, timeouts: HostTimeouts) -> None:
        super().__init__(timeouts)
        self.session = ""
        self.address = ""
        self.report: Report | None = None

    def has_ended(self, attempt: int) -> bool:
        return self.report is not None and self.report.attempt == attempt and not self.report.running

    def is_ready(self, now: float) -> bool:
        return self.report is not None and not self.report.running and not self.why_lost(now)


class Leader:
    """The first launcher's decisions for all hosts: when to start, when to end, when the job is over.

        WAIT ── every host is there and runs nothing ──→ RUN ── every worker exited with 0 ──→ OVER
         ↑ └── join_secs: the missing host is named ──→ OVER ←── no restart left, or stopped ──┐
         │                                           a worker fails, a host is lost, a signal  │
         └───────── a restart is left ──── END: all hosts end their workers ←── RUN ───────────┘

    The whole decision is `order`, which every launcher receives again and again, the one here included.
    """

    def __init__(
        self,
        hosts: Sequence[str],
        session: str,
        max_restarts: int,
        timeouts: HostTimeouts,
        now: float,
        run_name: str = "",
    ) -> None:
        self._timeouts = timeouts
        self._hosts = [_Host(timeouts) for _ in hosts]
        self._names = tuple(hosts)
        self._failures: dict[int, WorkerExit] = {}  # by host, in the order in which they were reported
        self._missing_since = dict.fromkeys(range(len(hosts)), now)
        self.refused = ""  # that a launcher was refused: perhaps the one that is waited for
        self._has_run = False
        self._failed_before: WorkerExit | None = None  # of the attempt before
        self.order = LaunchOrder(
            session=session,
            phase=Phase.WAIT,
            max_restarts=max_restarts,
            hosts=self._names,
            missing=tuple(range(len(hosts))),
            run_name=run_name,
        )

    def refusal(self, node: int, session: str, now: float) -> str:
        if not 0 <= node < len(self._hosts):
            return f"--node-rank must be from 0 to {len(self._hosts) - 1}. Received: {node}"
        host = self._hosts[node]
        if not host.connected or host.session == session:
            return ""
        if host.heard_at is None or now - host.heard_at >= _IN_USE_SECS:
            return ""
        return f"a launcher with --node-rank {node} is already connected, from {host.address or 'this host'}"

    def has_joined(self, node: int, session: str) -> bool:
        return 0 <= node < len(self._hosts) and self._hosts[node].session == session

    def on_joined(self, node: int, session: str, address: str, now: float) -> None:
        """A launcher has connected, for the first time or again. Call `refusal` before."""
        host = self._hosts[node]
        if host.session not in ("", session):
            self._lose(node, "its launcher was restarted")
            host.report = None
        host.session, host.address = session, address
        host.hear(now)
        self._advance(now)  # What it hears first must not be to run the attempt that has just failed.

    def on_report(self, node: int, report: Report, now: float) -> None:
        host = self._hosts[node]
        host.hear(now)
        host.report = report
        failure = report.failure if report.attempt == self.order.attempt else None
        if failure is not None and self._is_under_way():
            known = self._failures.get(node)
            if known is not None and (known.worker, known.code) != (failure.worker, failure.code):
                del self._failures[node]  # Another worker: later than what is known of other hosts.
            self._failures[node] = failure
        self._advance(now)

    def on_closed(self, node: int, session: str, now: float) -> None:
        if self._hosts[node].session == session:
            self._hosts[node].close(now)

    def on_time(self, now: float) -> None:
        """Some time has passed. Call it at least once a second."""
        for node, host in enumerate(self._hosts):
            why = host.why_lost(now, is_stopping=self.order.signal is not None)
            if why and not host.has_ended(self.order.attempt):
                self._lose(node, why)
        self._advance(now)

    def _is_under_way(self) -> bool:
        return self.order.phase in (Phase.RUN, Phase.END)

    def _lose(self, node: int, why: str) -> None:
        """A host will not end this attempt: its workers are taken for dead."""
        if not self._is_under_way() or self._hosts[node].report is None:
            return
        known = self._failures.get(node)
        # A worker that failed by itself stays the reason; what became of its host then follows from it.
        if known is None or known.code == PEER_FAILED:
            self._failures[node] = WorkerExit(host=node, why=why)
        self._hosts[node].report = None

    def _reports(self) -> dict[int, Report]:
        return {node: host.report for node, host in enumerate(self._hosts) if host.report is not None}

    def _advance(self, now: float) -> None:
        """Goes on to the next phase, and to the one after it, as far as everything is there."""
        for node, report in self._reports().items():
            if self.order.signal is None and report.signal is not None:
                self.order = replace(self.order, signal=report.signal, stopped_on=node)
        if self.order.phase is Phase.RUN:
            if self.order.signal is not None or self._failures:
                self.order = replace(self.order, phase=Phase.END)
            elif all(host.has_ended(self.order.attempt) for host in self._hosts):
                # Without the failure of the attempt before.
                self.order = order_after(self.order, None, None, left_behind=self._left_behind())
        if self.order.phase is Phase.END:
            self.order = order = replace(self.order, failure=first_cause(self._failures.values()))
            if all(self._hosts[node].has_ended(order.attempt) for node in self._reports()):
                left = self._left_behind() or order.failure is None
                before = replace(order, failure=self._failed_before)
                self.order = order_after(before, order.failure, order.signal, left_behind=left)
        if self.order.phase is Phase.WAIT:
            self._wait(now)

    def _wait(self, now: float) -> None:
        if self.order.signal is not None:  # All have reported the failure before it.
            self.order = order_after(self.order, None, self.order.signal, left_behind=False)
            return
        missing = tuple(node for node, host in enumerate(self._hosts) if not host.is_ready(now))
        self.order = replace(self.order, missing=missing)
        self._missing_since = {node: self._missing_since.get(node, now) for node in missing}
        late = [node for node in missing if now - self._missing_since[node] >= self._timeouts.join_secs]
        if not missing:
            self._start()
        elif late:
            why = f"it did not join within {self._timeouts.join_secs:g} s"
            same = "the same --hosts in the same order" if self._names[late[0]] else f"--node-rank {late[0]}"
            hint = self.refused or f"Was the command started there, with {same} and the same secret?"
            self._fail(late[0], f"{why}. {hint}")

    def _start(self) -> None:
        reports, order = self._reports().values(), self.order
        if not self._has_run:  # This process may be the second one of a job whose first launcher was killed.
            restarts = (report.restarts + 1 for report in reports if report.attempt is not None)
            order = replace(order, restarts=max(restarts, default=0))
            if order.restarts > order.max_restarts:
                self._fail(0, "its launcher ended")
                return
        attempt = max(order.attempt, *(report.next_attempt for report in reports))
        addresses = tuple(name or host.address for name, host in zip(self._names, self._hosts, strict=True))
        self._has_run = True
        self._failures, self.refused, self._failed_before = {}, "", order.failure
        self.order = replace(order, phase=Phase.RUN, attempt=attempt, hosts=addresses)

    def _left_behind(self) -> bool:
        return any(report.left_behind for report in self._reports().values())

    def _fail(self, node: int, why: str) -> None:
        failure = WorkerExit(host=node, why=why)
        self.order = replace(self.order, phase=Phase.OVER, code=failure.code, failure=failure)


# --- Every launcher --------------------------------------------------------------------------------------


class Member:
    """One launcher's part in the job: what it does by the last order, and without any.

    The launcher asks, again and again, as its own work goes on: `to_start` while nothing runs, `to_end` while
    its workers run, `after` when they have exited. So no order can be missed: only the last one counts.
    """

    def __init__(self, node: int, max_restarts: int, timeouts: HostTimeouts, now: float) -> None:
        self._node = node
        self._timeouts = timeouts
        self._presence = Presence(timeouts)
        self._lost_since: float | None = now  # It has not come yet.
        self.unreachable = ""  # why the first launcher could not be reached, or does not belong to this job
        self._gave_up: WorkerExit | None = None  # the first host, because of which the workers here must end
        self.order = LaunchOrder(phase=Phase.WAIT, max_restarts=max_restarts)
        self._began = self.order  # the order with which the last attempt began here
        self.report = Report(next_attempt=0)
        # One that does not know its run directory yet, nor which attempts are in it, reports nothing.
        self.is_ready = False

    def on_ready(self, next_attempt: int) -> None:
        self.report, self.is_ready = replace(self.report, next_attempt=next_attempt), True

    def on_order(self, order: LaunchOrder, now: float) -> None:
        self._presence.hear(now)
        self.unreachable, self._lost_since = "", None
        self.order = order
        if self.report.running and order.session != self._began.session:
            # The first launcher was started again: nobody knows of the attempt that runs here.
            self._give_up("its launcher was restarted")
        if order.phase is Phase.END and not self.report.running and order.attempt != self.report.attempt:
            # The attempt has failed before it was started here.
            self.report = replace(self.report, attempt=order.attempt, restarts=order.restarts, failure=None)

    def on_closed(self, now: float) -> None:
        self._presence.close(now)

    def should_redial(self, now: float) -> bool:
        """Whether nothing was heard for `redial_secs`. Ask only for a connection at least that old."""
        heard = self._presence.heard_at
        return heard is None or now - heard >= self._timeouts.redial_secs

    def on_failure(self, failure: WorkerExit) -> None:
        self.report = replace(self.report, failure=failure)

    def on_signal(self, signum: int) -> None:
        if self.report.signal is None:
            self.report = replace(self.report, signal=signum)

    def on_group_end(self, failure: WorkerExit | None, *, left_behind: bool) -> None:
        self.report = replace(
            self.report,
            running=False,
            failure=self.report.failure if failure is None else failure,
            left_behind=left_behind,
            next_attempt=self._began.attempt + 1,
        )

    def to_start(self, now: float) -> LaunchOrder | None:
        """While nothing runs here: an attempt to run, which begins with this answer; or the job is over."""
        order, report = self.order, self.report
        if order.phase is Phase.OVER:
            return order
        is_new = order.attempt >= report.next_attempt and order.attempt != report.attempt
        if order.phase is Phase.RUN and is_new and self.is_ready and report.signal is None:
            self._began, self._gave_up = order, None
            self.report = replace(
                report, attempt=order.attempt, restarts=order.restarts, running=True, failure=None
            )
            return order
        if not self._why_lost(now) or self._lost_since is None:
            return None
        if report.signal is not None:
            over = order_after(replace(order, failure=None), None, report.signal, left_behind=False)
            return replace(over, stopped_on=self._node)
        if now - self._lost_since < self._timeouts.join_secs:
            return None
        problem = f" ({self.unreachable})" if self.unreachable else ""
        why = f"it did not join within {self._timeouts.join_secs:g} s{problem}"
        return replace(order, phase=Phase.OVER, failure=self._first_host(why), code=PEER_FAILED)

    def to_end(self, now: float) -> LaunchOrder | None:
        """While workers run here: why they must end, if they must."""
        if self._gave_up is None and not self._is_stopping and (why := self._why_lost(now)):
            self._give_up(why)
        if self._gave_up is not None:
            return LaunchOrder(phase=Phase.END, failure=self._gave_up)
        order = self.order
        is_this = order.phase is Phase.RUN and order.attempt == self._began.attempt
        return None if is_this else order

    def after(self, now: float) -> LaunchOrder | None:
        """When the workers here have exited: that a restart follows, or that the job is over."""
        if self.order.phase is Phase.OVER:
            return self.order
        if self.order.attempt > self._began.attempt:
            return replace(self.order, phase=Phase.WAIT)
        why = self._gave_up.why if self._gave_up is not None else self._why_lost(now)
        if not why:
            return None
        # A restart, once the first host is there again, or the job is over.
        own, before = self.report.failure, replace(self._began, failure=None)
        signum = self.order.signal or self.report.signal
        if signum is not None:
            stopped_on = self._node if self.order.signal is None else self.order.stopped_on
            before = replace(before, stopped_on=stopped_on)
        is_told = signum is not None or (own is not None and own.was_told_to)
        return order_after(before, own if is_told else self._first_host(why), signum, left_behind=False)

    def missing(self, now: float) -> tuple[tuple[int, ...], str]:
        """The hosts for which nothing is started, and what is known of it."""
        return ((0,), self.unreachable) if self._why_lost(now) else (self.order.missing, "")

    @property
    def _is_stopping(self) -> bool:
        return self.report.signal is not None or self.order.signal is not None

    def _why_lost(self, now: float) -> str:
        if self._node == 0:  # It is in this process.
            return ""
        # Workers that were told to stop have the grace period, whatever happens.
        why = self._presence.why_lost(now, is_stopping=self._is_stopping)
        if why and self._lost_since is None:
            self._lost_since = now
        return why

    def _give_up(self, why: str) -> None:
        """The first host is lost. It may think otherwise, and must not take this for a good end."""
        self._gave_up = self._first_host(why)
        if self.report.failure is None:
            own = f"its launcher stopped its workers because of the first host: {why}"
            self.on_failure(WorkerExit(host=self._node, why=own, reported_by=self._node))

    def _first_host(self, why: str) -> WorkerExit:
        return WorkerExit(host=0, why=why, reported_by=self._node)
