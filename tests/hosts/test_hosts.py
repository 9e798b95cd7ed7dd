"""A job on two machines: what tests/long/hosts has for more machines and workers, and for every fault."""

from __future__ import annotations

from pathlib import Path

from replicast.config import PEER_FAILED
from tests.hosts.job import HostJob, need_machines
from tests.hosts.network import Network
from tests.hosts.story import WAITS_SECS, hosts_in_status, seen_by, train_push_and_heal

need_machines()

ENDS_SECS = 120.0
"""Far more than it takes, also on a busy machine."""


def test_two_hosts_train_update_and_heal_and_both_end_when_their_link_fails(
    tmp_path: Path,
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    with (
        Network(2, hidden={1: [runs]}) as network,
        HostJob(network, tmp_path, run_dir=runs / "first", environ={"EPOCHS": "1000"}) as job,
    ):
        train_push_and_heal(job)
        job.until(lambda: hosts_in_status(job) == ["host0", "host1"], WAITS_SECS)
        network.cut(network.hosts[1])
        ends = job.ends(ENDS_SECS)
        assert [None if end is None else end[1] for end in ends] == [PEER_FAILED] * 2, job.logs()
        assert "worker 1 was lost" in job.log(0).read_text()
        assert "worker 0" in job.log(1).read_text().splitlines()[-1]
        assert seen_by(job, 1, runs) == [], "a worker that cannot see the run directory creates none"
