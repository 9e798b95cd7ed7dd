"""Chooses the transport of a job: every worker publishes the id of its host.

Between several hosts all leaders listen, each tries the one before it, and worker 0 decides for all:

```
 worker 0        every leader                     every worker
 secret ───────► listen, publish the port
                 connect to the leader before it
        ◄─────── "" or what does not work
 decision ─────────────────────────────────────► chain, or TensorFlow's broadcast
```
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import uuid
import zlib
from collections.abc import Mapping

from replicast.config import host_and_port, host_id, read_cluster, shared_memory_directory
from replicast.coordination import Participant, Wait
from replicast.errors import JobFailed
from replicast.transport.base import Transport
from replicast.transport.broadcast import BroadcastTransport
from replicast.transport.chain import ChainLink, ChainTransport, Ends, Holdings, Server, predecessor
from replicast.transport.shared import SharedMemoryTransport, leaders_of

logger = logging.getLogger("replicast")

OPEN_SECS = 120.0
MOST_NAMED = 10  # How many missing workers an error names: each takes worker 0 a third of a second to find.
_PREFIX = "replicast/transport"
_CHAIN = "chain"


def open_transport(member: Participant, name: str) -> Transport:
    """The transport for this job. On every worker; blocks until all have published their host."""
    hosts, job = hosts_of_job(member, _PREFIX)
    rank, directory = member.rank, shared_memory_directory(member.environ)
    if len(set(hosts)) == 1:
        return SharedMemoryTransport(job, rank, directory=directory, local_ranks=range(member.size))
    # With REPLICAST_HOST_ID, several hosts may be one machine: their files must have different names.
    files = f"{job}-{zlib.crc32(hosts[rank].encode()):08x}"
    local_ranks = [local for local, host in enumerate(hosts) if host == hosts[rank]]
    shared = SharedMemoryTransport(files, rank, directory=directory, local_ranks=local_ranks)
    leaders = tuple(leaders_of(hosts).values())
    keys = f"{job}/{name}"
    is_chain, ends = open_chain(member, leaders, f"{_PREFIX}/{keys}")
    if is_chain:
        return ChainTransport(shared, member.coordination, rank, hosts, keys, ends)
    return BroadcastTransport(shared, member.coordination, rank, hosts, job)


def hosts_of_job(member: Participant, prefix: str) -> tuple[tuple[str, ...], str]:
    """The host of every worker, by rank, and a name of the job. Blocks until all have published theirs."""
    key, coordination, rank, size = f"{prefix}/host", member.coordination, member.rank, member.size
    if rank == 0:  # Written first, so that it exists once all hosts are published.
        coordination.put(f"{prefix}/job", uuid.uuid4().hex)
    coordination.put(f"{key}/{rank}", host_id(member.environ))

    def late(worker: int) -> JobFailed:
        others = range(worker + 1, size) if rank == 0 else ()  # worker 0 tells all what it has found
        without = (other for other in others if coordination.peek(f"{key}/{other}") is None)
        missing = [worker, *itertools.islice(without, MOST_NAMED - 1)]
        more = " and perhaps more" if len(missing) == MOST_NAMED else ""
        return JobFailed(
            f"Not all workers published their host within {OPEN_SECS:g} s. Every worker must create its "
            "Strategy and Replicas: see the logs of the missing workers for the reason. Received: nothing "
            f"from worker{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}{more}",
            worker=worker,
        )

    wait = member.wait(OPEN_SECS, late)
    hosts = wait.collect(key, rank, size)
    return tuple(hosts.values()), wait.value(f"{prefix}/job", 0)


def open_chain(member: Participant, leaders: tuple[int, ...], prefix: str) -> tuple[bool, Ends | None]:
    """Whether the hosts are a chain: the same on all workers. And this leader's ends of it."""
    rank, environ, coordination = member.rank, member.environ, member.coordination
    wait = wait_until_all(member, "connect to the other hosts")

    def put(what: str, value: str) -> None:
        coordination.put(f"{prefix}/{what}", value)

    def get(what: str, worker: int) -> str:
        return wait.value(f"{prefix}/{what}", worker)

    if rank == 0:
        put("secret", secrets.token_hex(32))
    with contextlib.ExitStack() as unless_chain:
        ends = None
        if rank in leaders:
            secret, holdings = bytes.fromhex(get("secret", 0)), Holdings(rank)
            host, server, problem = _host_of(rank, environ), None, ""
            if host:
                try:
                    server = Server(host, secret, holdings)
                except OSError as error:
                    problem = f"worker {rank} cannot listen at {host}, its address in TF_CONFIG: {error}"
            else:
                problem = f"worker {rank} has no TF_CONFIG, which would name its address"
            put(f"port/{rank}", "" if server is None else str(server.port))
            if server is not None:
                unless_chain.callback(server.close)
                before = predecessor(leaders, rank)
                port = get(f"port/{before}", before)
                host = _host_of(before, environ)
                link = ChainLink(host, int(port or 0), secret, rank, before)
                unless_chain.callback(link.close)
                ends = Ends(holdings, server, link)
                try:
                    if port:
                        link.give_back(link.take())
                except OSError as error:
                    problem = f"worker {rank} cannot reach worker {before} at {host}:{port}: {error}"
            put(f"reached/{rank}", problem)
        if rank == 0:  # the chain needs every link of the ring
            problems = [problem for leader in leaders if (problem := get(f"reached/{leader}", leader))]
            coordination.delete(f"{prefix}/secret")  # all leaders have read it
            if problems:
                logger.warning(
                    "updates go between the %d hosts by TensorFlow's broadcast, which is slower than direct "
                    "connections: %s. Allow TCP connections between the addresses in TF_CONFIG, any port",
                    len(leaders),
                    "; ".join(problems[:3]),
                )
            else:
                logger.info("updates go along a chain of %d hosts, over TCP", len(leaders))
            put("decision", "; ".join(problems) or _CHAIN)
        if get("decision", 0) != _CHAIN:
            return False, None
        unless_chain.pop_all()
    return True, ends


def wait_until_all(member: Participant, do: str) -> Wait:
    """A wait at the start of the job, whose error names the worker that did not do it."""

    def late(worker: int) -> JobFailed:
        return JobFailed(f"Worker {worker} did not {do} within {OPEN_SECS:g} s. See its log.", worker=worker)

    return member.wait(OPEN_SECS, late)


def _host_of(rank: int, environ: Mapping[str, str]) -> str:
    cluster = read_cluster(environ)
    return "" if cluster is None else host_and_port(cluster.addresses[rank])[0]
