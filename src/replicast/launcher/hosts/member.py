"""One launcher's part in a job on several hosts: what it does on an order, and without any. Pure.

    idle ── RUN ──→ running ── its workers have exited ──→ ended ── WAIT, RUN of a later attempt ──→ idle
                       └── END, or the first launcher is lost: end them ──↗ └── OVER ──→ over

The launcher on the first host has one too, so that all hosts act alike.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

from replicast.config import PEER_FAILED
from replicast.launcher.hosts.messages import Failure, Order, Phase, Report
from replicast.launcher.hosts.presence import Presence
from replicast.launcher.hosts.timeouts import HostTimeouts


@dataclass(frozen=True, slots=True)
class Start:
    """Start the workers of an attempt."""

    order: Order


@dataclass(frozen=True, slots=True)
class End:
    """End the workers: because of a failure, or because the job is stopped by a signal."""

    failure: Failure | None = None
    stopped_by: signal.Signals | None = None
    stopped_on: int = 0
    stopped_where: str = ""


@dataclass(frozen=True, slots=True)
class Restart:
    """The attempt has failed on all hosts, and another one follows when all are ready."""

    order: Order


@dataclass(frozen=True, slots=True)
class Over:
    """The job is over."""

    order: Order
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Waiting:
    """Hosts have been waited for."""

    secs: float
    missing: tuple[int, ...]
    first_is_lost: bool
    at_most_secs: float
    why: str = ""


Command = Start | End | Restart | Over | Waiting


class Member:
    """The state machine of one launcher."""

    def __init__(
        self, node: int, next_attempt: int, max_restarts: int, timeouts: HostTimeouts, now: float
    ) -> None:
        self._node = node
        self._timeouts = timeouts
        self._presence = Presence(timeouts)
        self._order = Order(
            session="", phase=Phase.WAIT, attempt=0, restarts=0, max_restarts=max_restarts, hosts=()
        )
        self._told_end: End | None = None
        self._told_restart = True
        self._unreachable = ""
        self._ended_at = self._next_tell = now
        self._lost_since: float | None = now  # It has not come yet.
        self._missing_since: dict[int, float] = {}
        self.report = Report(next_attempt=next_attempt)
        self.is_over = False

    def on_order(self, order: Order, now: float) -> list[Command]:
        """The first launcher's order came."""
        self._presence.hear(now)
        self._unreachable, self._lost_since = "", None
        if not self._missing_since.keys() >= set(order.missing):
            self._next_tell = now  # Others are waited for than was said.
        self._missing_since = {node: self._missing_since.get(node, now) for node in order.missing}
        if self.is_over:
            return []
        ended = self._take_other_leader(order)
        self._order = order
        if order.phase is Phase.OVER:
            return [*ended, *self._end_now(), *self._finish(Over(order))]
        if self.report.running:
            is_this = order.phase is Phase.RUN and order.attempt == self.report.attempt
            return ended if is_this or self.report.attempt is None else [*ended, *self._end_now()]
        if order.phase is Phase.END and order.attempt != self.report.attempt:
            self._skip(order)
        commands = self._restart(order) if self._follows(order) else []
        if self._may_start(order):
            return [*commands, *self._start(order)]
        if order.phase is Phase.RUN:  # The workers here have finished, those of other hosts have not.
            return commands
        since = min(self._missing_since.values(), default=self._ended_at)
        return [*commands, *self._wait(now, since, order.missing, first_is_lost=False)]

    def on_closed(self, now: float) -> None:
        """The first launcher's host has closed the connection, or refused one: nobody listens there."""
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
            return self._end_because(Failure(host=0, why=why, reported_by=self._node))
        return self._without_leader(why, now)

    def on_failure(self, failure: Failure) -> None:
        """A worker on this host has failed."""
        self.report = replace(self.report, failure=failure)

    def on_signal(self, signum: int) -> None:
        """This launcher was told to stop."""
        if self.report.signal is None:
            self.report = replace(self.report, signal=signum)

    def on_group_end(self, failure: Failure | None, now: float, *, left_behind: bool) -> list[Command]:
        """All workers on this host have exited."""
        attempt = self.report.attempt
        self.report = replace(
            self.report,
            running=False,
            failure=self.report.failure if failure is None else failure,
            left_behind=left_behind,
            next_attempt=self.report.next_attempt if attempt is None else attempt + 1,
        )
        self._ended_at = self._next_tell = now
        if self._order.phase is Phase.OVER:
            return self._finish(Over(self._order))
        return []

    def _take_other_leader(self, order: Order) -> list[Command]:
        """The first launcher was started again: nobody knows of the attempt that runs here."""
        before = self._order.session
        if before in ("", order.session) or not self.report.running:
            return []
        lost = Failure(host=0, why="its launcher ended and was started again", reported_by=self._node)
        return self._end_because(lost)

    def _may_start(self, order: Order) -> bool:
        """Whether the order is to run an attempt of which there is nothing here, by whichever launcher."""
        is_new = order.attempt != self.report.attempt and order.attempt >= self.report.next_attempt
        return order.phase is Phase.RUN and is_new and self.report.signal is None

    def _start(self, order: Order) -> list[Command]:
        self._told_end, self._told_restart = None, False
        self.report = replace(
            self.report, attempt=order.attempt, restarts=order.restarts, running=True, failure=None
        )
        return [Start(order)]

    def _skip(self, order: Order) -> None:
        """The attempt has failed before it was started here."""
        self._told_restart = False
        self.report = replace(
            self.report, attempt=order.attempt, restarts=order.restarts, running=False, failure=None
        )

    def _follows(self, order: Order) -> bool:
        """Whether the order is about a later attempt than the one that has ended here."""
        return self.report.attempt is not None and order.attempt > self.report.attempt

    def _restart(self, order: Order) -> list[Command]:
        if self._told_restart:
            return []
        self._told_restart = True
        return [Restart(order)]

    def _end_now(self) -> list[Command]:
        order = self._order
        stopped = None if order.signal is None else signal.Signals(order.signal)
        where = dict(enumerate(order.hosts)).get(order.stopped_on, "")
        return self._tell_end(End(order.failure, stopped, order.stopped_on, where))

    def _end_because(self, failure: Failure) -> list[Command]:
        """The first launcher is lost. It may think otherwise, and must not take this for a good end."""
        self._order = replace(self._order, failure=failure)
        if self.report.failure is None:
            own = f"its launcher ended its workers, because of the first host: {failure.why}"
            self.report = replace(
                self.report, failure=Failure(host=self._node, why=own, reported_by=self._node)
            )
        return self._tell_end(End(failure))

    def _tell_end(self, end: End) -> list[Command]:
        known = self._told_end
        if not self.report.running or (known is not None and known.stopped_by == end.stopped_by):
            return []
        self._told_end = end
        return [end]

    def _without_leader(self, why: str, now: float) -> list[Command]:
        if self._order.phase is Phase.OVER:
            return self._finish(Over(self._order))
        order, own = self._order, self.report.failure
        over = replace(order, phase=Phase.OVER, failure=own)
        if self.report.signal is not None:
            over = replace(over, signal=self.report.signal, stopped_on=self._node)
        has_run = self.report.attempt is not None
        if over.signal is not None:
            over = replace(over, unreached=(0,) if has_run else (), code=128 + over.signal)
            return self._finish(Over(over, alone=True))
        if own is not None and not own.is_failure:
            return self._finish(Over(replace(over, failure=own, code=own.shell_code), alone=True))
        lost = Failure(host=0, why=why, reported_by=self._node)
        gone = replace(over, failure=lost, code=PEER_FAILED)
        if has_run and order.restarts >= order.max_restarts:
            return self._finish(Over(gone, alone=True))
        if self._lost_since is None:  # Not when the workers here exited: it was not lost then.
            self._lost_since = self._next_tell = now
        if now - self._lost_since >= self._timeouts.join_secs:
            reason = f" ({self._unreachable})" if self._unreachable else ""
            lost = replace(lost, why=f"it did not come within {self._timeouts.join_secs:g} s{reason}")
            return self._finish(Over(replace(gone, failure=lost), alone=True))
        following = replace(order, failure=lost, attempt=order.attempt + 1, restarts=order.restarts + 1)
        commands = self._restart(following) if has_run else []
        return [*commands, *self._wait(now, self._lost_since, (0,), first_is_lost=True)]

    def _wait(
        self, now: float, since: float, missing: tuple[int, ...], *, first_is_lost: bool
    ) -> list[Command]:
        if now < max(self._next_tell, since + self._timeouts.tell_after_secs):
            return []
        self._next_tell = now + self._timeouts.tell_again_secs
        why = self._unreachable if first_is_lost else ""
        return [Waiting(now - since, missing, first_is_lost, self._timeouts.join_secs, why)]

    def _finish(self, over: Over) -> list[Command]:
        if (
            self.report.running
        ):  # The workers are being ended; `on_time` or the next order comes back to this.
            return []
        self.is_over = True
        return [over]
