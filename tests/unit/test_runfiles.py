"""What a job says of itself: its description, the notes of its workers, metrics and audits."""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from replicast.codec import sealed
from replicast.errors import FileDamaged
from replicast.storage import run_files as runfiles
from replicast.storage.claims import Fence
from replicast.storage.run_files import (
    FORMAT,
    RunInfo,
    WorkerNote,
    append_audit,
    append_metrics,
    clean_run,
    last_audits,
    last_metrics,
    lines_from_the_end,
    metrics_around,
    read_run_info,
    read_worker_notes,
    write_run_info,
    write_worker_note,
)
from replicast.update.edits import Variable
from replicast.update.schema import Schema
from tests.unit.test_audit import report

INFO = RunInfo(
    FORMAT, Schema([Variable("x", (2, 3), "bfloat16", "trainable")]), workers=2, attempt=1, created_at=1.5
)


def note(rank: int, step: int = 3) -> WorkerNote:
    return WorkerNote(rank, 100 + rank, "host", step, 0, 2.5, training=True, waiting_for="")


def metrics(run: Path) -> dict[str, Any]:
    found = last_metrics(run)
    assert found is not None
    return found


def test_the_names_of_a_run_and_of_its_workers_notes_are_on_disk(tmp_path: Path, synced: list[Path]) -> None:
    fence = Fence(tmp_path / "run", attempt=0)
    synced.clear()
    write_run_info(fence, INFO)
    write_worker_note(tmp_path / "run", note(0))
    assert synced == [fence.directory.as_path(), tmp_path / "run"]


def test_a_directory_of_something_else_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileDamaged, match="Is this a run directory"):
        read_run_info(tmp_path)
    with pytest.raises(FileDamaged, match="Is this a run directory"):
        read_run_info(tmp_path / "nowhere")


@pytest.mark.parametrize(
    "change",
    [{"format": 1}, {"format": 3}, {"schema": 3}, {"schema": {}}, {"workers": "many"}, {"created_at": None}],
)
def test_a_run_of_a_later_format_or_damaged_is_named(tmp_path: Path, change: dict) -> None:
    (Fence(tmp_path, attempt=0).directory.as_path() / "run.json").write_bytes(
        sealed(json.dumps(INFO.to_json() | change).encode())[0]
    )
    with pytest.raises(FileDamaged, match=r"run\.json"):
        read_run_info(tmp_path)


def test_each_worker_has_its_own_note_and_the_last_counts(tmp_path: Path) -> None:
    assert read_worker_notes(tmp_path) == []
    for rank in (10, 2, 0):
        write_worker_note(tmp_path, note(rank))
    write_worker_note(tmp_path, note(2, step=4))
    assert read_worker_notes(tmp_path) == [note(0), note(2, step=4), note(10)]


def test_temporaries_of_writers_that_died_are_removed_from_the_run_and_from_the_workers_notes(
    tmp_path: Path,
) -> None:
    clean_run(tmp_path / "nowhere")
    write_run_info(Fence(tmp_path, attempt=0), INFO)
    write_worker_note(tmp_path, note(0))
    (tmp_path / ".tmp-fence").touch()
    (tmp_path / "workers" / ".tmp-note").touch()
    clean_run(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["groups", "workers"]
    assert [path.name for path in (tmp_path / "workers").iterdir()] == ["0.json"]


def test_the_last_metrics_are_those_of_the_last_step(tmp_path: Path) -> None:
    assert last_metrics(tmp_path) is None
    for step in range(3000):
        append_metrics(tmp_path, (step, time.time(), {"loss": step / 2, "accuracy": 0.5}))
    found = metrics(tmp_path)
    assert (found["step"], found["values"]) == (2999, {"loss": 1499.5, "accuracy": 0.5})
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3000
    append_metrics(tmp_path, (2999, time.time(), {"val_loss": 2.0}))  # A validation has a line of its own.
    assert metrics(tmp_path)["values"] == {"loss": 1499.5, "accuracy": 0.5, "val_loss": 2.0}


def test_a_loss_that_is_not_finite_stays_json_and_comes_back(tmp_path: Path) -> None:
    append_metrics(tmp_path, (1, time.time(), {"loss": math.nan, "other": -math.inf}))
    found = metrics(tmp_path)
    assert math.isnan(found["values"]["loss"])
    assert found["values"]["other"] == -math.inf
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert line["values"] == {"loss": "nan", "other": "-inf"}


def test_a_torn_last_line_is_ignored_and_takes_nothing_with_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_metrics(tmp_path, (1, time.time(), {"loss": 1.0}))
    whole = path.read_bytes()
    append_metrics(tmp_path, (2, time.time(), {"loss": 2.0}))
    both = path.read_bytes()
    for length in range(len(whole), len(both)):
        path.write_bytes(both[:length])
        assert metrics(tmp_path)["step"] == 1
        append_metrics(tmp_path, (3, time.time(), {"loss": 3.0}))
        assert metrics(tmp_path)["step"] == 3


def test_a_file_without_a_whole_line_has_no_metrics(tmp_path: Path) -> None:
    for content in (b"", b"x", b"\n", b"3\n", b"{}\n", b"x" * 200_000):
        (tmp_path / "metrics.jsonl").write_bytes(content)
        assert last_metrics(tmp_path) is None


def test_a_line_that_the_disk_takes_only_in_part_is_an_error_and_spoils_no_other(tmp_path: Path) -> None:
    append_metrics(tmp_path, (1, time.time(), {"loss": 0.5}))
    nbytes = (tmp_path / "metrics.jsonl").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes + 10, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            append_metrics(tmp_path, (2, time.time(), {"loss": 0.25}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    append_metrics(tmp_path, (3, time.time(), {"loss": 0.125}))
    assert metrics(tmp_path)["step"] == 3


def test_the_last_reports_come_in_their_order(tmp_path: Path) -> None:
    assert last_audits(tmp_path, 3) == []
    reports = [report(number=number, requests=()) for number in range(1, 401)]
    for one in reports:
        append_audit(tmp_path, one)
    assert last_audits(tmp_path, 3) == reports[-3:]
    assert last_audits(tmp_path, 1000) == reports


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append_audit(tmp_path, report())
    path = tmp_path / "audits.jsonl"
    path.write_bytes(b"\xff" * 10_000_000 + b"\n" + path.read_bytes())
    opened, fdopen = [], os.fdopen

    def noted(descriptor: int, mode: str) -> Any:
        opened.append(mock.Mock(wraps=fdopen(descriptor, mode)))
        return contextlib.closing(opened[-1])

    monkeypatch.setattr(os, "fdopen", noted)
    assert last_audits(tmp_path, 1) == [report()]
    assert [len(file.read.call_args_list) for file in opened] == [1], "it looks for no line before that"


@pytest.mark.parametrize("piece", [1, 2, 3, 5, 64])
def test_lines_are_whole_however_the_file_is_cut_into_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    monkeypatch.setattr(runfiles, "_PIECE_BYTES", piece)
    path = tmp_path / "lines"
    for content in (b"", b"half", b"\n", b"one\n", b"one\nhalf", b"\none\n\ntwo\nhal", b"a\nb\nc\n"):
        path.write_bytes(content)
        assert list(lines_from_the_end(path)) == content.split(b"\n")[:-1][::-1]


def measured(run: Path, steps: Iterable[int], loss: Callable[[int], float], begins: float) -> None:
    append_metrics(run, *((step, begins + step, {"accuracy": 0.5, "loss": loss(step)}) for step in steps))


def test_what_is_told_of_the_epoch_so_far_says_nothing_of_single_steps(tmp_path: Path) -> None:
    for step in range(1, 11):
        append_metrics(tmp_path, (step, 1000.0 + step, {"a\udc80": 0.9, "loss": 0.5}, ["a\udc80"]))
    assert [one.metric for one in metrics_around(tmp_path, 5, 1005.2)] == ["loss"]


def test_the_loss_around_an_update_has_mean_and_spread_of_twenty_steps_on_each_side(tmp_path: Path) -> None:
    measured(tmp_path, range(1, 101), lambda step: (2.0 if step <= 50 else 1.0) + 0.1 * (-1) ** step, 1000.0)
    around, accuracy = metrics_around(tmp_path, 50, 1050.2)
    assert str(accuracy) == "accuracy 0.5 ± 0 (20 steps) → 0.5 ± 0 (20 steps)"
    assert (around.metric, around.before.steps, around.after.steps) == ("loss", 20, 20)
    assert (around.before.mean, around.after.mean) == (pytest.approx(2.0), pytest.approx(1.0))
    assert around.before.spread == pytest.approx(0.1)
    assert str(around) == "loss 2 ± 0.1 (20 steps) → 1 ± 0.1 (20 steps)"
    early, _ = metrics_around(tmp_path, 3, 1003.2)
    assert (early.before.steps, early.after.steps) == (3, 20)
    assert not metrics_around(tmp_path, 100, 1100.2), "nothing was measured after it"


def test_after_a_restart_the_steps_of_the_attempt_count_that_has_applied_it(tmp_path: Path) -> None:
    measured(tmp_path, range(1, 61), lambda step: 9.0, 1000.0)
    measured(tmp_path, range(31, 91), lambda step: 2.0 if step <= 50 else 1.0, 2000.0)
    around, _ = metrics_around(tmp_path, 50, 2050.2)
    assert (around.before.mean, around.after.mean, around.before.steps) == (2.0, 1.0, 20)
    first, _ = metrics_around(tmp_path, 40, 1040.2)
    assert (first.before.mean, first.after.mean) == (9.0, 9.0)


def test_little_of_a_long_file_is_read_and_damaged_lines_are_skipped(
    tmp_path: Path, preads: list[int]
) -> None:
    measured(tmp_path, range(1, 40_001), lambda step: float(step), 0.0)
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 40001, "time": "late"}\nhalf a line')
    size = (tmp_path / "metrics.jsonl").stat().st_size
    for step in (30, 12_345, 39_990):
        around, _ = metrics_around(tmp_path, step, step + 0.5)
        assert around.before.mean == pytest.approx(step - 9.5)
        assert around.after.mean == pytest.approx(step + min(20, 40_000 - step) / 2 + 0.5)
    assert sum(preads) < 3 * size


def test_a_loss_that_is_not_finite_is_said_and_without_metrics_there_is_none(tmp_path: Path) -> None:
    assert not metrics_around(tmp_path, 5, 5.0)
    measured(tmp_path, range(1, 11), lambda step: 1.0 if step <= 5 else math.nan, 0.0)
    around, _ = metrics_around(tmp_path, 5, 5.5)
    assert str(around) == "loss 1 ± 0 (5 steps) → nan ± nan (5 steps)"
