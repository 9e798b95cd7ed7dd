"""What waits in the inbox of a job that has stopped, and the start after it."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from msgspec.structs import replace

from replicast.core.entries import Saved, Stage
from replicast.replicas import proposals, worker_notes
from replicast.replicas.position import Training
from replicast.replicas.proposals import InboxReader
from replicast.storage import inbox
from replicast.storage.checkpoints import CheckpointStore, Manifest, saved_of
from replicast.storage.claims import Fence, read_chain
from replicast.storage.journal import FileJournal, committed_updates, undo
from replicast.storage.run_files import FORMAT as RUN_FORMAT
from replicast.storage.run_files import RunInfo, write_run_info
from replicast.update.schema import Schema
from replicast.update.tensorfiles import tensor_chunks
from replicast.update.trial import Trial
from replicast.update.update import FORMAT, Update
from tests.threads import DEADLINE_SECS, Job, Worker, eventually
from tests.unit.runtime.playing import scheduled
from tests.unit.test_inbox import reader_of

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
        ticket = scheduled(job.workers[1].propose(fix(), at_step=SAVED))
        scheduled(job.workers[1].propose(later(), at_step=LATER))
        job.train(STEPS, one_step=trained)
        return job.values(), ticket.result(120).digests[0]


def first_job(run: Path) -> CheckpointStore:
    """A job that has made a checkpoint, then applied an update, and has ended."""
    fence = Fence(run, attempt=0)
    with Job(2, FileJournal(run, fence)) as job:
        schema = job.workers[0].state.schema
        write_run_info(fence, RunInfo(RUN_FORMAT, schema, 2, 0, time.time()))
        scheduled(job.workers[1].propose(later(), at_step=LATER))
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
    with store.open(manifest.step) as reader:
        reader.verify()
        values = {name: reader.read(name) for name in reader.names()}
    return replace(saved_of(manifest), state=[values])


def next_start(
    run: Path, attempt: int = 1, *, answers: bool = True
) -> tuple[list[dict[str, bytes]], list[tuple[int, str]]]:
    """The values at the end of a job that goes on there, and what its last worker has applied."""
    journal = FileJournal(run, Fence(run, attempt))
    saved = last_saved(run)
    journal.check_start(saved)
    with Job(2, journal, attempt=attempt, checkpoints=[saved], begins=False) as job:
        reader = reader_of(job)
        reader.first(run)
        job.on_all(lambda worker: worker.session.begin())
        job.train(STEPS - saved.step, one_step=trained)
        if answers:
            eventually(lambda: (reader.take_outcomes(run), reader.settle(run), not reader._taken)[-1])
        return job.values(), list(job.workers[1].applied)


def test_an_update_that_was_taken_at_a_start_is_not_taken_again_by_another_start(tmp_path: Path) -> None:
    with Job(1) as job:
        reader = reader_of(job)
        path = inbox.submit(tmp_path, fix())
        reader.first(tmp_path)
        os.utime(path.as_path(), ns=(1, 1))  # to be told from the file that was taken
        with mock.patch.object(inbox, "take") as again:
            reader.first(tmp_path)
        assert (len(reader._taken), again.called) == (1, False)


def test_what_waits_when_a_job_starts_again_has_the_bits_of_the_live_update(tmp_path: Path) -> None:
    expected, digest = live()
    before = first_job(tmp_path).manifest(SAVED)
    inbox.submit(tmp_path, fix())
    values, applied = next_start(tmp_path)
    assert values == expected
    assert applied == [(SAVED, "fix"), (LATER, "later")]
    record = committed_updates(tmp_path)[1]
    assert (record.id, record.step, record.author, record.note) == ("fix", SAVED, "ada", "drifted")
    (receipt,) = record.receipts
    assert (receipt.stage, dict(receipt.digests)) == (Stage.VERIFIED, {0: digest, 1: digest})
    edits = {edit.variable: edit.operation for edit in undo(tmp_path, 2).update.edits}
    assert edits["table/embeddings"] == "assign_rows"
    assert inbox.waiting(tmp_path) == []
    assert CheckpointStore(tmp_path).manifest(SAVED) == before
    assert not read_chain(tmp_path).problems


def low_rank_of_nothing() -> bytes:
    """An update whose factors have no dimensions: no author can make it."""
    arrays = {"a": "0.a", "b": "0.b"}
    edits = [{"operation": "add_low_rank", "variable": "dense/kernel", "arrays": arrays}]
    told = {"replicast": json.dumps({"format": FORMAT, "id": "made-up", "edits": edits})}
    return b"".join(map(bytes, tensor_chunks(dict.fromkeys(arrays.values(), np.zeros((), np.float32)), told)))


@pytest.mark.parametrize("content", [b"no update", low_rank_of_nothing()], ids=["no update", "low rank"])
def test_a_file_that_is_no_update_is_refused_and_holds_back_no_other(tmp_path: Path, content: bytes) -> None:
    first_job(tmp_path)
    older = inbox.submit(tmp_path, fix()).parent / "made-up.safetensors"
    older.as_path().write_bytes(content)
    os.utime(older.as_path(), (0, 0))
    _, applied = next_start(tmp_path)
    assert applied == [(SAVED, "fix"), (LATER, "later")]
    assert [(id_, one.stage) for id_, one in inbox.ended(tmp_path).items()] == [("made-up", Stage.REFUSED)]


def test_it_is_applied_once_although_a_start_dies_between_its_commit_and_its_answer(tmp_path: Path) -> None:
    expected, _ = live()
    first_job(tmp_path)
    inbox.submit(tmp_path, fix())
    next_start(tmp_path, answers=False)
    assert [one.id for one in inbox.waiting(tmp_path)] == ["fix"]
    values, applied = next_start(tmp_path, attempt=2)
    assert values == expected
    assert applied == [(SAVED, "fix"), (LATER, "later")]
    assert inbox.waiting(tmp_path) == []


def test_an_attempt_begins_with_what_waits_up_to_a_trial_or_a_revert(tmp_path: Path) -> None:
    first_job(tmp_path)
    for place, submit in enumerate(
        (
            lambda: inbox.submit(tmp_path, fix()),
            lambda: inbox.submit(tmp_path, Update(id="planned").scale("dense/bias", 2.0), at_step=STEPS),
            lambda: inbox.submit(tmp_path, Update(id="undo"), reverts=1),
            lambda: inbox.submit(tmp_path, Update(id="behind").scale("dense/bias", 2.0)),
        )
    ):
        os.utime(submit().as_path(), (place, place))
    _, applied = next_start(tmp_path)
    assert applied == [(SAVED, "fix"), (LATER, "later"), (STEPS, "planned")]
    assert [one.id for one in inbox.waiting(tmp_path)] == ["undo", "behind"]


@pytest.mark.parametrize("bound", ["FIRST_SECS", "FIRST_BYTES"])
def test_a_start_takes_no_more_than_it_has_time_and_memory_for_and_the_rest_follows_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(proposals, bound, 0)
    with Job(1, begins=False) as job:
        reader = reader_of(job)
        for place, one in enumerate((fix(), later(), Update(id="third").scale("dense/bias", 2.0))):
            os.utime(inbox.submit(tmp_path, one).as_path(), (place, place))
        reader.first(tmp_path)
        assert taken(reader) == ["fix"]
        job.on_all(lambda worker: worker.session.begin())
        reader.look(tmp_path, training=True)
        job.train(2)
        assert [id_ for _, id_ in job.workers[0].applied] == ["fix", "later", "third"]


def taken(reader: InboxReader) -> list[str]:
    return [inbox.id_of(one.path) for one in reader._taken.values()]


@pytest.mark.parametrize("submit", [{"trial": Trial(2)}, {"reverts": 1}], ids=["trial", "revert"])
def test_a_trial_or_a_revert_is_left_to_the_next_looks_before_its_values_are_read(
    tmp_path: Path, submit: dict[str, Any]
) -> None:
    with Job(1, begins=False) as job:
        reader = reader_of(job)
        update = Update(id="later") if "reverts" in submit else later()
        os.utime(inbox.submit(tmp_path, update, **submit).as_path(), (0, 0))
        inbox.submit(tmp_path, fix())
        with mock.patch.object(inbox, "parse_tensors") as values:
            reader.first(tmp_path)
        assert (taken(reader), values.called) == ([], False)
        reader.look(tmp_path, training=True)
        assert taken(reader) == ["later", "fix"]


def test_a_start_does_not_wait_for_a_look_whose_disk_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_notes, "FIRST_SECS", 0)
    answers, looks = threading.Event(), threading.Event()

    def requests(run_dir: Path) -> list[Any]:
        looks.set()
        answers.wait(DEADLINE_SECS)
        return []

    monkeypatch.setattr(inbox, "requests", requests)
    with Job(1, begins=False) as job:
        session = job.workers[0].session
        keeping = worker_notes.RunFiles(session, tmp_path, Training(session))
        keeping.start()
        try:
            assert looks.wait(DEADLINE_SECS)
            start = threading.Thread(target=keeping.take_first, daemon=True)
            start.start()
            start.join(DEADLINE_SECS)
            assert not start.is_alive()
        finally:
            answers.set()
