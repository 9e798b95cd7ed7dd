"""The heartbeat file for schedulers, without TensorFlow."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from replicast.config import heartbeat_file
from replicast.replicas import worker_notes
from replicast.replicas.position import Fit, Position
from replicast.replicas.worker_notes import Heartbeat
from replicast.strictjson import parse_object

SECS = 120.0


@pytest.fixture(autouse=True)
def often_and_patiently(monkeypatch: pytest.MonkeyPatch) -> None:
    """A report comes soon, and no wait gives up because the machine is busy."""
    for name, secs in {"HEARTBEAT_SECS": 0.02, "_END_SECS": SECS}.items():
        monkeypatch.setattr(worker_notes, name, secs)


def heartbeat(path: Path | None, *, rank: int = 0, metrics: Any = None) -> Heartbeat:
    return Heartbeat(
        path,
        rank=rank,
        attempt=2,
        step=lambda: 30,
        training=lambda: True,
        position=lambda: Position(epoch=1, batch=10, fits=(Fit(epochs=4, batches=20),)),
        metrics=metrics or (lambda: {"loss": 0.25}),
    )


def wait(is_so: Callable[[], object]) -> None:
    ends = time.monotonic() + SECS
    while not is_so():
        assert time.monotonic() < ends
        time.sleep(0.02)


def test_every_worker_writes_a_heartbeat_and_the_last_one_says_that_all_is_done(tmp_path: Path) -> None:
    file = heartbeat_file({"REPLICAST_PROGRESS_FILE": str(tmp_path / "beat-{rank}.json")}, rank=3)
    beats = heartbeat(file, rank=3)
    beats.start()
    path = tmp_path / "beat-3.json"
    wait(path.exists)
    beat = json.loads(path.read_text())
    assert (beat["rank"], beat["attempt"], beat["step"], beat["training"]) == (3, 2, 30, True)
    assert (beat["percent"], beat["metrics"]) == (37, {"loss": 0.25})
    beats.stop(finished=True)
    assert json.loads(path.read_text())["percent"] == 100


def test_metrics_that_cannot_be_read_cost_one_warning(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    def broken() -> dict[str, float]:
        raise ValueError("no number")

    beats = heartbeat(tmp_path / "beat.json", metrics=broken)
    beats.start()
    wait(lambda: "cannot be written: no number" in caplog.text)
    beats.stop(finished=True)
    assert caplog.text.count("cannot be written") == 1


def test_a_loss_that_is_not_a_number_leaves_the_heartbeat_readable(tmp_path: Path) -> None:
    path = tmp_path / "beat.json"
    beats = heartbeat(path, metrics=lambda: {"loss": math.nan, "accuracy": 0.5})
    beats.start()
    wait(path.exists)
    beats.stop(finished=True)
    assert parse_object(path.read_bytes())["metrics"] == {"loss": None, "accuracy": 0.5}


def test_by_default_there_is_no_heartbeat() -> None:
    assert heartbeat_file({}, rank=0) is None
    beats = heartbeat(None)
    beats.start()
    beats.stop(finished=True)
