"""Threads that stop soon: a test makes and ends many jobs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="session")
def quick_looks() -> None:
    patch = pytest.MonkeyPatch()
    patch.setattr("replicast.protocol.channel.LOOK_SECS", 0.05)
    patch.setattr("replicast.protocol.threads.LOOK_SECS", 0.05)
    patch.setattr("replicast.protocol.verifier.LOOK_SECS", 0.05)
