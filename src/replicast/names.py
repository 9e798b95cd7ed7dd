"""The addresses of host names. A lookup has no time limit and ignores signals, so a thread makes it."""

from __future__ import annotations

import ipaddress
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait

LOOK_SECS = 0.2
# How long a launcher waits for names. The system's resolver asks silent servers for 10 to 30 s.
NAMES_SECS = 30.0


def look_up(host: str) -> Future[list[str]]:
    """The addresses of a name, later; an IP address is its own address at once.

    The thread is a daemon: it ends when the system's resolver gives up, which may take minutes, or with the
    process.
    """
    found: Future[list[str]] = Future()

    def run() -> None:
        try:
            answers = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
            found.set_result([str(address[0]) for *_, address in answers])
        except OSError as error:
            found.set_exception(error)
        except BaseException as error:  # Such as a text that cannot be encoded as a name.
            found.set_exception(OSError(f"{host!r} could not be looked up ({error})"))

    if is_address(host):
        found.set_result([host])
    else:
        try:
            threading.Thread(target=run, name="replicast-lookup", daemon=True).start()
        except RuntimeError:  # No more threads for now.
            found.set_exception(OSError("its name was not looked up"))
    return found


def addresses_of(host: str, port: int, look: Callable[[], object]) -> list[tuple[str, int]]:
    """Looks up a name; an IP address is returned as it is."""
    found = look_up(host)
    while wait([found], LOOK_SECS).not_done:
        look()
    return [(address, port) for address in found.result()]


class Dialer:
    """Connects to a host, in a bounded time however long its name takes.

    A lookup that takes longer goes on, and the next try takes its result: if the first of two DNS servers is
    down, each lookup takes some seconds.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._lookup: Future[list[str]] | None = None

    def connect(self, timeout_secs: float) -> socket.socket:
        """A connection; the name and each of its addresses have this time."""
        if self._lookup is None:
            self._lookup = look_up(self._host)
        if wait([self._lookup], timeout_secs).not_done:
            raise TimeoutError("no DNS server has resolved the name yet")
        found, self._lookup = self._lookup, None
        problem = OSError("it has no address")
        for address in found.result():
            try:
                return socket.create_connection((address, self._port), timeout=timeout_secs)
            except OSError as error:
                problem = error
        raise problem


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
