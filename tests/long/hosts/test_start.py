"""The start of a job whose hosts do not reach each other: somebody is named, and every worker ends."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.hosts.job import ROOT, HostJob, need_machines
from tests.hosts.network import Network

need_machines()

START = ROOT / "tests" / "hosts" / "start.py"
ENDS_SECS = 200.0
"""Far more than it takes, also on a busy machine."""


def test_a_worker_whose_peers_host_is_unreachable_says_so_and_ends_on_sigterm(tmp_path: Path) -> None:
    with Network(2) as network, HostJob(network, tmp_path, script=START) as job:
        network.cut(network.hosts[0])
        job.start(1)
        job.until(lambda: "s for worker 0 (10.77.0.1:2222), which does not answer" in job.log(1).read_text())
        job.workers[0].send_signal(signal.SIGTERM)
        ((_, code),) = [end for end in job.ends(ENDS_SECS) if end is not None]
        assert code == -signal.SIGTERM


def test_when_the_link_fails_while_tensorflow_connects_every_worker_ends_and_names_the_other(
    tmp_path: Path,
) -> None:
    with Network(2) as network, HostJob(network, tmp_path, script=START) as job:
        job.start()
        job.until(lambda: all((job.reports / f"met-{rank}").exists() for rank in range(2)))
        network.cut(network.hosts[1])
        (job.reports / "go").touch()
        assert [None if end is None else end[1] for end in job.ends(ENDS_SECS)] == [1, 1], job.logs()
        for rank, other in ((0, "worker 1 (10.77.0.2:2222)"), (1, "worker 0 (10.77.0.1:2222)")):
            named = f"TensorFlow could not connect worker {rank} with {other} within 60 s"
            assert named in job.log(rank).read_text()


def catches_sigterm(pid: int) -> bool:
    """Whether a process has a handler for SIGTERM: TensorFlow installs one when it connects the workers."""
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt")]
    return bool(caught >> (signal.SIGTERM - 1) & 1)


def test_ctrl_c_ends_a_worker_while_tensorflow_connects(tmp_path: Path) -> None:
    with Network(2) as network, HostJob(network, tmp_path, script=START) as job:
        job.start()
        job.until(lambda: all((job.reports / f"met-{rank}").exists() for rank in range(2)))
        network.cut(network.hosts[1])
        (job.reports / "go").touch()
        job.until(lambda: all(catches_sigterm(worker.pid) for worker in job.workers))
        for worker in job.workers:
            worker.send_signal(signal.SIGINT)
        codes = [None if end is None else end[1] for end in job.ends(ENDS_SECS)]
        assert codes == [-signal.SIGINT] * 2, job.logs()
        assert "Traceback" not in job.logs(), "the kernel ends it in the call, not Python after it"
