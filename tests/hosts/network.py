"""Machines played by Linux namespaces: each has its own network, ``/dev/shm`` and host name, on one switch.

Nothing is left behind, not even after ``kill -9`` of the test: the namespaces belong to processes that end
with this one, and the kernel removes links, addresses and shared memory with the last process of a namespace.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO

COMMANDS = ("ip", "nft", "nsenter", "setpriv", "tc", "unshare")
START_SECS = 10.0


def missing() -> str:
    """Why no machines can be played here, or an empty string."""
    if os.geteuid() != 0:
        return "namespaces need root"
    absent = [command for command in COMMANDS if shutil.which(command) is None]
    if absent:
        return f"not installed: {', '.join(absent)} (Debian packages iproute2, nftables, util-linux)"
    made = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, text=True, timeout=START_SECS
    )
    return "" if made.returncode == 0 else f"no namespaces: {made.stderr.strip()}"


def run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=START_SECS)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


class Namespaces:
    """The namespaces of one machine. Their process, ``sleep``, is killed when this one dies."""

    def __init__(self, name: str, *, hidden: Sequence[Path] = ()) -> None:
        tmpfs = "mount -t tmpfs -o mode=1777 tmpfs"
        empty = [f"{tmpfs} {path}" for path in hidden]
        script = " && ".join(
            [
                f"{tmpfs} /dev/shm",
                *empty,
                f"hostname {name}",
                "ip link set lo up",
                "echo ready",
                "exec sleep infinity",
            ]
        )
        self._holder = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--mount", "--uts", "sh", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self._holder.stdout is not None
        said = self._holder.stdout.readline().strip()
        if said != "ready":
            self.close()
            raise OSError(f"no namespaces for {name}: {said}")

    @property
    def pid(self) -> int:
        return self._holder.pid

    def inside(self, command: Sequence[str]) -> list[str]:
        return [
            "nsenter",
            f"--target={self.pid}",
            "--net",
            "--mount",
            "--uts",
            f"--wdns={Path.cwd()}",
            *command,
        ]

    def run(self, *command: str) -> str:
        return run(self.inside(command))

    def close(self) -> None:
        self._holder.kill()
        self._holder.wait()
        if self._holder.stdout is not None:
            self._holder.stdout.close()


class Host:
    """One machine of a :class:`Network`."""

    def __init__(self, number: int, *, hidden: Sequence[Path] = ()) -> None:
        self.name = f"host{number}"
        self.address = f"10.77.0.{number + 1}"
        self.namespaces = Namespaces(self.name, hidden=hidden)

    def start(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdout: IO[bytes] | int | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a process on this machine, in a session of its own; output and errors go to ``stdout``.

        It is killed when the thread that has started it ends.
        """
        return subprocess.Popen(
            self.namespaces.inside(["setpriv", "--pdeathsig", "KILL", *command]),
            env=env,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


class Network:
    """Machines on one switch: ``10.77.0.1`` is the first. A context manager.

    Example::

        with Network(2) as network:
            server = network.hosts[0].start(["python", "-m", "http.server", "--bind", "10.77.0.1"])
            network.shape("200mbit")
            network.cut(network.hosts[1])
    """

    def __init__(self, hosts: int, *, hidden: Mapping[int, Sequence[Path]] | None = None) -> None:
        """``hidden``: directories that a host cannot see; it has an empty one there."""
        self._switch = Namespaces("switch")
        self.hosts: list[Host] = []
        try:
            self._switch.run("ip", "link", "add", "switch", "type", "bridge")
            self._switch.run("ip", "link", "set", "switch", "up")
            for number in range(hosts):
                self._add(Host(number, hidden=(hidden or {}).get(number, ())))
        except BaseException:
            self.close()
            raise

    def _add(self, host: Host) -> None:
        self.hosts.append(host)
        port = host.name
        namespace = str(host.namespaces.pid)
        self._switch.run(
            "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", namespace
        )
        self._switch.run("ip", "link", "set", port, "master", "switch", "up")
        host.namespaces.run("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
        host.namespaces.run("ip", "link", "set", "eth0", "up")
        host.namespaces.run(
            "nft", "add table inet faults; add chain inet faults in { type filter hook input priority 0; }"
        )

    def shape(self, rate: str) -> None:
        """Limit what each host sends, for instance to ``200mbit``."""
        for host in self.hosts:
            host.namespaces.run(
                "tc",
                "qdisc",
                "replace",
                "dev",
                "eth0",
                "root",
                "tbf",
                "rate",
                rate,
                "burst",
                "256k",
                "latency",
                "50ms",
            )

    def unshape(self) -> None:
        for host in self.hosts:
            host.namespaces.run("tc", "qdisc", "delete", "dev", "eth0", "root")

    def cut(self, host: Host) -> None:
        """Take the host's link down at the switch: no packet arrives, and nobody is told."""
        self._switch.run("ip", "link", "set", host.name, "nomaster")

    def join(self, host: Host) -> None:
        self._switch.run("ip", "link", "set", host.name, "master", "switch")

    def drop(self, *, sender: Host, receiver: Host) -> None:
        """Drop what ``sender`` sends to ``receiver``; the other direction stays."""
        receiver.namespaces.run("nft", f"add rule inet faults in ip saddr {sender.address} drop")

    def lose(self, percent: int) -> None:
        """Lose so many packets in a hundred, of what every host receives."""
        for host in self.hosts:
            host.namespaces.run(
                "nft", f"add rule inet faults in iifname eth0 numgen random mod 100 < {percent} drop"
            )

    def mend(self) -> None:
        """End what :meth:`drop` and :meth:`lose` began."""
        for host in self.hosts:
            host.namespaces.run("nft", "flush chain inet faults in")

    def close(self) -> None:
        for namespaces in [host.namespaces for host in self.hosts] + [self._switch]:
            namespaces.close()

    def __enter__(self) -> Network:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
