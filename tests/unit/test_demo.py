"""The demo without its workers: claims by tables, notes in files, and what the screen says."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from replicast.cli import main
from replicast.demo.act_one import ASSIGNED, CONTINUED, TRAINED, OneWorkerAssigns, differences_from_the_claim
from replicast.demo.acts import WORKERS, programme, total_steps
from replicast.demo.audience import Audience
from replicast.demo.notes import Moment, Note, NoteReader, NoteWriter, Progress, notes_path
from replicast.demo.runner import run_demo
from replicast.demo.screen import WIDEST, make_console, progress_bar
from replicast.supervisor import Job, Settings

AS_CLAIMED = {TRAINED: "aa", ASSIGNED: "ba", CONTINUED: "dc"}
"""At each moment the digests of worker 0 and worker 1, a letter each."""


def moment(name: str, worker: int, digest: str) -> Moment:
    return Moment(name=name, worker=worker, weights_sum=float(ord(digest)), digest=digest * 32)


def replicas(digests: dict[str, str]) -> dict[str, list[Moment]]:
    return {
        name: [moment(name, worker, digest) for worker, digest in enumerate(both)]
        for name, both in digests.items()
    }


class Screen:
    """A console without a terminal."""

    def __init__(self, width: int = 80) -> None:
        self._file = io.StringIO()
        self.console = Console(file=self._file, width=width, highlight=False)

    @property
    def text(self) -> str:
        return self._file.getvalue()


def play(notes_dir: Path, digests: dict[str, str], screen: Screen) -> Audience:
    """Has an audience read the notes of workers that reached these moments."""
    with progress_bar(1, "starting", screen.console) as bar:
        audience = Audience(programme(), notes_dir, bar, screen.console)
        with audience:
            for worker in range(WORKERS):
                writer = NoteWriter(notes_path(notes_dir, worker))
                for name, both in digests.items():
                    writer.write(moment(name, worker, both[worker]))
    return audience


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({TRAINED: "ab"}, ["equal after training"]),
        ({ASSIGNED: "aa"}, ["differ after worker 0"]),
        ({CONTINUED: "cc"}, ["still differ"]),
        ({TRAINED: "ab", ASSIGNED: "aa", CONTINUED: "cc"}, ["equal after", "differ after", "still differ"]),
    ],
)
def test_act_one_says_what_did_not_happen(changed: dict[str, str], expected: list[str]) -> None:
    problems = differences_from_the_claim(replicas({**AS_CLAIMED, **changed}))
    assert len(problems) == len(expected)
    for problem, part in zip(problems, expected, strict=True):
        assert part in problem


def test_act_one_draws_its_conclusion_only_when_it_is_true() -> None:
    conclusion = "different for ever"
    true, false = Screen(), Screen()
    assert OneWorkerAssigns().show(replicas(AS_CLAIMED), true.console) == []
    assert conclusion in " ".join(true.text.split())
    assert OneWorkerAssigns().show(replicas({**AS_CLAIMED, CONTINUED: "cc"}), false.console) != []
    assert conclusion not in " ".join(false.text.split())


def test_the_table_compares_whole_digests_and_shows_short_ones() -> None:
    late_difference = replicas(AS_CLAIMED)
    late_difference[TRAINED] = [
        Moment(name=TRAINED, worker=worker, weights_sum=1.0, digest="a" * 31 + str(worker))
        for worker in (0, 1)
    ]
    screen = Screen()
    assert OneWorkerAssigns().show(late_difference, screen.console) != []
    row = next(line for line in screen.text.splitlines() if line.startswith(TRAINED))
    assert row.split()[-5:] == ["1.0000", "aaaaaaaa", "1.0000", "aaaaaaaa", "NO"]


def test_an_audience_tells_every_moment_and_shows_the_act(tmp_path: Path) -> None:
    screen = Screen()
    audience = play(tmp_path, AS_CLAIMED, screen)
    assert audience.problems == []
    assert audience.missing == []
    act = OneWorkerAssigns()
    positions = [screen.text.index(part) for part in ("starting", act.title, "1. ", "2. ", "3. ", "equal?")]
    assert positions == sorted(positions)


def test_an_audience_knows_which_moments_never_came(tmp_path: Path) -> None:
    screen = Screen()
    audience = play(tmp_path, {TRAINED: "aa"}, screen)
    assert audience.missing == [ASSIGNED, CONTINUED]
    assert "equal?" not in screen.text


def test_without_a_terminal_the_screen_is_plain_text_of_80_columns(tmp_path: Path) -> None:
    screen = Screen()
    play(tmp_path, AS_CLAIMED, screen)
    assert all(character.isprintable() or character == "\n" for character in screen.text)
    assert max(len(line.rstrip()) for line in screen.text.splitlines()) <= 80


@pytest.mark.parametrize("terminal", [False, True])
def test_a_narrow_screen_that_knows_only_ascii_gets_everything(terminal: bool, tmp_path: Path) -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    environ = {"TERM": "xterm"}
    screen = Screen()
    screen.console = Console(
        file=file, width=50, highlight=False, force_terminal=terminal, legacy_windows=False, _environ=environ
    )
    play(tmp_path, AS_CLAIMED, screen)
    file.seek(0)
    text = file.read()
    assert "NO" in text
    assert "different for ever" in " ".join(text.split())


def test_an_audience_that_fails_is_heard_when_the_workers_have_ended(tmp_path: Path) -> None:
    notes_path(tmp_path, 0).write_text("no note\n")
    with pytest.raises(json.JSONDecodeError):
        play(tmp_path, {}, Screen())


def test_a_wide_terminal_is_not_used_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert make_console().width == WIDEST
    monkeypatch.setenv("COLUMNS", "60")
    assert make_console().width == 60


def test_with_no_color_a_terminal_gets_no_colour() -> None:
    environ = {"NO_COLOR": "1", "TERM": "xterm-256color"}
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, highlight=False, _environ=environ)
    OneWorkerAssigns().show(replicas(AS_CLAIMED), console)
    assert "\x1b[1m" in file.getvalue()
    assert "\x1b[3" not in file.getvalue().replace("\x1b[3m", "")


def test_the_bar_is_as_long_as_the_acts(tmp_path: Path) -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, _environ={"TERM": "xterm"})
    steps = total_steps(programme())
    with progress_bar(steps, "starting two workers", console) as bar:
        bar.show(Progress(doing="training", done=steps // 2, loss=0.5))
        bar.show(Progress(doing="training", done=steps, loss=0.25))
    assert "training, loss 0.250" in file.getvalue()
    assert "100%" in file.getvalue()


@pytest.mark.parametrize(
    ("digests", "workers_code", "expected", "said"),
    [
        (AS_CLAIMED, 0, 0, "different for ever"),
        ({**AS_CLAIMED, CONTINUED: "cc"}, 0, 1, "should still differ after 50 more steps"),
        ({TRAINED: "aa"}, 0, 1, "the moment 'after worker 0 assigned' never came"),
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


def test_notes_come_back_as_they_were_written_and_only_once(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.jsonl"
    reader = NoteReader(path)
    assert list(reader.new()) == []
    written: list[Note] = [Progress(doing="training", done=3, loss=0.5), moment(TRAINED, 0, "a")]
    writer = NoteWriter(path)
    for note in written:
        writer.write(note)
    assert list(reader.new()) == written
    assert list(reader.new()) == []


def test_a_note_that_is_half_written_is_left_for_the_next_look(tmp_path: Path) -> None:
    path = tmp_path / "worker-0.jsonl"
    NoteWriter(path).write(moment(TRAINED, 0, "a"))
    whole = path.read_bytes()
    path.write_bytes(whole + whole[:20])
    reader = NoteReader(path)
    assert len(list(reader.new())) == 1
    path.write_bytes(whole + whole)
    assert len(list(reader.new())) == 1


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
