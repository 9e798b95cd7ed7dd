"""Trials on the command line: pushed, listed, shown."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console
from rich.status import Status
from rich.text import Text

from replicast.cli.updates import live_line
from replicast.client import connect
from replicast.core.records import Stage
from replicast.storage import inbox
from replicast.update.trial import Trial, TrialOutcome
from replicast.update.update import Update
from tests.unit.played_job import PlayedJob, heard_of, invoke, made_run, meanwhile


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "110")
    return made_run()


def committed(run: Path, outcome: TrialOutcome | None) -> None:
    """What a job leaves of an update that was on trial."""
    job = PlayedJob(run)
    job.fate, job.outcome = Stage.REVERTED, outcome
    job.stops_at = Stage.COMMITTED if outcome is None else None
    update = Update(id="tried", author="me").assign("learning_rate", 1)
    inbox.submit(run, update, trial=Trial(50, max_increase=0.05))
    job.act_all()


REVERTED = TrialOutcome(
    1, "reverted", 57, "loss", 0.5, 0.75, "loss was 0.5 before the update, and 0.75 in the trial"
)


def test_a_trial_is_pushed_with_what_it_is_judged_by(run: Path) -> None:
    words = ("--trial-steps", 50, "--trial-metric", "accuracy", "--max-increase", 0.05, "--trial-mode", "max")
    assert invoke("push", run, "--set", "learning_rate=1", *words).exit_code == 0
    (waiting,) = inbox.waiting(run)
    assert inbox.read(waiting.path).trial == Trial(50, "accuracy", 0.05, "max")


@pytest.mark.parametrize(
    "words",
    [
        ("--max-increase", 0.1),
        ("--max-increase", 0.0),
        ("--trial-metric", "loss"),
        ("--trial-mode", "min"),
        ("--trial-steps", 0),
        ("--trial-steps", 5, "--max-increase", "nan"),
    ],
)
def test_a_trial_that_makes_no_sense_is_a_wrong_command(run: Path, words: tuple[object, ...]) -> None:
    assert invoke("push", run, "--set", "learning_rate=1", *words).exit_code == 2
    assert not inbox.waiting(run)


def test_a_dry_run_shows_the_trial_and_says_that_it_knows_no_guard(run: Path) -> None:
    words = ("--trial-steps", 50, "--max-increase", 0.05, "--dry-run")
    said = invoke("push", run, "--set", "learning_rate=1", *words).output
    assert "On trial: 50 steps, loss, at most 5 % worse." in said
    assert "The job may have a guard" in said
    said = invoke("push", run, "--set", "learning_rate=1", "--dry-run").output
    assert "On trial" not in said
    assert "The job may have a guard" in said


def test_an_update_that_is_on_trial_is_listed_and_shown_as_such(run: Path) -> None:
    committed(run, None)
    assert "on trial: 50 steps, loss, at most 5 % worse" in invoke("log", run).output
    assert "50 steps, loss, at most 5 % worse" in invoke("show", run, 1).output
    described = json.loads(invoke("log", run, "--json").output)
    assert described["trial"] == {**Trial(50, max_increase=0.05).to_json(), "before": 0.5}


def test_how_a_trial_ended_is_listed_and_shown(run: Path) -> None:
    committed(run, REVERTED)
    said = "reverted at step 57: all replicas are back at their state before the update"
    listed = " ".join(invoke("log", run).output.split())
    assert "trial: reverted" in listed
    for command in (("log", run), ("status", run), ("show", run, "tried")):
        output = invoke(*command).output
        assert "reverted" in output
        assert "verified" not in output, "all replicas have the state of before"
    assert said in " ".join(invoke("show", run, "tried").output.split())
    described = json.loads(invoke("log", run, "--json").output)
    assert (described["stage"], described["outcome"]) == ("reverted", REVERTED.to_json())


def said_first(output: str) -> str:
    return output.splitlines()[1]


def test_waiting_for_a_trial_that_is_reverted_ends_with_its_own_exit_code(run: Path) -> None:
    committed(run, REVERTED)
    result = invoke("push", run, "--set", "learning_rate=1", "--id", "tried", "--wait", "--timeout", 5)
    assert result.exit_code == 4
    assert said_first(result.output) == "reverted: number 1, applied at step 7"
    assert "verified" not in result.output
    assert "loss was 0.5 before the update, and 0.75 in the trial" in result.output


HOSTILE = "\x1b[2Jgone\x07 [red]text[/red] [/nonsense]\rover"


def is_harmless(output: str) -> bool:
    return not any(character in output for character in "\x1b\x07\r") and "[red]text" in output


def test_what_files_say_of_a_trial_reaches_no_terminal_raw(run: Path) -> None:
    committed(run, replace(REVERTED, reason=HOSTILE, metric=HOSTILE))
    wait = ("push", run, "--set", "learning_rate=1", "--id", "tried", "--wait", "--timeout", 5)
    for command in (("log", run), ("status", run), ("show", run, "tried"), wait):
        output = " ".join(invoke(*command).output.split())
        assert is_harmless(output), command


def test_what_an_update_waits_for_reaches_no_terminal_raw(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert invoke("push", run, "--set", "learning_rate=1", "--id", "behind").exit_code == 0
    inbox.note_stage(run, "behind", Stage.PROPOSED, waits_for=HOSTILE)
    waited = invoke("push", run, "--set", "learning_rate=1", "--id", "behind", "--wait", "--timeout", 0.1)
    assert is_harmless(waited.output)
    shown: list[object] = []
    monkeypatch.setattr(Status, "update", lambda _self, text: shown.append(text))
    with live_line(Console(file=io.StringIO(), force_terminal=True)) as show:
        for view, brief in connect(run).follow("behind", 0.0):
            show(view, brief)
    (text,) = shown
    assert isinstance(text, Text), "a string is searched for markup"
    assert is_harmless(text.plain)


def test_names_of_directories_reach_no_terminal_raw(run: Path) -> None:
    (Path("beside") / HOSTILE.replace("/", "")).mkdir(parents=True)
    made_run(Path("beside") / HOSTILE.replace("/", ""))
    said = invoke("status", "beside")
    assert (said.exit_code, is_harmless(said.output)) == (2, True)
    inside = run / f"replicas-{HOSTILE.replace('/', '')}"
    made_run(inside)
    heard_of(run, secs_ago=60)
    assert is_harmless(" ".join(invoke("status", run).output.split()))
    assert is_harmless(" ".join(invoke("status", inside).output.split()))
    assert is_harmless(" ".join(invoke("checkpoint", "list", Path("beside")).output.split()) + "[red]text")


def test_a_wait_behind_a_trial_is_reported(run: Path) -> None:
    assert invoke("push", run, "--set", "learning_rate=1", "--id", "behind").exit_code == 0
    inbox.note_stage(run, "behind", Stage.PROPOSED, waits_for="the trial of update 3, until step 55")
    waited = invoke("push", run, "--set", "learning_rate=1", "--id", "behind", "--wait", "--timeout", 0.1)
    assert "is proposed and waits for the trial of update 3, until step 55" in waited.output


def test_waiting_for_a_trial_says_until_when_it_lasts_and_ends_with_the_verdict(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = PlayedJob(run)
    job.outcome = TrialOutcome(1, "kept", 57, "loss", 0.5, 0.5, "loss was 0.5 before the update")
    meanwhile(monkeypatch, job.act)
    words = ("--trial-steps", 50, "--id", "tried", "--wait", "--timeout", 60)
    result = invoke("push", run, "--set", "learning_rate=1", *words)
    lines = result.output.splitlines()
    assert "applied at step 7, on trial until step 57" in lines
    assert "applied" not in lines
    assert (result.exit_code, lines[-1].strip()) == (0, "kept at step 57: loss was 0.5 before the update")


def test_a_trial_that_outlasts_the_wait_is_said_to_be_on_trial(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = PlayedJob(run)
    job.stops_at = Stage.APPLIED
    meanwhile(monkeypatch, job.act)
    words = ("--trial-steps", 50, "--id", "tried", "--wait", "--timeout", 5)
    result = invoke("push", run, "--set", "learning_rate=1", *words)
    assert result.exit_code == 3
    assert "update tried is applied at step 7, on trial until step 57, the job is at step 5." in result.output
    assert "For the verdict: replicast show run tried" in result.output
    assert "Every worker applies it" not in result.output
