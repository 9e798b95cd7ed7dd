"""A checkpoint that is patched in place, as an update of the journal, and the start after it."""

from __future__ import annotations

import errno
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

from replicast.client.patching import patch_in_place
from replicast.core.entries import History, Saved
from replicast.core.records import Stage
from replicast.errors import UpdateRefused
from replicast.storage.checkpoints import CheckpointStore, Manifest, saved_of
from replicast.storage.claims import Fence, read_chain
from replicast.storage.journal import FileJournal, Updates, committed_updates, undo
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
    store.write(draft_at(SAVED, schema).with_updates(saved), saved.state[0].items())
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


def test_the_next_start_goes_on_from_it_with_the_bits_of_the_live_update(tmp_path: Path) -> None:
    expected, digest = live()
    first_job(tmp_path)
    done = patch_in_place(tmp_path, SAVED, fix())
    assert done.sequence == 2
    values, applied = next_start(tmp_path)
    assert values == expected
    assert applied == [(LATER, "later")], "the patch is in the checkpoint: no worker applies it again"
    record = committed_updates(tmp_path)[1]
    assert (record.id, record.step, record.author, record.note) == ("fix", SAVED, "ada", "drifted")
    (receipt,) = record.receipts
    assert (receipt.checkpoint, receipt.stage) == (done.path.name, Stage.VERIFIED)
    assert receipt.digests == {0: digest}
    assert not read_chain(tmp_path).problems


def test_a_record_without_its_checkpoint_is_applied_by_the_next_start_at_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, digest = live()
    before = first_job(tmp_path).manifest(SAVED)
    write_only_the_record(tmp_path, monkeypatch)
    assert CheckpointStore(tmp_path).manifest(SAVED) == before
    values, applied = next_start(tmp_path)
    assert values == expected
    assert applied == [(SAVED, "fix"), (LATER, "later")]
    (receipt,) = committed_updates(tmp_path)[1].receipts
    assert (receipt.checkpoint, dict(receipt.digests)) == ("", {0: digest, 1: digest})


def test_a_record_without_its_checkpoint_is_applied_at_once_by_a_start_from_a_later_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = first_job(tmp_path)
    arrays = last_saved(tmp_path).state[0]
    write_only_the_record(tmp_path, monkeypatch)
    CheckpointStore(tmp_path).write(draft_at(SAVED + 1, store.manifest(SAVED).schema), arrays.items())
    _, applied = next_start(tmp_path)
    assert applied == [(SAVED + 1, "fix"), (LATER, "later")]


def write_only_the_record(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A patch that fails between its record and its checkpoint."""

    def fails(*_: object) -> None:
        raise OSError(errno.EIO, "it failed")

    with monkeypatch.context() as failing:
        failing.setattr("replicast.storage.checkpoints.put_in_place", fails)
        with pytest.raises(OSError, match="it failed"):
            patch_in_place(run, SAVED, fix())


def test_the_values_before_are_kept_for_a_revert(tmp_path: Path) -> None:
    store = first_job(tmp_path)
    with store.open(SAVED) as reader:
        rows = reader.read("table/embeddings")[[1, 5]]
    patch_in_place(tmp_path, SAVED, fix())
    edits = {edit.variable: edit for edit in undo(tmp_path, 2).update.edits}
    assert edits["table/embeddings"].arrays["rows"].tobytes() == rows.tobytes()
    assert edits["dense/bias"].operation == "add"


def test_the_claim_ends_and_a_second_patch_follows_the_first(tmp_path: Path) -> None:
    first_job(tmp_path)
    first = patch_in_place(tmp_path, SAVED, fix())
    check_free(tmp_path)
    second = patch_in_place(tmp_path, SAVED, Update(id="again").scale("dense/bias", 2.0))
    assert (second.sequence, second.path.exists(), first.path.exists()) == (3, True, False)
    assert last_saved(tmp_path).holds == {2, 3}
    with pytest.raises(UpdateRefused, match="is in the journal, as number 2"):
        patch_in_place(tmp_path, SAVED, fix())


def test_a_checkpoint_without_an_update_of_its_own_step_is_not_patched(tmp_path: Path) -> None:
    first_job(tmp_path)
    source = CheckpointStore(tmp_path)
    with source.open(SAVED) as reader:
        arrays = {name: reader.read(name) for name in reader.names()}
        draft = draft_at(LATER, reader.manifest.schema)
    source.write(draft, arrays.items())
    with pytest.raises(
        UpdateRefused, match=f"does not contain update 1, which was committed at step {LATER}"
    ):
        patch_in_place(tmp_path, LATER, fix())
    assert len(committed_updates(tmp_path)) == 1


def prepared(run: Path) -> None:
    """A run with the checkpoint of step 5, whose job has ended."""
    fence, arrays = Fence(run, attempt=0), state_of()
    write_run_info(fence, RunInfo(FORMAT, schema_of(arrays), 2, 0, time.time()))
    CheckpointStore(run, fence).write(draft_of(arrays, 5, sequence=0), arrays.items())
    fence.release()


def test_a_patch_killed_at_any_operation_is_done_or_not_and_never_half(tmp_path: Path) -> None:
    prepared(tmp_path / "before")
    old = CheckpointStore(tmp_path / "before").manifest(5)
    command = [sys.executable, "-m", "tests.unit.checkpoint.killed_writer", "patch in place", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert result.returncode == 0, result.stderr
    attempts = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(attempts) > 10
    found = set()
    for each in attempts:
        run = tmp_path / str(each["number"])
        store, journal = CheckpointStore(run, fence := Fence(run, attempt=1)), FileJournal(run, fence)
        store.clean()
        manifest, history = store.manifest(5), journal.history()
        store.open(5, verify=True).close()
        journal.check_start(saved_of(manifest))
        found.add(_how_it_is(history, saved_of(manifest)))
        assert (manifest.state_digest == old.state_digest) == (not saved_of(manifest).holds)
        assert not list(store.directory.as_path().glob(".tmp-*"))
        assert not read_chain(run).problems
    # A checkpoint with an update that has no record, ("no record", "patched"), is not among them.
    assert found == {("no record", "old"), ("record", "old"), ("record", "patched")}
    done = Updates(tmp_path / str(attempts[-1]["number"])).history
    assert _how_it_is(done, saved_of(store.manifest(5))) == ("record", "patched")
    assert done.receipts[1].checkpoint == store.path(5).name


def _how_it_is(history: History, saved: Saved) -> tuple[str, str]:
    record = "record" if history.committed else "no record"
    return record, "patched" if saved.holds else "old"
