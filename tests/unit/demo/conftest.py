"""No test of the demo starts what an act asks a process outside for, unless it says so."""

from __future__ import annotations

import pytest

from tests.unit.demo.played import Errands


@pytest.fixture(autouse=True)
def errands(monkeypatch: pytest.MonkeyPatch) -> Errands:
    outside = Errands()
    monkeypatch.setattr("replicast.demo.audience.start", outside.start)
    return outside
