"""Chooses the transport of a job: every worker publishes the id of its host."""

from __future__ import annotations

import time
import uuid
import zlib
from collections.abc import Mapping

from replicast import agreement
from replicast.config import host_id, shared_memory_directory
from replicast.coordination import Coordination
from replicast.errors import JobFailed
from replicast.transport.base import Transport
from replicast.transport.broadcast import BroadcastTransport
from replicast.transport.chain import ChainTransport
from replicast.transport.chain_opening import ChainOpening
from replicast.transport.keys import leaders_of
from replicast.transport.shared import SharedMemoryTransport

OPEN_SECS = 120.0
_PREFIX = "replicast/transport"


def open_transport(
    coordination: Coordination, rank: int, size: int, environ: Mapping[str, str], name: str
) -> Transport:
    """The transport for this job. On every worker; blocks until all have published their host.

    Args:
        coordination: The keys that all workers share.
        rank: The rank of this worker.
        size: The number of workers.
        environ: The environment variables.
        name: The same on all workers, and different for each transport of a job.

    Raises:
        JobFailed: A worker did not do its part within two minutes.
        ClusterError: `REPLICAST_SHM_DIR` cannot be used.
    """
    hosts, job = hosts_of_job(_PREFIX, coordination, rank, size, environ)
    directory = shared_memory_directory(environ)
    if len(set(hosts)) == 1:
        return SharedMemoryTransport(job, rank, directory=directory, local_ranks=range(size))
    # With REPLICAST_HOST_ID, several hosts may be one machine: their files must have different names.
    local_ranks = [local for local, host in enumerate(hosts) if host == hosts[rank]]
    files = _job_on_host(job, hosts[rank])
    shared = SharedMemoryTransport(files, rank, directory=directory, local_ranks=local_ranks)
    leaders = tuple(leaders_of(hosts).values())
    keys = f"{job}/{name}"
    opening = ChainOpening(coordination, rank, leaders, f"{_PREFIX}/{keys}", environ, OPEN_SECS)
    is_chain, ends = opening.open()
    if is_chain:
        return ChainTransport(shared, coordination, rank, hosts, keys, ends)
    return BroadcastTransport(shared, coordination, rank, hosts, job)


def hosts_of_job(
    prefix: str, coordination: Coordination, rank: int, size: int, environ: Mapping[str, str]
) -> tuple[tuple[str, ...], str]:
    """The host of every worker, by rank, and a name of the job, unique for each prefix of the keys.

    Blocks until all workers have published their host under this prefix.

    Raises:
        JobFailed: A worker did not do so within two minutes.
    """
    key = f"{prefix}/host"
    if rank == 0:  # first: a worker that has the hosts of all finds it
        coordination.put(f"{prefix}/job", uuid.uuid4().hex)
    coordination.put(f"{key}/{rank}", host_id(environ))

    def late(worker: int) -> JobFailed:
        missing = [other for other in range(size) if coordination.get(f"{key}/{other}", 0.001) is None]
        return JobFailed(
            f"Not all workers published their host within {OPEN_SECS:g} s. Every worker must create its "
            "Strategy and Replicas: look for the reason in the logs of the missing workers. "
            f"Received: nothing from {_named(missing)}",
            worker=worker,
        )

    wait = agreement.waiting(coordination, time.monotonic() + OPEN_SECS, late)
    hosts = agreement.collect(coordination, key, rank, size, wait)
    return tuple(hosts.values()), wait(f"{prefix}/job", 0)


def _job_on_host(job: str, host: str) -> str:
    return f"{job}-{zlib.crc32(host.encode()):08x}"


def _named(ranks: list[int]) -> str:
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
