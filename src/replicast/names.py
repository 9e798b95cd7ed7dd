"""The addresses of a host name. A lookup has no time limit and ignores signals, so a thread makes it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

LOOK_SECS = 0.2


def addresses_of(host: str, port: int, look: Callable[[], object]) -> list[tuple[str, int]]:
    """Looks up a name; an IP address is returned as it is.

    The thread is a daemon, and nobody stops it: it ends when the system's resolver gives up, which may take
    minutes, or with the process.

    Args:
        host: A name or an address.
        port: Returned with each address.
        look: Called five times a second while the lookup lasts; raises to give it up.

    Raises:
        OSError: The name has no address.
    """
    lookup = _Lookup(host, port)
    lookup.start()
    while lookup.is_alive():
        lookup.join(LOOK_SECS)
        if lookup.is_alive():
            look()
    if not lookup.addresses:
        raise lookup.error or OSError("it has no address")
    return lookup.addresses


class _Lookup(threading.Thread):
    def __init__(self, host: str, port: int) -> None:
        super().__init__(name="replicast-lookup", daemon=True)
        self._host = host
        self._port = port
        self.addresses: list[tuple[str, int]] = []
        self.error: OSError | None = None

    def run(self) -> None:
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            self.error = error
        except UnicodeError:
            self.error = OSError(f"{self._host!r} is not a host name")
        else:
            self.addresses = [(str(address[0]), int(address[1])) for *_, address in found]
