"""The values of variables according to checkpoint and journal, for audits without a majority."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replicast.core.entries import Saved
from replicast.errors import FileDamaged
from replicast.replicas import job_audits as expectation
from replicast.storage.checkpoints import CheckpointStore, Draft
from replicast.storage.claims import Fence
from replicast.storage.journal import FileJournal
from replicast.testing.job import DEADLINE_SECS, Job
from replicast.update.update import Update


class Reads:
    """Counts how often the journal is read for an expectation; it may be damaged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.damaged = False
        read = expectation.committed_updates

        def counted(run_dir: Path) -> Any:
            self.count += 1
            if self.damaged:
                raise FileDamaged(run_dir / "groups", "it was damaged")
            return read(run_dir)

        monkeypatch.setattr(expectation, "committed_updates", counted)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    with Job(2, FileJournal(tmp_path, Fence(tmp_path, attempt=0))) as job:
        first = job.workers[0]
        first.hooks.expected_fingerprints = lambda names: expectation.expected_fingerprints(
            first.state, tmp_path, first.session.replica.holds, names, durable=True
        )
        yield job


def save(job: Job, run_dir: Path) -> None:
    worker = job.workers[0]
    step, holds = worker.session.step, frozenset(worker.session.replica.holds)
    draft = Draft(
        step=step,
        epoch=0,
        batch=0,
        created_at=time.time(),
        workers=job.size,
        attempt=0,
        schema=worker.state.schema,
    )
    draft = draft.with_updates(Saved(step, 0, holds, (), None))
    CheckpointStore(run_dir).write(draft, worker.state.values.items())


def spoil(job: Job) -> None:
    """Every variable of worker 0 has another value now than worker 1's."""
    for name, value in job.workers[0].state.values.items():
        job.workers[0].state.values[name] = np.asarray(value + 1, value.dtype)


def found_by_an_audit(job: Job) -> list[tuple[int, str]]:
    """Of each difference, who was right by which rule."""
    report = job.on_all(lambda worker: worker.session.rest("audit", "warn"))[0]
    return [(one.reference, one.rule) for one in report.differences]


def propose(job: Job, amount: float) -> None:
    ticket = job.workers[0].session.propose(Update().add("dense/bias", np.full(3, amount, np.float32)))
    job.train(3)
    assert ticket.settled.wait(DEADLINE_SECS)


def test_the_journal_is_read_once_for_all_variables_of_an_audit(
    job: Job, tmp_path: Path, reads: Reads
) -> None:
    propose(job, 1.0)
    save(job, tmp_path)
    propose(job, 2.0)
    spoil(job)
    assert found_by_an_audit(job) == [(1, "checkpoint and journal")] * 4
    assert reads.count == 1
    propose(job, 4.0)
    assert found_by_an_audit(job) == [(1, "checkpoint and journal")] * 4
    assert reads.count == 2


def test_a_checkpoint_that_was_made_since_is_what_the_next_audit_goes_by(job: Job, tmp_path: Path) -> None:
    propose(job, 1.0)
    spoil(job)
    assert "checkpoint and journal" not in [rule for _, rule in found_by_an_audit(job)]
    save(job, tmp_path)
    assert found_by_an_audit(job) == [(0, "checkpoint and journal")] * 4


def test_a_damaged_journal_is_said_once_for_all_variables(
    job: Job, tmp_path: Path, reads: Reads, caplog: pytest.LogCaptureFixture
) -> None:
    save(job, tmp_path)
    propose(job, 1.0)
    spoil(job)
    reads.damaged = True
    assert "checkpoint and journal" not in [rule for _, rule in found_by_an_audit(job)]
    assert reads.count == 1
    assert caplog.text.count("it was damaged") == 1
