"""Which transport a job needs: the workers tell each other where they are."""

from __future__ import annotations

import time
import uuid
import zlib
from collections.abc import Mapping

from replicast.config import host_id, shared_memory_directory
from replicast.coordination import Coordination
from replicast.errors import JobFailed
from replicast.transport.base import Transport
from replicast.transport.broadcast import BroadcastTransport
from replicast.transport.shared import SharedMemoryTransport

OPEN_SECS = 120.0
_PREFIX = "replicast/transport"


def open_transport(coordination: Coordination, rank: int, size: int, environ: Mapping[str, str]) -> Transport:
    """The transport for this job. On every worker; blocks until all have said where they are.

    Raises:
        JobFailed: A worker did not say so within two minutes.
        ClusterError: `REPLICAST_SHM_DIR` cannot be used.
    """
    until = time.monotonic() + OPEN_SECS
    coordination.put(f"{_PREFIX}/host/{rank}", host_id(environ))
    if rank == 0:
        coordination.put(f"{_PREFIX}/job", uuid.uuid4().hex)
    hosts = _hosts(coordination, size, until)
    job = coordination.get(f"{_PREFIX}/job", _remaining(until))
    if job is None:
        raise JobFailed(f"Worker 0 did not name the job within {OPEN_SECS:g} s. See its log.", worker=0)
    directory = shared_memory_directory(environ)
    if len(set(hosts)) == 1:
        return SharedMemoryTransport(job, rank, directory=directory, mates=range(size))
    # Hosts that are only said to be several, on one machine, must not meet in one directory.
    mates = [mate for mate, host in enumerate(hosts) if host == hosts[rank]]
    shared = SharedMemoryTransport(_job_on_host(job, hosts[rank]), rank, directory=directory, mates=mates)
    return BroadcastTransport(shared, coordination, rank, hosts, job)


def _hosts(coordination: Coordination, size: int, until: float) -> tuple[str, ...]:
    hosts = [coordination.get(f"{_PREFIX}/host/{rank}", _remaining(until)) for rank in range(size)]
    missing = [rank for rank, host in enumerate(hosts) if host is None]
    if missing:
        raise JobFailed(
            f"Not all workers said within {OPEN_SECS:g} s where they are. Every worker has to come here: "
            f"look into the logs of those that did not. Received: nothing from {_named(missing)}",
            worker=missing[0],
        )
    return tuple(host for host in hosts if host is not None)


def _job_on_host(job: str, host: str) -> str:
    return f"{job}-{zlib.crc32(host.encode()):08x}"


def _named(ranks: list[int]) -> str:
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _remaining(until: float) -> float:
    return max(0.001, until - time.monotonic())
