"""The first launcher's sockets: it accepts the others, hears their reports and tells them its order."""

from __future__ import annotations

import contextlib
import socket
import time

from replicast.errors import printable
from replicast.launcher.hosts.connection import Connection, Malformed, is_closed
from replicast.launcher.hosts.events import Event
from replicast.launcher.hosts.leader import Leader
from replicast.launcher.hosts.member import Member
from replicast.launcher.hosts.messages import (
    Ask,
    FirstOf,
    Hello,
    Identity,
    Message,
    Order,
    Phase,
    Refused,
    Report,
    Told,
    difference,
    two_firsts,
)
from replicast.launcher.hosts.notices import Notices
from replicast.launcher.hosts.rivals import Rivals
from replicast.launcher.hosts.timeouts import HostTimeouts
from replicast.launcher.hosts.wire import SAME_SECRET, NotAuthentic
from replicast.processes import accept_problem

_INTRODUCE_SECS = 5.0
"""A connection over which nobody introduces itself within this time is closed."""
_MAX_STRANGERS = 64
_DEAF_SECS = 1.0
"""How long nothing is accepted after it has failed, for example for too many open files."""


class First:
    """The first launcher: accepts the others and tells them its order."""

    def __init__(
        self,
        leader: Leader,
        member: Member,
        session: str,
        identity: Identity,
        secret: bytes,
        timeouts: HostTimeouts,
        listener: socket.socket,
        run_name: str,
        rivals: Rivals,
    ) -> None:
        self._leader, self._member = leader, member
        self._identity, self._secret, self._timeouts = identity, secret, timeouts
        self._listener, self._run_name, self._rivals = listener, run_name, rivals
        self._first_of = FirstOf(identity.hosts, identity.port)
        self._connections: list[Connection] = []
        self._sent: Order | None = None
        self._sent_at = 0.0
        self._of_strangers, self._of_launchers = Notices(), Notices()
        self._deaf_until = 0.0
        leader.on_joined(0, session, "", time.monotonic())

    def sockets(self) -> list[socket.socket]:
        """The sockets from which something may come."""
        listening = [] if time.monotonic() < self._deaf_until else [self._listener]
        return [*listening, *self._rivals.sockets(), *(one.socket for one in self._connections)]

    def poll(self, readable: list[socket.socket]) -> list[Event]:
        """Reads what has come, and sends what is due. Call it at least every second."""
        events: list[Event] = [*self._rivals.poll(readable, self._of_strangers)]
        if self._listener in readable:
            events += self._accept()
        for connection in list(self._connections):
            if connection.socket in readable:
                events += self._read(connection)
        now = time.monotonic()
        for connection in list(self._connections):
            if connection.hello is None and now - connection.since >= _INTRODUCE_SECS:
                self._drop(connection, is_closed=False)
        self._leader.on_report(0, self._member.report, now)
        self._leader.on_time(now)
        self._broadcast(now)
        events += self._member.on_order(self._leader.order, now)
        self._leader.on_report(0, self._member.report, now)
        return events

    def may_leave(self) -> bool:
        """Whether the thread may end: nobody waits to hear that the job is over."""
        return self._leader.order.phase is not Phase.OVER or self._leader.everybody_left()

    def close(self) -> None:
        """Closes all sockets."""
        self._listener.close()
        self._rivals.close()
        for connection in self._connections:
            connection.close()

    def _accept(self) -> list[Event]:
        now = time.monotonic()
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            if not (problem := accept_problem(error)):
                return []
            self._deaf_until = now + _DEAF_SECS
            return [*self._of_launchers.say(f"cannot accept other launchers for now: {problem}", now)]
        strangers = [one for one in self._connections if one.hello is None]
        if len(strangers) >= _MAX_STRANGERS:  # A launcher introduces itself at once: the oldest is none.
            self._drop(strangers[0], is_closed=False)
        try:
            nodes = self._identity.nodes
            self._connections.append(Connection(accepted, self._secret, is_first=True, nodes=nodes))
        except OSError:
            accepted.close()
        return []

    def _read(self, connection: Connection) -> list[Event]:
        try:
            events: list[Event] = []
            for message in connection.receive():
                events += self._take(connection, message)
            return events
        except NotAuthentic as error:
            if error.remedy == SAME_SECRET:  # Else it is not a launcher, and nobody waits for it.
                self._note_refusal(None, connection, str(error))
            return self._refuse(connection, f"{error}. {error.remedy}", self._of_strangers)
        except OSError as error:
            self._drop(connection, is_closed=is_closed(error))
            return []
        except ValueError:
            self._drop(connection, is_closed=False)
            return []

    def _take(self, connection: Connection, message: Message | Malformed) -> list[Event]:
        now = time.monotonic()
        if isinstance(message, Hello) and connection.hello is None:
            refusal = difference(self._identity, message.identity) or self._leader.refusal(
                message.node, message.session, now
            )
            if refusal:
                self._note_refusal(message.node, connection, refusal)
                return self._refuse(connection, refusal, self._of_launchers)
            for older in [one for one in self._connections if one.hello and one.hello.node == message.node]:
                self._drop(older, is_closed=False)
            connection.hello = message
            self._leader.on_joined(message.node, message.session, message.address, now)
            connection.send(self._leader.order)
        elif isinstance(message, Ask):
            connection.send(Told(self._run_name))
        elif isinstance(message, Report) and connection.hello is not None:
            self._leader.on_report(connection.hello.node, message, now)
        elif isinstance(message, FirstOf) and (refusal := two_firsts(self._first_of, message)):
            self._note_refusal(None, connection, refusal)
            return self._refuse(connection, refusal, self._of_launchers)
        elif isinstance(message, Malformed):
            text = f"a line of the launcher at {connection.host} is left out: {message.why}"
            return [*self._of_launchers.say(text, now)]
        return []

    def _broadcast(self, now: float) -> None:
        if self._leader.order == self._sent and now - self._sent_at < self._timeouts.beat_secs:
            return
        self._sent, self._sent_at = self._leader.order, now
        for connection in [one for one in self._connections if one.hello is not None]:
            try:
                connection.send(self._sent)
            except OSError as error:
                self._drop(connection, is_closed=is_closed(error))

    def _drop(self, connection: Connection, *, is_closed: bool) -> None:
        connection.close()
        if connection in self._connections:
            self._connections.remove(connection)
        if connection.hello is not None and is_closed:
            self._leader.on_closed(connection.hello.node, connection.hello.session, time.monotonic())

    def _refuse(self, connection: Connection, why: str, notices: Notices) -> list[Event]:
        connection.is_refused = True
        with contextlib.suppress(OSError):
            connection.send(Refused(why))
        text = f"refused a launcher at {connection.host}: {why}"
        return [*notices.say(text, time.monotonic())]

    def _note_refusal(self, node: int | None, connection: Connection, why: str) -> None:
        shown = printable(why)
        self._leader.on_refused(node, f"A launcher at {connection.host} was refused: {shown}")
