"""Only the group that was started last writes into a run directory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from replicast.errors import JobFailed
from replicast.fence import Fence
from replicast.journal import Journal, Receipt, Record, StagedPayload
from replicast.runfiles import FORMAT, RunInfo, read_run_info, write_run_info
from replicast.schema import Schema
from replicast.trial import TrialOutcome
from replicast.update import Stage, Update


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


def commit(journal: Journal, sequence: int, step: int) -> None:
    update = Update(id=f"u{sequence}").scale("dense/bias", 2.0)
    staged = journal.stage(update)
    journal.commit(staged, record_of(staged, sequence, step))


def record_of(staged: StagedPayload, sequence: int, step: int) -> Record:
    return Record(
        sequence=sequence,
        id=staged.id,
        step=step,
        sha256=staged.sha256,
        nbytes=staged.nbytes,
        author="",
        note="",
        edits=(),
        content_digest="",
        workers=1,
        attempt=0,
        scheduled=False,
        committed_at=0.0,
    )


def receipt(digest: str, stage: Stage) -> Receipt:
    return Receipt(1, "u1", 12, {0: "right", 1: digest}, 1.0, 0.1, 0.0, stage)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_coordinator_that_was_thought_dead_writes_nothing_into_the_journal(tmp_path: Path) -> None:
    old = Journal(tmp_path, Fence(tmp_path, attempt=0).check)
    commit(old, 1, step=12)
    staged = old.stage(Update(id="u2").scale("dense/bias", 2.0))
    new = Journal(tmp_path, Fence(tmp_path, attempt=1).check)
    new.write_receipt(receipt("right", Stage.VERIFIED))
    before = contents(tmp_path / "updates")
    outcome = TrialOutcome(1, "kept", 12, "loss", 1.0, 0.5, "why")
    writes: list[Callable[[], object]] = [
        lambda: old.stage(Update(id="u3").scale("dense/bias", 2.0)),
        lambda: old.commit(staged, record_of(staged, 2, 13)),
        lambda: old.discard(staged),
        lambda: old.write_receipt(receipt("another", Stage.FAILED)),
        lambda: old.move(1, 11),
        lambda: old.write_outcome(outcome),
        old.clean,
    ]
    for write in writes:
        with pytest.raises(JobFailed, match="taken over"):
            write()
        assert contents(tmp_path / "updates") == before
    assert new.moves() == {}
    assert new.receipts()[1].stage is Stage.VERIFIED


def test_a_place_that_the_next_group_has_filled_is_no_damage_to_who_was_thought_dead(tmp_path: Path) -> None:
    old = Journal(tmp_path, Fence(tmp_path, attempt=0).check)
    staged = old.stage(Update(id="old").scale("dense/bias", 2.0))
    commit(Journal(tmp_path, Fence(tmp_path, attempt=1).check), 1, step=5)
    with pytest.raises(JobFailed, match="taken over"):
        old.commit(staged, record_of(staged, 1, 4))


def test_what_a_run_is_about_is_said_by_the_group_that_has_it(tmp_path: Path) -> None:
    old, info = Fence(tmp_path, attempt=0), RunInfo(FORMAT, Schema([]), 2, 1, 0.0)
    write_run_info(tmp_path, info, Fence(tmp_path, attempt=1).check)
    with pytest.raises(JobFailed, match="taken over"):
        write_run_info(tmp_path, replace(info, workers=7, attempt=0), old.check)
    assert read_run_info(tmp_path).workers == 2
