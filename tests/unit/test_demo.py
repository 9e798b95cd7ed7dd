"""`replicast demo` without its workers: the checks before each claim, and how its commands end."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

import replicast
from replicast.cli import Failed, main, story
from replicast.cli.story import DemoJob, Story
from replicast.storage.run_files import WorkerNote
from tests.threads import eventually
from tests.unit.clock import Clock
from tests.unit.played_job import made_run

PROCESS = 2**22 + 1  # Above what the kernel gives out.


def trained(first: int, last: int, changes: dict[int, str]) -> list[dict[int, str]]:
    """Reports of both workers; `changes` has for some steps the digests of both, a character each."""
    steps = [first, *range(first // 50 * 50 + 50, last + 1, 50)]
    return [
        {step: changes.get(step, f"{step % 7}" * 2)[worker] * 64 for step in steps} for worker in range(2)
    ]


class Happened:
    """What the commands of a demo lead to when all claims hold; a test falsifies a part of it."""

    def __init__(self) -> None:
        self.assigned = trained(0, 200, {100: "ab", 150: "cd", 200: "ef"})
        self.undisturbed = trained(0, 600, {100: "bb", 600: "99"})
        self.killed = trained(0, 400, {})
        self.restarted = trained(225, 600, {600: "99"})
        self.signalled: list[tuple[int, int]] = []
        self.ran: list[str] = []

    def play(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> str:
        """Plays the story, and returns what the screen shows at 80 columns without a terminal."""
        runs = {
            "assign": [self.assigned],
            "undisturbed": [self.undisturbed],
            "killed": [self.killed, self.restarted],
        }
        workers = tuple(
            WorkerNote(rank, PROCESS, "box", 400, 0, 0.0, training=True, waiting_for="") for rank in range(2)
        )
        killed = SimpleNamespace(status=lambda: SimpleNamespace(workers=workers))

        def played(_directory: Path, run: str, _command: str) -> Any:
            def wait_until(happens: Callable[[], bool], claim: str) -> None:
                assert happens(), claim

            reports = lambda attempt=0: runs[run][attempt]  # noqa: E731
            return contextlib.nullcontext(
                SimpleNamespace(reports=reports, wait_until=wait_until, finish=lambda: None)
            )

        monkeypatch.setattr(story, "DemoJob", played)
        monkeypatch.setattr(story, "connect", lambda _path: killed)
        monkeypatch.setattr(story, "is_run", lambda _path: True)
        monkeypatch.setattr(Story, "_run", lambda _self, command, exit_code=0: self.ran.append(command))
        monkeypatch.setattr(os, "kill", lambda process, signum: self.signalled.append((process, signum)))
        file = io.StringIO()
        Story(directory, Console(file=file, width=80, highlight=False, markup=False)).play()
        return file.getvalue()


def test_the_story_says_what_happened_in_plain_text_of_80_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = Happened()
    shown = happened.play(tmp_path, monkeypatch)
    words = " ".join(shown.split())
    assert happened.signalled == [(PROCESS, 9)]
    assert "restored the checkpoint of step 225" in words
    assert [" ".join(command.split()[1:3]) for command in happened.ran] == [
        *["audit assign", "push undisturbed", "log undisturbed", "audit undisturbed", "push killed"]
    ]
    narration = shown[: shown.index("All of this happened")]
    assert all(character.isprintable() or character == "\n" for character in narration)
    assert max(map(len, narration.splitlines())) <= 80
    assert (tmp_path / "train.py").read_bytes() == story.TRAIN.read_bytes()


@pytest.mark.parametrize(
    ("falsify", "expected"),
    [
        (lambda h: setattr(h, "assigned", trained(0, 200, {50: "ab"})), "be equal at step 50"),
        (lambda h: setattr(h, "assigned", trained(0, 200, {})), "differ at step 100"),
        (lambda h: setattr(h, "assigned", trained(0, 150, {})), "report step 200. Received: \\[\\]"),
        (lambda h: h.undisturbed[1].pop(600), "All workers should report step 600. Received: \\[0\\]"),
        (lambda h: setattr(h, "undisturbed", trained(0, 600, {350: "ab"})), "be equal at step 350"),
        (lambda h: setattr(h, "undisturbed", trained(0, 600, {100: "aa"})), "as worker 1's alone was"),
        (lambda h: setattr(h, "restarted", [{}, {}]), "begin with one checkpoint"),
        (lambda h: setattr(h, "restarted", trained(0, 600, {})), "one checkpoint. Received: \\[0, 0\\]"),
        (lambda h: h.restarted[0].pop(225), "one checkpoint. Received: \\[250, 225\\]"),
        (lambda h: setattr(h, "restarted", trained(225, 600, {600: "88"})), "with the weights of part 2"),
    ],
)
def test_a_claim_that_does_not_hold_fails_the_demo_and_is_named(
    falsify: Callable[[Happened], None], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened = Happened()
    falsify(happened)
    with pytest.raises(Failed, match=expected):
        happened.play(tmp_path, monkeypatch)


def test_reports_are_found_among_other_output_and_not_before_their_line_is_complete(tmp_path: Path) -> None:
    digest = "0123456789abcdef" * 4
    logs = tmp_path / "run" / "logs" / "attempt-0"
    logs.mkdir(parents=True)
    said = f"Hello\nstep 50, weights {digest}\nsaid: step 7, weights {digest}\nstep 60, weights {digest[:-1]}"
    (logs / "worker-1.log").write_text(said)
    with DemoJob(tmp_path, "run", "replicast --version") as job:
        assert job.reports() == [{}, {50: digest}]
        assert job.reports(attempt=1) == [{}, {}]


def test_a_command_that_fails_fails_the_demo_with_what_it_said(tmp_path: Path) -> None:
    made_run(tmp_path / "run")
    told, job = Story(tmp_path, Console(file=io.StringIO())), DemoJob(tmp_path, "run", "replicast --version")
    with job, pytest.raises(Failed, match=r"should end with 0. Received: 1(?s:.*)hidden/kernel"):
        told._push(job, "run")


def test_a_job_that_fails_or_ends_too_early_fails_with_its_output(tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit('broken on purpose')")
    with (
        DemoJob(tmp_path, "run", "replicast run --run-dir run fails.py") as failing,
        pytest.raises(Failed, match=r"exit code 0. Received: exit code 1(?s:.*)broken on purpose"),
    ):
        failing.finish()
    (tmp_path / "ends.py").write_text("print('done')")
    with (
        DemoJob(tmp_path, "run", "replicast run --run-dir run ends.py") as ending,
        pytest.raises(Failed, match=r"report step 50. Received: exit code 0(?s:.*)done"),
    ):
        ending.wait_until(lambda: False, "All workers should report step 50")


def test_a_job_that_takes_too_long_fails_and_leaves_no_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(story, "time", clock)
    (tmp_path / "sleeps.py").write_text(
        "import os, pathlib, time\npathlib.Path('process').write_text(str(os.getpid()))\ntime.sleep(60)"
    )
    noted = tmp_path / "process"
    with DemoJob(tmp_path, "run", "replicast run --run-dir run sleeps.py") as sleeping:
        eventually(lambda: noted.exists() and noted.read_text())
        clock.added_secs = story.JOB_SECS
        with pytest.raises(Failed, match="still running after 180 s"):
            sleeping.wait_until(lambda: False, "All workers should report step 50")
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
