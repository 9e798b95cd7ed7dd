"""Another launcher's socket: it connects to the first one, again and again if need be."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from replicast.launcher.hosts.connection import Connection, Malformed, is_closed, shown_address
from replicast.launcher.hosts.events import Event, NotWelcome
from replicast.launcher.hosts.member import Member
from replicast.launcher.hosts.messages import Ask, Hello, Order, Refused, Report, Told
from replicast.launcher.hosts.notices import Notices
from replicast.launcher.hosts.timeouts import HostTimeouts
from replicast.launcher.hosts.wire import NotAuthentic
from replicast.names import Dialer

CONNECT_SECS = 2.0
_PAUSE_SECS = 0.25


class Other:
    """Another launcher: connects to the first one, again and again if need be."""

    def __init__(
        self,
        member: Member,
        introduce: Callable[[str], Hello | Ask],
        secret: bytes,
        timeouts: HostTimeouts,
        endpoint: tuple[str, int],
        nodes: int,
    ) -> None:
        self._member, self._introduce, self._secret = member, introduce, secret
        self._timeouts = timeouts
        self._dialer, self._nodes = Dialer(*endpoint), nodes
        self._shown = shown_address(*endpoint)
        self._connection: Connection | None = None
        self._next_try = self._connected_at = 0.0
        self._sent: Report | None = None
        self._sent_at = 0.0
        self._of_strangers, self._of_first = Notices(), Notices()

    def sockets(self) -> list[socket.socket]:
        """The sockets from which something may come."""
        return [] if self._connection is None else [self._connection.socket]

    def poll(self, readable: list[socket.socket]) -> list[Event]:
        """Reads what has come, and sends what is due. Call it at least every second."""
        events: list[Event] = []
        self._redial()
        if self._connection is None and time.monotonic() >= self._next_try and not self._member.is_over:
            self._connect()
        if self._connection is not None and self._connection.socket in readable:
            events += self._read(self._connection)
        events += self._member.on_time(time.monotonic())
        self._send_report()
        return events

    def may_leave(self) -> bool:
        """Whether the thread may end: nobody waits to hear that the job is over."""
        return True

    def close(self) -> None:
        """Closes all sockets."""
        if self._connection is not None:
            self._connection.close()

    def _redial(self) -> None:
        now = time.monotonic()
        fresh = now - self._connected_at < self._timeouts.redial_secs
        if self._connection is not None and not fresh and self._member.should_redial(now):
            silent_secs = self._timeouts.redial_secs
            self._member.on_unreachable(f"{self._shown}: nothing was heard from there for {silent_secs:g} s")
            self._lost(is_closed=False)

    def _connect(self) -> None:
        try:
            connected = self._dialer.connect(CONNECT_SECS)
        except OSError as error:  # No answer says nothing about the process; a refused connection does.
            self._member.on_unreachable(f"{self._shown}: {error.strerror or error}")
            self._lost(is_closed=isinstance(error, ConnectionRefusedError))
            return
        try:
            address = str(connected.getsockname()[0])
            self._connection = Connection(connected, self._secret, is_first=False, nodes=self._nodes)
            self._connection.send(self._introduce(address))
            self._sent, self._connected_at = None, time.monotonic()
        except OSError as error:
            connected.close()
            self._lost(is_closed=is_closed(error))

    def _read(self, connection: Connection) -> list[Event]:
        try:
            events: list[Event] = []
            for message in connection.receive():
                if isinstance(message, Refused):
                    return [NotWelcome(message.why)]
                if isinstance(message, Order):
                    events += self._member.on_order(message, time.monotonic())
                if isinstance(message, Told):
                    events.append(message)
                if isinstance(message, Malformed):
                    text = f"{self._shown}: a line is left out: {message.why}"
                    events += self._of_first.say(text, time.monotonic())
            return events
        except NotAuthentic as error:  # It may be anybody: no reason to give up.
            self._lost(is_closed=False)
            self._member.on_unreachable(f"{self._shown}: {error}")
            text = f"{self._shown}: {error}. {error.remedy}; this launcher keeps trying"
            return [*self._of_strangers.say(text, time.monotonic())]
        except OSError as error:
            self._lost(is_closed=is_closed(error))
            return []
        except ValueError:
            self._lost(is_closed=False)
            return []

    def _send_report(self) -> None:
        now, report = time.monotonic(), self._member.report
        if self._connection is None or (
            report == self._sent and now - self._sent_at < self._timeouts.beat_secs
        ):
            return
        try:
            self._connection.send(report)
            self._sent, self._sent_at = report, now
        except OSError as error:
            self._lost(is_closed=is_closed(error))

    def _lost(self, *, is_closed: bool) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        self._next_try = time.monotonic() + _PAUSE_SECS
        if is_closed:
            self._member.on_closed(time.monotonic())
