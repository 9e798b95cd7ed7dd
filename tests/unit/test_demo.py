"""`replicast demo` without training: how its jobs and commands end."""

from __future__ import annotations

import importlib.util
import io
import os
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

import replicast
from replicast.cli import Failed, main, story
from replicast.cli.story import Story
from tests.threads import eventually
from tests.unit.clock import Clock
from tests.unit.played_job import made_run


def told(directory: Path) -> Story:
    return Story(directory, Console(file=io.StringIO()))


def test_a_command_that_fails_fails_the_demo_with_what_it_said(tmp_path: Path) -> None:
    made_run(tmp_path / "run")
    with pytest.raises(Failed, match=r"should end with 0. Received: 1(?s:.*)hidden/kernel"):
        told(tmp_path)._push("run", lambda happens: None)


def test_a_job_that_fails_or_ends_too_early_fails_with_its_output(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("raise SystemExit('broken on purpose')")
    with pytest.raises(Failed, match=r"exit code 1(?s:.*)broken on purpose"), told(tmp_path)._job("fails"):
        pass
    (tmp_path / "train.py").write_text("print('done')")
    with pytest.raises(Failed, match=r"exit code 0(?s:.*)done"), told(tmp_path)._job("ends") as wait_until:
        wait_until(lambda: False)


def test_a_job_that_takes_too_long_fails_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(story, "time", clock)
    (tmp_path / "train.py").write_text(
        "import os, pathlib, time\npathlib.Path('process').write_text(str(os.getpid()))\ntime.sleep(60)"
    )
    noted = tmp_path / "process"

    def run_too_long() -> None:
        with told(tmp_path)._job("sleeps") as wait_until:
            eventually(lambda: noted.exists() and noted.read_text())
            clock.added_secs = story.JOB_SECS
            wait_until(lambda: False)

    with pytest.raises(Failed, match="still running after 180 s"):
        run_too_long()
    eventually(lambda: not Path("/proc", noted.read_text()).exists())


def test_the_training_script_uses_only_the_public_face() -> None:
    source = story.TRAIN.read_text()
    assert re.findall(r"^from (\S+)", source, re.MULTILINE) == ["typing", "sklearn.datasets"]
    used = set(re.findall(r"\breplicast\.([A-Z]\w+)", source))
    assert used == {"Replicas", "Strategy", "Update"}
    assert used <= set(replicast.__all__)


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        (["sklearn"], "needs scikit-learn, not installed"),
        (["tensorflow", "sklearn"], "needs TensorFlow and scikit-learn, not installed"),
    ],
)
def test_what_is_missing_is_named_with_the_command_that_installs_it(
    missing: list[str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec

    def found(name: str, *arguments: Any) -> Any:
        return None if name in missing else find(name, *arguments)

    monkeypatch.setattr(importlib.util, "find_spec", found)
    result = CliRunner().invoke(main, ["demo"])
    assert result.exit_code == 2
    assert expected in result.output
    assert "pip install 'replicast[" in result.output
    assert result.output.count(os.linesep) == 1
