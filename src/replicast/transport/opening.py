"""Chooses the transport of a job: every worker publishes the id of its host."""

from __future__ import annotations

import itertools
import uuid
import zlib
from collections.abc import Callable, Mapping

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
MOST_NAMED = 10  # How many missing workers an error names: each takes worker 0 a third of a second to find.
_PREFIX = "replicast/transport"


def open_transport(
    coordination: Coordination,
    rank: int,
    size: int,
    environ: Mapping[str, str],
    name: str,
    check: Callable[[], None] = lambda: None,
) -> Transport:
    """The transport for this job. On every worker; blocks until all have published their host."""
    hosts, job = hosts_of_job(_PREFIX, coordination, rank, size, environ, check)
    directory = shared_memory_directory(environ)
    if len(set(hosts)) == 1:
        return SharedMemoryTransport(job, rank, directory=directory, local_ranks=range(size))
    # With REPLICAST_HOST_ID, several hosts may be one machine: their files must have different names.
    local_ranks = [local for local, host in enumerate(hosts) if host == hosts[rank]]
    files = _job_on_host(job, hosts[rank])
    shared = SharedMemoryTransport(files, rank, directory=directory, local_ranks=local_ranks)
    leaders = tuple(leaders_of(hosts).values())
    keys = f"{job}/{name}"
    opening = ChainOpening(coordination, rank, leaders, f"{_PREFIX}/{keys}", environ, OPEN_SECS, check)
    is_chain, ends = opening.open()
    if is_chain:
        return ChainTransport(shared, coordination, rank, hosts, keys, ends)
    return BroadcastTransport(shared, coordination, rank, hosts, job)


def hosts_of_job(
    prefix: str,
    coordination: Coordination,
    rank: int,
    size: int,
    environ: Mapping[str, str],
    check: Callable[[], None] = lambda: None,
) -> tuple[tuple[str, ...], str]:
    """The host of every worker, by rank, and a name of the job, unique for each prefix of the keys.

    Blocks until all workers have published their host under this prefix.
    """
    key = f"{prefix}/host"
    if rank == 0:  # Written first, so that it exists once all hosts are published.
        coordination.put(f"{prefix}/job", uuid.uuid4().hex)
    coordination.put(f"{key}/{rank}", host_id(environ))

    def late(worker: int) -> JobFailed:
        others = range(worker + 1, size) if rank == 0 else ()  # worker 0 tells all what it has found
        without = (other for other in others if coordination.peek(f"{key}/{other}") is None)
        missing = [worker, *itertools.islice(without, MOST_NAMED - 1)]
        return JobFailed(
            f"Not all workers published their host within {OPEN_SECS:g} s. Every worker must create its "
            "Strategy and Replicas: look for the reason in the logs of the missing workers. "
            f"Received: nothing from {_named(missing)}",
            worker=worker,
        )

    wait = agreement.Wait(coordination, OPEN_SECS, late, lambda key, worker: check())
    hosts = agreement.collect(wait, key, rank, size)
    return tuple(hosts.values()), wait.value(f"{prefix}/job", 0)


def _job_on_host(job: str, host: str) -> str:
    return f"{job}-{zlib.crc32(host.encode()):08x}"


def _named(ranks: list[int]) -> str:
    more = " and perhaps more" if len(ranks) == MOST_NAMED else ""
    return f"worker{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}{more}"
