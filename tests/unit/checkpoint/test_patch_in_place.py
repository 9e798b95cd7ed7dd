"""A checkpoint that is patched in place, as an update of the journal, and the start after it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from replicast.client import patching
from replicast.client.patching import patch_in_place
from replicast.core.entries import Saved
from replicast.core.records import Stage
from replicast.errors import UpdateRefused
from replicast.storage.checkpoints import CheckpointStore, Manifest, saved_of
from replicast.storage.claims import Fence, read_chain
from replicast.storage.journal import FileJournal, committed_updates, undo
from replicast.storage.run_files import FORMAT, RunInfo, check_free, write_run_info
from replicast.update.schema import Schema
from replicast.update.update import Update
from tests.threads import Job, Worker, eventually
from tests.unit.checkpoint.samples import draft_of, schema_of, state_of
from tests.unit.runtime.playing import scheduled

ROOT = Path(__file__).parents[3]
STEPS, SAVED, LATER = 12, 6, 9


def fix() -> Update:
    bias = np.array([0.1, -2.0, 3e-3], np.float32)
    update = (
        Update(id="fix", author="ada", note="drifted").add("dense/bias", bias).scale("dense/kernel", 1 / 3)
    )
    return update.assign_rows("table/embeddings", [5, 1], np.full((2, 2), 7, np.float32))


def later() -> Update:
    return Update(id="later").scale("dense/bias", 0.7)


def trained(worker: Worker, step: int) -> Mapping[str, Any]:
    for name in ("dense/bias", "dense/kernel", "table/embeddings"):
        value = worker.state.values[name]
        worker.state.values[name] = (value * np.float32(0.9) + np.float32(step)).astype(np.float32)
    return {}


def live() -> tuple[list[dict[str, bytes]], str]:
    """The values at the end, and the digest that the workers reported, of a job that had the update live."""
    with Job(2) as job:
        ticket = scheduled(job.workers[1].session.propose(fix(), at_step=SAVED))
        scheduled(job.workers[1].session.propose(later(), at_step=LATER))
        job.train(STEPS, one_step=trained)
        return job.values(), ticket.result(120).digests[0]


def first_job(run: Path) -> CheckpointStore:
    """A job that has made a checkpoint, then applied an update, and has ended."""
    fence = Fence(run, attempt=0)
    with Job(2, FileJournal(run, fence)) as job:
        schema = job.workers[0].state.schema
        write_run_info(fence, RunInfo(FORMAT, schema, 2, 0, time.time()))
        scheduled(job.workers[1].session.propose(later(), at_step=LATER))
        job.train(
            STEPS,
            lambda worker, step: worker.save_in_passing() if step == SAVED else None,
            one_step=trained,
        )
        eventually(lambda: job.checkpoints)
        saved = job.checkpoints[0]
    store = CheckpointStore(run, fence)
    store.write(draft_at(SAVED, schema).with_updates(saved), saved.state[0])
    fence.release()
    return store


def draft_at(step: int, schema: Schema) -> Manifest:
    return Manifest(step=step, epoch=0, batch=0, created_at=1.0, workers=2, attempt=0, schema=schema)


def last_saved(run: Path) -> Saved:
    store = CheckpointStore(run)
    manifest = store.last()
    assert manifest is not None
    with store.open(manifest.step, verify=True) as reader:
        values = {name: reader.read(name) for name in reader.names()}
    return replace(saved_of(manifest), state=[values])


def next_start(run: Path) -> tuple[list[dict[str, bytes]], list[tuple[int, str]]]:
    """The values at the end of a job that goes on there, and what its last worker has applied."""
    journal = FileJournal(run, Fence(run, attempt=1))
    saved = last_saved(run)
    journal.check_start(saved)
    with Job(2, journal, attempt=1, checkpoints=[saved]) as job:
        job.train(STEPS - saved.step, one_step=trained)
        return job.values(), list(job.workers[1].applied)


def test_the_next_start_applies_it_with_the_bits_of_the_live_update(tmp_path: Path) -> None:
    expected, digest = live()
    before = first_job(tmp_path).manifest(SAVED)
    done = patch_in_place(tmp_path, SAVED, fix())
    check_free(tmp_path)
    assert (done.sequence, done.step) == (2, SAVED)
    assert CheckpointStore(tmp_path).manifest(SAVED) == before
    values, applied = next_start(tmp_path)
    assert values == expected
    assert applied == [(SAVED, "fix"), (LATER, "later")]
    record = committed_updates(tmp_path)[1]
    assert (record.id, record.step, record.author, record.note) == ("fix", SAVED, "ada", "drifted")
    (receipt,) = record.receipts
    assert (receipt.stage, dict(receipt.digests)) == (Stage.VERIFIED, {0: digest, 1: digest})
    edits = {edit.variable: edit.operation for edit in undo(tmp_path, 2).update.edits}
    assert edits["table/embeddings"] == "assign_rows"
    assert not read_chain(tmp_path).problems


def test_a_second_patch_follows_the_first_and_none_has_its_id(tmp_path: Path) -> None:
    first_job(tmp_path)
    patch_in_place(tmp_path, SAVED, fix())
    assert patch_in_place(tmp_path, SAVED, Update(id="again").scale("dense/bias", 2.0)).sequence == 3
    with pytest.raises(UpdateRefused, match="is in the journal, as number 2"):
        patch_in_place(tmp_path, SAVED, fix())


def test_of_two_patches_at_once_with_one_id_the_journal_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first_job(tmp_path)

    def other_comes_first(run: Path) -> None:
        monkeypatch.setattr(patching, "check_free", check_free)
        patch_in_place(run, SAVED, fix())

    monkeypatch.setattr(patching, "check_free", other_comes_first)
    with pytest.raises(UpdateRefused, match="is in the journal, as number 2"):
        patch_in_place(tmp_path, SAVED, fix())
    assert [one.id for one in committed_updates(tmp_path)] == ["later", "fix"]
    check_free(tmp_path)


def test_only_the_checkpoint_from_which_the_next_start_continues_is_patched(tmp_path: Path) -> None:
    first_job(tmp_path)
    source = CheckpointStore(tmp_path)
    with source.open(SAVED) as reader:
        arrays = {name: reader.read(name) for name in reader.names()}
        draft = draft_at(LATER, reader.manifest.schema)
    source.write(draft, arrays)
    with pytest.raises(UpdateRefused, match="Only the checkpoint that the next start continues from"):
        patch_in_place(tmp_path, SAVED, fix())
    assert len(committed_updates(tmp_path)) == 1


def prepared(run: Path) -> None:
    """A run with the checkpoint of step 5, whose job has ended."""
    fence, arrays = Fence(run, attempt=0), state_of()
    write_run_info(fence, RunInfo(FORMAT, schema_of(arrays), 2, 0, time.time()))
    CheckpointStore(run, fence).write(draft_of(arrays, 5, sequence=0), arrays)
    fence.release()


def test_a_patch_killed_at_any_operation_is_done_or_not_and_never_half(tmp_path: Path) -> None:
    prepared(tmp_path / "before")
    old = CheckpointStore(tmp_path / "before").manifest(5)
    command = [sys.executable, "-m", "tests.unit.checkpoint.killed_writer", "patch in place", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert result.returncode == 0, result.stderr
    attempts = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(attempts) > 10
    found = []
    for each in attempts:
        run = tmp_path / str(each["number"])
        store, journal = CheckpointStore(run, fence := Fence(run, attempt=1)), FileJournal(run, fence)
        assert store.manifest(5) == old
        journal.check_start(saved_of(old))
        found.append([record.id for record in journal.history().committed.values()])
        assert not read_chain(run).problems
    assert sorted(found) == found
    assert (found[0], found[-1]) == ([], ["u"])
