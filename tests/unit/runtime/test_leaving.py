"""A job that is told to exit saves once, at one boundary, exits there, and decides nothing after that."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from replicast.config import TOLD_TO_END
from replicast.core.records import Stage
from replicast.replicas.proposals import Ticket
from replicast.testing.job import Job, Worker, eventually
from replicast.update.trial import Trial
from tests.unit.runtime.playing import bias, bias_of, loss_of_bias, pending, scheduled


def train_for_long(worker: Worker) -> None:
    for _ in range(100_000):
        worker.step(logs={"loss": 1.0})


def rest(worker: Worker) -> None:
    worker.session.rest("close")


def leaving(job: Job, rank: int = 0, meanwhile: Callable[[Worker], None] = train_for_long) -> None:
    """SIGTERM, to this worker; all leave what they do."""

    def until_told(worker: Worker) -> object:
        with pytest.raises(SystemExit) as ended:
            meanwhile(worker)
        return ended.value.code

    job.workers[rank].session.request("leave")
    assert job.on_all(until_told) == [TOLD_TO_END] * job.size


def test_a_trial_that_is_under_way_is_neither_saved_nor_decided() -> None:
    with Job(2) as job:
        tickets: list[Ticket] = []

        def act(worker: Worker, step: int) -> None:
            if worker.rank == 1 and step == 4:
                tickets.append(scheduled(worker.session.propose(bias(-0.5), 6, Trial(10**6))))
            if worker.rank == 1 and step == 8:
                tickets.append(worker.session.propose(bias(2.0, id="behind")))
                eventually(lambda: tickets[1].waits_for)

        job.train(9, act, one_step=loss_of_bias, closes=False)
        leaving(job)
        assert job.checkpoints == []
        assert ["trial" in (worker.left or "") for worker in job.workers] == [True, True]
        assert not job.journal.history().decided
        assert (tickets[0].done(), tickets[1].done()) == (False, False)
        assert tickets[1].stage is not Stage.COMMITTED
        assert list(job.journal.history().committed) == [1]


def test_what_is_proposed_when_all_have_left_is_for_the_next_start() -> None:
    with Job(2) as job:
        job.train(2)
        leaving(job)
        ticket = job.workers[0].session.propose(bias(2.0))
        assert pending(ticket, 0.2).stage in ("proposed", "prepared")
        assert job.journal.history().committed == {}
        assert [bias_of(worker) for worker in job.workers] == [0.0, 0.0]


def test_a_script_that_ends_when_all_are_told_to_end_saves_and_is_not_ended_by_force() -> None:
    with Job(2) as job:
        job.train(3)
        for worker in job.workers:
            worker.session.script_ended = True
        job.workers[0].session.request("leave")
        job.on_all(lambda worker: worker.session.rest("close"))
        eventually(lambda: job.checkpoints)
        assert [worker.left for worker in job.workers] == ["", ""]


def test_workers_that_rest_leave_where_they_rest() -> None:
    with Job(2) as job:
        job.train(3)
        leaving(job, 1, meanwhile=rest)
        assert [saved.step for saved in job.checkpoints] == [3]
