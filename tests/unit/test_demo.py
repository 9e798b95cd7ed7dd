"""The demo without its workers: claims by tables, notes in files, and what the screen says."""

from __future__ import annotations

import importlib.util
import io
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from replicast.cli import main
from replicast.demo import act_two
from replicast.demo.act_one import ASSIGNED, CONTINUED, TRAINED, OneWorkerAssigns, differences_from_the_claim
from replicast.demo.act_two import PUSHED, SYNCED, EveryReplicaFollows
from replicast.demo.acts import WORKERS, programme, total_steps
from replicast.demo.audience import Audience
from replicast.demo.errands import Errand, RunningErrand, start
from replicast.demo.notes import Moment, Note, NoteReader, NoteWriter, Progress, notes_path
from replicast.demo.runner import run_demo
from replicast.demo.screen import WIDEST, make_console, progress_bar
from replicast.supervisor import Job, Settings
from replicast.update import Update

ACT_ONE_AS_CLAIMED = {TRAINED: "aa", ASSIGNED: "ba", CONTINUED: "dc"}
AS_CLAIMED = {**ACT_ONE_AS_CLAIMED, SYNCED: "00", PUSHED: "ff", act_two.CONTINUED: "ee"}
"""At each moment the digests of worker 0 and worker 1, a character each, which stands for the sum too."""


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


class Errands:
    """Plays the process outside, and remembers what it was asked for."""

    def __init__(self) -> None:
        self.started: list[Errand] = []
        self.code: int | None = 0
        self.stopped = 0

    def start(self, errand: Errand, width: int) -> RunningErrand:
        self.started.append(errand)
        return self

    def exit_code(self, wait_secs: float = 0.0) -> int | None:
        return self.code

    def output(self) -> str:
        return "the receipt [of the errand]\n"

    def stop(self) -> None:
        self.stopped += 1


@pytest.fixture(autouse=True)
def errands(monkeypatch: pytest.MonkeyPatch) -> Errands:
    outside = Errands()
    monkeypatch.setattr("replicast.demo.audience.start", outside.start)
    return outside


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


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({SYNCED: "01"}, ["equal after replicas.sync"]),
        ({PUSHED: "fe"}, ["equal after the push"]),
        ({act_two.CONTINUED: "ef"}, ["equal 50 more steps later"]),
        ({PUSHED: "11"}, ["worker 0 should sum to about 102 more", "worker 1 should sum to about 102 more"]),
        ({PUSHED: "f0"}, ["equal after the push", "worker 1 should sum to about 102 more"]),
    ],
)
def test_act_two_says_what_did_not_happen(changed: dict[str, str], expected: list[str]) -> None:
    problems = act_two.differences_from_the_claim(replicas({**AS_CLAIMED, **changed}))
    assert len(problems) == len(expected)
    for problem, part in zip(problems, expected, strict=True):
        assert part in problem


def test_act_two_draws_its_conclusion_only_when_it_is_true() -> None:
    conclusion = "every replica follows"
    true, false = Screen(), Screen()
    assert EveryReplicaFollows().show(replicas(AS_CLAIMED), true.console) == []
    assert conclusion in " ".join(true.text.split())
    assert EveryReplicaFollows().show(replicas({**AS_CLAIMED, PUSHED: "fe"}), false.console) != []
    assert conclusion not in " ".join(false.text.split())


def test_act_two_shows_the_different_replicas_of_act_one_above_its_equal_ones() -> None:
    screen = Screen()
    EveryReplicaFollows().show(replicas(AS_CLAIMED), screen.console)
    answers = [line.split()[-1] for line in screen.text.splitlines() if line.rstrip().endswith(("NO", "yes"))]
    assert answers == ["NO", "yes", "yes", "yes"]


@dataclass
class FakeReplicas:
    """The replicas of a worker whose updates come when it says so."""

    history: list[SimpleNamespace] = field(default_factory=list)
    step: int = 0
    synced: list[int] = field(default_factory=list)

    def sync(self, source: int) -> None:
        self.synced.append(source)
        self.history.append(SimpleNamespace(id="sync", step=0))


class FakePlayer:
    """A worker that notes what it does, and gets an update at a step."""

    rank = 0
    model = None

    def __init__(self, update_at: int | None) -> None:
        self.done: list[str | int] = []
        self._update_at = update_at
        self._replicas = FakeReplicas()

    def train(self, doing: str, steps: int) -> None:
        self.done.append(steps)
        self._replicas.step += steps
        if self._update_at is not None and self._update_at <= self._replicas.step:
            self._replicas.history.append(SimpleNamespace(id="pushed", step=self._update_at))

    def open_replicas(self) -> Any:
        return self._replicas

    def note_moment(self, name: str) -> None:
        self.done.append(name)


@pytest.mark.parametrize(("update_at", "pieces"), [(1, 1), (99, 1), (100, 2), (101, 2), (250, 3)])
def test_act_two_trains_until_an_update_of_an_earlier_step_is_there(update_at: int, pieces: int) -> None:
    player = FakePlayer(update_at)
    EveryReplicaFollows().play(player)
    assert player.done == [SYNCED, *[100] * pieces, PUSHED, 50, act_two.CONTINUED]


def test_act_two_gives_up_when_no_update_comes() -> None:
    player = FakePlayer(None)
    EveryReplicaFollows().play(player)
    assert player.done == [SYNCED, *[100] * act_two.MOST_PIECES]


def test_act_two_pushes_a_plain_file_of_the_change_of_act_one(tmp_path: Path) -> None:
    act = EveryReplicaFollows()
    errand = act.errand(SYNCED, tmp_path)
    assert errand is not None
    assert errand.command == "replicast push run --add delta.safetensors --wait"
    (edit,) = Update.from_tensors(tmp_path / "delta.safetensors", "add").edits
    assert edit.variable == "hidden/kernel"
    np.testing.assert_array_equal(edit.arrays["value"], np.full((64, 32), 0.05, np.float32))
    assert act.errand(PUSHED, tmp_path) is None


def test_an_errand_is_shown_as_typed_and_with_all_that_it_printed(tmp_path: Path, errands: Errands) -> None:
    screen = Screen()
    audience = play(tmp_path, AS_CLAIMED, screen)
    assert len(errands.started) == 1
    assert f"   $ {errands.started[0].command}\n   the receipt [of the errand]\n" in screen.text
    assert audience.problems == []
    assert errands.stopped == 0


def test_an_errand_that_fails_is_a_problem(tmp_path: Path, errands: Errands) -> None:
    errands.code = 3
    screen = Screen()
    problems = play(tmp_path, AS_CLAIMED, screen).problems
    assert problems == [f"`{errands.started[0].command}` ended with exit code 3"]
    assert "the receipt [of the errand]" in screen.text


def test_an_errand_that_does_not_end_is_stopped_when_the_workers_have_ended(
    tmp_path: Path, errands: Errands
) -> None:
    errands.code = None
    audience = play(tmp_path, AS_CLAIMED, Screen())
    assert errands.stopped == 1
    assert audience.missing == [PUSHED, act_two.CONTINUED]


def test_an_errand_is_a_process_whose_output_and_exit_code_are_kept(tmp_path: Path) -> None:
    running = start(Errand("", ("no-such-command",), tmp_path), 80)
    assert running.exit_code(60.0) == 2
    assert "No such command 'no-such-command'" in running.output()
    running.stop()


def test_an_errand_that_is_stopped_has_ended(tmp_path: Path) -> None:
    running = start(Errand("", ("run", "-n", "1", str(_script_that_waits(tmp_path))), tmp_path), 80)
    assert running.exit_code() is None
    running.stop()
    assert running.exit_code() is not None


def _script_that_waits(directory: Path) -> Path:
    script = directory / "waits.py"
    script.write_text("import threading; threading.Event().wait()")
    return script


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
    assert audience.missing == [ASSIGNED, CONTINUED, SYNCED, PUSHED, act_two.CONTINUED]
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
        (AS_CLAIMED, 0, 0, "every replica follows"),
        (ACT_ONE_AS_CLAIMED, 0, 1, "the moment 'after the push' never came"),
        ({**AS_CLAIMED, PUSHED: "fe"}, 0, 1, "should be equal after the push, and are not"),
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
