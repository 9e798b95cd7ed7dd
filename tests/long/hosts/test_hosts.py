"""Jobs on two and three machines with one and two workers each."""

from __future__ import annotations

from pathlib import Path

import pytest

import replicast
from replicast.client.directory import see
from replicast.storage.run_files import ENDED, JobState
from tests.hosts.job import HostJob, need_machines
from tests.hosts.network import Network
from tests.hosts.story import WAITS_SECS, hosts_in_status, seen_by, train_push_and_heal

need_machines()


@pytest.mark.parametrize(("hosts", "per_host"), [(2, 1), (2, 2), (3, 1), (3, 2)])
def test_hosts_train_update_and_heal_although_only_the_first_sees_the_run_directory(
    tmp_path: Path, hosts: int, per_host: int
) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    hidden = {host: [runs] for host in range(1, hosts)}
    with (
        Network(hosts, hidden=hidden) as network,
        HostJob(network, tmp_path, per_host=per_host, run_dir=runs / "first") as job,
    ):
        train_push_and_heal(job)
        assert [None if end is None else end[1] for end in job.ends(WAITS_SECS)] == [0] * len(job.hosts)
        finals = job.finals()
        assert len(set(finals)) == 1, finals
        assert finals[0].startswith("300 ")
        assert finals[0].endswith("cargo 2 to 2"), "each update was applied once"
        for rank in range(per_host, len(job.hosts)):
            assert seen_by(job, rank, runs) == []
        assert hosts_in_status(job) == [host.name for host in job.hosts]
        # Nobody notes the end of workers that do not see the run directory: the state of the run tells it.
        seen = replicast.connect(job.run_dir).status()
        assert {(note.step, note.waiting_for) for note in seen.workers[:per_host]} == {(300, ENDED)}
        assert see(job.run_dir).state.state is JobState.FINISHED
