"""Whatever is in a run directory, readers end in bounded time and memory, and find the valid entries."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replicast import client
from replicast.codec import sealed_json, unsealed
from replicast.errors import FileDamaged
from replicast.storage import inbox
from replicast.storage.checkpoints import CheckpointStore, choose
from replicast.storage.claims import MAX_LINE_BYTES
from replicast.storage.run_files import (
    Change,
    JobState,
    WorkerNote,
    append_metrics,
    last_audits,
    last_metrics,
    lines_from_the_end,
    read_worker_notes,
    write_change,
    write_worker_note,
)
from replicast.update.update import Update
from tests.unit.checkpoint.samples import assert_holds, state_of, written
from tests.unit.logs import log_of
from tests.unit.played_job import invoke, made_run

NOTE = WorkerNote(0, 100, "host", 3, 0, 2.5, training=True, waiting_for="")


def manifest_with_shape(path: Path, shape: list[Any]) -> None:
    """Gives the first variable of a checkpoint another shape, and the manifest the checksum that fits."""
    described = json.loads(unsealed((path / "manifest.json").read_bytes())[0])
    described["schema"]["variables"][0]["shape"] = shape
    (path / "manifest.json").write_bytes(sealed_json(described))


@pytest.mark.parametrize(
    "shape",
    [[2**40, 2**40], [2**62], [0, 2**40, 2**40], [1] * 100, [True], ["3"], [1.5], [[3]], [-1], [None]],
    ids=str,
)
def test_a_manifest_with_an_impossible_shape_hides_no_other_checkpoint(
    tmp_path: Path, shape: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = CheckpointStore(made_run())
    good = written(store, 5)
    written(store, 6)
    manifest_with_shape(store.path(6).as_path(), shape)
    assert store.manifests() == [good]
    assert [problem.path.parent for problem in store.problems()] == [store.path(6).as_path()]
    damaged: dict[int, str] = {}
    with choose(store, None, damaged) as reader:
        assert reader.manifest == good
    assert list(damaged) == [6]
    assert "00000006" in invoke("checkpoint", "list", "run").output
    assert "00000005  intact" in invoke("checkpoint", "verify", "run").output


def test_a_checkpoint_that_is_truncated_while_it_is_open_is_damaged_and_ends_no_process(
    tmp_path: Path,
) -> None:
    store = CheckpointStore(tmp_path)
    written(store, 5)
    with store.open(5) as reader:
        name = reader.names()[0]
        before = reader.read(name)
        os.truncate(store.path(5).as_path() / "state.safetensors", 10)
        np.testing.assert_array_equal(before, state_of()[name])
        with pytest.raises(FileDamaged, match="became shorter"):
            reader.read(name)


@pytest.mark.parametrize("file", ["manifest.json", "state.safetensors"])
def test_a_pipe_or_a_device_in_a_checkpoint_is_damage(tmp_path: Path, file: str) -> None:
    store = CheckpointStore(tmp_path)
    good = written(store, 4)
    for step in (5, 6):
        written(store, step)
        (store.path(step).as_path() / file).unlink()
    os.mkfifo(store.path(5).as_path() / file)
    (store.path(6).as_path() / file).symlink_to("/dev/zero")
    assert store.manifests() == [good]
    assert len(store.problems()) == 2
    assert_holds(store, 4, state_of())


def strange(path: Path) -> None:
    """Puts beside `path` what is no plain file, and what is too large."""
    os.mkfifo(path.with_name("7.json"))
    path.with_name("8.json").symlink_to("/dev/zero")
    path.with_name("9.json").mkdir()
    path.with_name("10.json").symlink_to(path.with_name("nowhere"))
    with path.with_name("11.json").open("wb") as file:
        file.truncate(2**40)
    path.with_name("12.json").write_bytes(path.read_bytes())


def test_invalid_notes_do_not_block_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_worker_note(tmp_path, NOTE)
    strange(tmp_path / "workers" / "0.json")
    assert read_worker_notes(tmp_path) == [NOTE]
    monkeypatch.chdir(tmp_path)
    run = made_run()
    strange(run / "workers" / "0.json")
    assert invoke("status", run).exit_code == 0


@pytest.mark.parametrize("name", ["metrics.jsonl", "audits.jsonl"])
def test_a_pipe_in_the_place_of_a_list_hangs_neither_reader_nor_writer(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    assert last_metrics(tmp_path) is None
    assert last_audits(tmp_path, 1) == []
    if name == "metrics.jsonl":
        with pytest.raises(OSError, match="regular file"):
            append_metrics(tmp_path, (1, time.time(), {"loss": 1.0}))


def test_a_line_that_is_too_long_is_left_out_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_metrics(tmp_path, (1, time.time(), {"loss": 0.5}))
    with path.open("ab") as file:
        file.write(b"x" * 50_000_000 + b"\n")
    tracemalloc.start()
    found = last_metrics(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found is not None
    assert (found["step"], found["values"]) == (1, {"loss": 0.5})
    assert peak < 20_000_000
    append_metrics(tmp_path, (2, time.time(), {"loss": 0.25}))
    assert len(list(lines_from_the_end(path))) == 2


@pytest.mark.parametrize("line", ['{"step": 1, "time": NaN, "values": {}}', '{"step": 1e400}', "[" * 3000])
def test_a_line_that_is_no_json_of_ours_is_left_out(tmp_path: Path, line: str) -> None:
    append_metrics(tmp_path, (1, time.time(), {"loss": 0.5}))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(f"{line}\n")
    assert (last_metrics(tmp_path) or {})["step"] == 1


def test_a_note_that_no_clock_can_show_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = made_run()
    inbox.submit(run, Update(id="good").assign("learning_rate", 1))
    path = run / "workers" / "1.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"time": 1e300, "step": 2**63}))
    os.utime(run / "inbox" / "good.safetensors", (time.time(), 2**33))
    result = invoke("status", run)
    assert (result.exit_code, "good" in result.output) == (0, True)


def no_entry(log: Path) -> None:
    log.write_text("damaged\n")


def endless(log: Path) -> None:
    with log.open("wb") as file:
        file.truncate(2**29)


def elsewhere(log: Path) -> None:
    log.symlink_to("/etc/passwd")


@pytest.mark.parametrize("spoil", [no_entry, endless, elsewhere, os.mkfifo])
def test_a_push_that_fails_because_the_last_claim_cannot_be_read_leaves_nothing_for_the_job(
    tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    write_change(tmp_path, Change(JobState.STARTING, 0, workers=2))
    log_of(tmp_path).parent.mkdir(parents=True)
    spoil(log_of(tmp_path))
    tracemalloc.start()
    with pytest.raises(FileDamaged, match="its claim"):
        client.connect(tmp_path).push(Update().assign("learning_rate", 1))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert list(inbox.waiting(tmp_path)) == []
    assert peak < 4 * MAX_LINE_BYTES
