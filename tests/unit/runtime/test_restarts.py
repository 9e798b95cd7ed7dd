"""The end of a job, and the next attempt: with a journal in memory and in files."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replicast.config import TOLD_TO_END
from replicast.core.entries import Stage
from replicast.errors import JobFailed
from replicast.replicas.proposals import Ticket
from replicast.replicas.session import WorkerThreads
from replicast.storage.claims import Fence
from replicast.storage.journal import FileJournal, Journal, MemoryJournal
from replicast.update.trial import Trial
from tests.threads import DEADLINE_SECS, Job, Worker, eventually
from tests.unit.runtime.playing import bias, bias_of, loss_of_bias, pending, scheduled


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
            worker.propose(bias(float(step), id=f"at-{step}"))

    with Job(2, journals(0)) as first:
        first.train(20, propose)
        scheduled(first.workers[0].propose(bias(5.0, id="scheduled"), at_step=30))
        applied = first.workers[0].applied
    with first.next_attempt(journal=journals(1)) as second:
        repeated: list[Ticket] = []

        def propose_again(worker: Worker, step: int) -> None:
            if worker.rank == 1 and step == 3:
                repeated.append(worker.propose(bias(3.0, id="at-3")))

        second.train(35, propose_again)
        assert second.workers[0].applied == [*applied, (30, "scheduled")]
        assert second.workers[0].applied == second.workers[1].applied
        assert repeated[0].result(DEADLINE_SECS).sequence == 1
        assert [bias_of(worker) for worker in second.workers] == [17.0, 17.0]


def test_open_tickets_of_a_job_that_ends_say_so() -> None:
    with Job(2) as job:
        ticket = scheduled(job.workers[1].propose(bias(1.0), at_step=50))
        job.train(3)
    error = pending(ticket)
    assert "The job ended at step 3" in str(error)
    assert "scheduled for step 50" in str(error)
    assert error.stage == "scheduled"


def test_a_group_that_another_one_has_taken_over_ends_and_says_so(tmp_path: Path) -> None:
    with Job(2, FileJournal(tmp_path, Fence(tmp_path, attempt=0))) as job:
        Fence(tmp_path, attempt=1)
        job.workers[1].propose(bias(1.0))
        with pytest.raises(JobFailed, match="Another group of workers has taken over"):
            job.train(200)
        assert [worker.applied for worker in job.workers] == [[], []]


# A job that is told to exit saves once, at one boundary, exits there, and decides nothing after that.


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

    job.workers[rank].session.proposals.request("leave")
    assert job.on_all(until_told) == [TOLD_TO_END] * job.size


def test_a_trial_that_is_under_way_is_neither_saved_nor_decided() -> None:
    with Job(2) as job:
        tickets: list[Ticket] = []

        def act(worker: Worker, step: int) -> None:
            if worker.rank == 1 and step == 4:
                tickets.append(scheduled(worker.propose(bias(-0.5), 6, Trial(10**6))))
            if worker.rank == 1 and step == 8:
                tickets.append(worker.propose(bias(2.0, id="behind")))
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
        ticket = job.workers[0].propose(bias(2.0))
        assert pending(ticket, 0.2).stage in ("proposed", "prepared")
        assert job.journal.history().committed == {}
        assert [bias_of(worker) for worker in job.workers] == [0.0, 0.0]


def test_a_script_that_ends_when_all_are_told_to_end_saves_and_is_not_ended_by_force() -> None:
    with Job(2) as job:
        job.train(3)
        for worker in job.workers:
            worker.session.script_ended = True
        job.workers[0].session.proposals.request("leave")
        job.on_all(lambda worker: worker.session.rest("close"))
        eventually(lambda: job.checkpoints)
        assert [worker.left for worker in job.workers] == ["", ""]


def test_workers_that_rest_leave_where_they_rest() -> None:
    with Job(2) as job:
        job.train(3)
        leaving(job, 1, meanwhile=rest)
        assert [saved.step for saved in job.checkpoints] == [3]


# Lanes: what they hold.


class Value:
    """What a task holds."""


def test_a_lane_that_waits_holds_nothing_of_its_last_task() -> None:
    threads = WorkerThreads()
    lane = threads.lane("test")
    value, done = Value(), threading.Event()
    gone = threading.Event()
    weakref.finalize(value, gone.set)
    lane.do(lambda kept=value: kept and done.set())  # type: ignore[misc]
    del value
    assert done.wait(120)
    gc.collect()
    assert gone.wait(120)
    threads.stop(10)


def test_what_the_journal_hands_on_while_the_job_ends_is_still_done() -> None:
    threads = WorkerThreads()
    journal = threads.lane("journal")
    telemetry = threads.lane("telemetry", fed_by=journal)
    threads.lane("ends-last")
    others_have_ended, told = threading.Event(), threading.Event()

    def write_entry() -> None:
        assert others_have_ended.wait(120)
        telemetry.do(told.set)

    journal.do(write_entry)
    ending = threading.Thread(target=threads.stop, args=(120,))
    ending.start()
    eventually(lambda: all(thread.name != "replicast-ends-last" for thread in threading.enumerate()))
    others_have_ended.set()
    ending.join(120)
    assert told.is_set()
