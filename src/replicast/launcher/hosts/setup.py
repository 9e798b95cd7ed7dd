"""What the launchers of a job need to meet: the address of the first one, its socket, and the secret."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import socket
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path

from replicast.config import JOB_SECRET
from replicast.errors import ClusterError, LaunchRefused
from replicast.launcher.hosts.connection import shown_address
from replicast.launcher.hosts.link import Link, first_link, other_link
from replicast.launcher.hosts.messages import Identity
from replicast.launcher.hosts.timeouts import HostTimeouts
from replicast.launcher.plan import Job
from replicast.names import NAMES_SECS, Lookups

DEFAULT_RDZV_PORT = 29400
_MAX_SECRET_BYTES = _MAX_PROGRAM = 4096
_NAME_SECS, _PAUSE_SECS = 10.0, 0.5


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
    found = [node for node, host in enumerate(hosts) if _is_here(host, lookups)]
    if len(found) == 1:
        return found[0]
    why = "none of --hosts is" if not found else "several of --hosts are"
    late = "" if are_resolved else f"; not all names were resolved within {NAMES_SECS:g} s"
    raise ClusterError(
        f"Which host this is cannot be found out: {why} an address of this machine{late}",
        remedy="Say it with --node-rank, the index of this machine in --hosts, from 0",
        received=",".join(hosts),
    )


def _is_here(host: str, lookups: Lookups) -> bool:
    try:
        addresses = lookups.addresses(host) or []
    except OSError:
        return False
    return any(map(_is_own, addresses))


def _is_own(address: str) -> bool:
    """Whether an IP address is one of this machine."""
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
                f"Another process listens at {shown}, where the first launcher must: another job?",
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


def identity_of(job: Job, max_restarts: int) -> Identity:
    """What must be the same on all hosts of a job."""
    return Identity(
        version=metadata.version("replicast"),
        program=_shortened(job.argv[1:]),
        workers=job.workers,
        nodes=job.nodes,
        hosts=job.hosts,
        port=job.port,
        max_restarts=max_restarts,
    )


def _shortened(program: tuple[str, ...]) -> tuple[str, ...]:
    """A program with its arguments; many are replaced by their digest, so that they fit into a message."""
    text = "\0".join(program)
    if len(text) <= _MAX_PROGRAM:
        return program
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
    return (program[0][:200], f"({len(program) - 1} arguments with the digest {digest})")


def make_link(
    job: Job,
    *,
    max_restarts: int,
    secret: bytes,
    next_attempt: int,
    run_name: str,
    timeouts: HostTimeouts,
) -> Link:
    """The link of this host's launcher with those of the others."""
    if job.endpoint is None:
        raise ValueError("A job on several hosts has an endpoint")
    identity = identity_of(job, max_restarts)
    if job.node_rank == 0:
        return first_link(
            names=job.hosts or (job.endpoint[0], *("" for _ in range(job.nodes - 1))),
            identity=identity,
            secret=secret,
            next_attempt=next_attempt,
            timeouts=timeouts,
            listener=listen(job.endpoint, name_secs=_NAME_SECS),
            run_name=run_name,
        )
    return other_link(
        node=job.node_rank,
        identity=identity,
        secret=secret,
        next_attempt=next_attempt,
        timeouts=timeouts,
        endpoint=job.endpoint,
    )


def secret_line(job: Job, secret: bytes) -> str:
    """One line on a missing secret; empty if there is one."""
    if secret or job.endpoint is None:
        return ""
    return (
        f"replicast: warning: {JOB_SECRET} is not set: any process that can reach "
        f"{shown_address(*job.endpoint)} can stop this job or take the place of a host; set it to the same "
        "random text on all hosts"
    )
