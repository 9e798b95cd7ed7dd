"""A blocking conversation with another host, for what happens once: each step has a deadline."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from typing import Any

from replicast.launcher.hosts.wire import NotAuthentic, Wire

STEP_SECS = 5.0


class Talk:
    """A blocking connection over which authenticated JSON objects go."""

    def __init__(self, connection: socket.socket, secret: bytes, *, is_first: bool) -> None:
        self._connection = connection
        self._wire = Wire(secret, secrets.token_hex(32), is_first=is_first)
        self._messages: list[dict[str, Any]] = []
        connection.settimeout(STEP_SECS)
        connection.sendall(self._wire.opening())
        while not self._wire.is_open:
            self._read(time.monotonic() + STEP_SECS)

    def send(self, message: dict[str, Any]) -> None:
        """Sends an object."""
        self._connection.settimeout(STEP_SECS)
        self._connection.sendall(self._wire.pack(message))

    def receive(self, secs: float) -> dict[str, Any]:
        """Waits for the next object."""
        until = time.monotonic() + secs
        while not self._messages:
            self._read(until)
        return self._messages.pop(0)

    def _read(self, until: float) -> None:
        self._connection.settimeout(max(0.01, until - time.monotonic()))
        data = self._connection.recv(65536)
        if not data:
            raise ConnectionResetError("closed by the other side")
        try:
            self._messages += self._wire.feed(data)
        except NotAuthentic:
            with contextlib.suppress(OSError):
                if self._wire.is_open:
                    self.send({})  # By its seal the other side sees that the secrets differ.
            raise
