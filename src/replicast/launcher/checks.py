"""What works on this machine and what does not, with how to fix it: for `replicast doctor`."""

from __future__ import annotations

import contextlib
import enum
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from replicast.config import SHM_DIR, read_cluster
from replicast.errors import ClusterError
from replicast.launcher.plan import Machine, this_machine

_LITTLE_SHARED_MEMORY = 256 * 2**20


class Verdict(enum.Enum):
    GOOD = "✓"  # Nothing to do.
    NOTE = "!"  # Works, but worth knowing.
    BROKEN = "✗"  # Must be fixed first.


@dataclass(frozen=True, slots=True)
class Check:
    """What was checked, how it came out, what was found, and how to fix it."""

    subject: str
    verdict: Verdict
    found: str
    remedy: str = ""


def all_checks(environ: Mapping[str, str]) -> list[Check]:
    shared_memory = Path(environ.get(SHM_DIR) or "/dev/shm")
    return [
        Check("Python", Verdict.GOOD, ".".join(map(str, sys.version_info[:3]))),  # pip has checked it
        check_package("TensorFlow"),
        check_package("Keras"),
        check_backend(environ),
        check_shared_memory(shared_memory, lambda place: shutil.disk_usage(place).free),
        check_machine(this_machine(environ)),
        check_cluster(environ),
    ]


# The distributions that bring a package, the oldest version that works, the first one that was not tested,
# how to install and how to uninstall it. Release candidates of TensorFlow bring a second copy of Keras.
_PACKAGES = {
    "TensorFlow": (
        ("tensorflow", "tensorflow-cpu"),
        ((2, 20), (2, 23)),
        "pip install 'replicast[cpu]' (no GPU) or 'replicast[tensorflow]'",
        "pip uninstall -y tensorflow tensorflow-cpu, then install one of them",
    ),
    "Keras": (
        ("keras", "keras-nightly"),
        ((3, 12), ()),
        "pip install 'keras>=3.12'",
        "pip uninstall -y keras keras-nightly, then pip install --no-deps keras",
    ),
}


def check_package(subject: str, version_of: Callable[[str], str] = metadata.version) -> Check:
    names, (oldest, untested), install, uninstall = _PACKAGES[subject]
    versions = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = version_of(name)
    if not versions:
        return Check(subject, Verdict.BROKEN, "not installed", install)
    found = " and ".join(f"{name} {version}" for name, version in versions.items())
    if len(versions) > 1:
        return Check(subject, Verdict.BROKEN, f"{found}: two copies of the same files", uninstall)
    (name, version), *_ = versions.items()
    if release(version) < oldest or (untested and release(version) >= untested):
        bounds = ((">=", oldest), ("<", untested))
        ends = ",".join(f"{sign}{'.'.join(map(str, end))}" for sign, end in bounds if end)
        return Check(subject, Verdict.BROKEN, f"{found}: not supported", f"pip install '{name}{ends}'")
    return Check(subject, Verdict.GOOD, found)


def release(version: str) -> tuple[int, ...]:
    """The numbers a version starts with: "2.21.0rc1" is (2, 21, 0)."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in found[0].split(".")) if found else ()


def check_backend(environ: Mapping[str, str]) -> Check:
    home = environ.get("KERAS_HOME")
    settings = (Path(home) if home is not None else Path.home() / ".keras") / "keras.json"
    backend, where = environ.get("KERAS_BACKEND"), "KERAS_BACKEND"
    remedy = "export KERAS_BACKEND=tensorflow"
    if not backend:
        with contextlib.suppress(OSError, ValueError, AttributeError):  # Keras ignores such a file too.
            backend, where = json.loads(settings.read_text()).get("backend"), str(settings)
            remedy = f'Set "backend": "tensorflow" in {where}, or {remedy}'
    if not backend or not isinstance(backend, str) or backend == "tensorflow":
        return Check("Keras backend", Verdict.GOOD, f"tensorflow ({where if backend else 'default'})")
    return Check("Keras backend", Verdict.BROKEN, f"{backend} ({where})", remedy)


def check_cluster(environ: Mapping[str, str]) -> Check:
    try:
        cluster = read_cluster(environ)
    except ClusterError as error:
        return Check("TF_CONFIG", Verdict.BROKEN, str(error), "Correct it, or unset TF_CONFIG")
    if cluster is None:
        return Check("TF_CONFIG", Verdict.GOOD, "not set: a job of one, or replicast run sets it")
    return Check("TF_CONFIG", Verdict.GOOD, f"worker {cluster.rank} of {cluster.size}")


def check_shared_memory(place: Path, free_bytes: Callable[[Path], int]) -> Check:
    if not place.is_dir() or not os.access(place, os.W_OK):
        return Check("Shared memory", Verdict.BROKEN, f"{place} is missing or not writable", "Mount a tmpfs")
    free = free_bytes(place)
    found = f"{free / 2**20:,.0f} MiB free in {place}"
    if free < _LITTLE_SHARED_MEMORY:
        return Check("Shared memory", Verdict.NOTE, found, "In a container: docker run --shm-size=2g")
    return Check("Shared memory", Verdict.GOOD, found)


def check_machine(machine: Machine) -> Check:
    verdict, fit = Verdict.GOOD, f"up to -n {machine.cores} without sharing a core"
    if machine.gpus:
        fit = f"-n {len(machine.gpus)} gives each worker one GPU"
    elif machine.cores < 2:
        verdict, fit = Verdict.NOTE, "several workers share one core"
    return Check("Cores and GPUs", verdict, f"{machine.cores} and {len(machine.gpus) or 'none'}: {fit}")
