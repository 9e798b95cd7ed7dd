"""What one host knows of itself and of the others: for `replicast doctor --hosts`."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from replicast.config import TRUSTED_NETWORKS, shared_memory_directory
from replicast.errors import ClusterError
from replicast.launcher.checks import installed
from replicast.launcher.machine import this_machine
from replicast.names import NAMES_SECS, Dialer, Lookups
from replicast.paths import RunDir, below

_CONNECT_SECS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A host by itself."""

    node: int
    name: str
    versions: dict[str, str]
    addresses: tuple[str, ...]
    shared_bytes: int | None
    cores: int
    gpus: int
    run_dir: str = ""
    port: str = ""
    trusted: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a host has found when it looked at the others."""

    reach: dict[str, str]
    sees_mark: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What the first host asks the others to do when all are there."""

    present: tuple[int, ...]
    mark: str = ""


def gather_facts(
    node: int, hosts: Sequence[str], environ: Mapping[str, str], run_dir: RunDir | None, port: str
) -> Facts:
    """Looks at this machine. Blocks until the names of the hosts are resolved, at most `NAMES_SECS`."""
    machine, lookups = this_machine(environ), Lookups(hosts)
    lookups.wait(NAMES_SECS)
    return Facts(
        node=node,
        name=socket.gethostname(),
        versions=_versions(),
        addresses=tuple(_address(host, lookups) for host in hosts),
        shared_bytes=_shared_bytes(environ),
        cores=machine.cores,
        gpus=len(machine.gpus),
        run_dir="" if run_dir is None else _state_of(run_dir),
        port=port,
        trusted=environ.get(TRUSTED_NETWORKS, ""),
    )


def look_around(look: Look, hosts: Sequence[str], port: int, run_dir: RunDir | None) -> Found:
    """Connects to every host that came and looks for the mark; 2 s for each host that does not answer."""
    reach = {str(node): _reach(hosts[node], port) for node in look.present}
    sees = (below(run_dir) / Path(look.mark).name).exists() if look.mark and run_dir is not None else None
    return Found(reach=reach, sees_mark=sees)


def now() -> float:
    """The clock of this host, in seconds since 1970."""
    return time.time()


def _versions() -> dict[str, str]:
    found = {
        "Python": ".".join(map(str, sys.version_info[:3])),
        "TensorFlow": " and ".join(installed("tensorflow", "tensorflow-cpu").values()),
        "Keras": " and ".join(installed("keras", "keras-nightly").values()),
    }
    return {**found, "replicast": metadata.version("replicast")}


def _address(host: str, lookups: Lookups) -> str:
    try:
        return next(iter(lookups.addresses(host) or []), "")
    except OSError:
        return ""


def _shared_bytes(environ: Mapping[str, str]) -> int | None:
    try:
        return shutil.disk_usage(shared_memory_directory(environ)).free
    except (ClusterError, OSError):
        return None


def _state_of(run_dir: RunDir) -> str:
    path = below(run_dir).as_path()  # Only whether a user's choice can be used: nothing is opened.
    if not path.is_dir():
        return "missing"
    return "writable" if os.access(path, os.W_OK | os.X_OK) else "not writable"


def _reach(host: str, port: int) -> str:
    try:
        with Dialer(host, port).connect(_CONNECT_SECS):
            return "answers"
    except OSError as error:
        return error.strerror or str(error)
