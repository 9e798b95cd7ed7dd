"""Audits on real threads: which replicas differ, where, by how much and since when; and heals."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from replicast.core.entries import Payload
from replicast.errors import ReplicasDiverged, UpdateRefused
from replicast.storage.journal import MemoryJournal, NotWritten
from replicast.update.audit_report import AuditReport
from tests.threads import DEADLINE_SECS, Job, Worker, eventually
from tests.unit.runtime.playing import flip


def audit(job: Job, policy: str = "heal") -> AuditReport:
    """All workers call for an audit between steps; what they were told, all the same."""
    reports = job.on_all(lambda worker: worker.session.rest("audit", policy))
    assert reports == reports[:1] * job.size
    assert isinstance(reports[0], AuditReport)
    return reports[0]


def what_an_audit_raises(job: Job, policy: str) -> list[AuditReport]:
    """The report that each worker was given before it raised."""

    def ask(worker: Worker) -> AuditReport:
        with pytest.raises(ReplicasDiverged):
            worker.session.rest("audit", policy)
        return worker.reports[-1]

    return job.on_all(ask)


def ended_reports(job: Job) -> list[AuditReport]:
    """Of all audits that have ended, as worker 0 hears of them; also those for which nobody stopped."""
    results = [ended.outcome.result for ended in job.ended if ended.kind == "audit"]
    return [result for result in results if isinstance(result, AuditReport)]


def test_what_may_differ_is_reported_in_the_order_of_the_state() -> None:
    with Job(2) as job:
        names = [variable.name for variable in job.workers[0].state.schema]
        for worker in job.workers:  # a set has another order in every process
            worker.session.replica.may_differ = FrozenSetInReverse(names)
        assert [one.variable for one in audit(job).declared] == names


class FrozenSetInReverse(frozenset[str]):
    def __iter__(self) -> Iterator[str]:
        return iter(sorted(super().__iter__(), reverse=True))


@pytest.mark.parametrize("policy", ["raise", "heal", "warn"])
def test_a_planned_audit_that_finds_a_difference_is_looked_into_by_the_policy(policy: str) -> None:
    with Job(3, audit_policy=policy) as job:
        raised: list[int] = []
        barrier = threading.Barrier(3)

        def script(worker: Worker) -> None:
            try:
                for step in range(1, 41):
                    barrier.wait(DEADLINE_SECS)
                    worker.step()
                    if (worker.rank, step) == (2, 13):
                        flip(worker, "dense/kernel", place=4)
                    if step in (10, 20):
                        worker.audit_in_passing()
                worker.session.rest("close")
            except ReplicasDiverged:
                raised.append(worker.rank)

        job.on_all(script)
        assert sorted(raised) == ([0, 1, 2] if policy == "raise" else [])
        reports = [worker.reports for worker in job.workers]
        assert reports == [reports[0]] * 3
        report = reports[0][0]
        assert (report.found_at, report.last_equal) == (20, 10)
        assert 20 <= report.step <= 40
        assert report.outcome == {"raise": "raised", "heal": "healed", "warn": "warned"}[policy]
        assert (job.values() == job.values()[:1] * 3) == (policy == "heal")


def test_planned_audits_are_numbered_and_stop_no_worker() -> None:
    with Job(3) as job:
        job.train(30, lambda worker, step: worker.audit_in_passing() if step % 5 == 0 else None)
        eventually(lambda: len(ended_reports(job)) == 6)
        reports = ended_reports(job)
        assert [report.number for report in reports] == [1, 2, 3, 4, 5, 6]
        assert [report.last_equal for report in reports] == [None, 5, 10, 15, 20, 25]
        assert all(report.outcome == "equal" for report in reports)
        assert [worker.reports for worker in job.workers] == [[], [], []]


def test_a_heal_is_in_the_journal_and_is_applied_again_after_a_restart() -> None:
    with Job(2) as first:
        first.train(5)
        flip(first.workers[1], "dense/bias", bit=24)
        assert audit(first).healed == (1,)
        first.train(3)
        applied, values = first.workers[0].applied, first.values()
        assert applied == first.workers[1].applied
    with first.next_attempt() as second:
        second.train(10)
        assert second.workers[0].applied == applied
        assert second.values() == values
        flip(second.workers[0], "dense/bias", bit=24)
        report = audit(second)
        assert (report.healed, report.attempt) == ((2,), 1)


def test_a_disk_that_is_full_makes_heal_raise_instead() -> None:
    class FullJournal(MemoryJournal):
        def write(self, entry: Any, update: Any = None) -> None:
            if isinstance(entry, Payload):
                raise NotWritten("No space left on device")
            super().write(entry, update)

    with Job(2, FullJournal()) as job:
        flip(job.workers[1], "dense/bias")
        report = what_an_audit_raises(job, "heal")[0]
        assert (report.outcome, report.healed) == ("raised", ())
        assert report.differences[0].differing[1].count == 1
        job.train(3)
        eventually(lambda: not job.files())


def test_values_that_a_worker_cannot_take_are_reported_without_distances() -> None:
    with Job(2) as job:
        flip(job.workers[1], "dense/bias")

        def no_room(*_: Any) -> Any:
            raise UpdateRefused("There is no room in shared memory")

        job.workers[1].transport.receive = no_room  # type: ignore[method-assign]
        report = what_an_audit_raises(job, "heal")[0]
        assert report.outcome == "raised"
        assert [(one.variable, dict(one.differing)) for one in report.differences] == [("dense/bias", {})]
        eventually(lambda: not job.files())


def test_workers_that_have_not_trained_equally_far_are_not_healed() -> None:
    with Job(2) as job:
        for worker in job.workers:
            worker.hooks.trained = lambda worker=worker: worker.rank
        flip(job.workers[1], "dense/bias")
        assert [report.outcome for report in what_an_audit_raises(job, "heal")] == ["raised", "raised"]


# With sync.


@pytest.mark.parametrize("asked", ["in passing", "for"])
def test_a_sync_makes_replicas_equal_instead_of_raising_that_they_differ(asked: str) -> None:
    with Job(2, audit_policy="raise") as job:

        def script(worker: Worker) -> None:
            worker.step()
            if worker.rank == 1:
                flip(worker, "dense/bias", bit=24)
            if asked == "in passing":
                worker.audit_in_passing()
            elif worker.rank == 0:
                worker.session.proposals.request("audit")
            worker.session.rest("sync", 0)

        job.on_all(script)
        assert job.values()[0] == job.values()[1]
        assert {report.outcome for report in job.workers[0].reports} <= {"warned", "equal"}
        job.train(3)


def test_a_difference_after_a_sync_is_not_as_old_as_the_one_before_it() -> None:
    with Job(2) as job:
        job.train(3)
        audit(job, "raise")
        seen = []
        for steps in (2, 4):
            flip(job.workers[1], "dense/bias", bit=24)
            job.train(steps)
            report = what_an_audit_raises(job, "raise")[0]
            seen.append((report.last_equal, report.found_at))
            job.on_all(lambda worker: worker.session.rest("sync", 0))
        assert seen == [(3, 5), (5, 9)]


def test_every_bit_counts_for_every_dtype() -> None:
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
        report = audit(job)
        where = {one.variable: one.differing[1].first_index for one in report.differences}
        expected = {**dict.fromkeys(kinds, (1, 1)), "bfloat16": (4,), "bool": (2,), "zero": (1,), "nan": (0,)}
        assert where == expected
        assert all(one.differing[1].count == 1 for one in report.differences)
        assert report.outcome == "healed"
        assert job.values() == job.values()[:1] * 3
