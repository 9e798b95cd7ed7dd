"""The addresses of host names. A lookup has no time limit and ignores signals, so threads make them."""

from __future__ import annotations

import collections
import contextlib
import ipaddress
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait

LOOK_SECS = 0.2
# How long a launcher waits for names. The system's resolver asks silent servers for 10 to 30 s.
NAMES_SECS = 30.0
_MAX_THREADS = 16


class Lookups:
    """Looks up some names at the same time, each once. An IP address is its own address at once.

    The threads are daemons. `stop` lets them begin no other lookup; the one that each is in ends when the
    system's resolver gives up, which may take minutes, or with the process.
    """

    def __init__(self, hosts: Iterable[str]) -> None:
        self._found: dict[str, Future[list[str]]] = {host: Future() for host in hosts}
        self._left: collections.deque[str] = collections.deque()
        for host, found in self._found.items():
            if is_address(host):
                found.set_result([host])
            else:
                self._left.append(host)
        for number in range(min(_MAX_THREADS, len(self._left))):
            try:
                threading.Thread(target=self._run, name="replicast-lookup", daemon=True).start()
            except RuntimeError:  # No more threads for now: those that were started look up all names.
                if number == 0:
                    self.stop()
                break

    def addresses(self, host: str) -> list[str] | None:
        """The addresses of one of the names; None if they are not known yet."""
        found = self._found.get(host)
        return found.result() if found is not None and found.done() else None

    def wait(self, secs: float) -> bool:
        """Blocks until all lookups have ended, at most this long; returns whether they have."""
        return not wait(self._found.values(), secs).not_done

    def stop(self) -> None:
        """Gives up the names of which the lookup has not begun."""
        with contextlib.suppress(IndexError):  # There is none left.
            while True:
                self._found[self._left.popleft()].set_exception(OSError("its name was not looked up"))

    def _run(self) -> None:
        with contextlib.suppress(IndexError):  # There is none left.
            while True:
                found = self._found[host := self._left.popleft()]
                try:
                    found.set_result(_look_up(host))
                except OSError as error:
                    found.set_exception(error)
                except BaseException:
                    found.set_exception(OSError("its name could not be looked up"))
                    raise


def addresses_of(host: str, port: int, look: Callable[[], object]) -> list[tuple[str, int]]:
    """Looks up a name; an IP address is returned as it is."""
    lookup = Lookups([host])
    while not lookup.wait(LOOK_SECS):
        look()
    return [(address, port) for address in lookup.addresses(host) or []]


class Dialer:
    """Connects to a host, in a bounded time however long its name takes.

    A lookup that takes longer goes on, and the next try takes its result: if the first of two DNS servers is
    down, each lookup takes some seconds.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._lookup: Lookups | None = None

    def connect(self, timeout_secs: float) -> socket.socket:
        """A connection; the name and each of its addresses have this time."""
        if self._lookup is None:
            self._lookup = Lookups([self._host])
        if not self._lookup.wait(timeout_secs):
            raise TimeoutError("no DNS server has resolved the name yet")
        lookup, self._lookup = self._lookup, None
        problem = OSError("it has no address")
        for address in lookup.addresses(self._host) or []:
            try:
                return socket.create_connection((address, self._port), timeout=timeout_secs)
            except OSError as error:
                problem = error
        raise problem


def _look_up(host: str) -> list[str]:
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except ValueError:  # A text that cannot be encoded as a name.
        raise OSError(f"{host!r} is not a host name") from None
    if not found:
        raise OSError("it has no address")
    return [str(address[0]) for *_, address in found]


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
