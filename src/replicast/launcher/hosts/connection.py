"""A connection between two launchers: messages in, messages out. Nothing here blocks."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from dataclasses import dataclass
from typing import Any

from replicast.launcher.hosts.messages import Hello, Message, from_json, to_json
from replicast.launcher.hosts.wire import Wire

_MAX_UNSENT = 1 << 20
_READ_BYTES = 65536


@dataclass(frozen=True, slots=True)
class Malformed:
    """An authentic line that is not a valid message. It is skipped."""

    why: str


class Connection:
    """A connection to another launcher: nothing here blocks."""

    def __init__(self, connection: socket.socket, secret: bytes, *, is_first: bool, nodes: int) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.socket = connection
        self.since = time.monotonic()
        self.host = _host_of(connection)
        self.hello: Hello | None = None
        """The introduction of the other side, once it is accepted."""
        self.is_refused = False
        self._wire = Wire(secret, secrets.token_hex(32), is_first=is_first)
        self._nodes = nodes
        self._unsent = self._wire.opening()
        self._waiting: list[Message] = []
        self.flush()

    def send(self, message: Message) -> None:
        """Queues a message and sends what the socket takes."""
        if not self._wire.is_open:
            older = [one for one in self._waiting if not isinstance(one, type(message))]
            self._waiting = [*older, message]
            return
        self._unsent += self._wire.pack(to_json(message))
        if len(self._unsent) > _MAX_UNSENT:
            raise TimeoutError("the other side does not read")
        self.flush()

    def flush(self) -> None:
        """Sends what the socket takes."""
        with contextlib.suppress(BlockingIOError):
            while self._unsent:
                self._unsent = self._unsent[self.socket.send(self._unsent) :]

    def receive(self) -> list[Message | Malformed]:
        """What has arrived."""
        try:
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise ConnectionResetError("closed by the other side")
        if self.is_refused:  # It may read why, and closes the connection then.
            return []
        messages = [_message(fields, self._nodes) for fields in self._wire.feed(data)]
        if self._wire.is_open and self._waiting:
            waiting, self._waiting = self._waiting, []
            for message in waiting:
                self.send(message)
        return messages

    def close(self) -> None:
        """Closes the socket."""
        self.socket.close()


def _host_of(connection: socket.socket) -> str:
    """The address of the other side, without the port, which is another one each time."""
    with contextlib.suppress(OSError):  # It is not connected yet, or no more.
        return str(connection.getpeername()[0])
    return "an unknown address"


def _message(fields: dict[str, Any], nodes: int) -> Message | Malformed:
    try:
        return from_json(fields, nodes)
    except ValueError as error:
        return Malformed(str(error))


def is_closed(error: OSError) -> bool:
    """Whether an error means that the other host has closed the connection: its process has ended."""
    return isinstance(error, ConnectionResetError | BrokenPipeError | ConnectionAbortedError)


def shown_address(host: str, port: int) -> str:
    """An address as people write it."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
