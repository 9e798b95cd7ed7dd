"""This machine's addresses beyond the loopback, and what TensorFlow's open ports mean on them."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from replicast.config import TRUSTED_NETWORKS, trusted_networks
from replicast.launcher.plan import Job, plan_addresses

_SIOCGIFADDR = 0x8915
_IF_INET6 = Path("/proc/net/if_inet6")
_SHOWN = 2


def outside_addresses() -> tuple[str, ...]:
    """The addresses of this machine at which others may reach it; without link-local ones."""
    found: list[ipaddress.IPv4Address | ipaddress.IPv6Address] = [*_addresses4(), *_addresses6()]
    return tuple(str(one) for one in found if not (one.is_loopback or one.is_link_local))


def exposure_line(job: Job, environ: Mapping[str, str], addresses: Sequence[str]) -> str:
    """One line if machines outside the job may connect to its workers, else nothing."""
    workers = plan_addresses(job, ports=[0] * job.workers)
    limited = trusted_networks(environ, workers) is not None
    if limited or environ.get(TRUSTED_NETWORKS) or not addresses:
        return ""
    return (
        f"replicast: warning: any process that can reach {shown(addresses)} can run code in the workers: "
        f"TensorFlow's ports ask for no credentials. Set {TRUSTED_NETWORKS}=NETWORK,… (or any); see "
        "SECURITY.md"
    )


def shown(addresses: Sequence[str]) -> str:
    """A few addresses, as text."""
    more = len(addresses) - _SHOWN
    return ", ".join(addresses[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _addresses4() -> list[ipaddress.IPv4Address]:
    """The first IPv4 address of every interface."""
    found = []
    try:
        interfaces = socket.if_nameindex()
    except OSError:  # A sandbox does not tell. A job on one machine does not need to know.
        return []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        for _, name in interfaces:
            with contextlib.suppress(OSError):  # an interface without one
                answer = fcntl.ioctl(asked, _SIOCGIFADDR, struct.pack("16s240x", name.encode()))
                found.append(ipaddress.IPv4Address(answer[20:24]))
    return found


def _addresses6() -> list[ipaddress.IPv6Address]:
    try:
        lines = _IF_INET6.read_text(encoding="ascii").splitlines()
    except OSError:  # IPv6 is off
        return []
    return [ipaddress.IPv6Address(bytes.fromhex(line.split()[0])) for line in lines]
