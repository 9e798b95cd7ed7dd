"""Fixtures for several unit tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


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
