"""What audits promise, with threads as workers: who differs, where, since when, and all equal again."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import numpy as np
import pytest

from replicast.audit import AuditReport
from replicast.errors import JobFailed, ReplicasDiverged, UpdateRefused
from replicast.protocol import Patience
from replicast.protocol.audit_messages import Audited
from replicast.core.stage import Stage
from tests.unit.protocol.twins import DEADLINE_SECS, Job, Worker, bias, eventually


def flip(worker: Worker, name: str, place: int = 0, bit: int = 0) -> None:
    """Changes one bit of one element of one replica."""
    value = worker.state.values[name] = worker.state.values[name].copy()
    value.reshape(-1).view(np.uint32)[place] ^= np.uint32(1 << bit)


def audit(job: Job, policy: str = "heal") -> list[AuditReport]:
    """All workers call for an audit between steps; what each was told."""

    def ask(worker: Worker) -> AuditReport:
        worker.member.pause(f"audit\n{policy}")
        return worker.member.examiner.reports[-1]

    return job.on_all(ask)


def train_looking(job: Job, steps: int, every: int, at_each: Any = lambda worker, step: None) -> None:
    """Training with a look every so many steps, and one at the end."""

    def look(worker: Worker, step: int) -> None:
        at_each(worker, step)
        if step % every == 0:
            worker.member.examiner.look()

    job.train(steps, look)


def left_behind(job: Job) -> list[str]:
    """The keys of audits that nobody has removed."""
    return [key for key in job.store.values if "/said/" in key]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_equal_replicas_are_found_equal_and_nothing_is_written(size: int) -> None:
    with Job(size) as job:
        job.train(3)
        reports = audit(job, "raise")
        assert all(report == reports[0] for report in reports)
        assert reports[0].equal
        assert reports[0].outcome == "equal"
        assert (reports[0].step, reports[0].workers, reports[0].variables) == (3, size, 4)
        assert job.journal.records() == []
        assert left_behind(job) == []


@pytest.mark.parametrize(("size", "bad"), [(size, bad) for size in (2, 3, 4) for bad in range(size)])
def test_one_flipped_bit_is_located_and_healed_whichever_worker_has_it(size: int, bad: int) -> None:
    with Job(size) as job:
        job.train(3)
        before = job.values()
        flip(job.workers[bad], "dense/kernel", place=7, bit=3)
        report = audit(job)[0]
        difference = report.differences[0]
        reference = 0 if size == 2 else min(set(range(size)) - {bad})
        assert difference.variable == "dense/kernel"
        assert difference.reference == reference
        assert difference.rule == ("coordinator" if size == 2 else "majority")
        assert difference.minority == ((1,) if size == 2 else (bad,))
        found = difference.differing[difference.minority[0]]
        assert (found.count, found.of, found.first_index) == (1, 12, (2, 1))
        assert (report.outcome, report.healed) == ("healed", (1,))
        assert job.values() == [job.values()[reference]] * size
        if size > 2:
            assert job.values() == before
        record = job.journal.records()[0]
        assert (record.author, record.step) == ("audit", 3)
        unsure = " (no majority: worker 0's value counts)" if size == 2 else ""
        assert record.note == f"heal: worker {difference.minority[0]} differed in dense/kernel{unsure}"
        assert audit(job)[0].equal
        assert left_behind(job) == []
        assert job.board.buffers == {}


def test_two_variables_with_different_minorities_are_healed_by_their_own_majorities() -> None:
    with Job(3) as job:
        before = job.values()
        flip(job.workers[0], "dense/bias", place=2, bit=30)
        flip(job.workers[2], "table/embeddings", place=5)
        report = audit(job)[0]
        by_name = {difference.variable: difference for difference in report.differences}
        assert by_name["dense/bias"].minority == (0,)
        assert by_name["dense/bias"].reference == 1
        assert by_name["table/embeddings"].minority == (2,)
        assert by_name["table/embeddings"].reference == 0
        assert report.healed == (1, 2)
        assert job.values() == before
        assert left_behind(job) == []


def test_a_tie_goes_to_whoever_has_what_checkpoint_and_journal_give() -> None:
    with Job(4) as job:
        right = job.workers[3].state.digests(["dense/bias"])["dense/bias"]
        flip(job.workers[0], "dense/bias")
        flip(job.workers[1], "dense/bias")
        examiner = job.workers[0].member.examiner
        asked = []

        def expected(name: str) -> str:
            asked.append(name)
            return right

        examiner.expected = expected
        difference = audit(job)[0].differences[0]
        assert asked == ["dense/bias"]
        assert (difference.reference, difference.rule) == (2, "checkpoint and journal")
        assert difference.groups == ((2, 3), (0, 1))
        assert not job.workers[0].state.values["dense/bias"].any()


def test_warn_tells_and_changes_nothing() -> None:
    with Job(3) as job:
        flip(job.workers[1], "dense/bias")
        values = job.values()
        reports = audit(job, "warn")
        assert [report.outcome for report in reports] == ["warned"] * 3
        assert reports[0].differences[0].differing[1].count == 1
        assert job.values() == values
        assert job.journal.records() == []
        assert job.board.buffers == {}
        assert left_behind(job) == []


def test_who_asks_with_raise_hears_it_raised_on_every_worker_and_may_go_on() -> None:
    with Job(2) as job:
        flip(job.workers[1], "dense/bias")
        assert len(what_an_audit_raises(job, "raise")) == 2
        assert [worker.member.examiner.reports[-1].outcome for worker in job.workers] == ["raised"] * 2
        eventually(lambda: not left_behind(job))
        job.train(3)


def what_an_audit_raises(job: Job, policy: str) -> list[ReplicasDiverged]:
    """What each worker that calls for an audit raised."""

    def ask(worker: Worker) -> ReplicasDiverged | None:
        try:
            worker.member.pause(f"audit\n{policy}")
        except ReplicasDiverged as error:
            return error
        return None

    return [error for error in job.on_all(ask) if error is not None]


def fails_elsewhere_before_it_is_heard(job: Job, late: int) -> None:
    """One worker hears the last word only when another has raised it, and the job has failed by that."""
    raised = threading.Event()
    heed = job.workers[late].member.examiner.heed

    def late_heed(message: Any) -> None:
        if isinstance(message, Audited):
            assert raised.wait(DEADLINE_SECS)
        heed(message)

    job.workers[late].member.examiner.heed = late_heed  # type: ignore[method-assign]
    for worker in job.workers:
        if worker.rank != late:
            watch_for_the_end(job, worker, raised)


def watch_for_the_end(job: Job, worker: Worker, raised: threading.Event) -> None:
    """The job has failed for all others as soon as this worker's training thread raises."""
    serve = worker.member.gate._serve

    def watched(*arguments: Any) -> bool:
        try:
            return serve(*arguments)
        except ReplicasDiverged:
            for other in job.workers:
                if other is not worker:
                    other.failure = JobFailed(f"worker {worker.rank} failed first")
                    other.member.gate.wake()
            raised.set()
            raise

    worker.member.gate._serve = watched  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("late", [0, 1, 2])
def test_every_worker_raises_the_divergence_though_the_first_to_raise_has_ended_the_job(late: int) -> None:
    with Job(3) as job:
        job.workers[0].member.examiner.policy = "raise"
        fails_elsewhere_before_it_is_heard(job, late)

        def corrupt(worker: Worker, step: int) -> None:
            if (worker.rank, step) == (2, 3):
                flip(worker, "dense/kernel")

        assert len(what_training_raises(job, 40, 10, corrupt)) == 3


@pytest.mark.parametrize("late", [0, 1])
def test_an_audit_that_was_called_for_raises_on_all_though_the_job_has_failed_meanwhile(late: int) -> None:
    with Job(2) as job:
        fails_elsewhere_before_it_is_heard(job, late)
        flip(job.workers[1], "dense/bias")
        assert len(what_an_audit_raises(job, "raise")) == 2


@pytest.mark.parametrize("policy", ["raise", "heal", "warn"])
def test_a_look_that_finds_a_difference_is_looked_into_by_the_policy(policy: Any) -> None:
    with Job(3) as job:
        job.workers[0].member.examiner.policy = policy

        def corrupt(worker: Worker, step: int) -> None:
            if (worker.rank, step) == (2, 13):
                flip(worker, "dense/kernel", place=4)

        errors = what_training_raises(job, 40, 10, corrupt)
        if policy == "raise":
            assert len(errors) == 3
            assert "dense/kernel: worker 2 differs from workers 0 and 1" in str(errors[0])
            assert errors[0].worker == 2
        else:
            assert errors == []
        reports = [r for r in job.workers[1].member.examiner.reports if not r.equal]
        report = reports[0]
        assert (report.found_at, report.last_equal) == (20, 10)
        assert 20 <= report.step <= 40
        assert report.since == "some step from 11 to 20"
        if policy == "heal":
            assert len(reports) == 1
            assert job.values()[0] == job.values()[1] == job.values()[2]
        eventually(lambda: not left_behind(job))


def what_training_raises(job: Job, steps: int, every: int, at_each: Any) -> list[ReplicasDiverged]:
    """As `train_looking`; what each training thread raised. All raise at one boundary, or none does."""
    barrier = threading.Barrier(job.size)

    def loop(worker: Worker) -> ReplicasDiverged | None:
        try:
            for _ in range(steps):
                barrier.wait(DEADLINE_SECS)
                step = worker.member.gate.step + 1
                worker.member.arrive(step)
                at_each(worker, step)
                if step % every == 0:
                    worker.member.examiner.look()
            worker.member.pause("drain")
        except ReplicasDiverged as error:
            return error
        return None

    return [error for error in job.on_all(loop) if error is not None]


def test_a_difference_that_is_there_at_the_end_is_healed_before_training_returns() -> None:
    with Job(2) as job:
        job.workers[0].member.examiner.policy = "heal"

        def corrupt(worker: Worker, step: int) -> None:
            if (worker.rank, step) == (1, 10):
                flip(worker, "dense/bias")

        train_looking(job, 10, 10, corrupt)
        assert job.values()[0] == job.values()[1]
        report = job.workers[1].member.examiner.reports[-1]
        assert (report.step, report.found_at, report.outcome) == (10, 10, "healed")


def test_quiet_looks_are_numbered_and_leave_no_keys() -> None:
    with Job(3) as job:
        train_looking(job, 30, 5)
        eventually(lambda: len(job.workers[0].member.examiner.reports) == 6)
        reports = list(job.workers[0].member.examiner.reports)
        assert [report.number for report in reports] == [1, 2, 3, 4, 5, 6]
        assert [report.last_equal for report in reports] == [None, 5, 10, 15, 20, 25]
        assert all(report.equal for report in reports)
        assert left_behind(job) == []


def test_a_wish_from_outside_is_answered_with_its_id_while_training_goes_on() -> None:
    with Job(2) as job:
        job.workers[0].member.examiner.requests = lambda: ("request-1",)
        done = threading.Event()
        written = []

        def write(report: AuditReport) -> None:
            written.append(report)
            done.set()

        job.workers[0].member.examiner.on_report = write
        job.workers[1].member.wish("audit")
        barrier = threading.Barrier(2)
        enough = [False]

        def loop(worker: Worker) -> None:
            while True:
                if worker.rank == 0:
                    enough[0] = done.wait(0.001)
                barrier.wait(DEADLINE_SECS)
                if enough[0]:
                    break
                worker.member.arrive(worker.member.gate.step + 1)
                barrier.wait(DEADLINE_SECS)
            worker.member.pause("drain")

        job.on_all(loop)
        assert written[0].requests == ("request-1",)
        assert written[0].equal


def test_updates_that_are_proposed_while_an_audit_runs_come_after_it_and_all_are_equal() -> None:
    with Job(3) as job:
        tickets = []

        def at_each(worker: Worker, step: int) -> None:
            if worker.rank == 0 and step % 3 == 0:
                worker.member.wish("audit")
            if worker.rank == step % 3:
                at_step = step + 2 if step % 2 else None
                tickets.append(worker.member.propose(bias(1.0, id=f"at-{step}"), at_step))

        job.workers[0].member.examiner.policy = "raise"
        job.train(60, at_each)
        job.train(5)
        for ticket in tickets:
            with contextlib.suppress(UpdateRefused):  # its step was past
                ticket.result(DEADLINE_SECS)
        assert all(report.equal for report in job.workers[1].member.examiner.reports)
        assert len(job.workers[1].member.examiner.reports) > 0
        assert job.values()[0] == job.values()[1] == job.values()[2]


def test_a_function_before_an_audit_at_the_same_boundary_is_seen_by_it() -> None:
    with Job(2) as job:
        ticket = job.workers[1].member.propose_function("up", lambda v: {"bias": v["bias"] + 1}, 1, 6)
        eventually(lambda: ticket.step == 6)
        job.workers[0].member.examiner.policy = "raise"

        def at_each(worker: Worker, step: int) -> None:
            if step == 5 and worker.rank == 0:
                worker.member.wish("audit")

        job.train(10, at_each)
        assert ticket.result(DEADLINE_SECS).step == 6
        eventually(lambda: job.workers[1].member.examiner.reports)
        assert job.workers[1].member.examiner.reports[-1].equal


def test_a_heal_is_in_the_journal_and_is_applied_again_after_a_restart() -> None:
    with Job(2) as first:
        first.train(5)
        flip(first.workers[1], "dense/bias", bit=24)
        assert audit(first)[0].healed == (1,)
        first.train(3)
        applied = first.workers[0].applied
        assert applied == first.workers[1].applied
        values = first.values()[0]
    with Job(2, journal=first.journal) as second:
        second.train(10)
        assert second.workers[0].applied == applied
        assert second.values() == [values, values]
        flip(second.workers[0], "dense/bias", bit=24)
        assert audit(second)[0].healed == (2,)


def test_an_audit_waits_for_what_the_journal_holds_for_its_boundary() -> None:
    with Job(2) as first:
        propose = first.workers[0].member.propose
        tickets = [propose(bias(1.0, id=f"early-{number}"), at_step=3) for number in range(9)]
        eventually(lambda: all(ticket.stage is Stage.COMMITTED for ticket in tickets))
        first.train(5)
        assert len(first.workers[0].applied) == 9
    with Job(2, journal=first.journal) as second:
        second.workers[0].member.wish("audit")
        second.train(8)
        assert len(second.workers[0].applied) == 9
        assert second.values()[0] == second.values()[1]


def test_what_may_differ_is_listed_and_never_healed() -> None:
    with Job(3) as job:
        for worker in job.workers:
            worker.member.examiner.declared = frozenset({"dense/bias", "optimizer/learning_rate"})
        flip(job.workers[1], "dense/bias")
        report = audit(job, "raise")[0]
        assert report.equal
        assert [(one.variable, one.differs) for one in report.declared] == [
            ("dense/bias", True),
            ("optimizer/learning_rate", False),
        ]
        train_looking(job, 4, 2)
        quiet = job.workers[0].member.examiner.reports[-1]
        assert quiet.equal
        assert [one.differs for one in quiet.declared] == [True, False]
        assert job.journal.records() == []


def test_a_disk_that_is_full_makes_heal_raise_instead() -> None:
    with Job(2) as job:
        flip(job.workers[1], "dense/bias")

        def full(update: Any) -> Any:
            raise UpdateRefused("The journal cannot be written")

        job.journal.stage = full  # type: ignore[method-assign]
        assert len(what_an_audit_raises(job, "heal")) == 2
        report = job.workers[1].member.examiner.reports[-1]
        assert (report.outcome, report.healed) == ("raised", ())
        assert report.differences[0].differing[1].count == 1
        assert job.board.buffers == {}
        job.train(3)


def test_values_that_nobody_can_take_are_reported_without_distances() -> None:
    with Job(2) as job:
        flip(job.workers[1], "dense/bias")

        def no_room(*_: Any) -> Any:
            raise UpdateRefused("There is no room in shared memory", worker=1)

        job.workers[1].member.transport.receive = no_room  # type: ignore[method-assign,assignment]
        assert len(what_an_audit_raises(job, "heal")) == 2
        report = job.workers[0].member.examiner.reports[-1]
        assert report.outcome == "raised"
        assert report.differences[0].variable == "dense/bias"
        assert dict(report.differences[0].differing) == {}


def test_a_worker_that_takes_no_part_is_named() -> None:
    patience = Patience(stage_secs=2, answer_secs=2, decide_secs=5, compute_secs=0.3, begin_secs=5)
    with Job(2, patience=patience) as job:
        job.workers[1].member.examiner.obey = lambda order: None  # type: ignore[method-assign]
        with pytest.raises(UpdateRefused, match="Worker 1 took no part in the audit") as refused:
            audit(job)
        assert refused.value.worker == 1
        job.train(2)


def test_nobody_waits_for_a_worker_that_died_in_an_audit() -> None:
    with Job(3) as job:
        job.train(2)

        def die(order: Any) -> None:
            for worker in job.workers:
                worker.die()

        job.workers[2].member.examiner.obey = die  # type: ignore[method-assign]
        with pytest.raises(JobFailed, match="a worker died"):
            audit(job)


def test_every_bit_counts_for_every_dtype() -> None:
    import ml_dtypes

    kinds = ["float16", "float32", "float64", "int8", "int32", "uint32", "uint8", "int64"]
    values: dict[str, Any] = {kind: np.arange(6).astype(kind).reshape(2, 3) for kind in kinds}
    values["bool"] = np.array([True, False, True])
    values["bfloat16"] = np.arange(6).astype(ml_dtypes.bfloat16)
    values["zero"] = np.zeros(2, np.float32)
    values["nan"] = np.full(2, np.nan, np.float32)
    with Job(3, values=values) as job:
        bad = job.workers[1].state.values
        for name in [*kinds, "bfloat16"]:
            flat = bad[name].reshape(-1)
            flat.view(f"u{flat.dtype.itemsize}")[4] ^= 1
        bad["bool"][2] = False
        bad["zero"][1] = -0.0
        bad["nan"].view(np.uint32)[0] ^= 1
        report = audit(job)[0]
        where = {one.variable: one.differing[1].first_index for one in report.differences}
        expected = {**dict.fromkeys(kinds, (1, 1)), "bfloat16": (4,), "bool": (2,), "zero": (1,), "nan": (0,)}
        assert where == expected
        assert all(one.differing[1].count == 1 for one in report.differences)
        assert report.outcome == "healed"
        assert job.values()[0] == job.values()[1] == job.values()[2]
