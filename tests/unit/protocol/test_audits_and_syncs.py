"""What `sync` makes of a difference that an audit has found, or is about to find."""

from __future__ import annotations

import pytest

from replicast.errors import ReplicasDiverged
from replicast.protocol.examining import diverged
from replicast.protocol.messages import Request
from tests.unit.protocol.twins import Job, Worker, eventually


def differ(job: Job) -> None:
    job.workers[1].state.values["dense/bias"][0] += 7.0


def find(job: Job, by: str) -> None:
    if by == "a look":
        job.on_all(lambda worker: worker.member.examiner.look())
    else:
        job.workers[0].member.channel.post(Request("audit", 0))
        eventually(lambda: all(worker.member.gate.pending() for worker in job.workers))


def sync(worker: Worker, id_: str, source: int = 0) -> None:
    names = [variable.name for variable in worker.state.schema]
    worker.member.pause("compare")
    worker.member.pause("\n".join(["sync", str(source), id_, *names]))


@pytest.mark.parametrize("found_by", ["a look", "an audit that waits"])
def test_who_asks_to_be_made_equal_is_not_told_instead_that_they_differ(found_by: str) -> None:
    with Job(2) as job:
        for worker in job.workers:
            worker.member.examiner.policy = "raise"
        job.on_all(lambda worker: worker.member.arrive(1))
        differ(job)
        find(job, found_by)
        job.on_all(lambda worker: sync(worker, "sync-1"))
        first, second = job.values()
        assert first == second
        assert [report.outcome for report in job.workers[0].member.examiner.reports] == ["warned"]


@pytest.mark.parametrize("found_by", ["a look", "an audit that waits"])
def test_what_is_to_be_healed_is_healed_when_something_else_is_synced(found_by: str) -> None:
    with Job(2) as job:
        for worker in job.workers:
            worker.member.examiner.policy = "heal"
        job.on_all(lambda worker: worker.member.arrive(1))
        differ(job)
        find(job, found_by)
        job.on_all(lambda worker: worker.member.pause("compare"))
        job.on_all(lambda worker: worker.member.pause("sync\n0\nsync-1\ndense/kernel"))
        first, second = job.values()
        assert first == second
        assert [report.outcome for report in job.workers[0].member.examiner.reports] == ["healed"]


def test_a_difference_after_a_sync_is_not_as_old_as_the_one_before_it() -> None:
    with Job(2) as job:
        job.on_all(lambda worker: worker.member.arrive(3))
        job.on_all(lambda worker: worker.member.pause("audit\nraise"))
        differ(job)

        def audited(worker: Worker) -> None:
            with pytest.raises(ReplicasDiverged):
                worker.member.pause("audit\nraise")

        job.on_all(lambda worker: worker.member.arrive(5))
        job.on_all(audited)
        job.on_all(lambda worker: sync(worker, "sync-1"))
        job.on_all(lambda worker: worker.member.arrive(9))
        differ(job)
        job.on_all(audited)
        said = [report.since for report in job.workers[1].member.examiner.reports if not report.equal]
        assert said == ["some step from 4 to 5", "some step from 6 to 9"]


def test_in_a_trial_the_error_says_when_its_remedy_is_not_refused() -> None:
    with Job(2) as job:
        differ(job)
        job.on_all(lambda worker: worker.member.pause("audit\nwarn"))
        report = job.workers[1].member.examiner.reports[-1]
        remedy = "replicas.sync(source=0) makes them equal"
        assert str(diverged(report)).endswith(f"{remedy}.")
        assert f"{remedy} when the trial that ends at step 40 is over" in str(diverged(report, 40))
