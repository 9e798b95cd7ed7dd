"""What `replicast doctor` looks at. Each check returns what it found and, where it matters, how to fix it."""

from __future__ import annotations

import enum
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from replicast.config import Cluster, read_cluster
from replicast.errors import ClusterError
from replicast.supervisor.machine import Machine, this_machine
from replicast.supervisor.ports import hold_free_ports, hold_ports

OLDEST_PYTHON = (3, 11)
OLDEST_TENSORFLOW, FIRST_UNSUPPORTED_TENSORFLOW = (2, 20), (2, 23)
OLDEST_KERAS = (3, 12)
_INSTALL = "pip install 'replicast[cpu]' (no GPU) or 'replicast[tensorflow]'"
_SHARED_MEMORY = Path("/dev/shm")
_LITTLE_SHARED_MEMORY = 256 * 2**20
_CONNECT_SECS = 1.0


class Verdict(enum.Enum):
    """How a check came out."""

    GOOD = "✓"  # Nothing to do.
    NOTE = "!"  # Works, but worth knowing.
    BROKEN = "✗"  # Must be fixed first.


@dataclass(frozen=True, slots=True)
class Check:
    """The outcome of one check.

    Attributes:
        subject: What was looked at.
        verdict: How it came out.
        found: What was found.
        remedy: How to fix it, where there is something to fix.
    """

    subject: str
    verdict: Verdict
    found: str
    remedy: str = ""


def all_checks(environ: Mapping[str, str]) -> list[Check]:
    """Looks at everything that needs no worker."""
    checks = [
        check_python(sys.version_info[:3]),
        check_tensorflow(_installed("tensorflow", "tensorflow-cpu")),
        check_keras(_installed("keras", "keras-nightly")),
        check_backend(environ),
    ]
    checks += check_cluster(environ)
    checks += [
        check_free_ports(),
        check_shared_memory(_SHARED_MEMORY, _free_bytes),
        check_machine(this_machine(environ)),
    ]
    return checks


def check_python(version: Sequence[int]) -> Check:
    """Python itself."""
    found = ".".join(str(part) for part in version)
    if tuple(version[:2]) >= OLDEST_PYTHON:
        return Check("Python", Verdict.GOOD, found)
    return Check("Python", Verdict.BROKEN, found, "Python 3.11 or newer is needed")


def check_tensorflow(versions: Mapping[str, str]) -> Check:
    """TensorFlow: there, once, and of a version that was tested.

    Args:
        versions: What is installed of `tensorflow` and `tensorflow-cpu`.
    """
    found = " and ".join(f"{name} {version}" for name, version in sorted(versions.items()))
    if not versions:
        return Check("TensorFlow", Verdict.BROKEN, "not installed", _INSTALL)
    if len(versions) > 1:
        return Check(
            "TensorFlow",
            Verdict.BROKEN,
            f"{found}: two copies of the same files",
            "pip uninstall -y tensorflow tensorflow-cpu, then install one of them",
        )
    (name, version), *_ = versions.items()
    if not OLDEST_TENSORFLOW <= release(version) < FIRST_UNSUPPORTED_TENSORFLOW:
        return Check(
            "TensorFlow", Verdict.BROKEN, f"{found}: not supported", f"pip install '{name}>=2.20,<2.23'"
        )
    return Check("TensorFlow", Verdict.GOOD, found)


def check_keras(versions: Mapping[str, str]) -> Check:
    """Keras 3, new enough, and one copy of it: release candidates of TensorFlow bring another one.

    Args:
        versions: What is installed of `keras` and `keras-nightly`.
    """
    if not versions:
        return Check("Keras", Verdict.BROKEN, "not installed", "pip install 'keras>=3.12'")
    if len(versions) > 1:
        found = " and ".join(f"{name} {version}" for name, version in sorted(versions.items()))
        return Check(
            "Keras",
            Verdict.BROKEN,
            f"{found}: two copies of the same files",
            "pip uninstall -y keras keras-nightly, then pip install --no-deps keras",
        )
    (version,) = versions.values()
    if release(version) < OLDEST_KERAS:
        return Check("Keras", Verdict.BROKEN, f"{version}: too old", "pip install 'keras>=3.12'")
    return Check("Keras", Verdict.GOOD, version)


def check_backend(environ: Mapping[str, str]) -> Check:
    """The backend that Keras will choose."""
    home = environ.get("KERAS_HOME")
    settings = (Path(home) if home is not None else Path.home() / ".keras") / "keras.json"
    backend, where = environ.get("KERAS_BACKEND"), "KERAS_BACKEND"
    if not backend:
        backend, where = _backend_in(settings), str(settings)
    if backend is None:
        return Check("Keras backend", Verdict.GOOD, "tensorflow (default)")
    if backend == "tensorflow":
        return Check("Keras backend", Verdict.GOOD, f"tensorflow ({where})")
    remedy = (
        "export KERAS_BACKEND=tensorflow"
        if where == "KERAS_BACKEND"
        else f'Set "backend": "tensorflow" in {where}, or export KERAS_BACKEND=tensorflow'
    )
    return Check("Keras backend", Verdict.BROKEN, f"{backend} ({where})", remedy)


def check_cluster(environ: Mapping[str, str]) -> list[Check]:
    """`TF_CONFIG`, this worker's port and the others' addresses."""
    try:
        cluster = read_cluster(environ)
    except ClusterError as error:
        return [Check("TF_CONFIG", Verdict.BROKEN, str(error), "Correct it, or unset TF_CONFIG")]
    if cluster is None:
        return [Check("TF_CONFIG", Verdict.GOOD, "not set: a job of one, or replicast run sets it")]
    return [
        Check("TF_CONFIG", Verdict.GOOD, f"worker {cluster.rank} of {cluster.size}"),
        _check_own_port(cluster),
        *(
            check_address(address, reachable)
            for rank, address in enumerate(cluster.addresses)
            if rank != cluster.rank
        ),
    ]


def check_address(address: str, look: Callable[[str, int], str]) -> Check:
    """Another worker's address. It may not have started yet, so only a name without an address is broken.

    Args:
        address: `host:port`.
        look: Tries to connect and says what happened; raises `socket.gaierror` for an unknown name.
    """
    host, _, port = address.rpartition(":")
    try:
        found = look(host, int(port))
    except socket.gaierror:
        return Check(
            address, Verdict.BROKEN, "its name has no address", "Correct the name in TF_CONFIG, or the DNS"
        )
    return Check(address, Verdict.GOOD if found == "answers" else Verdict.NOTE, found)


def check_free_ports() -> Check:
    """Whether local workers can get ports."""
    try:
        with hold_free_ports(2) as ports:
            return Check("Free ports", Verdict.GOOD, "for example " + ", ".join(map(str, ports.numbers)))
    except (OSError, ClusterError) as error:
        return Check("Free ports", Verdict.BROKEN, str(error), "Let this user open ports for listening")


def check_shared_memory(place: Path, free_bytes: Callable[[Path], int]) -> Check:
    """Whether workers on one machine can share memory."""
    if not place.is_dir() or not os.access(place, os.W_OK):
        return Check("Shared memory", Verdict.BROKEN, f"{place} is missing or not writable", "Mount a tmpfs")
    free = free_bytes(place)
    found = f"{free / 2**20:,.0f} MiB free in {place}"
    if free < _LITTLE_SHARED_MEMORY:
        return Check("Shared memory", Verdict.NOTE, found, "In a container: docker run --shm-size=2g")
    return Check("Shared memory", Verdict.GOOD, found)


def check_machine(machine: Machine) -> Check:
    """How many workers this machine is good for."""
    if machine.gpus:
        fit = f"-n {len(machine.gpus)} gives each worker one GPU"
        return Check("Cores and GPUs", Verdict.GOOD, f"{machine.cores} and {len(machine.gpus)}: {fit}")
    found = f"{machine.cores} and none"
    if machine.cores < 2:
        return Check("Cores and GPUs", Verdict.NOTE, f"{found}: several workers share one core")
    return Check("Cores and GPUs", Verdict.GOOD, f"{found}: up to -n {machine.cores} without sharing a core")


def release(version: str) -> tuple[int, ...]:
    """The numbers a version starts with: "2.21.0rc1" is (2, 21, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def reachable(host: str, port: int) -> str:
    """Tries to connect, for a second at most, and says what happened."""
    try:
        with socket.create_connection((host, port), timeout=_CONNECT_SECS):
            return "answers"
    except socket.gaierror:
        raise
    except OSError as error:
        return f"does not answer now ({error.strerror or error})"


def _check_own_port(cluster: Cluster) -> Check:
    address = cluster.addresses[cluster.rank]
    try:
        hold_ports([int(address.rpartition(":")[2])]).release()
    except ClusterError as error:
        return Check("Own port", Verdict.BROKEN, f"{address} is not free", str(error))
    return Check("Own port", Verdict.GOOD, f"{address} is free")


def _installed(*names: str) -> dict[str, str]:
    versions = {}
    for name in names:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _backend_in(settings: Path) -> str | None:
    try:
        written = json.loads(settings.read_text())
    except (OSError, ValueError):
        return None
    backend = written.get("backend") if isinstance(written, dict) else None
    return backend if isinstance(backend, str) else None


def _free_bytes(place: Path) -> int:
    return shutil.disk_usage(place).free
