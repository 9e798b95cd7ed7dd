"""The examples of docs/client.md do what they say."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from replicast.client import connect
from replicast.storage import inbox
from replicast.storage.run_files import append_metrics
from tests.page.live import TOKEN, served_run
from tests.unit.played_job import PlayedJob, made_run, meanwhile

DOCUMENT = Path(__file__).parents[3] / "docs" / "client.md"


def test_the_documented_examples_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = made_run(Path("runs/first"))
    append_metrics(run, (5, time.time(), {"loss": 0.25}))
    meanwhile(monkeypatch, PlayedJob(run).act)
    codes = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    with served_run(connect(run)) as address:
        names = {"address": address, "token": TOKEN}
        for code in codes:
            exec(compile(code, str(DOCUMENT), "exec"), names)
    said = capsys.readouterr().out
    for text in (
        "Training at step 5",
        "7 {0: 'a",
        "proposed",
        "Wrong shape",
        "(3,) (4,)",
        "[5, 5]",
        "5 0.25",
    ):
        assert text in said, text
    assert {one.id for one in inbox.waiting(run)} == {"slower", "from-elsewhere"}
