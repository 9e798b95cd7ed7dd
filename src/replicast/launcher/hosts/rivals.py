"""Whether a launcher on another host takes itself for the first one too: its `--hosts` have another order.

Each of the two would wait in vain for the other to connect. So a first launcher, once it listens, connects to
its own port on each other host, where nothing should listen. Another first launcher that knows the secret,
and needs the same ports on the same hosts, refuses it there. Of two such launchers at least the later one
finds the other, because each listens before it looks.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import time
from collections.abc import Sequence

from replicast.launcher.hosts.connection import Connection, shown_address
from replicast.launcher.hosts.events import NotWelcome, Tell
from replicast.launcher.hosts.messages import FirstOf, Refused
from replicast.launcher.hosts.notices import Notices
from replicast.launcher.hosts.wire import NotAuthentic
from replicast.names import Lookups

LOOK_SECS = 5.0
"""A host that does not answer within this time is taken to have no other first launcher."""


class Rivals:
    """Looks once at each other host, as soon as its name is resolved. Nothing here blocks."""

    def __init__(self, hosts: Sequence[str], endpoint_port: int, worker_port: int, secret: bytes) -> None:
        self._hosts, self._endpoint_port, self._secret = hosts, endpoint_port, secret
        self._question = FirstOf(tuple(hosts), worker_port)
        self._connections: dict[Connection, str] = {}
        self._unresolved = list(dict.fromkeys(hosts[1:]))
        self._lookups = Lookups(self._unresolved)
        self._connect()

    def sockets(self) -> list[socket.socket]:
        """The sockets from which something may come."""
        return [connection.socket for connection in self._connections]

    def poll(self, readable: list[socket.socket], notices: Notices) -> list[NotWelcome | Tell]:
        """What was found; `notices` decides which lines are said of strangers."""
        events: list[NotWelcome | Tell] = []
        for connection, address in list(self._connections.items()):
            found: list[NotWelcome | Tell] = []
            is_over = time.monotonic() - connection.since >= LOOK_SECS
            try:
                if connection.socket in readable:
                    found += [
                        NotWelcome(message.why, by=f"The launcher at {address}")
                        for message in connection.receive()
                        if isinstance(message, Refused)
                    ]
            except NotAuthentic as error:
                found += notices.say(f"{address}: {error}. {error.remedy}", time.monotonic())
                is_over = True
            except (OSError, ValueError):  # Nothing listens there, as it should be, or something else does.
                is_over = True
            if is_over or found:
                connection.close()
                del self._connections[connection]
            events += found
        self._connect()
        return events

    def close(self) -> None:
        """Closes all sockets."""
        self._lookups.stop()
        for connection in self._connections:
            connection.close()

    def _connect(self) -> None:
        """Begins a connection to each host whose name was resolved since the last call."""
        for host in list(self._unresolved):
            try:
                addresses = self._lookups.addresses(host)
            except OSError:
                self._unresolved.remove(host)
                continue
            if addresses is None:
                continue
            self._unresolved.remove(host)
            connecting = _connecting(addresses[0], self._endpoint_port)
            if connecting is None:
                continue
            try:
                connection = Connection(connecting, self._secret, is_first=False, nodes=len(self._hosts))
                connection.send(self._question)
            except OSError:
                connecting.close()
            else:
                self._connections[connection] = shown_address(host, self._endpoint_port)


def _connecting(host: str, port: int) -> socket.socket | None:
    """A socket that connects to an IP address, without waiting for it; None if it cannot."""
    with contextlib.suppress(OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        connecting = socket.socket(family, kind, protocol)
        connecting.setblocking(False)
        if connecting.connect_ex(address) in (0, errno.EINPROGRESS):
            return connecting
        connecting.close()
    return None
