"""Which hosts a job has and which of them this is, from the options of `replicast run`."""

from __future__ import annotations

from dataclasses import replace

from replicast.errors import ClusterError
from replicast.launcher.hosts.connection import shown_address
from replicast.launcher.hosts.setup import DEFAULT_RDZV_PORT, own_node, parse_endpoint, parse_nnodes
from replicast.launcher.plan import Job, check_job


def place_on_hosts(
    job: Job,
    *,
    hosts: str | None = None,
    nnodes: str | None = None,
    node_rank: int | None = None,
    rdzv_endpoint: str | None = None,
    master_addr: str | None = None,
    master_port: int | None = None,
) -> Job:
    """The job with its hosts, the index of this one, and where the launchers meet."""
    listed = tuple(hosts.split(",")) if hosts is not None else ()
    count = parse_nnodes(nnodes) if nnodes is not None else max(1, len(listed))
    endpoint = _endpoint(rdzv_endpoint, master_addr, master_port)
    if listed and count != len(listed):
        raise ClusterError(
            f"--nnodes {count} does not fit --hosts, which lists {len(listed)}", remedy="Give one of them"
        )
    if count > 1 and master_port is not None and master_addr is None:
        raise ClusterError(
            "--master-port needs --master-addr, the address of the first host",
            remedy=f"For example: --master-addr h1 --master-port {master_port}",
        )
    if count > 1 and not listed and endpoint is None:
        raise ClusterError(
            "--nnodes needs --rdzv-endpoint, the address of the first launcher",
            remedy="For example: --nnodes 2 --node-rank 0 --rdzv-endpoint h1:29400",
        )
    job = replace(job, hosts=listed, nnodes=count, node_rank=0 if node_rank is None else node_rank)
    check_job(job)
    if count == 1:
        return job
    if node_rank is None:
        if not listed:
            raise ClusterError("--nnodes needs --node-rank, the index of this machine, from 0")
        job = replace(job, node_rank=own_node(listed))
    if endpoint is None:
        if job.port < 2:
            raise ClusterError("--port must leave room for the launcher's port before it", received=job.port)
        endpoint = (listed[0], job.port - 1)
    _check_port(job, endpoint[1])
    return replace(job, endpoint=endpoint)


def _endpoint(
    rdzv_endpoint: str | None, master_addr: str | None, master_port: int | None
) -> tuple[str, int] | None:
    """Where the launchers meet, if it was said."""
    if master_addr is None:
        return parse_endpoint(rdzv_endpoint) if rdzv_endpoint is not None else None
    if rdzv_endpoint is not None:
        raise ClusterError(
            "--master-addr and --rdzv-endpoint say the same",
            remedy="Give one of them",
            received=f"--master-addr {master_addr} --rdzv-endpoint {rdzv_endpoint}",
        )
    port = DEFAULT_RDZV_PORT if master_port is None else master_port
    return parse_endpoint(shown_address(master_addr.strip("[]"), port))


def _check_port(job: Job, port: int) -> None:
    """The launcher of the first host and its workers need ports of their own."""
    last = job.port + job.workers - 1
    if job.port <= port <= last:
        workers = f"ports {job.port} to {last}" if job.workers > 1 else f"port {job.port}"
        raise ClusterError(
            f"The launchers cannot meet at port {port}: the workers of the first host use {workers}",
            remedy=f"Choose another port for one of them, for example --port {port + 1}",
        )
