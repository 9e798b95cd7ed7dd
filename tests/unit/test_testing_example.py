"""The example of docs/testing.md works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

_DOCUMENT = Path(__file__).parents[2] / "docs" / "testing.md"


@pytest.fixture
def example() -> dict[str, Any]:
    """The names that the document's code defines."""
    (code,) = re.findall(r"```python\n(.*?)```", _DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, str(_DOCUMENT), "exec"), names)
    return names


def test_the_documented_test_passes(example: dict[str, Any]) -> None:
    example["test_a_correction_reaches_every_replica_and_survives_a_restart"]()


def test_the_documented_test_notices_replicas_that_are_not_equal(
    example: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    trained_alike = example["one_step"]

    def drifting(worker: Any, step: int) -> dict[str, float]:
        measured: dict[str, float] = trained_alike(worker, step)
        if worker.rank == 1 and step == 18:
            worker.state.values["head/bias"] = worker.state.values["head/bias"] + 1
        return measured

    monkeypatch.setitem(example, "one_step", drifting)
    with pytest.raises(AssertionError):
        example["test_a_correction_reaches_every_replica_and_survives_a_restart"]()
