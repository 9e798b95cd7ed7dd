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

from replicast.config import shared_memory_directory
from replicast.errors import ClusterError
from replicast.names import NAMES_SECS, Dialer, Lookups
from replicast.options import TRUSTED_NETWORKS
from replicast.paths import RunDir, below
from replicast.supervisor.checks import installed
from replicast.supervisor.machine import this_machine

_CONNECT_SECS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """A host by itself.

    Attributes:
        node: Its index in the list of hosts.
        name: The name that it has for itself.
        versions: Of Python, TensorFlow, Keras and replicast; empty texts for what is not installed.
        addresses: The address of every listed host, as this one resolves its name; empty if it cannot.
        shared_bytes: The free shared memory; None if there is none that can be used.
        cores: The number of cores.
        gpus: The number of GPUs.
        run_dir: How it finds the run directory: "writable", "not writable", "missing", or empty if not asked.
        port: Empty if the port of its first worker is free, else why it is not.
        trusted: The networks from which its workers accept connections; empty for all.
    """

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
    """What a host has found when it looked at the others.

    Attributes:
        reach: What happened when it connected to each host that came: "answers", or why not.
        sees_mark: Whether it sees the file that the first host has put into the run directory; None if there
            is none.
    """

    reach: dict[str, str]
    sees_mark: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What the first host asks the others to do when all are there.

    Attributes:
        present: The hosts that came.
        mark: The name of a file in the run directory; empty if there is none.
    """

    present: tuple[int, ...]
    mark: str = ""


def gather_facts(
    node: int, hosts: Sequence[str], environ: Mapping[str, str], run_dir: RunDir | None, port: str
) -> Facts:
    """Looks at this machine. Blocks until the names of the hosts are resolved, at most `NAMES_SECS`.

    Args:
        node: The index of this host.
        hosts: All hosts.
        environ: The environment.
        run_dir: The run directory, if it shall be looked for.
        port: Empty if the port of the first worker is free here, else why it is not.
    """
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
