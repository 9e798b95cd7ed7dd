"""Whatever no worker has applied yet can be taken back; then nobody applies it, in no start of the job."""

from __future__ import annotations

from pathlib import Path

import pytest

from replicast.errors import UpdateRefused
from replicast.fence import Fence
from replicast.journal import AnyJournal, Journal, MemoryJournal
from replicast.runtime import Ticket
from replicast.core.stage import Stage
from tests.unit.protocol.test_trials import TRIAL, Run
from tests.unit.protocol.twins import Job, bias, eventually


@pytest.fixture(params=["memory", "files"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> AnyJournal:
    return MemoryJournal() if request.param == "memory" else Journal(tmp_path, Fence(tmp_path, attempt=0))


def biases(job: Job) -> list[float]:
    """The bias of each worker, whose elements are all the same."""
    for worker in job.workers:
        assert len(set(worker.state.values["dense/bias"].tolist())) == 1
    return [float(worker.state.values["dense/bias"][0]) for worker in job.workers]


def withdrawn(ticket: Ticket) -> bool:
    if not ticket.done():
        return False
    with pytest.raises(UpdateRefused, match="withdrawn before it was applied"):
        ticket.result(0)
    return True


@pytest.mark.parametrize("author", [0, 1])
def test_an_update_that_is_scheduled_for_a_later_step_is_applied_by_nobody(
    journal: AnyJournal, author: int
) -> None:
    with Job(2, journal, durable=True) as job:
        member = job.workers[author].member
        first = member.propose(bias(1.0, id="first"), at_step=10)
        second = member.propose(bias(10.0, id="second"), at_step=11)
        eventually(lambda: second.stage is Stage.COMMITTED and first.stage is Stage.COMMITTED)
        job.train(3)
        job.workers[0].member.withdraw("first")
        eventually(lambda: withdrawn(first))
        job.train(12)
        assert biases(job) == [10.0, 10.0]
        assert [id_ for _, id_ in job.workers[1].applied] == ["second"]
        assert journal.withdrawn() == {1}
        again = member.propose(bias(100.0, id="first"))
        job.train(3)
        assert again.result(5).sequence == 3
        assert biases(job) == [110.0, 110.0]


def test_an_update_that_is_held_behind_a_trial_is_applied_by_nobody(journal: AnyJournal) -> None:
    with Job(2, journal, durable=True) as job:
        run = Run(job)
        run.train(6)
        tried = job.workers[0].member.propose(bias(-0.5, id="tried"), trial=TRIAL)
        eventually(lambda: tried.stage is not Stage.PROPOSED)
        run.train(3, drain=False)
        behind = job.workers[1].member.propose(bias(10.0, id="behind"))
        eventually(lambda: "trial" in behind.waits_for)
        job.workers[0].member.withdraw("behind")
        eventually(lambda: withdrawn(behind))
        run.train(6)
        kept = tried.result(5).trial
        assert kept is not None
        assert kept.outcome == "kept"
        assert biases(job) == [-0.5, -0.5]
    assert [record.id for record in journal.records()] == ["tried"]


def test_what_is_applied_already_stays(journal: AnyJournal) -> None:
    with Job(2, journal, durable=True) as job:
        ticket = job.workers[0].member.propose(bias(1.0, id="done"), at_step=3)
        eventually(lambda: ticket.stage is Stage.COMMITTED)
        job.train(4)
        assert ticket.result(5).step == 3
        for id_ in ("done", "nobody-knows-it"):
            job.workers[0].member.withdraw(id_)
        job.train(3)
        assert biases(job) == [1.0, 1.0]
        assert journal.withdrawn() == frozenset()


def test_a_later_start_does_not_apply_what_was_withdrawn(journal: AnyJournal) -> None:
    with Job(2, journal, durable=True) as job:
        tickets = [
            job.workers[0].member.propose(bias(10.0**n, id=f"number-{n}"), at_step=8 + n) for n in range(3)
        ]
        eventually(lambda: all(ticket.stage is Stage.COMMITTED for ticket in tickets))
        job.workers[0].member.withdraw("number-1")
        eventually(lambda: withdrawn(tickets[1]))
    with Job(2, journal, durable=True) as job:
        job.train(3)
        waiting = job.workers[1].member.propose(bias(100.0, id="number-2"), at_step=10)
        job.train(1)
        job.workers[0].member.withdraw("number-2")
        eventually(lambda: withdrawn(waiting))
        job.train(10)
        assert biases(job) == [1.0, 1.0]
    assert journal.withdrawn() == {2, 3}
