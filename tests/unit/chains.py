"""Chains of hosts for tests: threads act as workers, one directory acts as the memory of all hosts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from replicast.coordination import DirectExchange, MemoryCoordination
from replicast.transport import ChainTransport
from replicast.transport.chain import open_ends
from tests.threads import DEADLINE_SECS


def environment(
    rank: int, hosts: Sequence[str], directory: Path, addresses: Sequence[str] | None = None
) -> dict[str, str]:
    """The environment of a worker; by default all have addresses of their own on the loopback network."""
    named = addresses or [f"127.0.0.{rank + 1}" for rank in range(len(hosts))]
    cluster = {"worker": [f"{address}:{2222 + number}" for number, address in enumerate(named)]}
    return {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}}),
        "REPLICAST_HOST_ID": hosts[rank],
        "REPLICAST_SHM_DIR": str(directory),
    }


def chain_of(
    hosts: Sequence[str], directory: Path, store: MemoryCoordination.Store | None = None
) -> list[ChainTransport]:
    """The transports of all workers. Each verifies all that it receives."""
    store = store or MemoryCoordination.Store()

    def open_one(rank: int) -> ChainTransport:
        exchange = DirectExchange(MemoryCoordination(store), "chain", rank, len(hosts))
        environ = environment(rank, hosts, directory)
        transport = ChainTransport(f"job-{hosts[rank]}", exchange, hosts, directory=directory)
        transport.ends = open_ends(exchange, environ, DEADLINE_SECS, hosts, b"s" * 32)
        return transport

    with ThreadPoolExecutor(len(hosts)) as threads:
        return list(threads.map(open_one, range(len(hosts))))
