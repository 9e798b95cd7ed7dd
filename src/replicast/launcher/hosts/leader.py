"""The first launcher's decisions for all hosts: when to start, when to end, when the job is over. Pure.

    WAIT ── every host is there and runs nothing ──→ RUN ── every worker exited with 0 ──→ OVER
     ↑ └── join_secs: the missing host is named ──→ OVER ←── no restart left, or stopped ──┐
     │                                           a worker fails, a host is lost, a signal  │
     └───────── a restart is left ──── END: all hosts end their workers ←── RUN ───────────┘

The whole decision is `order`, which every launcher receives again and again, the one on this host included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from replicast.config import PEER_FAILED
from replicast.launcher.hosts.messages import Failure, Order, Phase, Report, first_cause
from replicast.launcher.hosts.presence import Presence
from replicast.launcher.hosts.timeouts import HostTimeouts

_IN_USE_SECS = 5.0
_UNKILLABLE = 1


class _Host:
    """What is known of one host."""

    def __init__(self, timeouts: HostTimeouts) -> None:
        self.presence = Presence(timeouts)
        self.session = ""
        self.address = ""
        self.report: Report | None = None

    def has_ended(self, attempt: int) -> bool:
        return self.report is not None and self.report.attempt == attempt and not self.report.running


class Leader:
    """The state machine of the first launcher."""

    def __init__(
        self, hosts: Sequence[str], session: str, max_restarts: int, timeouts: HostTimeouts, now: float
    ) -> None:
        self._timeouts = timeouts
        self._hosts = [_Host(timeouts) for _ in hosts]
        self._names = tuple(hosts)
        self._failures: dict[int, Failure] = {}
        self._missing_since = dict.fromkeys(range(len(hosts)), now)
        self._refused: dict[int | None, str] = {}
        self._has_run = False
        self.order = Order(
            session=session,
            phase=Phase.WAIT,
            attempt=0,
            restarts=0,
            max_restarts=max_restarts,
            hosts=self._names,
            missing=tuple(range(len(hosts))),
        )

    def name(self, node: int) -> str:
        """A host in words."""
        return self._names[node] or self._hosts[node].address or f"host {node}"

    def refusal(self, node: int, session: str, now: float) -> str:
        """Why a launcher cannot be that of a host; empty if it can."""
        if not 0 <= node < len(self._hosts):
            return f"--node-rank must be from 0 to {len(self._hosts) - 1}. Received: {node}"
        host = self._hosts[node]
        heard = host.presence.heard_at
        if not host.presence.connected or heard is None or host.session == session:
            return ""
        if now - heard >= _IN_USE_SECS:
            return ""
        return f"a launcher with --node-rank {node} is connected already, from {host.address or 'this host'}"

    def on_refused(self, node: int | None, what: str) -> None:
        """A launcher was refused: perhaps the one that is waited for."""
        known = node if node is not None and 0 <= node < len(self._hosts) else None
        if known is None or not self._hosts[known].presence.connected:  # A second one of a host is not.
            self._refused[known] = what

    def on_joined(self, node: int, session: str, address: str, now: float) -> None:
        """A launcher has connected, for the first time or again. Call `refusal` before."""
        host = self._hosts[node]
        if host.session not in ("", session):
            self._lose(node, "its launcher ended and was started again")
            host.report = None
        host.session, host.address = session, address
        self._refused.pop(node, None)
        host.presence.hear(now)
        self._advance(now)  # What it hears first must not be to run the attempt that has just failed.

    def on_report(self, node: int, report: Report, now: float) -> None:
        """A launcher reports its state."""
        host = self._hosts[node]
        host.presence.hear(now)
        host.report = report
        failure = report.failure if report.attempt == self.order.attempt else None
        if failure is not None and self._is_under_way():
            known = self._failures.get(node)
            if known is not None and (known.worker, known.code) != (failure.worker, failure.code):
                del self._failures[node]  # Another worker: later than what is known of other hosts.
            self._failures[node] = failure
        self._advance(now)

    def on_closed(self, node: int, session: str, now: float) -> None:
        """The connection of a launcher was closed."""
        if self._hosts[node].session == session:
            self._hosts[node].presence.close(now)

    def on_time(self, now: float) -> None:
        """Some time has passed. Call it at least once a second."""
        for node, host in enumerate(self._hosts):
            why = host.presence.why_lost(now, is_stopping=self.order.signal is not None)
            if why and self._is_under_way() and not host.has_ended(self.order.attempt):
                self._lose(node, why)
        self._advance(now)

    def everybody_left(self) -> bool:
        """Whether no other launcher is connected any more."""
        return not any(host.presence.connected for host in self._hosts[1:])

    def _is_under_way(self) -> bool:
        return self.order.phase in (Phase.RUN, Phase.END)

    def _lose(self, node: int, why: str) -> None:
        """A host will not end this attempt: its workers are taken for dead."""
        if self._is_under_way() and node not in self._lost():
            known = self._failures.get(node)  # It keeps its place in the order.
            lost = Failure(host=node, why=why, reported_by=0)
            # A worker that failed by itself stays the reason; what became of its host then follows from it.
            keep = known is not None and known.code != PEER_FAILED
            self._failures[node] = replace(known, why=f"{known.why}; then {why}") if keep and known else lost
            self._hosts[node].report = None

    def _lost(self) -> set[int]:
        return {node for node, host in enumerate(self._hosts) if host.report is None}

    def _signal(self) -> tuple[int, int] | None:
        """The signal that a launcher has received, and the host."""
        for node, host in enumerate(self._hosts):
            if host.report is not None and host.report.signal is not None:
                return host.report.signal, node
        return None

    def _advance(self, now: float) -> None:
        {Phase.WAIT: self._wait, Phase.RUN: self._run, Phase.END: self._end, Phase.OVER: self._stay}[
            self.order.phase
        ](now)

    def _wait(self, now: float) -> None:
        signalled = self._signal()
        if signalled is not None:
            self._stopped_by(signalled)
            self.order = replace(self.order, failure=None)  # All have reported it.
            self._over(128 + signalled[0])
            return
        missing = tuple(node for node, host in enumerate(self._hosts) if not self._is_ready(host, now))
        self.order = replace(self.order, missing=missing)
        self._missing_since = {node: self._missing_since.get(node, now) for node in missing}
        late = [node for node in missing if now - self._missing_since[node] >= self._timeouts.join_secs]
        if not missing:
            self._start()
        elif late:
            self.order = replace(self.order, failure=Failure(host=late[0], why=self._why_late(late[0])))
            self._over(PEER_FAILED)

    def _why_late(self, node: int) -> str:
        waited = f"it did not come within {self._timeouts.join_secs:g} s"
        refused = self._refused.get(node) or self._refused.get(None)
        if refused:
            return f"{waited}. {refused}"
        same = "the same --hosts" if self._names[node] else f"--node-rank {node}"
        return f"{waited}. Was the command started there, with {same} and the same secret?"

    @staticmethod
    def _is_ready(host: _Host, now: float) -> bool:
        report = host.report
        return report is not None and not report.running and not host.presence.why_lost(now)

    def _start(self) -> None:
        reports = [host.report for host in self._hosts if host.report is not None]
        order = self.order
        if not self._has_run:  # This process may be the second one of a job whose first launcher was killed.
            had_run = [report for report in reports if report.attempt is not None]
            order = replace(order, restarts=max((report.restarts + 1 for report in had_run), default=0))
            if order.restarts > order.max_restarts:
                self.order = replace(order, failure=Failure(host=0, why="its launcher ended"))
                self._over(PEER_FAILED)
                return
        attempt = max(order.attempt, *(report.next_attempt for report in reports))
        addresses = tuple(name or host.address for name, host in zip(self._names, self._hosts, strict=True))
        self._has_run = True
        self._failures, self._refused = {}, {}
        self.order = replace(order, phase=Phase.RUN, attempt=attempt, hosts=addresses)

    def _run(self, now: float) -> None:
        signalled = self._signal()
        if signalled is not None:
            self._stopped_by(signalled)
        elif not self._failures:
            if all(host.has_ended(self.order.attempt) for host in self._hosts):
                self.order = replace(self.order, failure=None)  # That of the attempt before.
                self._over(_UNKILLABLE if self._left_behind() else 0)
            return
        self.order = replace(self.order, phase=Phase.END, failure=self._cause())
        self._end(now)

    def _end(self, now: float) -> None:
        if self.order.signal is None and (signalled := self._signal()) is not None:
            self._stopped_by(signalled)
        self.order = replace(self.order, failure=self._cause())
        lost = self._lost()
        under_way = [
            node
            for node, host in enumerate(self._hosts)
            if node not in lost and not host.has_ended(self.order.attempt)
        ]
        if not under_way:
            self._decide(now)

    def _cause(self) -> Failure | None:
        return first_cause(list(self._failures.values()))

    def _decide(self, now: float) -> None:
        order, cause = self.order, self._cause()
        if order.signal is not None:
            self.order = replace(order, unreached=tuple(sorted(self._lost())))
            self._over(128 + order.signal)
        elif cause is None:
            self._over(_UNKILLABLE)
        elif not cause.is_failure or self._left_behind() or order.restarts >= order.max_restarts:
            self._over(cause.shell_code)
        else:
            self.order = replace(
                order, phase=Phase.WAIT, attempt=order.attempt + 1, restarts=order.restarts + 1
            )
            self._wait(now)

    def _stopped_by(self, signalled: tuple[int, int]) -> None:
        self.order = replace(self.order, signal=signalled[0], stopped_on=signalled[1])

    def _left_behind(self) -> bool:
        return any(host.report is not None and host.report.left_behind for host in self._hosts)

    def _over(self, code: int) -> None:
        self.order = replace(self.order, phase=Phase.OVER, code=code)

    def _stay(self, now: float) -> None:
        """The job is over."""
