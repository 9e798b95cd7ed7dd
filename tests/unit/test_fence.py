"""Only the group that was started last writes into a run directory."""

from __future__ import annotations

from pathlib import Path

import pytest

from replicast.errors import JobFailed
from replicast.fence import Fence
from replicast.journal import Journal, Record, summarized
from replicast.update import Update


def test_a_group_writes_until_another_takes_the_run(tmp_path: Path) -> None:
    first = Fence(tmp_path, attempt=0)
    first.check()
    second = Fence(tmp_path, attempt=1)
    second.check()
    with pytest.raises(JobFailed, match="attempt 1"):
        first.check()


def test_who_claims_a_run_has_its_name_on_disk_also_when_another_made_the_directory(
    tmp_path: Path, synced: list[Path]
) -> None:
    (tmp_path / "run").mkdir()
    Fence(tmp_path / "run", attempt=0)
    assert synced == [tmp_path, tmp_path / "run"]


def test_a_coordinator_that_was_thought_dead_commits_nothing(tmp_path: Path) -> None:
    fence = Fence(tmp_path, attempt=0)
    journal = Journal(tmp_path, fence.check)
    update = Update().scale("dense/bias", 2.0)
    staged = journal.stage(update)
    Fence(tmp_path, attempt=1)
    record = Record(
        sequence=1,
        id=update.id,
        step=1,
        sha256=staged.sha256,
        nbytes=staged.nbytes,
        author="",
        note="",
        edits=summarized(update.edits),
        content_digest="",
        workers=1,
        attempt=0,
        scheduled=False,
        committed_at=0.0,
    )
    with pytest.raises(JobFailed, match="taken over"):
        journal.commit(staged, record)
    assert Journal(tmp_path).records() == []
