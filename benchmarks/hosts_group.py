"""Workers on machines of their own: network namespaces on one switch, whose links may have a rate."""

from __future__ import annotations

import sys

from benchmarks.groups import Workers, cluster_of
from tests.hosts.network import Network

PORT = 2222


class HostWorkers(Workers):
    """One worker on each host.

    Args:
        pool: "hosts:RATE", as `tc` has it, such as "200mbit", or "full".
        size: The number of hosts.
    """

    def __init__(self, pool: str, size: int) -> None:
        super().__init__(pool, size)
        _, self._rate = pool.split(":")
        self._network: Network | None = None

    def end(self) -> None:
        super().end()
        if self._network is not None:
            self._network.close()
            self._network = None

    def _launch(self, address: str) -> None:
        worker = [sys.executable, "-m", "benchmarks.worker", address, "benchmarks.shared:replicast"]
        self._network = Network(self._size)
        if self._rate != "full":
            self._network.shape(self._rate)
        addresses = [f"{host.address}:{PORT}" for host in self._network.hosts]
        for rank, host in enumerate(self._network.hosts):
            self._popen(host.namespaces.inside(worker), cluster_of(rank, addresses))
