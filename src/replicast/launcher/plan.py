"""Plans one record per local worker from the user's options. Pure: starts and changes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from replicast.config import ATTEMPT, LAUNCHED, RUN_DIR, Cluster, read_faults
from replicast.errors import ClusterError
from replicast.faults import Fault
from replicast.launcher.machine import CUDA_VISIBLE_DEVICES, Machine, assign_gpus, thread_settings
from replicast.paths import RunDir, RunPath

DEFAULT_PORT = 29500
LOOPBACK = "127.0.0.1"
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_GRPC_PROXY = "no_grpc_proxy"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What to run, and where."""

    argv: tuple[str, ...]
    workers: int = 1
    hosts: tuple[str, ...] = ()
    nnodes: int = 1
    node_rank: int = 0
    port: int = DEFAULT_PORT
    endpoint: tuple[str, int] | None = None
    given: Cluster | None = None

    @property
    def nodes(self) -> int:
        """The number of hosts."""
        return len(self.hosts) if self.hosts else self.nnodes

    @property
    def ranks(self) -> range:
        """The ranks of the workers on this machine."""
        first = self.node_rank * self.workers if self.given is None else self.given.rank
        return range(first, first + self.workers)

    @property
    def world_size(self) -> int:
        """The number of workers on all machines."""
        return self.workers * self.nodes if self.given is None else self.given.size

    @property
    def fixed_ports(self) -> tuple[int, ...] | None:
        """The ports that workers on this machine must use; None if any free ports will do."""
        if self.given is not None:
            return (int(self.given.addresses[self.given.rank].rpartition(":")[2]),)
        if self.hosts or self.nodes > 1:
            return tuple(range(self.port, self.port + self.workers))
        return None


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    """Everything needed to start one worker."""

    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: RunPath


def check_job(job: Job) -> None:
    """Checks that a job can be started."""
    if job.workers < 1:
        raise ClusterError("-n must be at least 1", remedy="Try -n 2", received=job.workers)
    if job.given is not None and (job.workers > 1 or job.hosts or job.nnodes > 1):
        raise ClusterError(
            f"TF_CONFIG already describes a cluster of {job.given.size} in which this process is worker "
            f"{job.given.rank}, so exactly one worker is started here",
            remedy="Leave out -n and --hosts, or unset TF_CONFIG to start a separate group",
            received=f"--hosts {','.join(job.hosts)}" if job.hosts else f"-n {job.workers}",
        )
    if job.hosts:
        _check_hosts(job)
    if job.hosts or job.nnodes > 1:
        _check_node(job)
    elif job.node_rank != 0:
        raise ClusterError(
            "--node-rank needs --hosts or --nnodes", remedy="For example: --hosts h1,h2 --node-rank 1"
        )


def planned_faults(environ: Mapping[str, str]) -> tuple[Fault, ...]:
    """Reads the fault plan from the environment."""
    return tuple(Fault.from_json(described) for described in read_faults(environ))


def absent_workers(job: Job, environ: Mapping[str, str]) -> tuple[int, ...]:
    """The workers in the fault plan that the job does not have."""
    planned = {fault.worker for fault in planned_faults(environ)}
    return tuple(sorted(worker for worker in planned if worker >= job.world_size))


def _check_hosts(job: Job) -> None:
    listed = ",".join(job.hosts)
    if any(not host or ":" in host or host != host.strip() for host in job.hosts):
        raise ClusterError(
            "--hosts must be names or IPv4 addresses separated by commas, without ports",
            remedy="Give the port of each host's first worker with --port",
            received=listed,
        )
    if len(set(job.hosts)) != len(job.hosts):
        raise ClusterError(
            "--hosts names a host twice",
            remedy="List every host once and use -n for the number of workers on each",
            received=listed,
        )


def _check_node(job: Job) -> None:
    if not 0 <= job.node_rank < job.nodes:
        raise ClusterError(
            f"--node-rank must be from 0 to {job.nodes - 1}: the job has {job.nodes} hosts",
            remedy="It is the index of this machine in --hosts, from 0",
            received=job.node_rank,
        )
    if not 0 < job.port <= 65536 - job.workers:
        raise ClusterError(
            f"--port must leave room for {job.workers} ports from 1 to 65535", received=job.port
        )


def parse_tee(text: str | None, job: Job) -> frozenset[int]:
    """Reads which workers' output goes to the screen: `all`, `none` or ranks such as `0,2`."""
    if text is None:
        return frozenset(job.ranks[:1])
    if text == "all":
        return frozenset(job.ranks)
    if text == "none":
        return frozenset()
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) < job.world_size for part in parts):
        raise ClusterError(
            f'--tee must be "all", "none" or workers from 0 to {job.world_size - 1} separated by commas',
            received=text,
        )
    return frozenset(int(part) for part in parts) & frozenset(job.ranks)


def plan_addresses(job: Job, ports: Sequence[int]) -> tuple[str, ...]:
    """The address of every worker in the job."""
    if job.given is not None:
        return job.given.addresses
    if not job.hosts:
        return tuple(f"{LOOPBACK}:{port}" for port in ports)
    return tuple(f"{host}:{job.port + local}" for host in job.hosts for local in range(job.workers))


def plan_workers(
    job: Job,
    *,
    ports: Sequence[int],
    attempt: int,
    run_dir: RunDir,
    log_dir: RunPath,
    machine: Machine,
    environ: Mapping[str, str],
) -> tuple[WorkerPlan, ...]:
    addresses = plan_addresses(job, ports)
    gpus = assign_gpus(machine.gpus, job.workers) if job.given is None else (None,)
    shared = {
        "WORLD_SIZE": str(job.world_size),
        "PYTHONUNBUFFERED": "1",
        RUN_DIR: str(run_dir),
        ATTEMPT: str(attempt),
        LAUNCHED: "1",
        **thread_settings(machine.cores, job.workers, environ),
        **proxy_settings(addresses, environ),
    }
    plans = []
    for local_rank, rank in enumerate(job.ranks):
        env = {**shared, "RANK": str(rank)}
        if job.given is None:
            env["TF_CONFIG"] = Cluster(addresses, rank).tf_config()
        if job.given is None or "LOCAL_RANK" not in environ:
            env["LOCAL_RANK"] = str(local_rank)
            env["LOCAL_WORLD_SIZE"] = str(job.workers)
        gpu = gpus[local_rank]
        if gpu is not None:
            env[CUDA_VISIBLE_DEVICES] = gpu
        plans.append(WorkerPlan(rank=rank, argv=job.argv, env=env, log=log_path(log_dir, attempt, rank)))
    return tuple(plans)


def proxy_settings(addresses: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """Exempts the workers' traffic from HTTP proxies, through which they would wait for ever.

    gRPC honours the proxy variables even for 127.0.0.1. Only gRPC reads the variable set here.
    """
    if not any(environ.get(name) for name in _PROXIES):
        return {}
    exempt = environ.get(_NO_GRPC_PROXY, environ.get("no_proxy", ""))
    hosts = dict.fromkeys(address.rpartition(":")[0] for address in addresses)
    return {_NO_GRPC_PROXY: ",".join([*filter(None, [exempt]), *hosts])}


def log_path(log_dir: RunPath, attempt: int, rank: int) -> RunPath:
    """The log file of one worker in one attempt."""
    return log_dir / f"attempt-{attempt}" / f"worker-{rank}.log"
