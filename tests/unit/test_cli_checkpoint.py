"""`replicast checkpoint` on the files of a run, with no job and no TensorFlow."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from replicast.storage.checkpoints import CheckpointStore, open_checkpoint
from replicast.storage.run_files import ENDED
from replicast.update.digest import digest_state
from replicast.update.schema import planned
from replicast.update.state import MemoryState
from replicast.update.update import Update
from tests.unit.checkpoint.samples import Arrays, draft_of, flip
from tests.unit.played_job import BIAS, SCHEMA, flat, heard_of, invoke, made_run, output_of, tensors


def state_of(step: int) -> Arrays:
    made: Arrays = {}
    for variable in SCHEMA:
        dtype = "float32" if variable.dtype == "bfloat16" else variable.dtype
        values = np.arange(int(np.prod(variable.shape))).reshape(variable.shape).astype(dtype) + step
        made[variable.name] = values.astype(dtype)
        if variable.dtype == "bfloat16":
            import ml_dtypes

            made[variable.name] = made[variable.name].astype(ml_dtypes.bfloat16)
    return made


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with the checkpoints of steps 100 and 200."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    path = made_run()
    for step in (100, 200):
        arrays = state_of(step)
        draft = draft_of(arrays, step, schema=SCHEMA, metrics={"loss": 1 / step}, sequence=step // 100)
        CheckpointStore(path).write(draft, arrays.items())
    return path


def at(run: Path, step: int) -> Path:
    return CheckpointStore(run).path(step).as_path()


def damage(run: Path, step: int, variable: str = "model/dense/bias") -> None:
    with open_checkpoint(at(run, step)) as reader:
        place = reader.layout.spans[variable].start
    flip(at(run, step) / "state.safetensors", place)


def test_a_damaged_last_one_is_not_skipped_without_a_word(run: Path) -> None:
    flip(at(run, 200) / "manifest.json", 5)
    result = invoke("checkpoint", "show", str(run))
    assert result.exit_code == 0
    assert f"Skipped: {at(run, 200) / 'manifest.json'} is damaged" in result.stderr
    assert "00000100" in result.stdout


def test_equal_manifests_do_not_make_damaged_files_equal(run: Path) -> None:
    shutil.copytree(at(run, 200), "copy")
    assert invoke("checkpoint", "diff", str(run), "copy").exit_code == 0
    damage(run, 200)
    result = invoke("checkpoint", "diff", str(run), "copy")
    assert result.exit_code == 1
    assert "the bytes of model/dense/bias are not those that were written" in result.stderr
    assert "equal" not in result.stdout
    assert invoke("checkpoint", "diff", str(run), "copy", "--digests-only").exit_code == 0


def test_no_command_loads_tensorflow_when_it_works(run: Path) -> None:
    code = (
        "import sys\nfrom replicast.cli import main\n"
        "def do(*words):\n"
        "    try: main(('checkpoint', *words), prog_name='replicast')\n"
        "    except SystemExit as end: assert end.code in (0, None), (words, end.code)\n"
        "do('list', 'run'); do('show', 'run'); do('verify', 'run'); do('diff', 'run', 'run')\n"
        "do('patch', 'run/checkpoints/00000100', '--set', 'learning_rate=1', '-o', 'out')\n"
        "assert not [name for name in ('tensorflow', 'keras') if name in sys.modules]"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_checkpoints_are_listed_by_step(run: Path) -> None:
    result = output_of(0, "checkpoint", "list", run)
    heading, first, second = result.splitlines()
    assert heading.split()[:4] == ["step", "epoch", "batch", "update"]
    assert first.split()[:4] == ["100", "2", "7", "1"]
    assert "loss 0.005" in second
    described = [json.loads(line) for line in invoke("checkpoint", "list", run, "--json").output.splitlines()]
    assert [each["step"] for each in described] == [100, 200]
    assert described[0]["path"] == str(at(run, 100))
    assert described[1]["state_digest"] == digest_state(state_of(200))


def test_a_run_without_checkpoints_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = made_run()
    for name in ("list", "verify"):
        result = invoke("checkpoint", name, run)
        assert (result.exit_code, result.output) == (0, "The run has no checkpoints yet.\n")
    result = output_of(1, "checkpoint", "show", run)
    assert "no checkpoint that can be used" in result


def test_damaged_checkpoints_are_named_in_the_list(run: Path) -> None:
    (at(run, 200) / "COMMITTED").write_text("torn")
    result = invoke("checkpoint", "list", run)
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1].split()[0] == "100"
    assert "Damaged: run/checkpoints/00000200/manifest.json" in result.stderr
    assert invoke("checkpoint", "show", run, "--json").stdout.startswith("{")  # The last that can be used.


@pytest.mark.parametrize("words", [("run", "100"), ("run/checkpoints/00000100",)])
def test_a_checkpoint_is_shown_with_its_variables(run: Path, words: tuple[str, ...]) -> None:
    result = output_of(0, "checkpoint", "show", *words)
    assert "100, batch 7 of epoch 2" in result
    assert "model/dense/kernel" in result
    assert "4×3" in result
    digest = open_checkpoint(at(run, 100)).manifest.digests["model/dense/kernel"]
    assert digest[:16] in result
    assert all(len(line) <= 80 for line in result.splitlines())


def test_a_checkpoint_is_shown_as_json(run: Path) -> None:
    described = json.loads(invoke("checkpoint", "show", run, "--json").output)
    manifest = open_checkpoint(at(run, 200)).manifest
    assert described == json.loads(json.dumps(manifest.to_json() | {"path": str(at(run, 200))}))


@pytest.mark.parametrize(
    ("words", "code", "text"),
    [
        (("show", "run", "150"), 1, "received: 150"),
        (("show", "run/checkpoints/00000100", "100"), 2, "leave the step out"),
        (("show", "nowhere"), 2, "There is no directory nowhere"),
        (("list", "run/checkpoints"), 2, "Perhaps: run."),
        (("verify", "."), 2, "not a run directory"),
        (("diff", "run", "nowhere"), 2, "There is no directory nowhere"),
        (("patch", "run/checkpoints/00000100", "-o", "out"), 2, "Say what to change"),
        (("patch", "run/checkpoints/00000100", "--set", "learning_rate=1"), 2, "-o"),
        (("patch", "run", "--in-place", "--set", "learning_rate=1", "-o", "out"), 2, "leave -o out"),
        (("patch", "run/checkpoints/00000100", "--in-place", "--set", "learning_rate=1"), 2, "needs a run"),
        (("patch", "run/checkpoints/00000100", "--set", "rate=1", "-o", "out"), 1, "Refused: There is no"),
        (("patch", "run/checkpoints/00000100", "--set", "learning_rate=1", "-o", "run"), 1, "already"),
    ],
)
def test_what_cannot_be_done_is_said_with_its_exit_code(
    run: Path, words: tuple[str, ...], code: int, text: str
) -> None:
    result = invoke("checkpoint", *words)
    assert (result.exit_code, text in result.output) == (code, True), result.output
    assert not Path("out").exists()


def test_whole_checkpoints_are_verified_and_one_that_is_not_committed_is_named(run: Path) -> None:
    result = output_of(0, "checkpoint", "verify", run)
    assert [line.split()[:2] for line in result.splitlines()] == [
        ["00000100", "intact:"],
        ["00000200", "intact:"],
    ]
    (at(run, 100) / "COMMITTED").unlink()
    result = invoke("checkpoint", "verify", run)
    assert (result.exit_code, "not committed" in result.stderr) == (1, True)
    assert invoke("checkpoint", "verify", at(run, 100)).exit_code == 1


def test_damage_is_named_by_variable(run: Path) -> None:
    damage(run, 100)
    for words in ((run,), (run, 100), (at(run, 100),)):
        result = invoke("checkpoint", "verify", *words)
        assert result.exit_code == 1
        assert "00000100  damaged" in result.stdout
        assert "model/dense/bias" in result.stderr
    assert invoke("checkpoint", "verify", run, 200).exit_code == 0


def test_a_terminal_gets_a_bar_beside_the_output(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    result = invoke("checkpoint", "verify", run, 100)
    assert result.exit_code == 0
    assert "━" in result.stderr
    assert result.stdout.startswith("00000100  intact")


def test_two_checkpoints_are_compared(run: Path) -> None:
    result = output_of(1, "checkpoint", "diff", at(run, 100), at(run, 200))
    assert "model/dense/bias" in result
    assert "0 of 6 variables are equal" in result
    same = invoke("checkpoint", "diff", run, at(run, 200))
    assert (same.exit_code, same.output) == (0, "All 6 variables are equal, bit for bit.\n")
    listed = invoke("checkpoint", "diff", run, run, "--all", "--json")
    assert {json.loads(line)["verdict"] for line in listed.output.splitlines()} == {"equal"}
    quick = invoke("checkpoint", "diff", at(run, 100), at(run, 200), "--digests-only", "--json")
    assert json.loads(quick.output.splitlines()[0])["differing"] is None


def test_a_patched_checkpoint_has_the_bits_of_a_running_job(run: Path) -> None:
    bias = tensors("bias", dense__bias=BIAS)
    result = invoke(
        "checkpoint", "patch", at(run, 100), "--add", bias, "--scale", "dense/kernel=0.5",
        "--set", "learning_rate=0.25", "--add", bias, "--reset-slots", "-o", "out",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    update = (
        Update(reset_slots=True)
        .add("dense/bias", BIAS)
        .scale("dense/kernel", 0.5)
        .assign("learning_rate", 0.25)
        .add("dense/bias", BIAS)
    )
    job = MemoryState(state_of(100), SCHEMA)
    job.apply(planned(update, SCHEMA).edits)
    with open_checkpoint("out", verify=True) as reader:
        assert reader.manifest.state_digest == digest_state(job.values)
        assert reader.manifest.parent is not None
        assert reader.manifest.parent["step"] == 100
    assert "4 of 6 variables changed" in result.output
    assert digest_state(job.values) in result.output
    assert "patched" in invoke("checkpoint", "show", "out").output


def test_an_update_of_the_journal_keeps_its_id_in_the_patched_checkpoint(run: Path) -> None:
    Update(id="fix-7").add("dense/bias", BIAS).save("fix.safetensors")
    store = CheckpointStore(Path("second"))
    result = invoke(
        "checkpoint", "patch", run, "--update", "fix.safetensors", "-o", store.path(200).as_path()
    )
    assert result.exit_code == 0, result.output
    (manifest,) = store.list()
    assert manifest.parent is not None
    assert manifest.parent["update_id"] == "fix-7"
    assert "patched by fix-7" in invoke("checkpoint", "list", "second").output


@pytest.mark.parametrize("where", [("-o", "out"), (), ("--in-place",)])
def test_a_dry_run_writes_nothing(ended: Path, where: tuple[str, ...]) -> None:
    before = files_in(ended)
    assert "No problems found" in output_of(0, "checkpoint", "patch", ended, *SCALE, *where, "--dry-run")
    assert "perhaps model/dense/kernel" in output_of(
        1, "checkpoint", "patch", ended, "--scale", "dense/kernl=2", *where, "--dry-run"
    )
    assert (files_in(ended), Path("out").exists()) == (before, False)


def test_a_damaged_checkpoint_is_not_patched(run: Path) -> None:
    damage(run, 100, "model/dense/kernel")
    result = output_of(
        1, "checkpoint", "patch", at(run, 100), "--add", tensors("b", dense__bias=BIAS), "-o", "out"
    )
    assert "model/dense/kernel" in result
    assert not Path("out").exists()


def test_a_place_that_cannot_be_written_is_named(run: Path) -> None:
    Path("file").write_text("")
    result = output_of(1, "checkpoint", "patch", run, "--scale", "dense/kernel=2", "-o", "file/out")
    assert "file/out cannot be written (File exists)" in result


@pytest.mark.parametrize("command", [["checkpoint", "list"], ["status"]])
def test_a_path_that_cannot_be_looked_at_is_no_traceback(command: list[str]) -> None:
    assert "File name too long" in output_of(2, *command, "x" * 300)


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with the checkpoints of steps 100 and 200, whose job has ended."""
    monkeypatch.chdir(tmp_path)
    path = made_run()
    heard_of(path, waiting_for=ENDED)
    for step in (100, 200):
        arrays = state_of(step)
        CheckpointStore(path).write(draft_of(arrays, step, schema=SCHEMA, sequence=0), arrays.items())
    return path


def files_in(run: Path) -> set[Path]:
    return {path for path in run.rglob("*") if path.is_file()}


SCALE = ("--scale", "dense/kernel=0.5")


def test_a_patch_in_place_is_in_the_journal_and_in_every_list(ended: Path) -> None:
    words = ("--in-place", *SCALE, "--set", "learning_rate=0.25", "--note", "too fast", "--author", "ada")
    result = output_of(0, "checkpoint", "patch", ended, *words)
    assert "2 of 6 variables changed" in result
    assert "update 1 of the journal" in result
    update = Update().scale("dense/kernel", 0.5).assign("learning_rate", 0.25)
    job = MemoryState(state_of(200), SCHEMA)
    job.apply(planned(update, SCHEMA).edits)
    store = CheckpointStore(ended)
    assert store.open(200, verify=True).manifest.state_digest == digest_state(job.values)
    (logged,) = [json.loads(line) for line in invoke("log", ended, "--json").output.splitlines()]
    assert (logged["sequence"], logged["step"], logged["stage"]) == (1, 200, "verified")
    assert (logged["author"], logged["note"]) == ("ada", "too fast")
    assert logged["receipts"][0]["checkpoint"] == store.path(200).name
    assert "applied to the checkpoint, by no worker" in flat(invoke("log", ended).output)
    assert f"to the checkpoint {store.path(200).name} of step 200" in invoke("show", ended, 1).output
    assert f"patched by {logged['id']}" in flat(invoke("checkpoint", "list", ended).output)
    assert invoke("report", ended, "-o", "report.html").exit_code == 0
    report = Path("report.html").read_text()
    assert store.path(200).name in report
    assert logged["id"] in report
    assert invoke("status", ended).exit_code == 0


def test_the_next_start_goes_on_from_the_step_that_was_patched_in_place(ended: Path) -> None:
    output_of(0, "checkpoint", "patch", ended, 100, "--in-place", *SCALE)
    last = CheckpointStore(ended).last()
    assert last is not None
    assert (last.step, last.sequence) == (100, 1)


def test_nothing_is_patched_in_place_while_a_job_runs(ended: Path) -> None:
    heard_of(ended)
    before = files_in(ended)
    for more in ((), ("--dry-run",)):
        result = invoke("checkpoint", "patch", ended, "--in-place", *SCALE, *more)
        assert result.exit_code == 1
        assert "A job is running in this directory" in result.stderr
        assert "replicast stop" in result.stderr
    assert files_in(ended) == before


def test_a_live_process_with_a_claim_is_a_running_job(ended: Path) -> None:
    words = ("checkpoint", "patch", str(ended), "--in-place", *SCALE)
    command = [sys.executable, "-m", "replicast", *words]  # this process has claimed the run
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 1
    assert f"process {os.getpid()}" in result.stderr


@pytest.mark.parametrize("file", ["manifest.json", "state.safetensors"])
def test_a_damaged_checkpoint_is_not_patched_in_place(ended: Path, file: str) -> None:
    damaged = at(ended, 200)
    if file == "manifest.json":
        flip(damaged / file, 5)
    else:
        damage(ended, 200)
    result = invoke("checkpoint", "patch", ended, "--in-place", *SCALE)
    assert result.exit_code == 1
    assert "damaged" in result.stderr
    assert at(ended, 200) == damaged
    assert invoke("log", ended, "--json").output == ""


@pytest.mark.parametrize(
    ("function", "fate"),
    [
        ("write_contents", "Nothing has changed."),
        ("put_in_place", "The journal has the update: the next start applies it"),
    ],
)
def test_a_patch_in_place_that_cannot_be_written_says_what_has_changed(
    ended: Path, monkeypatch: pytest.MonkeyPatch, function: str, fate: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"replicast.storage.checkpoints.{function}", full)
    result = invoke("checkpoint", "patch", ended, "--in-place", *SCALE)
    assert (result.exit_code, f"No space left on device. {fate}" in " ".join(result.stderr.split())) == (
        1,
        True,
    )
