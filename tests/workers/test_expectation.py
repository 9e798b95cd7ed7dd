"""What variables should be by checkpoint and journal, when workers differ and no majority knows."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from replicast.journal import Journal, Record
from replicast.replicas.expecting import Expectation

from replicast.checkpoint import CheckpointStore, Draft
from replicast.errors import FileDamaged
from replicast.fence import Fence
from tests.unit.protocol.twins import Job, bias, eventually


class CountingJournal(Journal):
    """A journal that counts how often all of it is read, and may be damaged."""

    reads = 0
    damaged = False

    def records(self) -> list[Record]:
        self.reads += 1
        if self.damaged:
            raise FileDamaged("updates/000001.json", "it was damaged")
        return super().records()


def save(job: Job, run: Path) -> None:
    member, state = job.workers[0].member, job.workers[0].state
    draft = Draft(
        step=member.gate.step,
        sequence=max(member.applied, default=0),
        epoch=0,
        batch=0,
        created_at=time.time(),
        workers=job.size,
        attempt=0,
        schema=state.schema,
    )
    CheckpointStore(run).write(draft, state.values.items())


def spoil(job: Job) -> None:
    """Every variable of worker 0 has another value now than worker 1's."""
    for name, value in job.workers[0].state.values.items():
        job.workers[0].state.values[name] = np.asarray(value + 1, value.dtype)


def found_by_an_audit(job: Job) -> list[tuple[int, str]]:
    """Of each difference, who was right by which rule."""
    job.on_all(lambda worker: worker.member.pause("audit\nwarn"))
    report = job.workers[0].member.examiner.reports[-1]
    return [(one.reference, one.rule) for one in report.differences]


def propose(job: Job, amount: float) -> None:
    ticket = job.workers[0].member.propose(bias(amount))
    job.train(3)
    eventually(ticket.done)


def test_the_journal_is_read_once_for_all_variables_of_an_audit(tmp_path: Path) -> None:
    journal = CountingJournal(tmp_path, Fence(tmp_path, attempt=0))
    with Job(2, journal, durable=True) as job:
        expectation = Expectation(job.workers[0].member, tmp_path, journal)
        job.workers[0].member.examiner.expected = expectation.fingerprint
        propose(job, 1.0)
        save(job, tmp_path)
        propose(job, 2.0)
        spoil(job)
        journal.reads = 0
        assert found_by_an_audit(job) == [(1, "checkpoint and journal")] * 4
        assert journal.reads == 1
        propose(job, 4.0)
        assert found_by_an_audit(job) == [(1, "checkpoint and journal")] * 4
        assert journal.reads == 2


def test_a_checkpoint_that_was_made_since_is_what_the_next_audit_goes_by(tmp_path: Path) -> None:
    journal = CountingJournal(tmp_path, Fence(tmp_path, attempt=0))
    with Job(2, journal, durable=True) as job:
        expectation = Expectation(job.workers[0].member, tmp_path, journal)
        job.workers[0].member.examiner.expected = expectation.fingerprint
        propose(job, 1.0)
        spoil(job)
        assert "checkpoint and journal" not in [rule for _, rule in found_by_an_audit(job)]
        save(job, tmp_path)
        assert found_by_an_audit(job) == [(0, "checkpoint and journal")] * 4


def test_a_damaged_journal_is_said_once_for_all_variables(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = CountingJournal(tmp_path, Fence(tmp_path, attempt=0))
    with Job(2, journal, durable=True) as job:
        expectation = Expectation(job.workers[0].member, tmp_path, journal)
        job.workers[0].member.examiner.expected = expectation.fingerprint
        save(job, tmp_path)
        spoil(job)
        journal.reads, journal.damaged = 0, True
        assert "checkpoint and journal" not in [rule for _, rule in found_by_an_audit(job)]
        assert journal.reads == 1
        assert caplog.text.count("it was damaged") == 1
