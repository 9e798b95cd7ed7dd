"""What the demo looks like: wide, narrow, without a terminal, without colours."""

from __future__ import annotations

import dataclasses
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from replicast.demo.act_one import TRAINED, OneWorkerAssigns
from replicast.demo.acts import programme, total_steps
from replicast.demo.notes import Progress
from replicast.demo.screen import WIDEST, make_console, print_output, progress_bar
from tests.unit.demo.played import AS_CLAIMED, Screen, moment, play, replicas


def test_the_table_compares_whole_digests_and_shows_short_ones() -> None:
    late_difference = replicas(AS_CLAIMED)
    late_difference[TRAINED] = [
        dataclasses.replace(moment(TRAINED, worker, "a"), weights_sum=1.0, digest="a" * 31 + str(worker))
        for worker in (0, 1)
    ]
    screen = Screen()
    assert OneWorkerAssigns().show(late_difference, screen.console) != []
    row = next(line for line in screen.text.splitlines() if line.startswith(TRAINED))
    assert row.split()[-5:] == ["1.0000", "aaaaaaaa", "1.0000", "aaaaaaaa", "NO"]


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
    text = re.sub(r"\x1b\[[\d;?]*\w", "", file.read())  # A style ends and begins again with every line.
    assert "NO" in text
    assert "different for ever" in " ".join(text.split())


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


def test_output_that_is_too_long_goes_on_below_with_the_indent_of_its_line() -> None:
    screen = Screen(width=24)
    print_output("first\n\n  worker [1] differs by a lot\n", screen.console)
    lines = [line.rstrip() for line in screen.text.splitlines()]
    assert lines == ["   first", "", "     worker [1] differs", "     by a lot"]
    print_output("", screen.console)
    assert len(screen.text.splitlines()) == len(lines)
