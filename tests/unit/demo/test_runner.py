"""The demo's end: its exit code, and what is said when something is missing."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from replicast.cli import main
from replicast.demo.act_one import CONTINUED, TRAINED
from replicast.demo.act_three import RECOVERED
from replicast.demo.act_two import PUSHED
from replicast.demo.acts import WORKERS, programme
from replicast.demo.notes import NoteWriter, notes_path
from replicast.demo.runner import run_demo
from replicast.supervisor import Job, Settings
from tests.unit.demo.played import ACT_ONE_AS_CLAIMED, AS_CLAIMED, Screen, moment


@pytest.mark.parametrize(
    ("digests", "workers_code", "expected", "said"),
    [
        (AS_CLAIMED, 0, 0, "the crash has lost nothing"),
        ({**AS_CLAIMED, RECOVERED: "dd"}, 0, 1, "worker 0 should end as in the undisturbed run"),
        (ACT_ONE_AS_CLAIMED, 0, 1, "the moment 'after the push' never came"),
        ({**AS_CLAIMED, PUSHED: "fe"}, 0, 1, "should be equal after the push, and are not"),
        ({**AS_CLAIMED, CONTINUED: "cc"}, 0, 1, "should still differ after 50 more steps"),
        ({TRAINED: "aa"}, 0, 1, "the moment 'after worker 1 assigned' never came"),
        (AS_CLAIMED, 9, 1, "the workers ended with exit code 9"),
        ({TRAINED: "aa"}, 130, 130, "the launcher's last word"),
    ],
)
def test_the_exit_code_is_0_only_if_what_was_shown_happened(
    digests: dict[str, str],
    workers_code: int,
    expected: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def supervise(job: Job, settings: Settings, environ: Mapping[str, str]) -> int:
        for worker in range(WORKERS):
            writer = NoteWriter(notes_path(Path(job.argv[-1]), worker))
            for name, both in digests.items():
                writer.write(moment(name, worker, both[worker]))
        sys.stderr.write("the launcher's last word\n")
        return workers_code

    monkeypatch.setattr("replicast.demo.runner.supervise", supervise)
    screen = Screen()
    assert run_demo(programme(), tmp_path, screen.console, {}) == expected
    assert said in " ".join(screen.text.split())


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
