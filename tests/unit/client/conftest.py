"""A run directory, seen from its parent, whose job was just heard from."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.played_job import made_run


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("REPLICAST_TOKEN", raising=False)
    return made_run()
