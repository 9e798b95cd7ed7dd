"""Launchers on machines played by namespaces: started, killed and cut off, with what each of them shows."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.hosts.network import Host, Network

DEADLINE_SECS = 90.0
SECRET = "only these launchers know it"


@dataclass
class Launched:
    """A launcher on one of the machines."""

    process: subprocess.Popen[bytes]
    output: Path
    host: Host

    @property
    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def wait_for(self, text: str, secs: float = DEADLINE_SECS) -> None:
        eventually(lambda: text in self.text or self.process.poll() is not None, f"{text!r} never came", secs)
        assert text in self.text, self.text

    def finish(self, secs: float = DEADLINE_SECS) -> int:
        try:
            return self.process.wait(secs)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.host.name} has not ended:\n{self.text}") from None

    def send(self, signum: signal.Signals) -> None:
        os.kill(self.process.pid, signum)


@dataclass
class Machines:
    """Machines with a launcher each. All see the directory, unless it is hidden from some."""

    network: Network
    directory: Path
    launched: list[Launched]

    @property
    def hosts(self) -> list[Host]:
        return self.network.hosts

    def launch(self, node: int, *options: str, secret: str | None = SECRET) -> Launched:
        """Start `replicast run` on a machine; nsenter execs it, so its pid is the launcher's."""
        environ = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
        if secret is not None:
            environ["REPLICAST_JOB_SECRET"] = secret
        output = self.directory / f"launcher-{node}-{len(self.launched)}.txt"
        with output.open("wb") as file:
            process = self.hosts[node].start(
                [sys.executable, "-m", "replicast", "run", *options], env=environ, stdout=file
            )
        launched = Launched(process, output, self.hosts[node])
        self.launched.append(launched)
        return launched

    def launch_all(self, *options: str, secret: str | None = SECRET) -> list[Launched]:
        """The same command on every machine."""
        listed = ",".join(host.address for host in self.hosts)
        return [
            self.launch(node, "--hosts", listed, *options, secret=secret) for node in range(len(self.hosts))
        ]

    def pids(self, attempt: int, workers: int = 2) -> list[int]:
        """Waits until the workers of an attempt have noted their pids."""
        return [noted_pid(self.directory / f"pid-{attempt}-{rank}") for rank in range(workers)]


@contextlib.contextmanager
def machines(
    directory: Path, hosts: int = 2, *, hidden: Mapping[int, Sequence[Path]] | None = None
) -> Iterator[Machines]:
    """Machines on one switch; whatever was started there is killed at the end."""
    with Network(hosts, hidden=hidden) as network, contextlib.chdir(directory):
        made = Machines(network, directory, [])
        try:
            yield made
        finally:
            for launched in made.launched:
                launched.process.kill()
                launched.process.wait()


def eventually(condition: Callable[[], bool], otherwise: str, secs: float = DEADLINE_SECS) -> None:
    end = time.monotonic() + secs
    while not condition():
        assert time.monotonic() < end, otherwise
        time.sleep(0.01)


def noted_pid(path: Path, secs: float = DEADLINE_SECS) -> int:
    eventually(path.exists, f"{path.name} never came", secs)
    return int(path.read_text())


def lines_with(launched: Sequence[Launched], pattern: str) -> list[list[str]]:
    """The lines of each screen in which a pattern is found."""
    return [[line for line in one.text.splitlines() if re.search(pattern, line)] for one in launched]
