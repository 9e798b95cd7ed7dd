"""Fixtures for several unit tests."""

from __future__ import annotations

import os
import time
from pathlib import Path

import hypothesis
import pytest

from tests.unit.clock import Clock
from tests.unit.played_job import made_run

# Hypothesis has time limits for an example and for the making of all: a busy machine misses them.
hypothesis.settings.register_profile(
    "at any load", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("at any load")


@pytest.fixture(autouse=True)
def nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that is played dead is taken for dead at once; `played_job.meanwhile` lets commands listen."""
    monkeypatch.setattr("replicast.client.directory.LISTEN_SECS", 0.0)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories that are fsynced from now on, in order."""
    found: list[Path] = []
    real = os.fsync

    def noting(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_dir():
            found.append(path)
        real(descriptor)

    monkeypatch.setattr(os, "fsync", noting)
    return found


@pytest.fixture
def preads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes each `os.pread` from now on asks for."""
    asked: list[int] = []
    real = os.pread

    def noting(descriptor: int, length: int, place: int) -> bytes:
        asked.append(length)
        return real(descriptor, length, place)

    monkeypatch.setattr(os, "pread", noting)
    return asked


@pytest.fixture
def loop_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the event loops: a time limit of the job is over when a test says so, and at once."""
    made = Clock()
    monkeypatch.setattr("replicast.replicas.session.time", made)
    monkeypatch.setattr("replicast.replicas.session.IDLE_SECS", 0.01)
    return made


@pytest.fixture
def wall_clock_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was 12 s ago stays so, however long a busy machine takes until somebody looks."""
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory, seen from its parent, on a terminal of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return made_run()
