"""`replicast.connect` and the command line at the address of a served run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from replicast.client import connect
from replicast.errors import RequestRefused, UpdateRefused
from replicast.page import app as api
from replicast.page.live import runs_in
from replicast.page.web_server import PageSettings
from replicast.update.update import Update
from tests.memory_run import MemoryRun
from tests.page.conftest import TOKEN
from tests.page.live import served
from tests.page.played_run import PlayedRun
from tests.unit.played_job import invoke

DELTA = np.ones(3, np.float32)


@pytest.fixture
def address(run: MemoryRun) -> Iterator[str]:
    """The address of the run, served."""
    found = {"first": run}
    with served(lambda: found, PageSettings(port=0, token=TOKEN)) as server:
        yield f"{server}/first"


def test_a_push_over_http_returns_its_receipt(address: str, run: MemoryRun) -> None:
    served_run = connect(address, token=TOKEN)
    receipt = served_run.push(Update(id="mine").add("dense/bias", DELTA)).result(120)
    assert (receipt.step, set(receipt.digests)) == (100, {0, 1})
    assert served_run.push(Update(id="mine").add("dense/bias", DELTA)).number == 1
    with pytest.raises(UpdateRefused, match="Another update with this id"):
        served_run.push(Update(id="mine").add("dense/bias", 2 * DELTA))
    assert served_run.audit(5).equal
    assert (served_run.checkpoint(5), served_run.stop(5)) == (100, 100)
    assert run.done == ["push", "audit", "checkpoint", "stop"]


def test_values_come_as_they_are_and_too_many_are_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served_run = connect(address, token=TOKEN)
    pulled = served_run.pull("dense/kernel")
    assert (pulled.array.dtype, pulled.array.shape, pulled.source) == (np.float32, (4, 3), "job")
    with pytest.raises(RequestRefused, match="at most 47 bytes"):
        served_run.pull("dense/kernel", max_bytes=47)
    monkeypatch.setattr(api, "MAX_VALUES_BYTES", 47)
    with pytest.raises(RequestRefused, match="too many values of model/dense/kernel"):
        served_run.pull("dense/kernel")
    assert served_run.pull("dense/kernel", [0]).array.shape == (1, 3)


def test_the_command_line_pushes_to_an_address_and_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "delta.safetensors"
    safetensors.numpy.save_file({"dense/bias": DELTA}, file)
    monkeypatch.setenv("REPLICAST_TOKEN", TOKEN)
    with (
        PlayedRun(tmp_path / "first") as run,
        served(runs_in(run.path), PageSettings(port=0, token=TOKEN)) as server,
    ):
        result = invoke("push", f"{server}/first", "--add", file, "--note", "drifted", "--wait")
        assert (result.exit_code, "verified" in result.output) == (0, True), result.output
        assert [view.note for view in connect(run.path).log()] == ["drifted"]
