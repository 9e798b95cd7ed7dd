"""`replicast push`: its options, what it says while it waits, and how it ends, with a job that is played."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from rich.console import Console
from rich.status import Status
from rich.text import Text

from replicast.cli.push import live_line
from replicast.client import connect
from replicast.codec import sealed, unsealed
from replicast.core.entries import Stage
from replicast.storage import inbox
from replicast.storage.claims import Fence
from replicast.storage.run_files import ENDED, WITHOUT_CALLBACK, Change, JobState, write_change
from replicast.update.schema import Schema, planned
from replicast.update.trial import Trial, TrialOutcome
from replicast.update.update import Update
from tests.unit.played_job import (
    BIAS,
    SCHEMA,
    PlayedJob,
    flat,
    has,
    heard_of,
    invoke,
    made_run,
    meanwhile,
    output_of,
    pushed,
    tensors,
)

pytestmark = pytest.mark.usefixtures("wall_clock_stands_still")

SET = ("--set", "learning_rate=0.1", "--id", "x")
REVERTED = TrialOutcome(1, "reverted", 57, "loss", 0.5, 0.75, "loss was 0.5 before, and 0.75 in the trial")
HOSTILE = "\x1b[2Jgone\x07 [red]text[/red] [/nonsense]\rover"


@pytest.fixture
def job(run: Path, monkeypatch: pytest.MonkeyPatch) -> PlayedJob:
    """A job that acts whenever `push --wait` pauses."""
    played = PlayedJob(run)
    meanwhile(monkeypatch, played.act)
    return played


def interrupted(*_arguments: object) -> None:
    raise KeyboardInterrupt


def is_harmless(output: str) -> bool:
    return not any(character in output for character in "\x1b\x07\r") and "[red]text" in output


def test_one_number_is_assigned_and_the_id_is_printed(run: Path) -> None:
    result = output_of(0, "push", run, "--set", "learning_rate=5e-4", "--note", "slower", "--at-step", 9)
    update, at_step = pushed(run)
    assert f"pushed {update.id}\n" in result
    assert f"replicast show run {update.id}" in result
    assert (update.note, at_step, "@" in update.author) == ("slower", 9, True)
    (edit,) = planned(update, SCHEMA).edits
    assert (edit.operation, edit.variable) == ("assign", "optimizer/learning_rate")
    assert edit.arrays["value"] == np.float32(5e-4)
    output_of(0, "withdraw", run, update.id)
    output_of(0, "push", run, "--set", f"iteration={2**62 + 1}")
    assert planned(pushed(run)[0], SCHEMA).edits[0].arrays["value"] == 2**62 + 1, "whole numbers stay whole"


def test_operations_become_one_update_in_the_order_of_the_command_line(run: Path) -> None:
    factors = {"dense__kernel.a": np.ones((4, 1), np.float32), "dense__kernel.b": np.ones((1, 3), np.float32)}
    low, bias = tensors("low", **factors), tensors("bias", dense__bias=BIAS)
    Update(note="saved", author="ann").add("dense/bias", BIAS).save("saved.safetensors")
    output_of(
        0, "push", run, "--add", bias, "--scale", "dense/kernel=0.5", "--add-low-rank", low, "--add", bias,
        "--set", "learning_rate=1", "--blend", bias, "--weight", 0.25, "--update", "saved.safetensors",
        "--assign", bias, "--scale", "dense/bias=2",
    )  # fmt: skip
    update, _ = pushed(run)
    assert ", ".join(f"{edit.operation} {edit.variable}" for edit in update.edits) == (
        "add dense/bias, scale dense/kernel, add_low_rank dense/kernel, add dense/bias, "
        "assign learning_rate, blend dense/bias, add dense/bias, assign dense/bias, scale dense/bias"
    )
    assert [edit.factor for edit in update.edits if edit.factor is not None] == [0.5, 0.25, 2.0]
    assert (update.note, update.author) == ("saved", "ann")


def test_a_saved_update_keeps_its_id_and_flags_unless_others_are_given(run: Path) -> None:
    update = Update(id="mine", note="why", author="ann", allow_nonfinite=True)
    update.add("dense/bias", BIAS * np.nan).save("saved.safetensors")
    assert invoke("push", run, "--update", "saved.safetensors", "--reset-slots").exit_code == 0
    found, _ = pushed(run)
    assert (found.id, found.note, found.author) == ("mine", "why", "ann")
    assert (found.allow_nonfinite, found.reset_slots) == (True, True)
    assert invoke("withdraw", run, "mine").exit_code == 0
    options = ("--id", "other", "--note", "new", "--author", "bob")
    assert invoke("push", run, "--update", "saved.safetensors", *options).exit_code == 0
    found, _ = pushed(run)
    assert (found.id, found.note, found.author, found.reset_slots) == ("other", "new", "bob", False)


def test_a_trial_is_pushed_with_what_it_is_judged_by(run: Path) -> None:
    words = ("--trial-steps", 50, "--trial-metric", "accuracy", "--max-increase", 0.05, "--trial-mode", "max")
    output_of(0, "push", run, *SET, *words)
    assert inbox.read(inbox.waiting(run)[0].path).trial == Trial(50, "accuracy", 0.05, "max")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "Say what to change"),
        (["--blend", "bias.safetensors"], "--blend and --weight must be given together"),
        (["--add", "bias.safetensors", "--weight", "1"], "--blend and --weight must be given together"),
        (["--set", "learning_rate"], "NAME=NUMBER"),
        (["--set", "=1"], "NAME=NUMBER"),
        (["--set", "learning_rate=much"], "NAME=NUMBER"),
        (["--scale", "missing.safetensors"], "NAME=FACTOR or an existing file"),
        (["--add", "missing.safetensors"], "does not exist"),
        ([*SET, "--at-step", "-1"], "--at-step"),
        ([*SET, "--max-increase", 0.0], "--trial-steps"),
        ([*SET, "--trial-metric", "loss"], "--trial-steps"),
        ([*SET, "--trial-mode", "min"], "--trial-steps"),
        ([*SET, "--trial-steps", 0], "--trial-steps"),
        ([*SET, "--trial-steps", 5, "--max-increase", "nan"], "nan"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(run: Path, arguments: list[str], expected: str) -> None:
    tensors("bias", dense__bias=BIAS)
    output = output_of(2, "push", run, *arguments)
    assert expected in output
    assert "push --help" in output
    assert inbox.waiting(run) == []


def test_what_is_not_a_run_directory_is_a_usage_error(run: Path) -> None:
    Path("empty").mkdir()
    Path("logs").mkdir()
    Path("starting").mkdir()
    for node in (0, 1):  # On a directory that both hosts share.
        (Path("starting") / f"launcher-{node}.lock").touch()
    (Path("logs") / "launcher-2.lock").touch()  # Of the second host of a job; worker 0 is on the first.
    for path, expected in {
        "nowhere": "There is no directory nowhere",
        ".": "Perhaps: run.",
        "empty": "empty is not a run directory. Give the --run-dir",
        "logs": "is not shared with the first host",
        "starting": "No job has begun in starting yet. If it is starting, try again",
        "x" * 300: "File name too long",
    }.items():
        assert expected in flat(output_of(2, "status", path))


def test_every_problem_is_listed_with_variable_expected_and_received(run: Path) -> None:
    bad = tensors("bad", dense__bias=np.ones(4, np.float32), dense__kernl=BIAS, learning_rate=np.float32([1]))
    for more in ((), ("--dry-run",)):
        output = output_of(1, "push", run, "--add", bad, "--set", "learning_rate=nan", *more)
        assert (output.count("Refused: "), "=True" in output) == (4, False), "an argument of Python"
        assert has(
            output, "expected: (3,)", "received: (4,)", "perhaps model/dense/kernel", "--allow-nonfinite"
        )
    assert inbox.waiting(run) == []
    output_of(0, "push", run, "--set", "learning_rate=inf", "--allow-nonfinite")


def test_damaged_files_and_files_of_the_other_kind_are_refused(run: Path) -> None:
    bias = tensors("bias", dense__bias=BIAS)
    Path("short.safetensors").write_bytes(bias.read_bytes()[:-1])
    Update().add("dense/bias", BIAS).save("saved.safetensors")
    for arguments, expected in (
        (["--add", "short.safetensors"], "truncated"),
        (["--add", "saved.safetensors"], "--update"),
        (["--update", bias], "--add"),
        (["--add-rows", bias], "dense/bias.indices"),
        (["--set", "learning_rate=1", "--id", "../x"], "id is not valid"),
    ):
        assert expected in output_of(1, "push", run, *arguments)
    assert inbox.waiting(run) == []


def test_a_dry_run_shows_what_would_be_done_and_pushes_nothing(run: Path) -> None:
    good = output_of(0, "push", run, "--scale", "dense/kernel=0.5", "--reset-slots", "--dry-run")
    assert has(
        good, "model/dense/kernel", "optimizer/kernel_momentum", "No problems found", "may have a guard"
    )
    trial = ("--trial-steps", 50, "--max-increase", 0.05)
    for pushed_as, code in ((["--dry-run"], 1), ([], 1)):
        told = flat(output_of(code, "push", run, "--set", "learning_rate=-1", *pushed_as))
        assert "This learning rate has no schedule, so it cannot be below 0" in told
        assert "the schedule" not in told
    assert ("On trial" in good, inbox.waiting(run)) == (False, [])
    hints = {"optimizer/learning_rate": "a schedule computes it"}
    with_schedule = made_run(Path("with_schedule"), Schema(SCHEMA, hints))
    warned = output_of(0, "push", with_schedule, "--set", "learning_rate=-2000", *trial, "--dry-run")
    assert has(
        warned,
        "optimizer/learning_rate: -2000 is 2000 times what the schedule computes",
        "optimizer/learning_rate would be 2000 times as large",
        "On trial: 50 steps, loss, at most 5 %",
    )
    assert "times as large" in output_of(0, "push", run, "--scale", "learning_rate=101", "--dry-run")
    for more in (["--dry-run"], []):
        said = flat(output_of(0, "push", with_schedule, "--set", "learning_rate=-1", *more))
        assert said.count("-1 gives the rate back to the schedule") == 1
        assert "Warning" not in said, "it is the documented way"


def test_a_name_with_control_characters_cannot_reach_the_terminal(run: Path) -> None:
    evil = tensors("evil", **{f"{HOSTILE}": BIAS})
    for more in ((), ("--dry-run",)):
        result = invoke("push", run, "--add", evil, *more)
        assert (result.exit_code, is_harmless(result.output)) == (1, True)


def test_waiting_ends_with_the_receipt(run: Path, job: PlayedJob) -> None:
    result = output_of(0, "push", run, *SET, "--wait", "--at-step", 40)
    assert result.splitlines() == [
        "pushed x",
        "proposed",
        "prepared",
        "scheduled for step 40",
        "committed at step 40",
        "applied",
        "verified: number 1, applied at step 40",
        f"  digest {'a' * 32}, the same on 2 workers",
        "  0.25 s from proposed to applied by all; training paused for 3.0 ms",
    ]


@pytest.mark.parametrize(
    ("fate", "said"),
    [
        (Stage.REFUSED, "Error: Worker 1 has no room\n  worker: 1\n  received: 28 bytes free"),
        (
            Stage.FAILED,
            f"applied at step 7, but worker 1 differs (worker 0: {'a' * 32}; worker 1: {'b' * 32})",
        ),
    ],
)
def test_an_update_that_ends_badly_is_told_with_its_reason(
    run: Path, job: PlayedJob, fate: Stage, said: str
) -> None:
    job.fate = fate
    assert said in output_of(1, "push", run, *SET, "--wait")


@pytest.mark.parametrize(
    ("code", "said"), [(3, "After 0.5 s, update x is proposed"), (130, "Stopped waiting")]
)
def test_when_time_is_up_or_after_ctrl_c_the_update_stays_and_can_be_withdrawn(
    run: Path, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    meanwhile(monkeypatch, interrupted if code == 130 else lambda _secs: None)
    result = output_of(code, "push", run, *SET, "--wait", "--timeout", 0.5)
    assert has(result, said, "replicast show run x")
    assert ("To withdraw it: replicast withdraw run x" in result) == (code == 3)
    assert [entry.id for entry in inbox.waiting(run)] == ["x"]


def test_push_wait_and_status_say_that_the_training_has_no_callback(run: Path) -> None:
    heard_of(run, waiting_for=WITHOUT_CALLBACK)
    for words in (("push", run, *SET, "--wait", "--timeout", 0), ("status", run)):
        assert "waits for a boundary: its fit has no replicas.callback()" in flat(invoke(*words).output)


def test_an_update_that_is_committed_is_not_pushed_again_and_is_said_to_be_applied(run: Path) -> None:
    output_of(0, "push", run, *SET)
    PlayedJob(run, stops_at=Stage.COMMITTED).act_all()
    result = output_of(3, "push", run, *SET, "--wait", "--timeout", 0)
    assert has(result, "already in the journal, as number 1", "update x is committed at step 7.")
    assert not any(words in result for words in ("pushed x", "withdraw"))


def test_what_is_refused_is_not_warned_about(run: Path) -> None:
    for more in (["--dry-run"], []):
        told = flat(output_of(1, "push", run, "--set", "optimizer/iterations=0", *more))
        assert "There is no variable with this name" in told
        assert "perhaps optimizer/iteration" in told
        assert "Warning" not in told


def test_a_warning_is_told_once(run: Path) -> None:
    result = output_of(0, "push", run, "--set", "optimizer/iteration=0")
    assert flat(result).count(flat("is the optimizer's own count of steps")) == 1


def test_ctrl_c_before_it_is_written_pushes_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicast.cli.push.update_of", interrupted)
    result = invoke("push", run, *SET)
    told = "Stopped. Nothing was pushed.\n"
    assert (result.exit_code, result.output, inbox.waiting(run)) == (130, told, [])


def test_a_push_to_a_job_that_is_not_running_names_the_option_for_the_next_start(
    run: Path, job: PlayedJob
) -> None:
    heard_of(run, waiting_for=ENDED)
    refused = invoke("push", run, *SET)
    assert (refused.exit_code, "--next-start" in refused.output, inbox.waiting(run)) == (1, True, [])
    output_of(0, "push", run, "--set", "learning_rate=1", "--id", "y", "--next-start")
    assert "1 in the inbox, for the next start that trains" in invoke("status", run).output
    waited = output_of(0, "push", run, *SET, "--wait", "--next-start")
    assert "It will take the update when it is started again" in flat(waited)
    assert "To withdraw it: replicast withdraw run x" in waited
    assert "proposed. The job is not running. The next start that trains takes it from the inbox" in waited


def new_run(state: JobState, **fields: Any) -> Path:
    """The directory of a job whose workers have not met yet."""
    run = Path("new")
    run.mkdir()
    write_change(run, Change(state, 0, **fields))
    return run


def test_a_push_during_the_first_start_is_accepted_and_the_job_checks_it(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = new_run(JobState.STARTING, workers=2)
    Fence(run, attempt=0).release()  # a group that has no run.json yet
    arguments = "push", run, "--set", "learning_rate=0.1", "--id"
    for more in (["--dry-run"], []):
        told = output_of(0, *arguments, "x", *more)
        assert "Starting: no worker has been heard from yet" in told
        assert "The job checks this when its workers have met" in flat(told)
        assert "damaged" not in told
    assert "known when its workers have met" in output_of(1, "pull", run, "dense/bias", "-o", "a.npy")
    assert invoke("show", run, "x").exit_code == 0

    def starts(_secs: float) -> None:
        made_run(run)
        PlayedJob(run).act_all()

    moments = meanwhile(monkeypatch, lambda secs: starts(secs) if len(moments) == 1 else None)
    assert "verified: number 2" in output_of(0, *arguments, "y", "--wait")


def test_a_first_start_that_has_failed_takes_no_push_unless_it_is_for_the_next_one(run: Path) -> None:
    run = new_run(JobState.FAILED, reason="no GPU")
    assert "Failed: no GPU" in output_of(1, "push", run, *SET)
    assert invoke("push", run, *SET, "--next-start").exit_code == 0
    assert [one.id for one in inbox.waiting(run)] == ["x"]


def test_a_full_disk_is_told_without_a_traceback(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object, **_options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(inbox, "write_durably", full)
    assert "No space left on device" in output_of(1, "push", run, *SET)


def test_a_run_of_a_later_format_is_refused(run: Path) -> None:
    (path,) = run.glob("groups/*/run.json")
    fields = json.loads(unsealed(path.read_bytes())[0]) | {"format": 99}
    path.write_bytes(sealed(json.dumps(fields).encode())[0])
    assert "Received: 99" in output_of(1, "push", run, *SET)


# Trials


def committed(run: Path, outcome: TrialOutcome | None) -> None:
    """What a job leaves of an update that was on trial."""
    job = PlayedJob(run)
    job.fate, job.outcome = Stage.REVERTED, outcome
    job.stops_at = Stage.COMMITTED if outcome is None else None
    update = Update(id="x", author="me").assign("learning_rate", 0.1)
    inbox.submit(run, update, trial=Trial(50, max_increase=0.05))
    job.act_all()


def test_an_update_that_is_on_trial_is_listed_and_shown_as_such(run: Path) -> None:
    committed(run, None)
    for words in (("log", run), ("show", run, 1)):
        assert has(output_of(0, *words), "trial", "50 steps, loss, at most 5 % worse")


@pytest.mark.parametrize("reason", [REVERTED.reason, HOSTILE])
def test_how_a_trial_ended_is_listed_and_shown_and_has_its_own_exit_code(run: Path, reason: str) -> None:
    committed(run, replace(REVERTED, reason=reason, metric=reason))
    said = "reverted at step 57: all replicas are back at their state before the update ("
    wait = ("push", run, *SET, "--wait", "--timeout", 5)
    for command in (("log", run), ("status", run), ("show", run, "x"), wait):
        result = invoke(*command)
        output = flat(result.output)
        assert "verified" not in output, "all replicas have the state of before"
        assert said in output or command[0] in ("log", "status"), command
        assert "reverted" in output
        assert reason in output if reason != HOSTILE else is_harmless(output), command
        assert result.exit_code == (4 if command == wait else 0)


def test_a_wait_behind_a_trial_is_reported_and_reaches_no_terminal_raw(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = ("push", run, *SET, "--wait", "--timeout", 0.1)
    assert invoke(*wait).exit_code == 3
    inbox.note_stage(run, "x", Stage.PROPOSED, waits_for="the trial of update 3, until step 55")
    assert "is proposed and waits for the trial of update 3, until step 55" in invoke(*wait).output
    inbox.note_stage(run, "x", Stage.PROPOSED, waits_for=HOSTILE)
    assert is_harmless(invoke(*wait).output)
    shown: list[object] = []
    monkeypatch.setattr(Status, "update", lambda _self, text: shown.append(text))
    with live_line(Console(file=io.StringIO(), force_terminal=True)) as show:
        for view, brief in connect(run).follow("x", 0.0):
            show(view, brief)
    (text,) = shown
    assert isinstance(text, Text), "a string is searched for markup"
    assert is_harmless(text.plain)


def test_names_of_directories_reach_no_terminal_raw(run: Path) -> None:
    name = HOSTILE.replace("/", "")
    made_run(Path("beside") / name)
    said = invoke("status", "beside")
    assert (said.exit_code, is_harmless(said.output)) == (2, True)
    inside = made_run(run / f"replicas-{name}")
    heard_of(run, secs_ago=60)
    for words in (("status", inside), ("checkpoint", "list", "beside")):
        assert is_harmless(flat(invoke(*words).output)), words


@pytest.mark.parametrize("ends", [True, False])
def test_waiting_for_a_trial_says_until_when_it_lasts_and_where_its_verdict_will_be(
    run: Path, job: PlayedJob, ends: bool
) -> None:
    job.outcome = TrialOutcome(1, "kept", 57, "loss", 0.5, 0.5, "loss was 0.5 before the update")
    job.stops_at = None if ends else Stage.APPLIED
    result = invoke("push", run, *SET, "--trial-steps", 50, "--wait", "--timeout", 60 if ends else 5)
    lines = result.output.splitlines()
    assert "applied at step 7, on trial until step 57" in lines
    if ends:
        assert (result.exit_code, lines[-1]) == (0, "  kept at step 57: loss was 0.5 before the update")
        return
    assert (result.exit_code, "withdraw" in result.output) == (3, False)
    assert "update x is applied at step 7, on trial until step 57, the job is at step 5." in result.output
    assert "To see it: replicast show run x" in result.output
