"""A real Slurm of two machines played by namespaces: munge, slurmctld and a slurmd on each."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from tests.hosts.network import Host, Network

COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
SECS = 30.0
CONFIG = """
ClusterName=test
SlurmctldHost=host0(10.77.0.1)
SlurmUser=root
AuthInfo=socket={directory}/munge/socket,cred_expire=10
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
StateSaveLocation={directory}/state
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmdSpoolDir={directory}/spool-%n
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SchedulerParameters=bf_interval=2,sched_interval=2
NodeName=host0 NodeAddr=10.77.0.1 CPUs={cpus}
NodeName=host1 NodeAddr=10.77.0.2 CPUs={cpus}
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 State=UP
PartitionName=high Nodes=ALL PriorityTier=10 PreemptMode=OFF State=UP
"""


def missing() -> str:
    """Why there is no Slurm here, or an empty string."""
    absent = [command for command in COMMANDS if shutil.which(command) is None]
    return f"not installed: {', '.join(absent)} (make test-slurm installs them)" if absent else ""


class Slurm:
    """The daemons. A context manager; they end with it."""

    def __init__(self, directory: Path, network: Network) -> None:
        self.directory = directory
        self.first, self.second = network.hosts[:2]
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environ = {**os.environ, "SLURM_CONF": str(directory / "slurm.conf")}
        (directory / "state").mkdir()
        hosts = directory / "hosts"
        hosts.write_text("127.0.0.1 localhost\n10.77.0.1 host0\n10.77.0.2 host1\n")
        for host in (self.first, self.second):
            host.namespaces.run("mount", "--bind", str(hosts), "/etc/hosts")
        config = CONFIG.format(directory=directory, cpus=os.cpu_count())
        (directory / "slurm.conf").write_text(config)

    def __enter__(self) -> Slurm:
        try:
            self._start_munge()
            self._start(self.first, "slurmctld", "-D", "-i")
            for host in (self.first, self.second):
                self._start(host, "slurmd", "-D", "-N", host.name)
            self.wait(lambda: self.run("sinfo", "-h", "-t", "idle", "-o", "%D").startswith("2"), "idle nodes")
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(self, *command: str, **environ: str) -> str:
        """The output of a command on the first machine."""
        done = subprocess.run(
            self.first.namespaces.inside(command),
            env={**self.environ, **environ},
            capture_output=True,
            text=True,
            timeout=SECS,
        )
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout.strip()

    def field(self, job: str, name: str) -> str:
        """One field of what Slurm says of a job."""
        said = self.run("scontrol", "show", "job", "-o", job)
        return next(pair.partition("=")[2] for pair in said.split() if pair.startswith(f"{name}="))

    def wait(self, is_so: Callable[[], bool], what: str, secs: float = SECS) -> None:
        """Waits until something is so."""
        ends = time.monotonic() + secs
        while not is_so():
            assert all(daemon.poll() is None for daemon in self._daemons), self.logs()
            assert time.monotonic() < ends, f"no {what} after {secs:.0f} s\n{self.logs()}"
            time.sleep(0.25)

    def logs(self) -> str:
        """The end of each daemon's log."""
        return "\n".join(
            f"== {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:])
            for path in sorted(self.directory.glob("*.log"))
        )

    def close(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(SECS)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def _start_munge(self) -> None:
        place = self.directory / "munge"
        place.mkdir(mode=0o755)
        key = place / "key"
        key.touch(mode=0o600)
        key.write_bytes(secrets.token_bytes(128))
        files = [f"--{name}-file={place / name}" for name in ("key", "pid", "log", "seed")]
        self._start(self.first, "munged", "--force", "-F", f"--socket={place / 'socket'}", *files)
        self.wait((place / "socket").exists, "socket of munge")

    def _start(self, host: Host, *command: str) -> None:
        log = self.directory / f"{command[0]}-{host.name}.log"
        with log.open("wb") as output:
            self._daemons.append(host.start(command, env=self.environ, stdout=output))
