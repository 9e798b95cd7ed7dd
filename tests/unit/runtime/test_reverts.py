"""An update is undone by a new one, on every worker; the values that it has overwritten are kept for that."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replicast.errors import UpdateRefused
from replicast.replicas.proposals import Ticket
from replicast.storage.claims import Fence
from replicast.storage.journal import FileJournal, Updates, committed_updates, undo
from replicast.update.edits import Variable
from replicast.update.schema import Limits, Schema
from replicast.update.trial import Trial
from replicast.update.update import Update
from tests.threads import Job, eventually, start_values

KERNEL, BIAS, TABLE = "dense/kernel", "dense/bias", "table/embeddings"
DELTA = np.array([0.5, -1.25, 3.0], np.float32)


def committed(job: Job, ticket: Ticket) -> int:
    """Trains until the update is applied; gives its number."""
    job.train(3)
    return ticket.result(120).sequence


def propose(job: Job, update: Update, rank: int = 0) -> int:
    return committed(job, job.workers[rank].propose(update))


def revert(job: Job, number: int, rank: int = 0, *, forced: bool = False) -> int:
    return committed(job, job.workers[rank].session.proposals.revert(number, "", force=forced))


def overwriting() -> Update:
    return (
        Update(note="overwrite")
        .assign(BIAS, DELTA)
        .blend(KERNEL, np.ones((4, 3), np.float32), 0.25)
        .assign_rows(TABLE, [5, 1], np.ones((2, 2), np.float32))
        .scale("learning_rate", 0.0)
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_what_was_overwritten_is_exactly_what_it_was_before_whichever_worker_reverts(rank: int) -> None:
    with Job(2) as job:
        before = job.values()
        number = propose(job, overwriting(), rank=1)
        assert job.values() != before
        revert(job, number, rank)
        assert job.values() == before


def test_the_job_refuses_a_revert_that_later_updates_make_wrong_unless_forced() -> None:
    with Job(2) as job:
        number = propose(job, Update().add(BIAS, DELTA))
        later = propose(job, Update().assign(BIAS, DELTA))
        with pytest.raises(UpdateRefused, match=f"update {later} has assigned {BIAS} since then"):
            revert(job, number)
        revert(job, number, forced=True)
        np.testing.assert_array_equal(job.workers[1].state.values[BIAS], DELTA - DELTA)


def test_slots_that_an_update_has_reset_go_back_too() -> None:
    schema = Schema(
        [
            Variable("w", (3, 2), "float32", "trainable", (("optimizer/m", 0.0),)),
            Variable("optimizer/m", (3, 2), "float32", "optimizer"),
        ]
    )
    values = {"w": np.ones((3, 2), np.float32), "optimizer/m": np.full((3, 2), 0.5, np.float32)}
    with Job(2, values=values, schema=schema) as job:
        before = job.values()
        update = Update(reset_slots=True).add_rows("w", [1], np.ones((1, 2), np.float32))
        number = propose(job, update)
        assert job.workers[0].state.values["optimizer/m"][1].tolist() == [0.0, 0.0]
        revert(job, number)
        assert job.values() == before


def test_a_revert_can_be_reverted_and_then_the_update_again() -> None:
    with Job(2) as job:
        before = job.values()
        first = propose(job, overwriting())
        changed = job.values()
        second = revert(job, first)
        third = revert(job, second)
        assert job.values() == changed
        assert revert(job, first) == third + 1
        assert job.values() == before


def test_what_is_reverted_already_is_refused_unless_forced() -> None:
    with Job(2) as job:
        first = propose(job, Update().add(BIAS, DELTA))
        second = revert(job, first)
        with pytest.raises(UpdateRefused, match=f"is reverted already, by update {second}"):
            revert(job, first)
        revert(job, first, forced=True)
        np.testing.assert_array_equal(job.workers[0].state.values[BIAS], -DELTA)


def test_an_update_that_failed_its_trial_or_does_not_exist_cannot_be_reverted() -> None:
    with Job(2) as job:
        trial = Trial(2, "loss", max_increase=-2.0)
        job.train(2, one_step=lambda worker, step: {"loss": 1.0}, closes=False)
        ticket = job.workers[0].propose(overwriting(), None, trial)
        job.train(6, one_step=lambda worker, step: {"loss": 1.0})
        assert ticket.result(120).stage == "reverted"
        with pytest.raises(UpdateRefused, match="failed its trial"):
            revert(job, 1)
        with pytest.raises(UpdateRefused, match="There is no update 9: the journal has updates 1 to 1"):
            revert(job, 9)


def test_an_update_that_is_too_large_to_keep_is_applied_and_its_revert_says_why_not() -> None:
    with Job(1, limits=Limits(max_before_bytes=20)) as job:
        number = propose(job, Update().assign(KERNEL, np.zeros((4, 3), np.float32)))
        with pytest.raises(UpdateRefused, match="cannot be reverted: it has overwritten") as refused:
            revert(job, number)
        assert "max_before_bytes" in str(refused.value)
        assert "checkpoint" in str(refused.value)


def file_job(run_dir: Path, attempt: int = 0, **options: Any) -> Job:
    return Job(2, FileJournal(run_dir, Fence(run_dir, attempt)), attempt=attempt, **options)


def test_the_journal_says_what_reverts_what_and_anybody_can_see_beforehand_what_that_does(
    tmp_path: Path,
) -> None:
    with file_job(tmp_path) as job:
        number = propose(job, overwriting())
        eventually(lambda: Updates(tmp_path).journal.before)
        plan = undo(tmp_path, number)
        assert plan.record.sequence == number
        assert {edit.operation.value for edit in plan.update.edits} == {"assign", "assign_rows"}
        rows = next(edit for edit in plan.update.edits if edit.variable == TABLE)
        assert rows.arrays["rows"].shape == (2, 2)  # of the touched rows only
        revert(job, number)
        first, second = committed_updates(tmp_path)
        assert (first.reverted_by, second.reverts) == (2, 1)
        with pytest.raises(UpdateRefused, match="reverted already"):
            undo(tmp_path, number)
        assert undo(tmp_path, 1, forced=True).record.sequence == 1


def test_an_attempt_that_applies_an_update_again_keeps_the_values_before_it_again(tmp_path: Path) -> None:
    with file_job(tmp_path) as job:
        before = job.values()
        number = propose(job, overwriting())
        eventually(lambda: Updates(tmp_path).journal.before)
    for path in tmp_path.glob("groups/*/*.before.safetensors"):
        path.unlink()
    with file_job(tmp_path, attempt=1, values=start_values()) as again:
        again.train(6)
        revert(again, number)
        assert again.values() == before


def test_values_that_an_attempt_cannot_write_are_not_taken_from_an_earlier_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with file_job(tmp_path) as job:
        number = propose(job, overwriting())
        eventually(lambda: Updates(tmp_path).journal.before)
    other = {name: value + 1 for name, value in start_values().items()}  # another training led to these
    with file_job(tmp_path, attempt=1, values=other) as again:

        def is_full(before: Update) -> Any:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(again.journal, "stage_before", is_full)
        again.train(6)
        with pytest.raises(UpdateRefused, match="cannot be written"):
            revert(again, number)


def test_values_that_are_not_kept_any_more_are_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("replicast.storage.journal.REVERTIBLE_BYTES", 0)
    with file_job(tmp_path) as job:
        number = propose(job, overwriting())
        eventually(lambda: Updates(tmp_path).journal.before)
        assert job.journal.remove_payloads({number}, None) == 2
        assert not list(tmp_path.glob("groups/*/*.safetensors"))
        with pytest.raises(
            UpdateRefused, match=r"not kept any more: every checkpoint .* contains it.*--assign"
        ):
            revert(job, number)
        with pytest.raises(UpdateRefused, match=r"not kept any more"):
            undo(tmp_path, number)
