"""What the launchers of a job need to meet: who is which host, the first one's address, and the secret."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from replicast.config import JOB_SECRET
from replicast.errors import ClusterError, LaunchRefused
from replicast.launcher.hosts_leader import Identity
from replicast.launcher.hosts_link import First, Link, Other, Part, shown_address
from replicast.launcher.plan import JobPlan, check_job
from replicast.names import NAMES_SECS, Lookups

DEFAULT_RDZV_PORT = 29400
_MAX_SECRET_BYTES = _MAX_PROGRAM = 4096
_NAME_SECS, _PAUSE_SECS = 10.0, 0.5


# --- Options ---------------------------------------------------------------------------------------------


def place_on_hosts(
    job: JobPlan,
    *,
    hosts: str | None = None,
    nnodes: str | None = None,
    node_rank: int | None = None,
    rdzv_endpoint: str | None = None,
) -> JobPlan:
    """The job with its hosts, the index of this one, and where the launchers meet."""
    listed = tuple(hosts.split(",")) if hosts is not None else ()
    count = parse_nnodes(nnodes) if nnodes is not None else max(1, len(listed))
    endpoint = parse_endpoint(rdzv_endpoint) if rdzv_endpoint is not None else None
    if listed and count != len(listed):
        raise ClusterError(
            f"--nnodes {count} does not fit --hosts, which lists {len(listed)}", remedy="Give one of them"
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
    port, last = endpoint[1], job.port + job.workers - 1
    if job.port <= port <= last:
        workers = f"ports {job.port} to {last}" if job.workers > 1 else f"port {job.port}"
        raise ClusterError(
            f"The launchers cannot meet at port {port}: the workers of the first host use {workers}",
            remedy=f"Choose another port for one of them, for example --port {port + 1}",
        )
    return replace(job, endpoint=endpoint)


def parse_endpoint(text: str) -> tuple[str, int]:
    """The address in `--rdzv-endpoint HOST[:PORT]`."""
    host, colon, port = text.rpartition(":")
    if not colon or text.endswith("]"):
        host, port = text, str(DEFAULT_RDZV_PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
        raise ClusterError(
            "--rdzv-endpoint must be the host and port of the first launcher",
            remedy="For example: --rdzv-endpoint h1:29400",
            received=text,
        )
    return host, int(port)


def parse_nnodes(text: str) -> int:
    """The number in `--nnodes`."""
    if ":" in text and all(part.isdigit() for part in text.split(":")):
        raise ClusterError(
            "--nnodes must be one number: a job has the same hosts until it ends",
            remedy="To continue with fewer or more hosts, start it again with the same --run-dir",
            received=text,
        )
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise ClusterError("--nnodes must be a number, at least 1", received=text)
    return int(text)


def own_node(hosts: Sequence[str]) -> int:
    """The index of this machine in the list of hosts: the one whose address is an address of this machine.

    Blocks until the names are resolved, at most `NAMES_SECS`.
    """
    lookups = Lookups(hosts)
    are_resolved = lookups.wait(NAMES_SECS)
    found = []
    for node, host in enumerate(hosts):
        with contextlib.suppress(OSError):  # a name without an address
            if any(map(_is_own, lookups.addresses(host) or [])):
                found.append(node)
    if len(found) == 1:
        return found[0]
    why = "none of --hosts is" if not found else "several of --hosts are"
    late = "" if are_resolved else f"; not all names were resolved within {NAMES_SECS:g} s"
    raise ClusterError(
        f"Cannot tell which host this is: {why} an address of this machine{late}",
        remedy="Give --node-rank, the index of this machine in --hosts, from 0",
        received=",".join(hosts),
    )


def _is_own(address: str) -> bool:
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            address, 0, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST
        )[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.bind(place)
    except OSError:
        return False
    return True


def read_secret(environ: Mapping[str, str], file: Path | None) -> bytes:
    """The secret of the job: from a file, else from the environment; empty if there is none."""
    if file is None:
        return environ.get(JOB_SECRET, "").strip().encode()
    try:
        with file.open("rb") as opened:
            secret = opened.read(_MAX_SECRET_BYTES).strip()
    except OSError as error:
        raise LaunchRefused(
            f"--secret-file {file} cannot be read ({error.strerror})", remedy="Check its path and its rights"
        ) from None
    if not secret:
        raise LaunchRefused(f"--secret-file {file} is empty", remedy="For example: openssl rand -hex 32")
    return secret


def secret_line(job: JobPlan, secret: bytes) -> str:
    if secret or job.endpoint is None:
        return ""
    return (
        f"replicast: warning: {JOB_SECRET} is not set: any process that can reach "
        f"{shown_address(*job.endpoint)} can stop this job or take the place of a host; set it to the same "
        "random text on all hosts"
    )


# --- The address of the first launcher -------------------------------------------------------------------


def listen(endpoint: tuple[str, int], *, name_secs: float = 0.0) -> socket.socket:
    """A socket that listens at an address of this machine, and at no other."""
    host, port = endpoint
    shown = shown_address(host, port)
    address = _address_of(host, time.monotonic() + name_secs)
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, port), family=family, backlog=1024)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise ClusterError(
                f"Another process listens at {shown}, the address of the first launcher: another job?",
                remedy="Give each job an address of its own: --rdzv-endpoint HOST:PORT, or another --port",
            ) from None
        why = os.strerror(error.errno or 0)  # Without what create_server adds to it.
        raise ClusterError(
            f"This machine cannot listen at {shown}, the address of the first host ({why})",
            remedy="Give --node-rank 0 on the first host alone, by a name or address that is its own",
        ) from None
    listener.setblocking(False)
    return listener


def _address_of(host: str, until: float) -> str:
    """The address of the first host. A name that has none is looked up again until then."""
    while True:
        lookup, problem = Lookups([host]), "has no address"
        with contextlib.suppress(OSError):
            if not lookup.wait(NAMES_SECS):
                problem = f"was not resolved within {NAMES_SECS:g} s"
            elif addresses := lookup.addresses(host):
                return addresses[0]
        if time.monotonic() >= until:
            raise ClusterError(
                f"The name of the first host {problem}: {host}", remedy="Correct it, or the DNS"
            )
        time.sleep(_PAUSE_SECS)


# --- Joining ---------------------------------------------------------------------------------------------


def identity_of(job: JobPlan, max_restarts: int) -> Identity:
    """What must be the same on all hosts of a job."""
    program, text = job.argv[1:], "\0".join(job.argv[1:])
    if (
        len(text) > _MAX_PROGRAM
    ):  # Many arguments are replaced by their digest, so that they fit into a message.
        digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
        program = (program[0][:200], f"({len(program) - 1} arguments with the digest {digest})")
    return Identity(
        version=metadata.version("replicast"),
        program=program,
        workers=job.workers,
        nodes=job.nodes,
        hosts=job.hosts,
        port=job.port,
        max_restarts=max_restarts,
    )


def make_link(part: Part) -> Link:
    if part.job.node_rank == 0 and part.identity is not None:
        return Link(First(part, part.identity, listen(part.endpoint, name_secs=_NAME_SECS)))
    return Link(Other(part))
