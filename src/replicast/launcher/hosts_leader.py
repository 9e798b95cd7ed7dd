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
from typing import Any

import msgspec
from msgspec.structs import replace

from replicast.config import PEER_FAILED
from replicast.errors import printable
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
    tell_after_secs: float = 10.0
    tell_again_secs: float = 30.0


# --- Messages --------------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """The first message of a launcher to the first one, and of that one to see whether it is the only one."""

    node: int
    session: str
    address: str
    identity: dict[str, str]  # What must be the same on all hosts, by the words for it.


class Report(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="report"):
    next_attempt: Index
    attempt: Index | None = None
    restarts: Index = 0
    running: bool = False
    failure: WorkerExit | None = None
    signal: StopSignal | None = None
    left_behind: bool = False
    progress: tuple[Index, Index] | None = None  # as in an order; the first host knows it


class RefusedHost(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag="refused"):
    """The first launcher's answer to one that does not belong to the job."""

    why: str


Message = Hello | Report | LaunchOrder | RefusedHost


def read_message(fields: Mapping[str, Any], nodes: int) -> Message:
    """Reads a message to a job of so many hosts; raises ValueError if no launcher can have sent it."""
    message: Message = msgspec.convert(fields, Message)
    hosts: set[int] = set()
    if isinstance(message, Report | LaunchOrder) and message.failure is not None:
        hosts |= {message.failure.host, message.failure.reported_by}
    if isinstance(message, LaunchOrder):
        hosts |= {message.stopped_on, *message.missing, *message.unreached}
        if len(message.hosts) != nodes:
            raise ValueError(f"an order for {len(message.hosts)} hosts, expected {nodes}")
    if not hosts <= set(range(nodes)):
        raise ValueError(f"it names the hosts {sorted(hosts)} of {nodes}")
    return message


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


def two_firsts(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Says that two launchers of one job take themselves for the first one; empty if they do not.

    Theirs may be a job of its own, on other ports or hosts; or this launcher's own hello, which a stranger
    has passed on.
    """
    one, other = (identity.get("--hosts", "").split(",") for identity in (ours, theirs))
    same_port = ours.get("--port") == theirs.get("--port")
    if one == other or not same_port or one[0] not in other or other[0] not in one:
        return ""
    lists = f"one with --hosts {','.join(one)[:200]}, the other with --hosts {','.join(other)[:200]}"
    return f"both act as the launcher of the first host, {lists}"


# --- What the main thread of a launcher learns -----------------------------------------------------------
#
# An order itself, by its phase: RUN, start the workers of this attempt; END, end them; WAIT, the attempt
# before has failed on all hosts, and this one follows when all are ready; OVER, the job is over. Or:


@dataclass(frozen=True, slots=True)
class Waiting:
    secs: float
    missing: tuple[int, ...]
    at_most_secs: float
    why: str = ""


Command = LaunchOrder | Waiting


# --- Whether the other side is there ---------------------------------------------------------------------


class Presence:
    """When the other side was last heard of, and whether it counts as lost."""

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
        self._refused: dict[int | None, str] = {}
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

    def on_refused(self, node: int | None, what: str) -> None:
        """A launcher was refused: perhaps the one that is waited for."""
        known = node if node is not None and 0 <= node < len(self._hosts) else None
        if known is None or not self._hosts[known].connected:  # A second one of a host is not.
            self._refused[known] = what

    def on_joined(self, node: int, session: str, address: str, now: float) -> None:
        """A launcher has connected, for the first time or again. Call `refusal` before."""
        host = self._hosts[node]
        if host.session not in ("", session):
            self._lose(node, "its launcher was restarted")
            host.report = None
        host.session, host.address = session, address
        self._refused.pop(node, None)
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

    def everybody_left(self) -> bool:
        return not any(host.connected for host in self._hosts[1:])

    def _is_under_way(self) -> bool:
        return self.order.phase in (Phase.RUN, Phase.END)

    def _lose(self, node: int, why: str) -> None:
        """A host will not end this attempt: its workers are taken for dead."""
        if not self._is_under_way() or self._hosts[node].report is None:
            return
        known = self._failures.get(node)  # It keeps its place in the order.
        # A worker that failed by itself stays the reason; what became of its host then follows from it.
        if known is not None and known.code != PEER_FAILED:
            self._failures[node] = replace(known, why=f"{known.why or known.how}; then {why}")
        else:
            self._failures[node] = WorkerExit(host=node, why=why)
        self._hosts[node].report = None

    def _reports(self) -> dict[int, Report]:
        """What the hosts say that are not lost."""
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
            self._end()
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
            self._fail(late[0], self._why_late(late[0]))

    def _why_late(self, node: int) -> str:
        waited = f"it did not join within {self._timeouts.join_secs:g} s"
        refused = self._refused.get(node) or self._refused.get(None)
        if refused:
            return f"{waited}. {refused}"
        same = "the same --hosts" if self._names[node] else f"--node-rank {node}"
        return f"{waited}. Was the command started there, with {same} and the same secret?"

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
        self._failures, self._refused, self._failed_before = {}, {}, order.failure
        self.order = replace(order, phase=Phase.RUN, attempt=attempt, hosts=addresses)

    def _end(self) -> None:
        self.order = replace(self.order, failure=first_cause(self._failures.values()))
        order, reports = self.order, self._reports()
        if all(self._hosts[node].has_ended(order.attempt) for node in reports):
            if order.signal is not None:
                unreached = tuple(node for node in range(len(self._hosts)) if node not in reports)
                order = replace(order, unreached=unreached)
            left = self._left_behind() or order.failure is None
            progress = reports[0].progress if 0 in reports else None
            before = replace(order, failure=self._failed_before)
            cause, signum = order.failure, order.signal
            self.order = order_after(before, cause, signum, left_behind=left, progress=progress)

    def _left_behind(self) -> bool:
        return any(report.left_behind for report in self._reports().values())

    def _fail(self, node: int, why: str) -> None:
        failure = WorkerExit(host=node, why=why)
        self.order = replace(self.order, phase=Phase.OVER, code=failure.code, failure=failure)


# --- Every launcher --------------------------------------------------------------------------------------


class Member:
    """One launcher's part in the job: what it does on an order, and without any.

    idle ── RUN ──→ running ── its workers have exited ──→ ended ── WAIT, RUN of a later attempt ──→ idle
                       └── END, or the first launcher is lost: end them ──↗ └── OVER ──→ over
    """

    def __init__(
        self, node: int, next_attempt: int | None, max_restarts: int, timeouts: HostTimeouts, now: float
    ) -> None:
        self._node = node
        self._timeouts = timeouts
        self._presence = Presence(timeouts)
        self._order = LaunchOrder(phase=Phase.WAIT, max_restarts=max_restarts)
        self._told_end: LaunchOrder | None = None
        self._told_restart = True
        self._unreachable = ""
        self._ended_at = self._next_tell = now
        self._lost_since: float | None = now  # It has not come yet.
        self._missing_since: dict[int, float] = {}
        self.report = Report(next_attempt=0 if next_attempt is None else next_attempt)
        # One that does not know its run directory yet, nor which attempts are in it, reports nothing.
        self.is_ready = next_attempt is not None
        self.is_over = False

    def on_ready(self, next_attempt: int) -> None:
        self.report, self.is_ready = replace(self.report, next_attempt=next_attempt), True

    def on_order(self, order: LaunchOrder, now: float) -> list[Command]:
        self._presence.hear(now)
        self._unreachable, self._lost_since = "", None
        if not self._missing_since.keys() >= set(order.missing):
            self._next_tell = now  # Others are waited for than was said.
        self._missing_since = {node: self._missing_since.get(node, now) for node in order.missing}
        if self.is_over:
            return []
        if not self.is_ready:  # It waits for the name of the run directory, which is in every order.
            return [order if order.phase is Phase.OVER else replace(order, phase=Phase.WAIT)]
        commands: list[Command] = []
        if self._order.session not in ("", order.session) and self.report.running:
            # The first launcher was started again: nobody knows of the attempt that runs here.
            commands = self._end_because("its launcher was restarted")
        self._order = order
        if order.phase is Phase.OVER:
            return [*commands, *self._tell_end(order), *self._finish(order)]
        if self.report.running:
            is_this = order.phase is Phase.RUN and order.attempt == self.report.attempt
            return commands if is_this else [*commands, *self._tell_end(order)]
        if order.phase is Phase.END and order.attempt != self.report.attempt:
            self._begin(order, running=False)  # The attempt has failed before it was started here.
        if self.report.attempt is not None and order.attempt > self.report.attempt:
            commands += self._restart(order)
        if order.phase is not Phase.RUN:
            since = min(self._missing_since.values(), default=self._ended_at)
            return [*commands, *self._wait(now, since, order.missing)]
        # To run an attempt of which there is nothing here, by whichever launcher; else the workers here have
        # finished, and those of other hosts have not.
        is_new = order.attempt != self.report.attempt and order.attempt >= self.report.next_attempt
        if is_new and self.report.signal is None:
            self._begin(order, running=True)
            commands.append(order)
        return commands

    def on_closed(self, now: float) -> None:
        self._presence.close(now)

    def on_unreachable(self, why: str) -> None:
        """The first launcher could not be reached, or does not belong to this job."""
        self._unreachable = why

    def should_redial(self, now: float) -> bool:
        """Whether nothing was heard for `redial_secs`. Ask only for a connection at least that old."""
        heard = self._presence.heard_at
        return heard is None or now - heard >= self._timeouts.redial_secs

    def on_time(self, now: float) -> list[Command]:
        """Some time has passed. Call it at least once a second."""
        if self.is_over:
            return []
        is_stopping = self.report.signal is not None or self._order.signal is not None
        why = self._presence.why_lost(now, is_stopping=is_stopping)
        if not why or (is_stopping and self.report.running):  # They have the grace period, whatever happens.
            return []
        if self.report.running:
            return self._end_because(why)
        return self._without_leader(why, now)

    def on_failure(self, failure: WorkerExit) -> None:
        self.report = replace(self.report, failure=failure)

    def on_signal(self, signum: int) -> None:
        if self.report.signal is None:
            self.report = replace(self.report, signal=signum)

    def on_group_end(
        self,
        failure: WorkerExit | None,
        now: float,
        *,
        left_behind: bool,
        progress: tuple[int, int] | None = None,
    ) -> list[Command]:
        attempt = self.report.attempt
        self.report = replace(
            self.report,
            running=False,
            failure=self.report.failure if failure is None else failure,
            left_behind=left_behind,
            next_attempt=self.report.next_attempt if attempt is None else attempt + 1,
            progress=progress,
        )
        self._ended_at = self._next_tell = now
        return self._finish(self._order) if self._order.phase is Phase.OVER else []

    def _begin(self, order: LaunchOrder, *, running: bool) -> None:
        self._told_end, self._told_restart = None, False
        self.report = replace(
            self.report, attempt=order.attempt, restarts=order.restarts, running=running, failure=None
        )

    def _restart(self, order: LaunchOrder) -> list[Command]:
        told, self._told_restart = self._told_restart, True
        return [] if told else [replace(order, phase=Phase.WAIT)]

    def _end_because(self, why: str) -> list[Command]:
        """The first launcher is lost. It may think otherwise, and must not take this for a good end."""
        failure = WorkerExit(host=0, why=why, reported_by=self._node)
        self._order = replace(self._order, failure=failure)
        if self.report.failure is None:
            own = f"its launcher stopped its workers because of the first host: {why}"
            self.on_failure(WorkerExit(host=self._node, why=own, reported_by=self._node))
        return self._tell_end(replace(self._order, signal=None))

    def _tell_end(self, order: LaunchOrder) -> list[Command]:
        known = self._told_end
        if not self.report.running or (known is not None and known.signal == order.signal):
            return []
        self._told_end = replace(order, phase=Phase.END)
        return [self._told_end]

    def _without_leader(self, why: str, now: float) -> list[Command]:
        order, own, has_run = self._order, self.report.failure, self.report.attempt is not None
        if order.phase is Phase.OVER:
            return self._finish(order)
        if self.report.signal is not None:
            order = replace(order, signal=self.report.signal, stopped_on=self._node)
        if order.signal is not None and has_run:
            order = replace(order, unreached=(0,))
        lost = WorkerExit(host=0, why=why, reported_by=self._node)
        is_told = order.signal is not None or (own is not None and own.was_told_to)
        following = order_after(order, own if is_told else lost, order.signal, left_behind=False)
        if following.phase is Phase.OVER and (has_run or is_told):
            return self._finish(following)
        if self._lost_since is None:  # Not when the workers here exited: it was not lost then.
            self._lost_since = self._next_tell = now
        if now - self._lost_since >= self._timeouts.join_secs:
            problem = f" ({self._unreachable})" if self._unreachable else ""
            lost = replace(lost, why=f"it did not join within {self._timeouts.join_secs:g} s{problem}")
            return self._finish(replace(order, phase=Phase.OVER, failure=lost, code=PEER_FAILED))
        commands = self._restart(following) if has_run else []
        return [*commands, *self._wait(now, self._lost_since, (0,), self._unreachable)]

    def _wait(self, now: float, since: float, missing: tuple[int, ...], why: str = "") -> list[Command]:
        if now < max(self._next_tell, since + self._timeouts.tell_after_secs):
            return []
        self._next_tell = now + self._timeouts.tell_again_secs
        return [Waiting(now - since, missing, self._timeouts.join_secs, why)]

    def _finish(self, over: LaunchOrder) -> list[Command]:
        if self.report.running:  # Its workers are being ended; `on_time` or an order comes back to this.
            return []
        self.is_over = True
        return [over]


# --- What is said of launchers that do not belong together -----------------------------------------------

NOTICES_SECS, MAX_NOTICES, MAX_NOTICE_CHARACTERS = 300.0, 6, 1000


class Notices:
    """Decides which lines are said: each at most once in `NOTICES_SECS`, and `MAX_NOTICES` of them.

    Use one for strangers and another one for launchers that know the secret: strangers must not hide a line
    that the user needs.
    """

    def __init__(self) -> None:
        self._said: dict[str, float] = {}

    def say(self, text: str, now: float) -> list[str]:
        """The line to show, if any; without what would move the cursor of a terminal."""
        if len(text) > MAX_NOTICE_CHARACTERS:
            text = f"{text[:MAX_NOTICE_CHARACTERS]}…"
        self._said = {said: at for said, at in self._said.items() if now - at < NOTICES_SECS}
        if len(self._said) >= MAX_NOTICES or text in self._said:
            return []
        self._said[text] = now
        is_last = len(self._said) == MAX_NOTICES
        more = f" (more lines like this are not shown for {NOTICES_SECS / 60:.0f} min)" if is_last else ""
        return [printable(text) + more]
