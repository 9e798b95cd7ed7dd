"""Bytes of files that earlier versions wrote: they must be read, and written the same."""

import hashlib
from pathlib import Path

import ml_dtypes
import numpy as np

from replicast.files import json_bytes, read_json
from replicast.journal import Receipt, Record, summarized
from replicast.runfiles import RunInfo
from replicast.schema import Schema, Variable
from replicast.update import Stage, Update

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


def record() -> Record:
    content = (FOLDER / "update.safetensors").read_bytes()
    return Record(
        sequence=42,
        id="golden-1",
        step=1200,
        sha256=hashlib.sha256(content).hexdigest(),
        nbytes=len(content),
        author="somebody",
        note="fix drifted bias é",
        edits=summarized(update().edits),
        content_digest=update().content_digest(),
        workers=3,
        attempt=1,
        scheduled=True,
        committed_at=1700000000.25,
    )


def receipt() -> Receipt:
    digests = dict.fromkeys(range(3), "592be1533d2bfb376a167e118f2f63a5")
    return Receipt(42, "golden-1", 1200, digests, 0.125, 0.0625, 1700000001.5, Stage.VERIFIED)


def run_info() -> RunInfo:
    variables = [
        Variable("dense/bias", (3,), "float32", "trainable", (("optimizer/m", 0.0), ("optimizer/v", 0.1))),
        Variable("optimizer/m", (3,), "float32", "optimizer"),
        Variable("optimizer/v", (3,), "float32", "optimizer"),
        Variable("count", (), "int64", "non_trainable"),
    ]
    hints = {"optimizer/learning_rate": "the learning rate is computed by a schedule"}
    return RunInfo(1, Schema(variables, hints), workers=3, attempt=1, created_at=1700000000.0)


def test_an_update_file_stays_what_it_is() -> None:
    path = FOLDER / "update.safetensors"
    assert b"".join(update().file_chunks()) == path.read_bytes()
    loaded = Update.load(path)
    assert loaded.describe() == update().describe()
    assert [array.tobytes() for array in loaded.arrays()] == [array.tobytes() for array in update().arrays()]


def test_the_digest_of_an_updates_content_stays_what_it_is() -> None:
    assert update().content_digest() == "ff7c6c371f4fbd8a7202bc013c9fb3ca"


def test_a_record_a_receipt_and_a_run_stay_what_they_are() -> None:
    for made, name in ((record(), "record.json"), (receipt(), "receipt.json"), (run_info(), "run.json")):
        assert json_bytes(made.to_json()) == (FOLDER / name).read_bytes()
        assert type(made).from_json(read_json(FOLDER / name)).to_json() == made.to_json()
    assert Record.from_json(read_json(FOLDER / "record.json")) == record()
    assert Receipt.from_json(read_json(FOLDER / "receipt.json")) == receipt()


def test_the_digest_of_a_schema_stays_what_it_is() -> None:
    assert run_info().schema.digest() == "4662111dd61b91b3bbcdf9fe5dda291c"
