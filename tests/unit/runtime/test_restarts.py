"""The end of a job, and the next attempt: with a journal in memory and in files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from replicast.errors import JobFailed
from replicast.replicas.proposals import Ticket
from replicast.storage.claims import Fence
from replicast.storage.journal import FileJournal, Journal, MemoryJournal
from replicast.testing.job import DEADLINE_SECS, Job, Worker, eventually
from tests.unit.runtime.playing import bias, bias_of, own_threads, pending, scheduled


@pytest.fixture(params=["memory", "files"])
def journals(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """The journal of each attempt, one after the other."""
    memory = MemoryJournal()

    def journal(attempt: int) -> Journal:
        if request.param == "memory":
            return memory
        return FileJournal(tmp_path, Fence(tmp_path, attempt=attempt))

    return journal


def test_a_restarted_job_applies_the_journal_again_each_update_at_its_step(journals: Any) -> None:
    def propose(worker: Worker, step: int) -> None:
        if worker.rank == 1 and step in (3, 9):
            worker.session.propose(bias(float(step), id=f"at-{step}"))

    with Job(2, journals(0)) as first:
        first.train(20, propose)
        scheduled(first.workers[0].session.propose(bias(5.0, id="scheduled"), at_step=30))
        applied = first.workers[0].applied
    with first.next_attempt(journal=journals(1)) as second:
        repeated: list[Ticket] = []

        def propose_again(worker: Worker, step: int) -> None:
            if worker.rank == 1 and step == 3:
                repeated.append(worker.session.propose(bias(3.0, id="at-3")))

        second.train(35, propose_again)
        assert second.workers[0].applied == [*applied, (30, "scheduled")]
        assert second.workers[0].applied == second.workers[1].applied
        assert repeated[0].result(DEADLINE_SECS).sequence == 1
        assert [bias_of(worker) for worker in second.workers] == [17.0, 17.0]


def test_open_tickets_of_a_job_that_ends_say_so() -> None:
    with Job(2) as job:
        ticket = scheduled(job.workers[1].session.propose(bias(1.0), at_step=50))
        job.train(3)
    error = pending(ticket)
    assert "The job ended at step 3" in str(error)
    assert "scheduled for step 50" in str(error)
    assert error.stage == "scheduled"


def test_a_job_that_stops_leaves_no_thread() -> None:
    before = own_threads()
    with Job(3) as job:
        job.train(2)
        assert own_threads() - before
    eventually(lambda: not own_threads() - before)


def test_a_group_that_another_one_has_taken_over_ends_and_says_so(tmp_path: Path) -> None:
    with Job(2, FileJournal(tmp_path, Fence(tmp_path, attempt=0))) as job:
        Fence(tmp_path, attempt=1)
        job.workers[1].session.propose(bias(1.0))
        with pytest.raises(JobFailed, match="Another group of workers has taken over"):
            job.train(200)
        assert [worker.applied for worker in job.workers] == [[], []]
