"""Reserves ports from the moment they are chosen until the group has ended.

Choosing a free port and closing it again is a race. The launcher keeps each port bound instead, without
listening. TensorFlow's gRPC server binds with SO_REUSEADDR (and turns SO_REUSEPORT off), and Linux lets a
second SO_REUSEADDR socket bind and listen as long as the first one does not listen. A process that asks the
kernel for any free port never gets a reserved one.
"""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from replicast.errors import ClusterError

_PAUSE_SECS = 0.1


class HeldPorts:
    """Bound sockets that reserve their ports for the workers. A context manager."""

    def __init__(self, sockets: Sequence[socket.socket]) -> None:
        self._sockets = tuple(sockets)
        self.numbers = tuple(int(held.getsockname()[1]) for held in sockets)

    def release(self) -> None:
        """Releases the ports."""
        for held in self._sockets:
            held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def hold_free_ports(count: int) -> HeldPorts:
    """Lets the kernel choose free ports and holds them."""
    return _hold([0] * count)


def hold_ports(numbers: Sequence[int], *, within_secs: float = 0.0) -> HeldPorts:
    """Holds the given ports."""
    until = time.monotonic() + within_secs
    while True:
        try:
            return _hold(numbers)
        except ClusterError:
            if time.monotonic() >= until:
                raise
        time.sleep(_PAUSE_SECS)


def _hold(numbers: Sequence[int]) -> HeldPorts:
    sockets: list[socket.socket] = []
    try:
        for number in numbers:
            sockets.append(_bind(number))
    except BaseException:
        for held in sockets:
            held.close()
        raise
    return HeldPorts(sockets)


def _bind(number: int) -> socket.socket:
    try:
        return _bind_all_interfaces(socket.AF_INET6, number)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _taken(number) from None
    try:  # IPv6 is missing or turned off.
        return _bind_all_interfaces(socket.AF_INET, number)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise _taken(number) from None
        if error.errno == errno.EACCES:
            raise ClusterError(
                f"This user may not use port {number}", remedy="Choose a port above 1023"
            ) from None
        raise


def _bind_all_interfaces(family: socket.AddressFamily, number: int) -> socket.socket:
    held = socket.socket(family, socket.SOCK_STREAM)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        held.bind(("", number))
    except BaseException:
        held.close()
        raise
    return held


def _taken(number: int) -> ClusterError:
    return ClusterError(
        f"Port {number} is in use on this machine",
        remedy=f"Stop the process that listens there (ss -ltnp 'sport = :{number}' shows it), "
        "or choose another port (--port, or in TF_CONFIG)",
    )
