"""What the protocol promises, with threads as workers."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from replicast.errors import JobFailed, ReplicasDiverged, UpdatePending, UpdateRefused
from replicast.runtime import Ticket
from replicast.core.stage import Stage
from replicast.update import Update
from tests.unit.protocol.twins import DEADLINE_SECS, Job, Worker, bias, eventually


@pytest.mark.parametrize("size", [1, 2, 3])
def test_an_update_of_the_last_worker_reaches_every_replica_at_one_step(size: int) -> None:
    with Job(size) as job:
        ticket = job.workers[-1].member.propose(bias(2.0))
        job.train(20)
        receipt = ticket.result(DEADLINE_SECS)
        assert len(set(receipt.digests.values())) == 1
        assert sorted(receipt.digests) == list(range(size))
        assert [worker.applied for worker in job.workers] == [[(receipt.step, ticket.id)]] * size
        for worker in job.workers:
            np.testing.assert_array_equal(worker.state.values["dense/bias"], np.full(3, 2.0, np.float32))


def test_fifty_updates_from_three_sources_have_one_order_and_none_is_lost_or_doubled() -> None:
    with Job(3) as job:
        tickets: list[Ticket] = []
        keep = threading.Lock()

        def propose(worker: Worker, step: int) -> None:
            if step <= 16:
                ticket = worker.member.propose(bias(1.0, note=f"{worker.rank} at {step}"))
                with keep:
                    tickets.append(ticket)

        job.train(40, propose)
        receipts = [ticket.result(DEADLINE_SECS) for ticket in tickets]
        assert sorted(receipt.sequence for receipt in receipts) == list(range(1, 49))
        assert job.workers[0].applied == job.workers[1].applied == job.workers[2].applied
        assert len({id_ for _, id_ in job.workers[0].applied}) == 48
        assert job.values()[0] == job.values()[1] == job.values()[2]
        np.testing.assert_array_equal(job.workers[0].state.values["dense/bias"], np.full(3, 48, np.float32))


def test_a_scheduled_update_is_applied_at_its_step() -> None:
    with Job(2) as job:
        ticket = job.workers[1].member.propose(bias(1.0), at_step=15)
        eventually(lambda: ticket.stage is Stage.COMMITTED)
        job.train(30)
        assert ticket.result(DEADLINE_SECS).step == 15
        assert job.workers[0].applied == [(15, ticket.id)]


def test_an_update_for_a_far_step_keeps_no_other_waiting() -> None:
    with Job(2) as job:
        asked: list[str] = []
        get = job.workers[0].coordination.get

        def noting(key: str, timeout_secs: float) -> str | None:
            asked.append(key)
            return get(key, timeout_secs)

        job.workers[0].coordination.get = noting  # type: ignore[method-assign]
        far = job.workers[1].member.propose(bias(1.0), at_step=5000)
        eventually(lambda: far.stage is Stage.COMMITTED)
        near = job.workers[1].member.propose(bias(1.0))
        job.train(5)
        assert near.result(timeout=DEADLINE_SECS).sequence == 2
        assert "replicast/test/applied/2/1" in asked
        assert not [key for key in asked if "/applied/1/" in key], "while it is asked for, others wait"
        job.train(10)


def test_a_step_that_is_past_is_refused() -> None:
    with Job(2) as job:
        job.train(5)
        ticket = job.workers[1].member.propose(bias(1.0), at_step=3)
        job.train(5)
        with pytest.raises(UpdateRefused, match="Step 3 is past"):
            ticket.result(DEADLINE_SECS)
        assert job.workers[0].applied == []


def test_a_scheduled_update_waits_for_its_step_over_a_pause() -> None:
    with Job(2) as job:
        ticket = job.workers[0].member.propose(bias(1.0), at_step=15)
        eventually(lambda: ticket.stage is Stage.COMMITTED)
        job.train(10)
        assert not ticket.done()
        with pytest.raises(UpdatePending, match="committed for step 15"):
            ticket.result(0.05)
        job.train(10)
        assert ticket.result(DEADLINE_SECS).step == 15


def test_everything_proposed_before_the_end_of_training_is_applied_at_its_end() -> None:
    with Job(3, durable=True) as job:
        tickets: list[Ticket] = []

        def propose_at_the_end(worker: Worker, step: int) -> None:
            if step == 5 and worker.rank == 2:
                tickets.append(worker.member.propose(bias(1.0)))

        job.train(5, propose_at_the_end)
        assert job.workers[0].applied == [(5, tickets[0].id)]
        assert tickets[0].result(DEADLINE_SECS).step == 5


def test_a_result_can_be_waited_for_in_the_training_thread_when_the_others_wait_too() -> None:
    with Job(3) as job:
        job.train(3)

        def end_of_script(worker: Worker) -> Any:
            receipt = None
            worker.member.arrive(3)
            if worker.rank == 1:
                receipt = worker.member.propose(bias(1.0)).result(DEADLINE_SECS)
            worker.member.pause("drain")
            worker.member.pause("close")
            return receipt

        receipt = job.on_all(end_of_script)[1]
        assert receipt.step == 3
        assert job.values()[0] == job.values()[1] == job.values()[2]


def test_a_training_thread_that_would_wait_for_itself_is_told() -> None:
    with Job(2) as job:
        told: list[UpdatePending] = []

        def ask(worker: Worker, step: int) -> None:
            if worker.rank == 1 and step == 3:
                eventually(lambda: job.workers[0].member.gate.step == 3)  # else it still could stop here
                with pytest.raises(UpdatePending) as pending:
                    worker.member.propose(bias(1.0)).result(DEADLINE_SECS)
                told.append(pending.value)

        job.train(10, ask)
        assert "committed for step" in str(told[0])
        assert len(job.workers[0].applied) == 1


@pytest.mark.parametrize(
    ("update", "said"),
    [
        (Update().add("dense/nothing", [1.0]), "dense/nothing"),
        (Update().add("dense/bias", np.zeros(4, np.float32)), "shape"),
        (Update().add("dense/bias", np.zeros(3, np.float64)), "dtype"),
        (Update().add("dense/bias", np.array([1, np.nan, 2], np.float32)), "finite|NaN"),
        (Update().assign_rows("embeddings", [8], np.zeros((1, 2), np.float32)), "8"),
        (Update().assign_rows("embeddings", [1, 1], np.zeros((2, 2), np.float32)), "1"),
        (Update(), "no edits"),
    ],
)
def test_a_bad_update_is_refused_and_training_goes_on(update: Update, said: str) -> None:
    with Job(2) as job:
        bad = job.workers[1].member.propose(update)
        good = job.workers[0].member.propose(bias(1.0))
        job.train(10)
        with pytest.raises(UpdateRefused, match=said):
            bad.result(DEADLINE_SECS)
        assert bad.stage is Stage.REFUSED
        good.result(DEADLINE_SECS)
        assert [id_ for _, id_ in job.workers[0].applied] == [good.id]


def test_a_worker_that_cannot_stage_refuses_for_all() -> None:
    with Job(3) as job:
        transport = job.workers[2].member.transport

        def no_room(*_: Any) -> Any:
            raise UpdateRefused("There is no room in shared memory", worker=2)

        transport.receive = no_room  # type: ignore[method-assign]
        ticket = job.workers[0].member.propose(bias(1.0))
        job.train(5)
        with pytest.raises(UpdateRefused, match="no room") as refused:
            ticket.result(DEADLINE_SECS)
        assert refused.value.worker == 2
        assert [worker.applied for worker in job.workers] == [[], [], []]
        assert job.journal.records() == []


def test_the_same_id_with_the_same_content_is_applied_once_and_both_get_the_receipt() -> None:
    with Job(2) as job:
        first = job.workers[0].member.propose(bias(1.0, id="fix"))
        second = job.workers[1].member.propose(bias(1.0, id="fix"))
        job.train(10)
        assert first.result(DEADLINE_SECS) == second.result(DEADLINE_SECS)
        later = job.workers[1].member.propose(bias(1.0, id="fix"))
        assert later.result(DEADLINE_SECS) == first.result()
        assert len(job.workers[0].applied) == 1


def test_the_same_id_with_other_content_is_refused_and_the_first_one_stays() -> None:
    with Job(2) as job:
        first = job.workers[0].member.propose(bias(1.0, id="fix"))
        job.train(10)
        first.result(DEADLINE_SECS)
        second = job.workers[1].member.propose(bias(2.0, id="fix"))
        with pytest.raises(UpdateRefused, match="other content"):
            second.result(DEADLINE_SECS)
        assert len(job.workers[0].applied) == 1


def test_a_function_runs_once_on_its_source_with_the_live_values() -> None:
    with Job(3) as job:
        seen: list[tuple[int, float]] = []

        def double(values: Any, rank: int) -> Update:
            seen.append((rank, float(values["dense/bias"][0])))
            return Update().add("dense/bias", values["bias"])

        before = job.workers[0].member.propose(bias(3.0))
        eventually(lambda: before.stage is Stage.COMMITTED)

        def at_each(worker: Worker, step: int) -> None:
            if step == 6:
                worker.member.propose_function("double", lambda v: double(v, worker.rank), 2, None)

        job.train(12, at_each)
        assert seen == [(2, 3.0)]
        for worker in job.workers:
            np.testing.assert_array_equal(worker.state.values["dense/bias"], np.full(3, 6.0, np.float32))
            assert [id_ for _, id_ in worker.applied][1:] == ["double"]


def test_a_function_that_raises_changes_nothing_and_its_author_is_told() -> None:
    with Job(2) as job:
        ticket = job.workers[1].member.propose_function("broken", lambda values: values["nothing"], 1, None)
        job.train(8)
        with pytest.raises(UpdateRefused, match="nothing"):
            ticket.result(DEADLINE_SECS)
        assert job.workers[0].applied == []
        ticket = job.workers[1].member.propose_function("divides", lambda values: 1 / 0, 1, None)
        job.train(8)
        with pytest.raises(UpdateRefused, match="ZeroDivisionError"):
            ticket.result(DEADLINE_SECS)


def test_replicas_that_differ_are_named_in_the_outcome() -> None:
    with Job(3) as job:
        job.workers[1].state.values["dense/bias"][0] = 7.0
        ticket = job.workers[0].member.propose(bias(1.0))
        job.train(8)
        with pytest.raises(ReplicasDiverged, match="worker 0, 2") as diverged:
            ticket.result(DEADLINE_SECS)
        assert diverged.value.digests[0] == diverged.value.digests[2] != diverged.value.digests[1]


def test_a_dead_background_thread_makes_the_next_boundary_raise() -> None:
    with Job(2) as job:
        job.workers[1].coordination.get = lambda *_: 1 / 0  # type: ignore[method-assign,assignment]
        job.workers[1].member.threads.stopping.wait(DEADLINE_SECS)
        with pytest.raises(JobFailed, match="background thread 'follower'"):
            job.workers[1].member.arrive(1)


def test_workers_that_pause_for_different_reasons_are_told() -> None:
    with Job(2) as job, pytest.raises(UpdateRefused, match="different places"):
        job.on_all(lambda worker: worker.member.pause("drain" if worker.rank else "close"))


def test_an_update_is_applied_at_the_first_boundary_when_several_steps_are_one_execution() -> None:
    with Job(2) as job:
        ticket = job.workers[1].member.propose(bias(1.0), at_step=10)
        eventually(lambda: ticket.stage is Stage.COMMITTED)
        barrier = threading.Barrier(2)

        def loop(worker: Worker) -> None:
            for _ in range(5):
                barrier.wait(DEADLINE_SECS)
                worker.member.arrive(worker.member.gate.step + 4)
            worker.member.pause("drain")

        job.on_all(loop)
        assert ticket.result(DEADLINE_SECS).step == 12
        assert job.workers[0].applied == job.workers[1].applied == [(12, ticket.id)]


def test_a_restarted_job_applies_the_journal_again_each_update_at_its_step() -> None:
    with Job(2) as first:
        tickets = []

        def propose(worker: Worker, step: int) -> None:
            if worker.rank == 1 and step in (3, 9):
                tickets.append(worker.member.propose(bias(float(step), id=f"at-{step}")))

        first.train(20, propose)
        again = first.workers[0].member.propose(bias(5.0, id="scheduled"), at_step=30)
        first.train(1)
        assert again.stage is Stage.COMMITTED
    with Job(2, journal=first.journal) as second:
        repeated = []

        def propose_again(worker: Worker, step: int) -> None:
            if worker.rank == 1 and step == 3:
                repeated.append(worker.member.propose(bias(3.0, id="at-3")))

        second.train(35, propose_again)
        assert [id_ for _, id_ in second.workers[0].applied] == ["at-3", "at-9", "scheduled"]
        assert second.workers[0].applied[:2] == first.workers[0].applied
        assert second.workers[0].applied[2][0] == 30
        assert second.workers[0].applied == second.workers[1].applied
        assert repeated[0].result(DEADLINE_SECS).sequence == 1


def test_a_function_runs_while_all_wait_at_the_end_of_their_scripts() -> None:
    with Job(3) as job:
        job.train(3)

        def end_of_script(worker: Worker) -> Any:
            worker.member.arrive(3)
            receipt = None
            if worker.rank == 0:
                ticket = worker.member.propose_function("one", lambda v: {"bias": v["bias"] + 1}, 0, None)
                receipt = ticket.result(DEADLINE_SECS)
            worker.member.pause("drain")
            worker.member.pause("close")
            return receipt

        assert job.on_all(end_of_script)[0].step == 3
        assert job.values()[0] == job.values()[1] == job.values()[2]


def test_a_function_for_a_later_step_keeps_nobody_waiting() -> None:
    with Job(2) as job:
        later = job.workers[1].member.propose_function("later", lambda v: {"bias": v["bias"] * 2}, 1, 12)
        eventually(lambda: later.step == 12)
        soon = job.workers[0].member.propose(bias(3.0))
        eventually(lambda: soon.stage is Stage.COMMITTED)
        job.train(20)
        assert soon.result(DEADLINE_SECS).step < 12
        assert later.result(DEADLINE_SECS).step == 12
        assert job.workers[0].applied == job.workers[1].applied
        np.testing.assert_array_equal(job.workers[0].state.values["dense/bias"], np.full(3, 6.0, np.float32))


def test_what_was_computed_is_applied_again_in_the_same_order() -> None:
    with Job(2) as first:
        first.workers[1].member.propose_function("double", lambda v: {"bias": v["bias"] * 2}, 1, 5)
        plain = first.workers[0].member.propose(bias(1.0), at_step=5)
        eventually(lambda: plain.stage is Stage.COMMITTED)
        first.train(8)
        values = first.values()[0]
    with Job(2, journal=first.journal) as second:
        second.train(8)
        assert second.workers[0].applied == first.workers[0].applied
        assert second.values() == [values, values]


def test_a_refused_proposal_under_a_known_id_does_not_harm_the_one_that_is_on_its_way() -> None:
    with Job(2) as job:
        first = job.workers[1].member.propose(bias(1.0, id="fix"), at_step=6)
        eventually(lambda: first.stage is Stage.COMMITTED)
        second = job.workers[1].member.propose(bias(2.0, id="fix"))
        with pytest.raises(UpdateRefused, match="other content"):
            second.result(DEADLINE_SECS)
        job.train(8)
        assert first.result(DEADLINE_SECS).step == 6
        assert job.values()[0] == job.values()[1]


def test_an_update_that_assigns_is_received_in_memory_of_its_own_because_a_variable_will_live_there() -> None:
    with Job(2) as job:
        author = job.workers[0].member
        published: list[bool] = []
        publish = author.transport.publish

        def publish_noting(*given: Any, to_read: bool = False, **how: Any) -> Any:
            published.append(to_read)
            return publish(*given, to_read=to_read, **how)

        author.transport.publish = publish_noting  # type: ignore[method-assign]
        changes = [bias(1.0), bias(1.0).assign("dense/bias", np.zeros(3, np.float32)), bias(2.0)]
        tickets = [author.propose(change) for change in changes]
        job.train(2)
        assert [ticket.result(DEADLINE_SECS).sequence for ticket in tickets] == [1, 2, 3]
        assert published == [True, False, True]


def test_what_worker_0_says_to_itself_does_not_go_through_the_service() -> None:
    with Job(2) as job:
        ticket = job.workers[0].member.propose(bias(1.0))
        job.train(2)
        assert ticket.result(DEADLINE_SECS).sequence == 1
        keys = [key.removeprefix("replicast/test/") for key in job.store.values]
    assert [key for key in keys if key.startswith("answer/")]
    assert not [key for key in keys if key.startswith("answer/") and key.endswith("/0")]
    # Worker 1's two pauses, and nothing that worker 0 has posted.
    assert len([key for key in keys if key.startswith("proposal/")]) <= 2
