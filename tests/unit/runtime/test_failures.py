"""Threads that die, full disks, silent workers: no wait is unlimited, and the error says why."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from replicast import faults
from replicast.core.entries import Committed, Entry, Payload, Receipt, Stage
from replicast.errors import JobFailed
from replicast.replicas.proposals import Ticket
from replicast.storage.journal import MemoryJournal, NotWritten, PerhapsWritten
from replicast.update.update import Update
from tests.threads import DEADLINE_SECS, Job, Worker, eventually
from tests.unit.runtime.playing import adding, bias, bias_of, refusal

FULL = "No space left on device"


@pytest.fixture(autouse=True)
def readers_look_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the end of a job that has failed, nobody writes the message for which a reader waits."""
    monkeypatch.setattr("replicast.replicas.channel.LOOK_SECS", 0.05)


@pytest.fixture
def fail_at() -> Iterator[Callable[[str], None]]:
    """Whoever comes to a named point next raises `FaultInjected` there."""

    def plan(point: str) -> None:
        faults.set_plan([faults.Fault(0, faults.Point(point), action=faults.Action.RAISE)])

    yield plan
    faults.set_plan([])


class FaultyJournal(MemoryJournal):
    """Raises instead of writing the next entry of a kind, or waits before it."""

    def __init__(self) -> None:
        super().__init__()
        self.raises: dict[type[Entry], Exception] = {}
        self.waits: dict[type[Entry], threading.Event] = {}

    def write(self, entry: Entry, update: Update | None = None) -> None:
        waiting = self.waits.pop(type(entry), None)
        if waiting is not None:
            waiting.wait(DEADLINE_SECS)
        error = self.raises.pop(type(entry), None)
        if error is not None:
            raise error
        super().write(entry, update)


def zero(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("of the test")


def break_the_reader(job: Job) -> None:
    job.workers[1].coordination.get = zero  # type: ignore[method-assign]


def break_the_loop(job: Job) -> None:
    job.workers[1].coordination.put = zero  # type: ignore[method-assign]
    job.workers[1].session.proposals.request("audit")


def break_the_outbox(job: Job) -> None:
    faults.set_plan([faults.Fault(0, faults.Point.PROPOSE, action=faults.Action.RAISE)])
    job.workers[1].propose(bias(1.0))


def break_the_release_lane(job: Job) -> None:
    release = job.workers[1].transport.release

    def broken(parcel_id: str, *, reuse: bool = False) -> None:
        if threading.current_thread().name == "replicast-release":
            raise ZeroDivisionError("of the test")
        release(parcel_id, reuse=reuse)

    job.workers[1].transport.release = broken  # type: ignore[method-assign]
    job.workers[1].propose(bias(math.nan))  # its bytes are given back when it is refused


def at_a_boundary(worker: Worker, ticket: Ticket) -> None:
    ends = time.monotonic() + DEADLINE_SECS
    while time.monotonic() < ends:
        worker.step()
        time.sleep(0.005)


def at_rest(worker: Worker, ticket: Ticket) -> None:
    worker.session.rest("close")


def for_a_ticket(worker: Worker, ticket: Ticket) -> None:
    ticket.result(DEADLINE_SECS)


WAITS = [at_a_boundary, at_rest, for_a_ticket]


def what_a_wait_raises(job: Job, rank: int, wait: Any, then: Callable[[], None]) -> JobFailed:
    """What a training thread raises that waits for an update, for which the others do not come."""
    worker, raised = job.workers[rank], list[JobFailed]()
    ticket = worker.propose(bias(1.0))

    def act() -> None:
        with pytest.raises(JobFailed) as failed:
            wait(worker, ticket)
        raised.append(failed.value)

    worker.do(act)
    time.sleep(0.05)  # It waits, most likely; if not, it is told as soon as it does.
    then()
    eventually(lambda: raised)
    return raised[0]


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize(
    ("name", "breaks"),
    [
        ("reader", break_the_reader),
        ("loop", break_the_loop),
        ("outbox", break_the_outbox),
        ("release", break_the_release_lane),
    ],
)
def test_a_background_thread_that_dies_ends_every_wait_of_its_worker_with_the_reason(
    name: str, breaks: Callable[[Job], None], wait: Any, fail_at: object
) -> None:
    with Job(2) as job:
        error = what_a_wait_raises(job, 1, wait, lambda: breaks(job))
        assert f"The background thread {name!r} of replicast died: " in str(error)
        assert isinstance(error.__cause__, ZeroDivisionError | faults.FaultInjected)


@pytest.mark.parametrize("wait", WAITS)
def test_the_death_of_another_worker_ends_every_wait(wait: Any) -> None:
    with Job(2) as job:
        assert "a worker died" in str(what_a_wait_raises(job, 0, wait, job.workers[0].die))


def test_the_death_of_the_journals_thread_ends_the_job(fail_at: Callable[[str], None]) -> None:
    with Job(2) as job:
        fail_at("verify")
        job.workers[1].propose(bias(1.0))
        with pytest.raises(JobFailed, match=r"The background thread 'journal'.*FaultInjected"):
            job.train(1000)


def test_an_error_in_applying_ends_the_worker_and_is_its_own(fail_at: Callable[[str], None]) -> None:
    with Job(1) as job:
        fail_at("apply")
        job.workers[0].propose(bias(1.0))
        with pytest.raises(faults.FaultInjected):
            job.train(3)


# The journal.


@pytest.mark.parametrize("entry", [Payload, Committed])
def test_a_full_disk_refuses_the_update_and_the_job_continues(entry: type[Entry]) -> None:
    journal = FaultyJournal()
    with Job(2, journal) as job:
        journal.raises[entry] = NotWritten(FULL)
        bad = job.workers[1].propose(bias(1.0, id="bad"))
        job.train(3)
        assert FULL in str(refusal(bad))
        computed = job.on_all(
            lambda worker: worker.session.proposals.propose_function("f", adding(1.0), 1, None)
        )
        journal.raises[entry] = NotWritten(FULL)
        job.train(3)
        assert FULL in str(refusal(computed[0]))
        good = job.workers[1].propose(bias(2.0, id="bad"))
        job.train(3)
        assert good.result(DEADLINE_SECS).sequence == 1
        assert [bias_of(worker) for worker in job.workers] == [2.0, 2.0]
        eventually(lambda: not job.files())


def test_a_receipt_that_cannot_be_written_is_told_all_the_same_also_in_the_next_attempt() -> None:
    journal = FaultyJournal()
    with Job(2, journal) as job:
        journal.raises[Receipt] = NotWritten(FULL)
        ticket = job.workers[1].propose(bias(1.0, id="fix"))
        job.train(3)
        assert ticket.result(DEADLINE_SECS).stage is Stage.VERIFIED
        job.on_all(lambda worker: worker.session.rest("save"))
        eventually(lambda: job.checkpoints)
    with job.next_attempt() as again:
        told = again.workers[1].propose(bias(1.0, id="fix"))
        assert told.result(DEADLINE_SECS).sequence == 1
        assert again.workers[0].applied == []


def test_a_write_with_unknown_result_ends_the_job_and_says_so() -> None:
    journal = FaultyJournal()
    with Job(2, journal) as job:
        journal.raises[Committed] = PerhapsWritten("renamed, and not synced")
        job.workers[1].propose(bias(1.0))
        with pytest.raises(JobFailed, match="It is unknown whether the journal was written"):
            job.train(1000)
        assert [worker.applied for worker in job.workers] == [[], []]


def test_an_update_of_the_journal_that_cannot_be_applied_again_ends_the_job() -> None:
    with Job(2) as first:
        ticket = first.workers[0].propose(bias(1.0, id="fix"))
        first.train(3)
        ticket.result(DEADLINE_SECS)
    smaller = Job(2, first.journal, values={"dense/kernel": first.start["dense/kernel"]})
    with pytest.raises(JobFailed, match="Update 1 of the journal cannot be applied again"), smaller:
        smaller.train(1000)
