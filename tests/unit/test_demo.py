"""The demo without its workers: claims by tables, notes in files, and what the screen says."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from replicast.cli import main
from replicast.demo import act_three, act_two
from replicast.demo.act_one import ASSIGNED, CONTINUED, TRAINED, OneWorkerAssigns, differences_from_the_claim
from replicast.demo.act_three import HALFWAY, RECOVERED, RESTORED, UNDISTURBED, NothingIsLost
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
ACT_THREE_AS_CLAIMED = {UNDISTURBED: "cc", HALFWAY: "bb", RESTORED: "aa", RECOVERED: "cc"}
AS_CLAIMED = {
    **ACT_ONE_AS_CLAIMED,
    SYNCED: "00",
    PUSHED: "ff",
    act_two.CONTINUED: "ee",
    **ACT_THREE_AS_CLAIMED,
}
"""At each moment the digests of worker 0 and worker 1, a character each, which stands for the sum too."""
FIRST_PROCESS = 2**22 + 1  # Above what the kernel gives out: no process has it.


def moment(name: str, worker: int, digest: str) -> Moment:
    later_life = name in (RESTORED, RECOVERED)
    return Moment(
        name=name,
        worker=worker,
        weights_sum=float(ord(digest)),
        digest=digest * 32,
        step=act_three.EXPECTED_STEPS.get(name, 0),
        process=FIRST_PROCESS + worker + (WORKERS if later_life else 0),
    )


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

    def train(self, doing: str, steps: int, after_step: Callable[[int], None] | None = None) -> None:
        self.done.append(steps)
        self._replicas.step += steps
        if self._update_at is not None and self._update_at <= self._replicas.step:
            self._replicas.history.append(SimpleNamespace(id="pushed", step=self._update_at))

    def open_replicas(self) -> Any:
        return self._replicas

    def begin_again(self, run: str, *, save_every: int) -> Any:
        raise NotImplementedError

    def note_moment(self, name: str) -> None:
        self.done.append(name)

    def has_noted(self, name: str) -> bool:
        return name in self.done

    def wait_for_the_end(self, sender: str) -> None:
        raise NotImplementedError


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
    errand = act.errand(SYNCED, {}, tmp_path)
    assert errand is not None
    assert errand.command == "replicast push run --add delta.safetensors --wait"
    (edit,) = Update.from_tensors(tmp_path / "delta.safetensors", "add").edits
    assert edit.variable == "hidden/kernel"
    np.testing.assert_array_equal(edit.arrays["value"], np.full((64, 32), 0.05, np.float32))
    assert act.errand(PUSHED, {}, tmp_path) is None


class Killed(BaseException):
    """The end of a process that is played."""


@dataclass
class PlayedReplicas:
    """Replicas with checkpoints, as act three knows them."""

    checkpoint: int | None
    settled: int = 0
    proposed: list[tuple[Update, int]] = field(default_factory=list)
    step: int = 0

    def __post_init__(self) -> None:
        self.recovery = self

    def restore(self) -> object | None:
        self.step = self.checkpoint or 0
        return None if self.checkpoint is None else object()

    def settle(self) -> None:
        self.settled += 1

    def propose(self, update: Update, *, at_step: int) -> None:
        self.proposed.append((update, at_step))


class LivingPlayer:
    """A worker that has lives: one that is killed, and the next, which knows what the first has noted."""

    model = None

    def __init__(self, rank: int, noted: Mapping[str, int], checkpoint: int | None) -> None:
        self.rank = rank
        self.noted = dict(noted)
        self.replicas: dict[str, PlayedReplicas] = {}
        self._checkpoint = checkpoint
        self._now = PlayedReplicas(None)

    def begin_again(self, run: str, *, save_every: int) -> Any:
        self._now = self.replicas[run] = PlayedReplicas(self._checkpoint if run == "killed" else None)
        return self._now

    def train(self, doing: str, steps: int, after_step: Callable[[int], None] | None = None) -> None:
        assert after_step is not None
        while self._now.step < steps:
            self._now.step += 1
            after_step(self._now.step)

    def open_replicas(self) -> Any:
        raise NotImplementedError

    def note_moment(self, name: str) -> None:
        self.noted[name] = self._now.step

    def has_noted(self, name: str) -> bool:
        return name in self.noted

    def wait_for_the_end(self, sender: str) -> None:
        raise Killed(sender)


def test_act_three_waits_to_be_killed_and_goes_on_from_the_checkpoint_in_its_next_life() -> None:
    first = LivingPlayer(1, {}, None)
    with pytest.raises(Killed, match=f"kill -9 {os.getpid()}"):
        NothingIsLost().play(first)
    assert first.noted == {UNDISTURBED: 200, HALFWAY: 150}
    assert list(first.replicas) == ["undisturbed", "killed"]
    assert first.replicas["killed"].settled == 1

    second = LivingPlayer(1, first.noted, 100)
    NothingIsLost().play(second)
    assert second.noted == act_three.EXPECTED_STEPS
    assert list(second.replicas) == ["killed"]
    assert second.replicas["killed"].settled == 0


def test_act_three_proposes_the_same_change_in_every_run_on_one_worker() -> None:
    first, second = LivingPlayer(1, {}, None), LivingPlayer(1, {UNDISTURBED: 200}, 100)
    with pytest.raises(Killed):
        NothingIsLost().play(first)
    NothingIsLost().play(second)
    proposed = [run.proposed for run in (*first.replicas.values(), *second.replicas.values())]
    assert [[step for _, step in each] for each in proposed] == [[140], [140], [140]]
    other = LivingPlayer(0, {}, None)
    NothingIsLost().play(other)
    assert [run.proposed for run in other.replicas.values()] == [[], []]


def test_act_three_kills_a_process_of_the_first_life(tmp_path: Path) -> None:
    act = NothingIsLost()
    errand = act.errand(HALFWAY, replicas(AS_CLAIMED), tmp_path)
    assert errand is not None
    assert errand.command == f"kill -9 {FIRST_PROCESS + 1}"
    assert [act.errand(name, {}, tmp_path) for name in act.moments if name != HALFWAY] == [None] * 3


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({HALFWAY: "bc"}, ["equal at 'before the kill, 150'"]),
        ({RESTORED: "ab"}, ["equal at 'restored, step 100'"]),
        ({RECOVERED: "dd"}, ["worker 0 should end as in the undisturbed run", "worker 1 should end as in"]),
        ({RECOVERED: "cd"}, ["equal at 'recovered, step 200'", "worker 1 should end as in"]),
    ],
)
def test_act_three_says_what_did_not_happen(changed: dict[str, str], expected: list[str]) -> None:
    problems = act_three.differences_from_the_claim(replicas({**AS_CLAIMED, **changed}))
    assert len(problems) == len(expected)
    for problem, part in zip(problems, expected, strict=True):
        assert part in problem


def test_act_three_notices_a_worker_that_was_never_killed_and_a_checkpoint_of_another_step() -> None:
    found = replicas(AS_CLAIMED)
    process = found[HALFWAY][1].process
    found[RESTORED][1] = dataclasses.replace(found[RESTORED][1], process=process, step=0)
    wrong_step, same_process = act_three.differences_from_the_claim(found)
    assert "worker 1 should be at step 100 at 'restored, step 100', and is at step 0" in wrong_step
    assert "worker 1 should be a new process" in same_process


def test_act_three_ends_with_both_digests_and_draws_its_conclusion_only_when_it_is_true() -> None:
    true, false = Screen(), Screen()
    assert NothingIsLost().show(replicas(AS_CLAIMED), true.console) == []
    last = " ".join(true.text.split())[-120:]
    assert "Undisturbed: cccccccc. Killed and recovered: cccccccc. Equal, bit for bit" in last
    assert NothingIsLost().show(replicas({**AS_CLAIMED, RECOVERED: "dd"}), false.console) != []
    assert "Equal, bit for bit" not in " ".join(false.text.split())


def test_the_bar_says_what_goes_on_after_the_kill(tmp_path: Path) -> None:
    shown: list[Progress] = []
    bar = SimpleNamespace(show=shown.append)
    NoteWriter(notes_path(tmp_path, 0)).write(Progress(doing="training", done=7, loss=0.5))
    with Audience(programme(), tmp_path, bar, Screen().console):
        for worker in range(WORKERS):
            for name, both in AS_CLAIMED.items():
                NoteWriter(notes_path(tmp_path, worker)).write(moment(name, worker, both[worker]))
    assert Progress(doing="starting both again", done=7, loss=None) in shown


def test_an_errand_can_be_a_command_of_the_shell(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as victim:
        running = start(Errand("", ("-9", str(victim.pid)), tmp_path, program="kill"), 80)
        assert running.exit_code(60.0) == 0
        assert victim.wait(60.0) == -signal.SIGKILL
    assert running.output() == ""


def test_an_errand_is_shown_as_typed_and_with_all_that_it_printed(tmp_path: Path, errands: Errands) -> None:
    screen = Screen()
    audience = play(tmp_path, AS_CLAIMED, screen)
    assert [errand.program for errand in errands.started] == ["replicast", "kill"]
    assert f"   $ {errands.started[0].command}\n   the receipt [of the errand]\n" in screen.text
    assert audience.problems == []
    assert errands.stopped == 0


def test_an_errand_that_fails_is_a_problem(tmp_path: Path, errands: Errands) -> None:
    errands.code = 3
    screen = Screen()
    problems = play(tmp_path, AS_CLAIMED, screen).problems
    assert problems == [f"`{errand.command}` ended with exit code 3" for errand in errands.started]
    assert "the receipt [of the errand]" in screen.text


def test_an_errand_that_does_not_end_is_stopped_when_the_workers_have_ended(
    tmp_path: Path, errands: Errands
) -> None:
    errands.code = None
    audience = play(tmp_path, AS_CLAIMED, Screen())
    assert errands.stopped == 1
    assert audience.missing == [PUSHED, act_two.CONTINUED, *ACT_THREE_AS_CLAIMED]


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
        dataclasses.replace(moment(TRAINED, worker, "a"), weights_sum=1.0, digest="a" * 31 + str(worker))
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
    assert audience.missing == [
        ASSIGNED,
        CONTINUED,
        SYNCED,
        PUSHED,
        act_two.CONTINUED,
        *ACT_THREE_AS_CLAIMED,
    ]
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
        (AS_CLAIMED, 0, 0, "the crash has lost nothing"),
        ({**AS_CLAIMED, RECOVERED: "dd"}, 0, 1, "worker 0 should end as in the undisturbed run"),
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
