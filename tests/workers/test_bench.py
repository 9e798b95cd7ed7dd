"""`replicast bench` with real workers: what it prints, and what it leaves behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from replicast.cli.bench import Plan, measure
from replicast.config import SHM_DIR
from replicast.demo import MEASURES

BENCH_SECS = 180.0


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory, in which all temporary files and all shared memory are from now on."""
    for name in ("TMPDIR", SHM_DIR):
        monkeypatch.setenv(name, str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


def left_in(directory: Path) -> list[Path]:
    """What is in a directory, without Python's cache of the files that AutoGraph generates and removes."""
    return [path for path in directory.iterdir() if path.name != "__pycache__"]


def processes_in(directory: Path) -> list[str]:
    """The command lines of processes that name a directory."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found.append(path.read_text().replace("\0", " "))
        except OSError:
            continue  # It has just ended.
    return [line for line in found if str(directory) in line]


def test_every_operation_is_measured_on_two_workers_and_nothing_is_left_behind(temporary: Path) -> None:
    command = ["bench", "--workers", "2", "--size", "1MB", "--rounds", "1", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "replicast", *command],
        capture_output=True,
        text=True,
        timeout=BENCH_SECS,
        env=os.environ.copy(),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["starting the workers", "warming up", "round 1 of 1"]
    data = json.loads(done.stdout)
    assert (data["workers"], data["bytes"], data["rounds"]) == (2, 10**6, 1)
    assert {one["name"]: one["median_secs"] > 0 for one in data["figures"]} == dict.fromkeys(MEASURES, True)
    assert left_in(temporary) == []


def test_ctrl_c_ends_the_workers_and_leaves_nothing_behind(temporary: Path) -> None:
    def interrupt(done: int, total: int, doing: str) -> None:
        assert doing == "starting the workers"
        if len(list(temporary.glob("replicast-bench-*/run/logs/attempt-0/worker-*.log"))) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure(Plan(2, 10**6, 1), interrupt)
    assert processes_in(temporary) == []
    assert left_in(temporary) == []
