"""Environment variables, read and checked in one place: the cluster, and what the launcher sets.

`TF_CONFIG` is TensorFlow's own description of a cluster. Kubeflow, Vertex AI, Ray Train and Slurm scripts
set it, and so does `replicast run`. TensorFlow itself hardly checks it, so this module does.
"""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from replicast.codec import is_integer
from replicast.errors import ClusterError, LaunchRefused

# Set by `replicast run` for its workers.
RUN_DIR = "REPLICAST_RUN_DIR"
ATTEMPT = "REPLICAST_ATTEMPT"
LAUNCHED = "REPLICAST_LAUNCHED"  # a launcher on the same host watches their exit codes
# Set by users.
FAULTS = "REPLICAST_FAULTS"
HEARTBEAT_TIMEOUT = "REPLICAST_HEARTBEAT_TIMEOUT"
HOST_ID = "REPLICAST_HOST_ID"
PROGRESS_FILE = "REPLICAST_PROGRESS_FILE"
SHM_DIR = "REPLICAST_SHM_DIR"
START_TIMEOUT = "REPLICAST_START_TIMEOUT"
TAKE_OVER = "REPLICAST_TAKE_OVER"  # the running job of another host that a start may take over, or `ANY`
TRUSTED_NETWORKS = "REPLICAST_TRUSTED_NETWORKS"  # who may connect to TensorFlow's ports
# Secrets: workers do not see them.
JOB_SECRET = "REPLICAST_JOB_SECRET"  # with it the launchers of a job on several hosts recognise each other
TOKEN = "REPLICAST_TOKEN"  # with it people act on a served run
SECRETS = (JOB_SECRET, TOKEN)

ANY = "1"
# The exit code of a worker that exits only because another one failed. It may exit first, while the failed
# worker still tells the others: from the exit code the launcher knows which worker to blame.
PEER_FAILED = 75
TOLD_TO_END = 143  # of a worker that received SIGTERM, saved its state together with all others, and exited
HEARTBEAT_SECS = 10.0  # TensorFlow's own limit
MIN_HEARTBEAT_SECS = 2.0
Network = ipaddress.IPv4Network | ipaddress.IPv6Network
LOOPBACK: tuple[Network, ...] = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("::1/128"))

_EXAMPLE = (
    'For example {"cluster": {"worker": ["host1:2222", "host2:2222"]}, '
    '"task": {"type": "worker", "index": 0}}'
)
_Kind = TypeVar("_Kind")


def decoded(environ: Mapping[str, str], name: str, kind: type[_Kind], example: str) -> _Kind | None:
    """The JSON value of a variable; None if it is not set."""
    text = environ.get(name, "").strip()
    try:
        return msgspec.json.decode(text, type=kind) if text else None
    except (msgspec.MsgspecError, UnicodeError) as error:
        problem = f"{name} is not valid ({error})"
        raise ClusterError(problem, received=shortened(text), remedy=example) from None


@dataclass(frozen=True, slots=True)
class Cluster:
    addresses: tuple[str, ...]
    rank: int
    chiefs: int = 0

    @property
    def size(self) -> int:
        return len(self.addresses)

    def tf_config(self) -> str:
        """The value of `TF_CONFIG` for this worker, if all tasks are of type "worker"."""
        task = {"type": "worker", "index": self.rank}
        return json.dumps({"cluster": {"worker": list(self.addresses)}, "task": task})


@dataclass(frozen=True, slots=True)
class Launch:
    run_dir: Path | None
    attempt: int
    launched: bool
    take_over: str = ""

    def check_run_dir(self, chosen: Path) -> None:
        """A script may choose its run directory, but not another one than its launcher, who logs there."""
        if self.launched and self.run_dir is not None and chosen.resolve() != self.run_dir.resolve():
            raise LaunchRefused(
                f"Two run directories: `replicast run` uses {self.run_dir}, and the script "
                f"{chosen.absolute()}",
                remedy=f"Leave out run_dir in Replicas(...), or start with --run-dir {chosen}",
            )


def read_launch(environ: Mapping[str, str]) -> Launch:
    run_dir = environ.get(RUN_DIR)
    attempt = environ.get(ATTEMPT, "0")
    if not attempt.isdigit():
        raise ClusterError(f"{ATTEMPT} must be a whole number", received=attempt)
    launched, take_over = environ.get(LAUNCHED) == "1", environ.get(TAKE_OVER, "").strip()
    return Launch(Path(run_dir) if run_dir else None, int(attempt), launched, take_over)


def without(environ: Mapping[str, str], *names: str) -> dict[str, str]:
    """An environment for a child process that does not need these variables."""
    return {name: value for name, value in environ.items() if name not in names}


def start_timeout_secs(environ: Mapping[str, str], default: float = 3600.0) -> float:
    """How long workers, which a scheduler may start at different times, wait for each other at the start.

    An hour is TensorFlow's own limit. The launchers of several hosts wait for each other as long.
    """
    return _seconds(environ, START_TIMEOUT, default, at_least=0.0)


def heartbeat_timeout_secs(environ: Mapping[str, str]) -> float:
    """After how long without a heartbeat a worker is lost. Heartbeats are sent twice in this time."""
    return _seconds(environ, HEARTBEAT_TIMEOUT, HEARTBEAT_SECS, at_least=MIN_HEARTBEAT_SECS)


def _seconds(environ: Mapping[str, str], name: str, default: float, *, at_least: float) -> float:
    text = environ.get(name, "").strip()
    if not text:
        return default
    secs = 0.0
    with contextlib.suppress(ValueError):
        secs = float(text)
    if not (0.0 < secs < float("inf") and secs >= at_least):
        expected = f"a number of seconds from {at_least:g}" if at_least else "a positive number of seconds"
        raise ClusterError(f"{name} must be {expected}", received=repr(text))
    return secs


def shared_memory_directory(environ: Mapping[str, str]) -> Path:
    """Where workers of one host share memory: `REPLICAST_SHM_DIR`, /dev/shm, or a temporary directory."""
    chosen = environ.get(SHM_DIR)
    if chosen:
        if not (Path(chosen).is_dir() and os.access(chosen, os.W_OK | os.X_OK)):
            problem = f"{SHM_DIR} must be a directory that this process may write to"
            remedy = "Create it, or unset the variable to use /dev/shm"
            raise ClusterError(problem, received=repr(chosen), remedy=remedy)
        return Path(chosen).resolve()
    usual = Path("/dev/shm")
    return usual if os.access(usual, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


def host_id(environ: Mapping[str, str]) -> str:
    """An identifier of this host: two processes with the same one can share memory.

    `REPLICAST_HOST_ID` if it is set, so that tests can use one machine as several hosts. Otherwise the host
    name, the boot id and the identity of the shared-memory directory: containers on one machine with separate
    directories cannot share memory, even if they share everything else.
    """
    chosen = environ.get(HOST_ID)
    if chosen:
        return chosen
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        boot = "unknown-boot"
    place = shared_memory_directory(environ).stat()
    return f"{socket.gethostname()}/{boot}/{place.st_dev}-{place.st_ino}"


class _Task(msgspec.Struct):
    type: str
    index: int | str  # some platforms write it as text


class _TfConfig(msgspec.Struct):
    cluster: dict[str, list[str]] = {}
    task: _Task | None = None


def is_evaluator(environ: Mapping[str, str]) -> bool:
    """Whether this process does not train, but evaluates the checkpoints of the job."""
    described = decoded(environ, "TF_CONFIG", _TfConfig, _EXAMPLE)
    return described is not None and described.task is not None and described.task.type == "evaluator"


def read_cluster(environ: Mapping[str, str]) -> Cluster | None:
    """The workers of the job; None for a job of one, and for an evaluator, which is not one of them."""
    described = decoded(environ, "TF_CONFIG", _TfConfig, _EXAMPLE) or _TfConfig()
    if is_evaluator(environ):
        return None
    if "ps" in described.cluster:
        problem = "TF_CONFIG describes parameter servers, which MultiWorkerMirroredStrategy does not use"
        remedy = 'Leave only "worker" (and "chief") in "cluster"'
        raise ClusterError(problem, remedy=remedy, received=sorted(described.cluster))
    jobs = {job: described.cluster[job] for job in ("chief", "worker") if described.cluster.get(job)}
    if not jobs:
        return None
    addresses = [address for job in jobs.values() for address in job]
    for address in addresses:
        host, colon, port = address.rpartition(":")
        if not (host and colon and is_integer(port, 1, 65535)):
            raise ClusterError(
                "TF_CONFIG: an address is not host:port with a port from 1 to 65535", received=repr(address)
            )
    duplicates = sorted({address for address in addresses if addresses.count(address) > 1})
    if duplicates:
        problem, remedy = "TF_CONFIG: two workers have the same address", "Give each its own host:port"
        raise ClusterError(problem, received=", ".join(duplicates), remedy=remedy)
    job, index = ("", -1) if described.task is None else (described.task.type, described.task.index)
    if isinstance(index, str) and index.isdecimal():
        index = int(index)
    if job not in jobs or isinstance(index, str) or not 0 <= index < len(jobs[job]):
        tasks = ", ".join(f"{job} 0 to {len(addresses) - 1}" for job, addresses in jobs.items())
        raise ClusterError(
            f'TF_CONFIG: "task" must be one of those in "cluster" that train: {tasks}',
            received="no task" if described.task is None else f"{job} {described.task.index!r}",
            remedy=_EXAMPLE,
        )
    chiefs = len(jobs.get("chief", ()))
    return Cluster(tuple(addresses), index if job == "chief" else chiefs + index, chiefs)


def shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}… ({len(text)} characters)"


def heartbeat_file(environ: Mapping[str, str], rank: int) -> Path | None:
    """Where a worker reports its progress: `REPLICAST_PROGRESS_FILE`, which may have {rank} in it."""
    file = environ.get(PROGRESS_FILE, "").strip()
    return Path(file.replace("{rank}", str(rank))).absolute() if file else None


def trusted_networks(environ: Mapping[str, str], addresses: Sequence[str]) -> tuple[Network, ...] | None:
    """Which networks may connect to TensorFlow's ports: `REPLICAST_TRUSTED_NETWORKS`."""
    text = environ.get(TRUSTED_NETWORKS, "").strip()
    if text == "any":
        return None
    if not text:
        hosts = [host_and_port(address)[0] for address in addresses]
        return LOOPBACK if hosts and all(map(is_loopback, hosts)) else None
    try:
        return LOOPBACK + tuple(ipaddress.ip_network(part.strip()) for part in text.split(","))
    except ValueError as error:
        problem = f"{TRUSTED_NETWORKS} must be networks separated by commas ({error})"
        remedy = 'For example 10.1.0.0/16,fd00::/8, or "any"'
        raise ClusterError(problem, received=shortened(text), remedy=remedy) from None


def host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address, or whether a peer is on this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.lower() == "localhost"
