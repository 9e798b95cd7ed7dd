"""Waits: for tickets in training threads and elsewhere, and of workers for each other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from replicast.core.entries import Stage
from replicast.errors import ClusterError, JobFailed, UpdatePending
from replicast.replicas import session
from replicast.replicas.proposals import Ticket
from replicast.update.trial import Trial
from tests.threads import DEADLINE_SECS, QUICK, Job, Worker, eventually
from tests.unit.runtime.playing import bias, pending, scheduled

TRIAL = Trial(steps=5, max_increase=0.1)


def test_a_result_can_be_waited_for_in_the_training_thread_when_the_others_rest() -> None:
    with Job(3) as job:
        job.train(3)

        def end_of_script(worker: Worker) -> Any:
            receipt = worker.propose(bias(1.0)).result() if worker.rank == 1 else None
            worker.session.rest("close")
            return receipt

        assert job.on_all(end_of_script)[1].step == 3
        assert job.values() == job.values()[:1] * 3


def test_all_training_threads_may_wait_for_their_own_results_at_one_boundary() -> None:
    with Job(3) as job:
        tickets: list[Ticket] = []

        def wait(worker: Worker, step: int) -> None:
            if step == 3:
                ticket = worker.propose(bias(1.0))
                tickets.append(ticket)
                # Who has its result trains on: before all are known, the others would have to train first.
                eventually(lambda: [one.stage for one in tickets] == [Stage.PREPARED] * 3)
                assert ticket.result().step == 3

        job.train(5, wait)
        assert [step for step, _ in job.workers[0].applied] == [3, 3, 3]


def test_a_training_thread_that_has_to_train_first_is_told_soon() -> None:
    with Job(2, timeouts=replace(QUICK, wait_secs=0.2)) as job:
        told: list[UpdatePending] = []

        def ask(worker: Worker, step: int) -> None:
            if worker.rank == 1 and step == 3:
                eventually(lambda: job.workers[0].session.step == 3)  # else it still could stop here
                told.append(pending(worker.propose(bias(1.0))))

        job.train(10, ask)
        assert "this thread has to train first" in str(told[0])
        assert job.workers[0].applied[0][0] > 3


def test_a_time_limit_in_the_training_thread_is_kept_and_training_continues() -> None:
    with Job(2) as job:

        def ask(worker: Worker, step: int) -> None:
            if worker.rank == 1 and step == 3:
                eventually(lambda: job.workers[0].session.step == 3)  # else it still could stop here
                ticket = worker.propose(bias(1.0))
                eventually(lambda: ticket.stage is Stage.PREPARED)
                until = time.monotonic() + 0.2
                assert "0.2 s have passed, and it is prepared" in str(pending(ticket, 0.2))
                assert time.monotonic() >= until

        job.train(12, ask)
        (step,) = [step for step, _ in job.workers[0].applied]
        assert step > 3


def test_a_time_limit_that_was_not_waited_for_is_not_said_to_have_passed() -> None:
    with Job(2) as job:

        def ask(worker: Worker, step: int) -> None:
            if worker.rank == 1 and step == 3:
                ticket = scheduled(worker.propose(bias(1.0), at_step=9))
                said = str(pending(ticket, DEADLINE_SECS))
                assert "this thread has to train first, and it is scheduled for step 9" in said

        job.train(12, ask)
        assert [step for step, _ in job.workers[0].applied] == [9]


def test_another_thread_may_wait_while_the_training_continues() -> None:
    with Job(2) as job:
        receipts: list[Any] = []
        ticket = scheduled(job.workers[0].propose(bias(1.0), at_step=20))
        waits = threading.Thread(target=lambda: receipts.append(ticket.result()), daemon=True)
        waits.start()
        job.train(25)
        waits.join(DEADLINE_SECS)
        assert receipts[0].step == 20
        assert ticket.done()


def test_another_thread_that_waits_is_told_when_its_time_is_up_and_when_the_job_fails() -> None:
    with Job(2) as job:
        ticket = scheduled(job.workers[0].propose(bias(1.0), at_step=20))
        assert "0.05 s have passed, and it is scheduled for step 20" in str(pending(ticket, 0.05))
        job.workers[0].die()
        with pytest.raises(JobFailed, match="a worker died"):
            ticket.result()


def test_what_is_proposed_before_the_workers_begin_is_waited_for_only_briefly() -> None:
    with Job(2, begins=False, timeouts=replace(QUICK, wait_secs=0.2)) as job:

        def script(worker: Worker) -> Ticket | None:
            ticket = None
            if worker.rank == 1:
                ticket = worker.propose(bias(1.0, id="early"))
                pending(ticket)
            worker.session.begin()
            return ticket

        ticket = job.on_all(script)[1]
        job.train(3)
        assert ticket.result(DEADLINE_SECS).sequence == 1


def test_workers_that_wait_at_different_places_are_told_where_and_may_come_again() -> None:
    with Job(2) as job:

        def come(worker: Worker) -> str:
            with pytest.raises(ClusterError) as told:
                worker.session.rest("close" if worker.rank else "save")
            return str(told.value)

        job.train(2)
        for said in job.on_all(come):
            assert "worker 0 at step 2: save; worker 1 at step 2: close" in said
            assert "Every worker must make the same calls" in said
        job.train(2)


def test_who_is_elsewhere_because_another_has_left_blames_that_one() -> None:
    with Job(2) as job:
        job.gone.add(1)

        def come(worker: Worker) -> str:
            with pytest.raises((ClusterError, JobFailed)) as told:
                worker.session.rest("save" if worker.rank == 0 else "close")
            return str(told.value)

        first, second = job.on_all(come)
        assert first.startswith("worker 1 reached the end of its script")
        assert second.startswith("The workers wait for each other at different places")


def test_what_a_worker_reports_comes_after_what_it_has_proposed_before() -> None:
    """A checkpoint of a boundary has what was proposed up to it, however long its bytes take."""
    with Job(2) as job:
        publish, slow = job.workers[1].transport.publish, threading.Event()

        def slow_publish(*given: Any, **how: Any) -> Any:
            slow.wait(0.3)
            return publish(*given, **how)

        job.workers[1].transport.publish = slow_publish  # type: ignore[method-assign]

        def act(worker: Worker, step: int) -> None:
            if step == 3:
                if worker.rank == 1:
                    worker.propose(bias(1.0, id="before"), at_step=50)
                worker.save_in_passing()

        job.train(6, act)
        eventually(lambda: job.checkpoints)
        (saved,) = job.checkpoints
        assert saved.step == 3
        assert [one.proposal.id for one in saved.pending] == ["before"]
    with job.next_attempt() as again:
        again.train(50)
        assert again.workers[1].applied == [(50, "before")]


def test_a_worker_that_has_waited_long_continues_only_when_the_others_know_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise they take it for one that has missed a boundary, and end the job."""
    monkeypatch.setattr(session, "LONG_SECS", session.REMIND_SECS)
    with Job(2) as job:
        first, said, is_done = job.workers[0], list[int | None](), threading.Event()
        first.hooks.on_long_wait = said.append

        def keep_background_busy(_: Any) -> None:
            is_done.wait(DEADLINE_SECS)

        first.hooks.on_ended = keep_background_busy

        def come(worker: Worker) -> list[int | None]:
            worker.audit_in_passing()
            if worker.rank == 1:
                time.sleep(3 * session.REMIND_SECS)
            worker.session.rest("meet", "late")
            return list(said)

        assert job.on_all(come)[0] == [0, None]
        is_done.set()


def test_what_a_worker_reports_last_of_all_is_sent_before_its_threads_end() -> None:
    """Worker 0 waits for that part of a checkpoint, and no other comes."""
    with Job(2) as job:

        def report(worker: Worker) -> None:
            snapshot = worker.take_snapshot("", True, False)()
            slow = threading.Event()
            worker.session.report(worker.session.next_report("save"), lambda: (slow.wait(0.5), snapshot)[1])
            if worker.rank == 1:
                worker.session.stop()

        job.on_all(report)
        eventually(lambda: job.checkpoints)


WAITS: dict[str, Callable[[Worker], object]] = {
    "boundary": Worker.step,
    "sync": lambda worker: worker.session.rest("sync", 0),
    "save": lambda worker: worker.session.rest("save"),
    "audit": lambda worker: worker.session.rest("audit", "warn"),
    "result": lambda worker: worker.propose(bias(1.0, id="mine"), at_step=99).result(DEADLINE_SECS),
    "close": lambda worker: worker.session.rest("close"),
}


@pytest.mark.parametrize("then", WAITS)
@pytest.mark.parametrize("wait", WAITS)
def test_a_worker_that_was_interrupted_while_it_waited_for_the_others_does_not_go_on_with_them(
    wait: str, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not done what it was told to do there, and what it was told is not about a later wait."""
    monkeypatch.setattr(session, "REMIND_SECS", 0.05)
    with Job(2) as job:
        is_interrupted, has_heard = threading.Event(), threading.Event()
        if wait == "boundary":
            job.workers[0].propose(bias(2.0, id="theirs"))
            eventually(lambda: job.workers[1].session.is_wanted)

        def act(worker: Worker) -> str:
            if worker.rank == 0:
                assert is_interrupted.wait(DEADLINE_SECS)
                if wait == "close":
                    worker.session.rest("close")
                has_heard.set()
                return ""
            worker.failure = KeyboardInterrupt()  # type: ignore[assignment]
            with pytest.raises(KeyboardInterrupt):
                WAITS[wait](worker)
            worker.failure = None  # the script has caught it
            is_interrupted.set()
            assert has_heard.wait(DEADLINE_SECS)
            with pytest.raises(JobFailed) as failed:
                WAITS[then](worker)
            return str(failed.value)

        said = job.on_all(act)[1]
        assert said.startswith("This worker was interrupted while it waited for the others")
