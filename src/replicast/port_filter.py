"""Limits who may connect to TensorFlow's port: a packet filter on its socket, without any privilege.

TensorFlow's gRPC server listens on every address of the machine, whatever `TF_CONFIG` says, and asks for no
credentials: "0.0.0.0" is fixed in its code. So after it has opened the port, this process attaches a filter
(classic BPF, `SO_ATTACH_FILTER`) to the sockets of that port. The kernel then drops packets from any other
network; connections that are accepted later inherit the filter. TensorFlow opens the port in a call that
holds Python's lock, so the filter comes when that call has returned, a fraction of a second later.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import socket
import struct
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from replicast.config import TRUSTED_NETWORKS, Cluster, Network, host_and_port, trusted_networks
from replicast.connections import is_address
from replicast.errors import logger

_SO_ATTACH_FILTER = 26
_NETWORK_HEADER = 0xFFF00000  # SKF_NET_OFF: offsets from here are in the IP header.
_LOAD_BYTE, _LOAD_WORD, _AND, _SHIFT_RIGHT = 0x30, 0x20, 0x54, 0x74
_JUMP, _JUMP_IF_EQUAL, _RETURN = 0x05, 0x15, 0x06
_WHOLE_PACKET = 0xFFFFFFFF
_SOURCE_OFFSET = {4: 12, 6: 8}

Instruction = tuple[int, int, int, int]  # Operation, jump if true, jump if false, operand.


def port_limit(cluster: Cluster | None, environ: Mapping[str, str]) -> Callable[[], None]:
    """Reads who may connect to this worker; call the result once TensorFlow has opened its port."""
    if cluster is None:  # TensorFlow opens no port
        return lambda: None
    networks = trusted_networks(environ, cluster.addresses)
    if networks is None:
        return lambda: None
    absent = []
    for worker, address in enumerate(cluster.addresses):  # Also this one: it connects to itself.
        host = host_and_port(address)[0]
        # Only addresses: this machine may resolve a name to another address than the other machine does.
        if is_address(host) and not any(
            ipaddress.ip_address(host.partition("%")[0]) in network for network in networks
        ):
            absent.append(f"worker {worker} ({address})")
    if absent:
        logger.warning(
            "%s: not in %s=%s: unless it connects from another address, the workers cannot reach each other, "
            "and the job hangs. Give the networks of all workers",
            ", ".join(absent),
            TRUSTED_NETWORKS,
            environ.get(TRUSTED_NETWORKS, ""),
        )
    return partial(limit_port, host_and_port(cluster.addresses[cluster.rank])[1], networks)


def limit_port(port: int, networks: Sequence[Network]) -> None:
    """Lets only these networks reach a port of this process. Logs a warning if that cannot be done."""
    try:
        reason = "" if _attach(port, program(networks)) else "its socket was not found"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        logger.warning(
            "TensorFlow's port %d accepts connections from every network (%s). See SECURITY.md", port, reason
        )


def program(networks: Sequence[Network]) -> list[Instruction]:
    """The filter that accepts packets whose source address is in one of the networks. Pure."""
    version4, version6 = (
        [step for network in networks if network.version == version for step in _accept(network)]
        for version in (4, 6)
    )
    drop = (_RETURN, 0, 0, 0)
    return [
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        (_SHIFT_RIGHT, 0, 0, 4),
        (_JUMP_IF_EQUAL, 1, 0, 4),
        (_JUMP, 0, 0, len(version4) + 1),
        *version4,
        drop,
        *version6,
        drop,
    ]


def _accept(network: Network) -> list[Instruction]:
    """Accepts a packet from a network, else goes on behind the last instruction."""
    address, mask = network.network_address.packed, network.netmask.packed
    words = [
        (place, int.from_bytes(address[place : place + 4]), int.from_bytes(mask[place : place + 4]))
        for place in range(0, len(address), 4)
    ]
    compared = [word for word in words if word[2]] or words[:1]
    steps: list[Instruction] = []
    for number, (place, wanted, bits) in enumerate(compared):
        behind = 3 * (len(compared) - number - 1) + 1
        steps += [
            (_LOAD_WORD, 0, 0, _NETWORK_HEADER + _SOURCE_OFFSET[network.version] + place),
            (_AND, 0, 0, bits),
            (_JUMP_IF_EQUAL, 0, behind, wanted),
        ]
    return [*steps, (_RETURN, 0, 0, _WHOLE_PACKET)]


def _attach(port: int, filter_program: Sequence[Instruction]) -> int:
    """Attaches a filter to the sockets of this process that have this port; returns how many there are."""
    packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in filter_program))
    described = struct.pack("HL", len(filter_program), ctypes.addressof(packed))
    count = 0
    for entry in sorted(Path("/proc/self/fd").iterdir()):
        with contextlib.ExitStack() as stack:
            try:
                if not str(entry.readlink()).startswith("socket:"):
                    continue
                descriptor = os.dup(int(entry.name))
                stack.callback(os.close, descriptor)
                one = socket.socket(fileno=descriptor)
            except OSError:  # closed meanwhile
                continue
            stack.callback(one.detach)
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.getsockname()[1] == port:
                one.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)
                count += 1
    return count
