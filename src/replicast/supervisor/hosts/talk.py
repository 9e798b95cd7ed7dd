"""A blocking conversation with another host, for what happens once: each step has a deadline."""

from __future__ import annotations

import contextlib
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from replicast.errors import ClusterError
from replicast.names import Dialer
from replicast.supervisor.hosts.connection import shown_address
from replicast.supervisor.hosts.messages import Ask, Told, from_json, to_json
from replicast.supervisor.hosts.notices import Notices
from replicast.supervisor.hosts.wire import NotAuthentic, Wire

STEP_SECS = 5.0
_PAUSE_SECS, _TELL_AFTER_SECS = 0.25, 10.0


class Talk:
    """A blocking connection over which authenticated JSON objects go.

    Raises:
        OSError: From every method: the other side is gone, or too late.
        ValueError: From every method: it is no doctor of this job.
    """

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


def ask_run_name(
    endpoint: tuple[str, int],
    node: int,
    secret: bytes,
    *,
    timeout_secs: float,
    report: Callable[[str], object],
) -> str:
    """Asks the first launcher for the name of the run directory; blocks until it answers.

    Args:
        endpoint: The address of the first launcher.
        node: The index of this host.
        secret: The secret of the job; empty if there is none.
        timeout_secs: How long to wait.
        report: Called with a line of text while it does not answer.

    Raises:
        ClusterError: It has not answered in time.
    """
    shown, began, told, why = shown_address(*endpoint), time.monotonic(), False, ""
    notices, dialer = Notices(), Dialer(*endpoint)
    while time.monotonic() - began < timeout_secs:
        try:
            with dialer.connect(STEP_SECS) as connection:
                talk = Talk(connection, secret, is_first=False)
                talk.send(to_json(Ask(node)))
                answer = from_json(talk.receive(STEP_SECS), node + 1)
                if isinstance(answer, Told):
                    return Path(answer.run_name).name
        except NotAuthentic as error:  # It may be anybody: no reason to give up.
            why = str(error)
            text = f"{shown}: {why}. {error.remedy}; this launcher keeps trying"
            for notice in notices.say(text, time.monotonic()):
                report(notice.text)
        except (OSError, ValueError) as error:
            why = str(error)
        if not told and time.monotonic() - began >= _TELL_AFTER_SECS:
            told = True
            report(f"waiting for the first launcher at {shown} ({why})")
        time.sleep(_PAUSE_SECS)
    raise ClusterError(
        f"The first launcher did not answer at {shown} within {timeout_secs:g} s ({why})",
        remedy="Start the same command on the first host, and open this port there",
    )
