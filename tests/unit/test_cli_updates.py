"""`replicast push` on a run directory with a fake job."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from replicast.core.records import Stage
from replicast.storage import inbox
from replicast.storage.claims import Fence
from replicast.storage.run_files import ENDED, WITHOUT_CALLBACK, Change, State, write_change
from replicast.strictjson import sealed, unsealed
from replicast.update.schema import planned
from replicast.update.update import Update
from tests.unit.played_job import (
    BIAS,
    LONG_AGO,
    SCHEMA,
    PlayedJob,
    heard_of,
    heard_of_always,
    invoke,
    made_run,
    meanwhile,
    pushed,
    tensors,
)

pytestmark = pytest.mark.usefixtures("wall_clock_stands_still")

UPDATE_COMMANDS = ("push", "status", "log", "show", "inspect", "withdraw", "audit")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return made_run()


@pytest.fixture
def job(run: Path, monkeypatch: pytest.MonkeyPatch) -> PlayedJob:
    """A job that acts whenever `push --wait` pauses."""
    played = PlayedJob(run)
    meanwhile(monkeypatch, played.act)
    return played


def test_no_command_loads_tensorflow_when_it_works(run: Path) -> None:
    code = (
        "import sys\nfrom replicast.cli import main\n"
        "def do(*words):\n"
        "    try: main(words, prog_name='replicast')\n"
        "    except SystemExit as end: assert end.code in (0, 3), (words, end.code)\n"
        "do('push', 'run', '--set', 'learning_rate=0.1', '--id', 'x', '--wait', '--timeout', '0')\n"
        "do('status', 'run'); do('log', 'run'); do('show', 'run', 'x')\n"
        "do('inspect', 'run/inbox/x.safetensors', '--run', 'run'); do('withdraw', 'run', 'x')\n"
        "do('audit', 'run'); do('audit', 'run', '--now', '--timeout', '0')\n"
        "assert not [name for name in ('tensorflow', 'keras') if name in sys.modules]"
    )
    with heard_of_always(run):
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_one_number_is_assigned_and_the_id_is_printed(run: Path) -> None:
    result = invoke("push", run, "--set", "learning_rate=5e-4", "--note", "slower", "--at-step", 9)
    assert result.exit_code == 0
    update, at_step = pushed(run)
    assert f"pushed {update.id}\n" in result.output
    assert f"replicast show run {update.id}" in result.output
    assert (update.note, at_step) == ("slower", 9)
    assert "@" in update.author
    (edit,) = planned(update, SCHEMA).edits
    assert (edit.operation, edit.variable) == ("assign", "optimizer/learning_rate")
    assert edit.arrays["value"] == np.float32(5e-4)


def test_a_whole_number_stays_whole(run: Path) -> None:
    assert invoke("push", run, "--set", f"iteration={2**62 + 1}").exit_code == 0
    assert planned(pushed(run)[0], SCHEMA).edits[0].arrays["value"] == 2**62 + 1


def test_operations_become_one_update_in_the_order_of_the_command_line(run: Path) -> None:
    rows = tensors(
        "rows",
        embeddings=np.ones((2, 2), np.float16).astype("float32"),
        **{"embeddings.indices": np.array([1, 3])},
    )
    low = tensors(
        "low",
        **{"dense__kernel.a": np.ones((4, 1), np.float32), "dense__kernel.b": np.ones((1, 3), np.float32)},
    )
    bias = tensors("bias", dense__bias=BIAS)
    Update(note="saved", author="ann").add("dense/bias", BIAS).save("saved.safetensors")
    result = invoke(
        "push", run, "--add", bias, "--scale", "dense/kernel=0.5", "--add-low-rank", low, "--add", bias,
        "--set", "learning_rate=1", "--blend", bias, "--weight", 0.25, "--update", "saved.safetensors",
        "--assign", bias, "--scale", "dense/bias=2",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    update, _ = pushed(run)
    assert [f"{edit.operation} {edit.variable} {edit.factor}" for edit in update.edits] == [
        "add dense/bias None",
        "scale dense/kernel 0.5",
        "add_low_rank dense/kernel None",
        "add dense/bias None",
        "assign learning_rate None",
        "blend dense/bias 0.25",
        "add dense/bias None",
        "assign dense/bias None",
        "scale dense/bias 2.0",
    ]
    assert (update.note, update.author) == ("saved", "ann")
    refused = invoke("push", run, "--assign-rows", rows)
    assert refused.exit_code == 1
    assert "expected: bfloat16" in refused.output


def test_a_saved_update_keeps_its_id_and_flags_unless_others_are_given(run: Path) -> None:
    update = Update(id="mine", note="why", author="ann", allow_nonfinite=True).add(
        "dense/bias", BIAS * np.nan
    )
    update.save("saved.safetensors")
    assert invoke("push", run, "--update", "saved.safetensors", "--reset-slots").exit_code == 0
    found, _ = pushed(run)
    assert (found.id, found.note, found.author) == ("mine", "why", "ann")
    assert (found.allow_nonfinite, found.reset_slots) == (True, True)
    inbox.done(run / "inbox" / "mine.safetensors")
    options = ("--id", "other", "--note", "new", "--author", "bob")
    assert invoke("push", run, "--update", "saved.safetensors", *options).exit_code == 0
    found, _ = pushed(run)
    assert (found.id, found.note, found.author, found.reset_slots) == ("other", "new", "bob", False)


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
        (["--set", "learning_rate=1", "--at-step", "-1"], "--at-step"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(run: Path, arguments: list[str], expected: str) -> None:
    tensors("bias", dense__bias=BIAS)
    result = invoke("push", run, *arguments)
    assert result.exit_code == 2
    assert expected in result.output
    assert inbox.waiting(run) == []


@pytest.mark.parametrize("name", UPDATE_COMMANDS)
def test_what_is_no_run_directory_is_said_clearly(run: Path, name: str) -> None:
    tensors("bias", dense__bias=BIAS)
    words = {
        "push": ["push", "@", "--set", "learning_rate=1"],
        "show": ["show", "@", "1"],
        "withdraw": ["withdraw", "@", "x"],
        "inspect": ["inspect", "bias.safetensors", "--as", "add", "--run", "@"],
    }.get(name, [name, "@"])
    for path, expected in {"nowhere": "There is no directory nowhere", ".": "Perhaps: run."}.items():
        result = invoke(*(path if word == "@" else word for word in words))
        assert (result.exit_code, expected in result.output) == (2, True), result.output
    Path("empty").mkdir()
    result = invoke(*("empty" if word == "@" else word for word in words))
    assert result.exit_code == 2
    assert "has no run.json yet: is the job still starting?" in result.output
    (Path("empty") / "launcher-2.lock").touch()  # Of the second host of a job; worker 0 is on the first.
    result = invoke(*("empty" if word == "@" else word for word in words))
    assert (result.exit_code, "is not shared with the first host" in result.output) == (2, True), (
        result.output
    )


def test_every_problem_is_listed_with_variable_expected_and_received(run: Path) -> None:
    bad = tensors("bad", dense__bias=np.ones(4, np.float32), dense__kernl=BIAS, learning_rate=np.float32([1]))
    result = invoke("push", run, "--add", bad, "--set", "learning_rate=nan")
    assert result.exit_code == 1
    assert result.output.count("Refused: ") == 4
    for text in ("expected: (3,)", "received: (4,)", "perhaps model/dense/kernel", "values are not finite"):
        assert text in result.output
    assert inbox.waiting(run) == []


def test_nonfinite_values_are_taken_when_allowed(run: Path) -> None:
    refused = invoke("push", run, "--set", "learning_rate=inf")
    assert refused.exit_code == 1
    assert "or --allow-nonfinite" in refused.output
    assert "=True" not in refused.output
    assert invoke("push", run, "--set", "learning_rate=inf", "--allow-nonfinite").exit_code == 0


def test_damaged_files_and_files_of_the_other_kind_are_refused(run: Path) -> None:
    bias = tensors("bias", dense__bias=BIAS)
    Path("short.safetensors").write_bytes(bias.read_bytes()[:-1])
    Update().add("dense/bias", BIAS).save("saved.safetensors")
    np.savez("many.npz", bias=BIAS)
    np.save("one.npy", BIAS)
    for arguments, expected in (
        (["--add", "short.safetensors"], "truncated"),
        (["--add", "many.npz"], "is a ZIP archive"),
        (["--add", "one.npy"], "is a NumPy file"),
        (["--add", "saved.safetensors"], "--update"),
        (["--update", bias], "--add"),
        (["--add-rows", bias], "dense/bias.indices"),
        (["--set", "learning_rate=1", "--id", "../x"], "id is not valid"),
    ):
        result = invoke("push", run, *arguments)
        assert (result.exit_code, expected in result.output) == (1, True), result.output
    assert inbox.waiting(run) == []


def test_a_dry_run_shows_what_would_be_done_and_pushes_nothing(run: Path) -> None:
    good = invoke("push", run, "--scale", "dense/kernel=0.5", "--reset-slots", "--dry-run")
    assert good.exit_code == 0
    assert "model/dense/kernel" in good.output
    assert "optimizer/kernel_momentum" in good.output
    assert "No problems found" in good.output
    bad = invoke("push", run, "--scale", "dense/kernl=0.5", "--dry-run")
    assert bad.exit_code == 1
    assert "no variable with this name" in bad.output
    assert inbox.waiting(run) == []


def test_a_name_with_control_characters_cannot_reach_the_terminal(run: Path) -> None:
    evil = tensors("evil", **{"\x1b]0;owned\x07[red]": BIAS})
    for words in (["push", run, "--add", evil], ["push", run, "--add", evil, "--dry-run"]):
        result = invoke(*words)
        assert result.exit_code == 1
        assert "\x1b" not in result.output
        assert "\x07" not in result.output
        assert "[red]" in result.output


def test_waiting_ends_with_the_receipt(run: Path, job: PlayedJob) -> None:
    result = invoke("push", run, "--set", "learning_rate=0.1", "--id", "x", "--wait", "--at-step", 40)
    assert result.exit_code == 0, result.output
    assert result.output.splitlines() == [
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
    assert inbox.waiting(run) == []


def test_a_refusal_by_the_job_is_told_with_its_reason(run: Path, job: PlayedJob) -> None:
    job.fate = Stage.REFUSED
    result = invoke("push", run, "--set", "learning_rate=0.1", "--id", "x", "--wait")
    assert result.exit_code == 1
    assert "Refused: Worker 1 has no room\n  worker: 1\n  received: 28 bytes free" in result.output
    job.fate = Stage.VERIFIED
    again = ("push", run, "--set", "learning_rate=0.1", "--id", "x")
    assert invoke(*again).exit_code == 0
    job.act_all()
    assert invoke(*again, "--wait").exit_code == 0


def test_replicas_that_differ_are_a_failure_with_each_digest(run: Path, job: PlayedJob) -> None:
    job.fate = Stage.FAILED
    result = invoke("push", run, "--set", "learning_rate=0.1", "--id", "x", "--wait")
    assert result.exit_code == 1
    assert "Failed: worker 1 differs" in result.output
    assert f"worker 0: {'a' * 32}; worker 1: {'b' * 32}" in result.output


def test_when_time_is_up_the_update_stays_and_can_be_withdrawn(run: Path) -> None:
    result = invoke("push", run, "--set", "learning_rate=0.1", "--id", "x", "--wait", "--timeout", 0)
    assert result.exit_code == 3
    assert "0 s have passed: update x is proposed" in result.output
    assert "replicast withdraw run x" in result.output
    assert [entry.id for entry in inbox.waiting(run)] == ["x"]


def test_push_wait_and_status_say_that_the_training_has_no_callback(run: Path) -> None:
    heard_of(run, waiting_for=WITHOUT_CALLBACK)
    waited = invoke("push", run, "--set", "learning_rate=0.1", "--id", "x", "--wait", "--timeout", 0)
    looked = invoke("status", run)
    for said in (waited.output, looked.output):
        assert "waits for a boundary: its fit has no replicas.callback()" in " ".join(said.split())


def test_when_time_is_up_a_committed_update_is_said_to_be_committed(run: Path) -> None:
    assert invoke("push", run, "--set", "learning_rate=0.1", "--id", "x").exit_code == 0
    played = PlayedJob(run)
    played.stops_at = Stage.COMMITTED
    played.act_all()
    result = invoke("push", run, "--set", "learning_rate=0.1", "--id", "x", "--wait", "--timeout", 0)
    assert result.exit_code == 3
    assert "already in the journal, as number 1" in result.output
    assert "x is committed at step 7.\nEvery worker applies it.\n" in result.output


def test_ctrl_c_while_waiting_says_that_the_update_stays(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_secs: float) -> None:
        raise KeyboardInterrupt

    meanwhile(monkeypatch, interrupted)
    result = invoke("push", run, "--set", "learning_rate=0.1", "--id", "x", "--wait")
    assert result.exit_code == 130
    assert "Stopped waiting: update x is proposed" in result.output
    assert "replicast withdraw run x" in result.output


def test_ctrl_c_before_it_is_written_pushes_nothing(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("replicast.cli.updates.update_of", interrupted)
    result = invoke("push", run, "--set", "learning_rate=0.1")
    assert (result.exit_code, inbox.waiting(run)) == (130, [])
    assert "Nothing was pushed" in result.output


def test_a_push_to_a_job_that_is_not_running_is_refused_unless_it_is_for_the_next_start(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard_of(run, secs_ago=35)
    meanwhile(monkeypatch, lambda _secs: None)
    words = ("push", run, "--set", "learning_rate=0.1", "--id", "x")
    refused = invoke(*words)
    assert (refused.exit_code, inbox.waiting(run)) == (1, [])
    assert "Not running: last heard of 35 s ago at step 5" in refused.output
    assert "--next-start" in refused.output
    taken = invoke(*words, "--next-start")
    assert (taken.exit_code, [one.id for one in inbox.waiting(run)]) == (0, ["x"])
    assert "it did not say why. It will take the update when it is started again" in " ".join(
        taken.output.split()
    )
    assert "replicast withdraw run x" in taken.output


def test_a_push_to_a_job_whose_clock_is_behind_is_taken(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard_of(run, secs_ago=60)
    listened = meanwhile(monkeypatch, lambda _secs: heard_of(run, secs_ago=59))
    result = invoke("push", run, "--set", "learning_rate=0.1", "--id", "x")
    assert (result.exit_code, [one.id for one in inbox.waiting(run)]) == (0, ["x"])
    assert "not running" not in result.output
    assert sum(listened) < 1.5


def test_who_waits_for_the_next_start_is_told_that_the_job_is_not_running(run: Path, job: PlayedJob) -> None:
    heard_of(run, LONG_AGO)
    waited = invoke("push", run, "--set", "learning_rate=0.1", "--id", "x", "--wait", "--next-start")
    assert waited.exit_code == 0
    told = "proposed. The job is not running: the update waits in the inbox, and the next start that trains"
    assert told in waited.output
    assert "in the inbox, for the next start that trains" not in invoke("status", run).output, "it was taken"


def test_what_a_job_that_has_ended_left_in_the_inbox_is_said_to_wait_for_the_next_start(run: Path) -> None:
    invoke("push", run, "--set", "learning_rate=0.1", "--id", "x")
    assert "1 in the inbox\n" in invoke("status", run).output
    heard_of(run, waiting_for=ENDED)
    assert "1 in the inbox, for the next start that trains" in invoke("status", run).output


def test_a_push_during_the_first_start_is_accepted_and_the_job_checks_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("new")
    run.mkdir()
    write_change(run, Change(State.STARTING, 0, workers=2))
    Fence(run, attempt=0).release()  # a group that has no run.json yet
    arguments = "push", run, "--set", "learning_rate=0.1", "--id"
    for more in (["--dry-run"], []):
        told = invoke(*arguments, "x", *more)
        assert told.exit_code == 0, told.output
        assert "Starting: no worker has been heard of yet" in told.output
        assert "The job checks this when its workers have met" in " ".join(told.output.split())
        assert "damaged" not in told.output
    pulled = invoke("pull", run, "dense/bias", "-o", "a.npy")
    assert (pulled.exit_code, "Its variables are known when its workers have met" in pulled.output) == (
        1,
        True,
    )
    assert invoke("show", run, "x").exit_code == 0

    def starts(_secs: float) -> None:
        made_run(run)
        PlayedJob(run).act_all()

    moments = meanwhile(monkeypatch, lambda secs: starts(secs) if len(moments) == 1 else None)
    waited = invoke(*arguments, "y", "--wait")
    assert (waited.exit_code, "verified: number 2" in waited.output) == (0, True), waited.output


def test_a_first_start_that_has_failed_takes_no_push_unless_it_is_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Path("new")
    run.mkdir()
    write_change(run, Change(State.FAILED, 0, reason="no GPU"))
    refused = invoke("push", run, "--set", "learning_rate=0.1", "--id", "x")
    assert (refused.exit_code, "Failed: no GPU" in refused.output) == (1, True), refused.output
    assert invoke("push", run, "--set", "learning_rate=0.1", "--id", "x", "--next-start").exit_code == 0
    assert [one.id for one in inbox.waiting(run)] == ["x"]


def test_the_first_of_several_runs_of_a_script_names_the_one_that_is_running(run: Path) -> None:
    heard_of(run, 35.0)
    later = run / "replicas-2"
    made_run(later)
    told = f"Another Replicas of the same script is running: give {later} instead"
    for command in (["push", run, "--set", "learning_rate=0.5"], ["status", run]):
        assert told in " ".join(invoke(*command).output.split()), command
    heard_of(later, 35.0)
    assert "Another Replicas" not in invoke("status", run).output


def test_a_step_that_is_past_is_refused_at_once(run: Path) -> None:
    result = invoke("push", run, "--set", "learning_rate=0.1", "--at-step", 5)
    assert result.exit_code == 1
    assert "Step 5 is past" in result.output
    assert inbox.waiting(run) == []


def test_pushing_the_same_id_again_is_a_no_op_and_other_content_is_refused(run: Path, job: PlayedJob) -> None:
    same = ("push", run, "--set", "learning_rate=0.1", "--id", "x")
    assert invoke(*same).exit_code == 0
    assert invoke(*same).exit_code == 0
    other = invoke("push", run, "--set", "learning_rate=0.2", "--id", "x")
    assert (other.exit_code, "waits in the inbox" in other.output) == (1, True)
    job.act_all()
    again = invoke(*same, "--wait")
    assert (again.exit_code, "already in the journal" in again.output) == (0, True)
    assert "verified: number 1" in again.output
    other = invoke("push", run, "--set", "learning_rate=0.2", "--id", "x", "--wait")
    assert (other.exit_code, "is in the journal, as number 1" in other.output) == (1, True)
    assert inbox.waiting(run) == []


def test_a_full_disk_is_told_without_a_traceback(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(inbox, "write_durably", full)
    result = invoke("push", run, "--set", "learning_rate=0.1")
    assert result.exit_code == 1
    assert "No space left on device" in result.output


def test_a_run_of_a_later_format_is_refused(run: Path) -> None:
    (path,) = run.glob("groups/*/run.json")
    path.write_bytes(sealed(unsealed(path.read_bytes()) | {"format": 99}))
    result = invoke("push", run, "--set", "learning_rate=0.1")
    assert result.exit_code == 1
    assert "Received: 99" in result.output
