"""What to run, where, and with which resources: from the user's options to one record per local worker.

Everything that can be refused is refused here, before a process is started or a directory is made.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field, replace
from importlib.machinery import PathFinder
from pathlib import Path

from replicast import config
from replicast.codec import is_integer
from replicast.connections import NAMES_SECS, look_up
from replicast.errors import ClusterError, LaunchRefused
from replicast.faults import read_faults
from replicast.files import RunDir, RunPath, below
from replicast.launcher.hosts_leader import HostTimeouts

DEFAULT_PORT = 29500
DEFAULT_RDZV_PORT = 29400
LOOPBACK = "127.0.0.1"
CUDA_VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"
_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")
_PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
_NO_GRPC_PROXY = "no_grpc_proxy"
_PYTHON = re.compile(r"python[0-9.]*t?")
_DEVICES = Path("/dev")
_TUNABLES = "GLIBC_TUNABLES"
# Large memory in pages of 2 MiB, where the kernel gives them on request. With pages of 4 KiB every row misses
# the TLB: the gathers and scatters of a step on a table of 10,000,000 rows took 1.3 times as long.
_HUGE_PAGES = "glibc.malloc.hugetlb=1"
_MIN_INTEROP_THREADS = 2  # With one, a collective that waits for another worker could block the step.
_PORT_PAUSE_SECS = 0.1


# --- The job ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class EndTimeouts:
    settle_secs: float = 5.0  # for the others to exit by themselves, after a worker has failed
    settle_killed_secs: float = 1.0  # … after it was ended by a signal, or if all others are frozen
    settle_blamed_secs: float = 15.0  # … after it exited because of another one, which has not exited yet
    stop_secs: float = 30.0  # from SIGTERM to SIGKILL: for the last checkpoint
    stop_failed_secs: float = 2.0  # … after a failure, when nothing is saved any more
    stop_killed_secs: float = 0.25  # … after one of them was killed
    kill_secs: float = 10.0  # for processes to disappear after SIGKILL
    frozen_secs: float = 10.0  # a worker that is stopped so long, while another runs, is to blame


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """All that was asked for, by options, by `TF_CONFIG` and by the environment."""

    argv: tuple[str, ...]
    workers: int = 1  # on each host
    hosts: tuple[str, ...] = ()
    nnodes: int = 1
    node_rank: int = 0
    port: int = DEFAULT_PORT
    endpoint: tuple[str, int] = ("", 0)  # where the launchers of several hosts meet
    given: config.Cluster | None = None  # that in TF_CONFIG, if somebody else has set it; spread over devices
    run_dir: Path | None = None  # None: the first launcher of several hosts gives its name.
    log_dir: RunPath | None = None  # None: in the run directory
    tee: frozenset[int] = frozenset()  # the workers whose output is shown
    max_restarts: int = 0
    timeouts: EndTimeouts = field(default_factory=EndTimeouts)
    host_timeouts: HostTimeouts = field(default_factory=HostTimeouts)
    secret: bytes = b""
    page: tuple[str, int] | None = None  # the address of `--serve`

    def logs(self, run_dir: RunDir) -> RunPath:
        return below(run_dir) / "logs" if self.log_dir is None else self.log_dir

    @property
    def nodes(self) -> int:
        return len(self.hosts) if self.hosts else self.nnodes

    @property
    def ranks(self) -> range:
        first = self.node_rank * self.workers if self.given is None else self.given.rank
        return range(first, first + self.workers)

    @property
    def world_size(self) -> int:
        return self.workers * self.nodes if self.given is None else self.given.size

    @property
    def fixed_ports(self) -> tuple[int, ...] | None:
        """The ports that workers on this machine must use; None if any free ports will do."""
        if self.given is not None:
            return tuple(int(self.given.addresses[rank].rpartition(":")[2]) for rank in self.ranks)
        if self.hosts or self.nodes > 1:
            return tuple(range(self.port, self.port + self.workers))
        return None


def refuse_if(wrong: object, what: str, remedy: str = "", received: object = None) -> None:
    if wrong:
        raise ClusterError(what, remedy=remedy, received=received)


def check_job(job: JobPlan) -> None:
    given, listed, alone = job.given, ",".join(job.hosts), not job.hosts and job.nnodes == 1
    refuse_if(job.workers < 1, "-n must be at least 1", "Try -n 2", job.workers)
    if given is not None:
        refuse_if(
            job.workers > 1 or not alone,
            f"TF_CONFIG already describes a cluster of {given.size} in which this process is worker "
            f"{given.rank}, so exactly one worker is started here",
            "Leave out -n and --hosts, or unset TF_CONFIG to start a separate group. For several "
            "workers in each task, one per GPU, add --from-tf-config",
            f"--hosts {listed}" if job.hosts else f"-n {job.workers}",
        )
    refuse_if(
        any(not host or ":" in host or host != host.strip() for host in job.hosts),
        "--hosts must be names or IPv4 addresses separated by commas, without ports",
        "Give the port of each host's first worker with --port",
        listed,
    )
    remedy = "List every host once and use -n for the number of workers on each"
    refuse_if(len(set(job.hosts)) != len(job.hosts), "--hosts names a host twice", remedy, listed)
    if alone:
        remedy = "For example: --hosts h1,h2 --node-rank 1"
        refuse_if(job.node_rank != 0, "--node-rank needs --hosts or --nnodes", remedy)
        return
    what = f"--node-rank must be from 0 to {job.nodes - 1}: the job has {job.nodes} hosts"
    remedy = "It is the index of this machine in --hosts, from 0"
    refuse_if(not 0 <= job.node_rank < job.nodes, what, remedy, job.node_rank)
    what = f"--port must leave room for {job.workers} ports from 1 to 65535"
    refuse_if(not 0 < job.port <= 65536 - job.workers, what, received=job.port)


def spread_over_devices(job: JobPlan, count: int) -> JobPlan:
    """The job with `count` workers for each task of TF_CONFIG: at its port and those that follow it."""
    if job.given is None:
        remedy = "Leave out --from-tf-config; -n is the number of workers on this machine"
        raise ClusterError("--from-tf-config needs a TF_CONFIG, and there is none", remedy=remedy)
    refuse_if(count < 1, "-n must be at least 1", "Try -n 2", count)
    tasks = [address.rpartition(":") for address in job.given.addresses]
    spread = [f"{host}:{int(port) + local}" for host, _, port in tasks for local in range(count)]
    used = sorted({one for one in spread if spread.count(one) > 1})
    refuse_if(
        used or max(int(port) for _, _, port in tasks) + count > 65536,
        f"--from-tf-config needs {count} ports for each task of TF_CONFIG",
        f"Give tasks on one host ports that are {count} apart, or give -n 1",
        f"{used[0]} for two workers" if used else "ports above 65535",
    )
    return replace(job, workers=count, given=config.Cluster(tuple(spread), job.given.rank * count))


def parse_tee(text: str | None, job: JobPlan) -> frozenset[int]:
    """Reads which workers' output goes to the screen: `all`, `none` or ranks such as `0,2`."""
    if text is None:
        return frozenset(job.ranks[:1])
    if text in ("all", "none"):
        return frozenset(job.ranks if text == "all" else ())
    parts = [part.strip() for part in text.split(",")]
    what = f'--tee must be "all", "none" or workers from 0 to {job.world_size - 1} separated by commas'
    refuse_if(not all(is_integer(part, 0, job.world_size - 1) for part in parts), what, received=text)
    return frozenset(int(part) for part in parts) & frozenset(job.ranks)


# --- The hosts of a job ------------------------------------------------------------------------------------


def place_on_hosts(
    job: JobPlan,
    *,
    hosts: str | None = None,
    nnodes: int | None = None,
    node_rank: int | None = None,
    rdzv_endpoint: str | None = None,
) -> JobPlan:
    listed = tuple(hosts.split(",")) if hosts is not None else ()
    count = max(1, len(listed)) if nnodes is None else nnodes
    endpoint = parse_endpoint(rdzv_endpoint) if rdzv_endpoint is not None else None
    what = f"--nnodes {count} does not fit --hosts, which lists {len(listed)}"
    refuse_if(listed and count != len(listed), what, "Give one of them")
    what = "--nnodes needs --rdzv-endpoint, the address of the first launcher"
    remedy = "For example: --nnodes 2 --node-rank 0 --rdzv-endpoint h1:29400"
    refuse_if(count > 1 and not listed and endpoint is None, what, remedy)
    job = replace(job, hosts=listed, nnodes=count, node_rank=0 if node_rank is None else node_rank)
    check_job(job)
    if count == 1:
        return job
    if node_rank is None:
        refuse_if(not listed, "--nnodes needs --node-rank, the index of this machine, from 0")
        job = replace(job, node_rank=own_node(listed))
    if endpoint is None:
        what = "--port must leave room for the launcher's port before it"
        refuse_if(job.port < 2, what, received=job.port)
        endpoint = (listed[0], job.port - 1)
    port, last = endpoint[1], job.port + job.workers - 1
    workers = f"ports {job.port} to {last}" if job.workers > 1 else f"port {job.port}"
    what = f"The launchers cannot meet at port {port}: the workers of the first host use {workers}"
    remedy = f"Choose another port for one of them, for example --port {port + 1}"
    refuse_if(job.port <= port <= last, what, remedy)
    return replace(job, endpoint=endpoint)


def parse_endpoint(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_RDZV_PORT)
    host = host.removeprefix("[").removesuffix("]")
    what = "--rdzv-endpoint must be the host and port of the first launcher"
    remedy = "For example: --rdzv-endpoint h1:29400"
    refuse_if(not host or not is_integer(port, 1, 65535), what, remedy, text)
    return host, int(port)


def own_node(hosts: Sequence[str]) -> int:
    """The index of this machine in the list of hosts: the one whose address is an address of this machine.

    Blocks until the names are resolved, at most `NAMES_SECS`.
    """

    def is_own(address: str) -> bool:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with contextlib.suppress(OSError), socket.socket(family) as tried:
            tried.bind((address, 0))
            return True
        return False

    lookups = [look_up(host) for host in hosts]
    unresolved = wait(lookups, NAMES_SECS).not_done
    found = []
    for node, lookup in enumerate(lookups):
        with contextlib.suppress(OSError):  # a name without an address
            if lookup.done() and any(map(is_own, lookup.result())):
                found.append(node)
    if len(found) == 1:
        return found[0]
    why = "none of --hosts is" if not found else "several of --hosts are"
    late = "" if not unresolved else f"; not all names were resolved within {NAMES_SECS:g} s"
    raise ClusterError(
        f"Cannot tell which host this is: {why} an address of this machine{late}",
        remedy="Give --node-rank, the index of this machine in --hosts, from 0",
        received=",".join(hosts),
    )


# --- The program -----------------------------------------------------------------------------------------


def check_script(script: str) -> None:
    """Finds the script before anything starts, so that N workers need not fail to find it."""
    if _PYTHON.fullmatch(Path(script).name) and not Path(script).is_dir():
        remedy = "Give the script alone: replicast run --workers 2 train.py"
        raise LaunchRefused(f"{script!r} is Python itself, which replicast run starts", remedy=remedy)
    if not Path(script).exists():
        remedy = "Check the path, or give -m to run a module by its name"
        raise LaunchRefused(f"There is no script {script!r} in {Path.cwd()}", remedy=remedy)


def check_module(module: str) -> None:
    """The same for a package, which is not imported; `python -m` looks in the current directory first."""
    name = module.partition(".")[0]
    if not name or PathFinder.find_spec(name, [str(Path.cwd()), *sys.path]) is None:
        remedy = "Check its name, install it, or start from the directory that contains it"
        raise LaunchRefused(f"There is no module {module!r} for {sys.executable}", remedy=remedy)


# --- The machine -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Machine:
    cores: int
    gpus: tuple[str, ...] = ()


def this_machine(environ: Mapping[str, str]) -> Machine:
    nodes = [entry.name for entry in _DEVICES.glob("nvidia[0-9]*")]
    return Machine(len(os.sched_getaffinity(0)), visible_gpus(environ.get(CUDA_VISIBLE_DEVICES), nodes))


def visible_gpus(setting: str | None, device_nodes: Sequence[str]) -> tuple[str, ...]:
    """The GPUs that may be used: those that the user listed, else all that have a device node."""
    present = sorted(int(found[1]) for node in device_nodes if (found := re.fullmatch(r"nvidia(\d+)", node)))
    if not present:
        return ()
    if setting is None:
        return tuple(str(index) for index in present)
    listed = [device.strip() for device in setting.split(",")]
    # CUDA itself stops at the first entry that is not a device.
    hidden = next((i for i, device in enumerate(listed) if device in ("", "-1")), len(listed))
    return tuple(listed[:hidden])


def thread_settings(cores: int, workers: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Divides the cores among local workers. Keeps what the user set; a single worker gets all cores."""
    if workers < 2:
        return {}
    share = max(1, cores // workers)
    wanted = {
        "TF_NUM_INTRAOP_THREADS": str(share),
        "TF_NUM_INTEROP_THREADS": str(max(_MIN_INTEROP_THREADS, share)),
        "OMP_NUM_THREADS": str(share),
    }
    return {name: value for name, value in wanted.items() if name not in environ}


# --- The workers -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WorkerPlan:
    rank: int
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: RunPath


def log_path(log_dir: RunPath, attempt: int, rank: int) -> RunPath:
    return log_dir / f"attempt-{attempt}" / f"worker-{rank}.log"


def plan_addresses(job: JobPlan, ports: Sequence[int]) -> tuple[str, ...]:
    if job.given is not None:
        return job.given.addresses
    if not job.hosts:
        return tuple(f"{LOOPBACK}:{port}" for port in ports)
    return tuple(f"{host}:{job.port + local}" for host in job.hosts for local in range(job.workers))


def plan_workers(
    job: JobPlan,
    *,
    ports: Sequence[int],
    attempt: int,
    run_dir: RunDir,
    machine: Machine,
    environ: Mapping[str, str],
) -> tuple[WorkerPlan, ...]:
    addresses = plan_addresses(job, ports)
    shared = {
        "WORLD_SIZE": str(job.world_size),
        "PYTHONUNBUFFERED": "1",
        config.RUN_DIR: str(run_dir),
        config.ATTEMPT: str(attempt),
        config.LAUNCHED: "1",
        _TUNABLES: environ.get(_TUNABLES, _HUGE_PAGES),
        **thread_settings(machine.cores, job.workers, environ),
    }
    if any(environ.get(name) for name in _PROXIES):
        # gRPC honours the proxy variables even for 127.0.0.1: the workers would wait for each other for ever.
        # Only gRPC reads the variable set here.
        exempt = environ.get(_NO_GRPC_PROXY, environ.get("no_proxy", ""))
        names = dict.fromkeys(address.rpartition(":")[0] for address in addresses)
        shared[_NO_GRPC_PROXY] = ",".join([*filter(None, [exempt]), *names])
    plans = []
    for local_rank, rank in enumerate(job.ranks):
        env = {**shared, "RANK": str(rank)}
        if job.given is None or job.workers > 1:
            env["TF_CONFIG"] = config.Cluster(addresses, rank).tf_config()
            if len(machine.gpus) > 1:  # One GPU for each: one replica per worker.
                env[CUDA_VISIBLE_DEVICES] = machine.gpus[local_rank % len(machine.gpus)]
        if job.given is None or job.workers > 1 or "LOCAL_RANK" not in environ:
            env |= {"LOCAL_RANK": str(local_rank), "LOCAL_WORLD_SIZE": str(job.workers)}
        plans.append(WorkerPlan(rank, job.argv, env, log_path(job.logs(run_dir), attempt, rank)))
    return tuple(plans)


def bootstrapped(argv: Sequence[str]) -> list[str]:
    """A command whose process the kernel kills when this launcher dies."""
    return [sys.executable, "-I", "-S", str(_BOOTSTRAP), str(os.getpid()), *argv]


# --- Ports -----------------------------------------------------------------------------------------------
#
# Choosing a free port and closing it again is a race. The launcher keeps each port bound instead, without
# listening, until the group has ended. TensorFlow's gRPC server binds with SO_REUSEADDR (and turns
# SO_REUSEPORT off), and Linux lets a second SO_REUSEADDR socket bind and listen as long as the first one does
# not listen. A process that asks the kernel for any free port never gets a reserved one.


class HeldPorts(contextlib.ExitStack):
    """Bound sockets that reserve their ports for the workers, until it is closed."""

    numbers: tuple[int, ...] = ()


def hold_ports(numbers: Sequence[int], *, within_secs: float = 0.0) -> HeldPorts:
    """Holds the given ports, any free one for 0; tries again for `within_secs` while one is in use."""
    until = time.monotonic() + within_secs
    while True:
        with HeldPorts() as trying:
            try:
                sockets = [trying.enter_context(_bind(number)) for number in numbers]
                held = trying.pop_all()
                held.numbers = tuple(int(one.getsockname()[1]) for one in sockets)
                return held
            except ClusterError:
                if time.monotonic() >= until:
                    raise
        time.sleep(_PORT_PAUSE_SECS)


def _bind(number: int, family: socket.AddressFamily = socket.AF_INET6) -> socket.socket:
    """A socket at all addresses. Those of IPv6 include IPv4; without IPv6, those of IPv4."""
    try:
        with contextlib.ExitStack() as stack:
            held = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                held.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            held.bind(("", number))
            stack.pop_all()
            return held
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ClusterError(
                f"Port {number} is in use on this machine",
                remedy=f"Stop the process that listens there (ss -ltnp 'sport = :{number}' shows it), "
                "or choose another port (--port, or in TF_CONFIG)",
            ) from None
        if family == socket.AF_INET6:
            return _bind(number, socket.AF_INET)
        if error.errno == errno.EACCES:
            what = f"This user may not use port {number}"
            raise ClusterError(what, remedy="Choose a port above 1023") from None
        raise


def warnings(job: JobPlan, environ: Mapping[str, str]) -> Iterator[str]:
    if job.nodes > 1 and not job.secret:
        yield (
            f"{config.JOB_SECRET} is not set: any process that can reach {shown_address(*job.endpoint)} can "
            "stop this job or take the place of a host; set it to the same random text on all hosts"
        )
    if faults := read_faults(environ):
        shown = ", ".join(f"{fault.action} worker {fault.worker} at {fault.point}" for fault in faults)
        yield f"{config.FAULTS} is set: workers will fail on purpose: {shown[:300]}"
    workers = plan_addresses(job, ports=[0] * job.workers)
    if config.trusted_networks(environ, workers) is None and not environ.get(config.TRUSTED_NETWORKS):
        yield (
            "any process that can reach this machine can run code in the workers: TensorFlow's ports ask for "
            f"no credentials. Set {config.TRUSTED_NETWORKS}=NETWORK,… (or any). See SECURITY.md"
        )


def shown_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
