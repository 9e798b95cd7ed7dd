"""The bytes of the file formats: they must stay readable, and be written unchanged."""

import shutil
import time
import uuid
from pathlib import Path
from typing import get_args

import ml_dtypes
import numpy as np
import pytest
from msgspec.structs import replace

from replicast.core.entries import (
    Before,
    Committed,
    Decided,
    Entry,
    Logged,
    Payload,
    Receipt,
    Refused,
    Scheduled,
    Stage,
    Started,
    Withdrawn,
)
from replicast.storage.claims import Claim, Fence, last_claim
from replicast.storage.journal import FileJournal, StoredJournal, committed_updates, load_update, read_stored
from replicast.storage.run_files import RunInfo, read_run_info, write_run_info
from replicast.update.edits import Variable
from replicast.update.schema import Schema, update_before
from replicast.update.trial import Effect, Trial, TrialOutcome
from replicast.update.update import Update

TIME = 1700000000.25
FOLDER = Path(__file__).parent / "files"


def update() -> Update:
    return (
        Update(id="golden-1", note="fix drifted bias é", author="somebody", reset_slots=True)
        .add("dense/bias", np.array([0.5, -0.0, 1e-40], np.float32))
        .assign("dense/kernel", np.array([[1.5, -2.0]]).astype(ml_dtypes.bfloat16))
        .scale("optimizer/learning_rate", 0.1)
        .blend("moving_mean", np.array(3.0, np.float16), 0.25)
        .add_rows("embedding/embeddings", [2, 0], np.ones((2, 2), np.float64))
        .assign("mask", np.array([True, False]))
        .add("count", 7)
        .add_low_rank("head/kernel", np.ones((2, 1), np.float32), np.ones((1, 3), np.float32))
    )


def entries() -> list[Entry]:
    digest, trial = update().content_digest(), Trial(50, "loss", 0.25)
    outcome = TrialOutcome(1, "kept", 1250, "loss", 0.5, 0.25, "loss was 0.5 before the update")
    digests = dict.fromkeys(range(3), "592be1533d2bfb376a167e118f2f63a5")
    return [
        Started(1, None),
        Started(2, 1100),
        Payload("golden-1", digest, None, "somebody", "fix drifted bias é"),
        Scheduled("golden-1", digest, 1200, trial),
        Committed(1, "golden-1", digest, 1200, 1, trial, 0.5, workers=3),
        Before(1, "golden-1", {}),
        Decided(1, True, 1250, 1, "loss was 0.5 before the update", 0.25),
        Receipt(
            *(1, "golden-1", 1200, digests, 0.125, 0.0625, TIME + 1, Stage.VERIFIED, outcome, 1),
            trained=(38400,) * 3,
            effects=(
                Effect("optimizer/learning_rate", (), before=0.001, after=0.0001),
                Effect("embedding/embeddings", (1000, 2), rows=2, norm=2.5, change=2.0),
            ),
        ),
        Receipt(2, "golden-1", 1300, digests, 0.0, 0.0, TIME + 2, Stage.FAILED),
        Withdrawn("golden-2"),
        Refused("golden-3", ("0-7", "inbox-3"), "there is no variable é"),
        Committed(2, "golden-1", digest, 1300, 1, workers=3, reverts=1),
        Before(2, "golden-1", problem="Update 2 cannot be reverted"),
    ]


def before() -> Update:
    """The values before the update."""
    kernel = np.array([[3.0, 4.0]]).astype(ml_dtypes.bfloat16)
    rows = {"moving_mean": (np.array([1]), np.array([0.5], np.float16))}
    return update_before("golden-1", {"dense/kernel": kernel}, rows)


def claim() -> Claim:
    process = {"pid": 4242, "host": "box", "started": 123456}
    return Claim(1, (), ("00001200-1",), attempt=1, process=process, claimed_at=TIME, run="a" * 32)


def run_info() -> RunInfo:
    variables = [
        Variable("dense/bias", (3,), "float32", "trainable", (("optimizer/m", 0.0), ("optimizer/v", 0.1))),
        Variable("optimizer/m", (3,), "float32", "optimizer"),
        Variable("optimizer/v", (3,), "float32", "optimizer"),
        Variable("count", (), "int64", "non_trainable"),
    ]
    hints = {"optimizer/learning_rate": "the learning rate is computed by a schedule"}
    return RunInfo(2, Schema(variables, hints), workers=3, attempt=1, created_at=1700000000.0)


def test_an_update_file_stays_what_it_is() -> None:
    path = FOLDER / "update.safetensors"
    assert b"".join(update().file_chunks()) == path.read_bytes()
    loaded = Update.load(path)
    assert loaded.describe() == update().describe()
    assert [array.tobytes() for array in loaded.arrays()] == [array.tobytes() for array in update().arrays()]


def test_the_digest_of_an_updates_content_stays_what_it_is() -> None:
    assert update().content_digest() == "e97358eb7e009af8504f36fad76c085f"


def test_what_a_group_writes_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: TIME)
    monkeypatch.setattr(uuid, "uuid4", lambda: uuid.UUID(claim().run))
    monkeypatch.setattr("replicast.storage.claims.this_process", lambda: claim().process)
    (tmp_path / "checkpoints" / claim().checkpoints[0]).mkdir(parents=True)
    fence = Fence(tmp_path, attempt=1)
    journal = FileJournal(tmp_path, fence)
    write_run_info(fence, run_info())
    assert {type(entry) for entry in entries()} == set(get_args(Logged))
    for entry in entries():
        if isinstance(entry, Before) and entry.content == {}:
            entry = replace(entry, content=journal.stage_before(before()))
        journal.write(entry, update() if isinstance(entry, Payload) else None)
    names = sorted(path.name for path in (FOLDER / "group").iterdir())
    assert names == sorted(path.name for path in fence.directory.as_path().iterdir())
    for name in names:
        assert (fence.directory.as_path() / name).read_bytes() == (FOLDER / "group" / name).read_bytes(), name


def test_what_a_group_wrote_is_read(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "group", tmp_path / "groups" / "000001")
    assert last_claim(tmp_path) == claim()
    stored = StoredJournal(tmp_path)
    assert not stored.damaged
    lines = stored.lines
    payload, overwritten = lines[2].entry, lines[5].entry
    assert isinstance(payload, Payload)
    assert (payload.id, payload.digest) == ("golden-1", update().content_digest())
    assert (payload.author, payload.note) == ("somebody", "fix drifted bias é")
    assert isinstance(overwritten, Before)
    assert (overwritten.sequence, overwritten.id, overwritten.problem) == (1, "golden-1", "")
    expected = {place: one for place, one in enumerate(entries()) if place not in (2, 5)}
    assert {place: lines[place].entry for place in expected} == expected
    committed, revert = committed_updates(tmp_path)
    assert (committed.reverted_by, revert.reverts) == (2, 1)
    assert read_stored(tmp_path, lines[5]).content_digest() == before().content_digest()
    assert [edit["variable"] for edit in committed.edits] == [edit.variable for edit in update().edits]
    assert load_update(tmp_path, 1).content_digest() == update().content_digest()
    assert read_run_info(tmp_path).to_json() == run_info().to_json()


def test_the_digest_of_a_schema_stays_what_it_is() -> None:
    assert run_info().schema.digest() == "4662111dd61b91b3bbcdf9fe5dda291c"
