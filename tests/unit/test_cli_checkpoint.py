"""`replicast checkpoint` on the files of a run, with no job and no TensorFlow."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from replicast.storage.checkpoints import CheckpointStore, open_checkpoint
from replicast.storage.run_files import ENDED
from replicast.update.digest import digest_state
from replicast.update.schema import planned
from replicast.update.update import Update
from tests.threads import MemoryState
from tests.unit.checkpoint.samples import Arrays, draft_of, flip
from tests.unit.played_job import (
    BIAS,
    SCHEMA,
    heard_of,
    heard_of_always,
    invoke,
    made_run,
    output_of,
    tensors,
)


def state_of(step: int) -> Arrays:
    dtypes = {"bfloat16": ml_dtypes.bfloat16}
    return {
        one.name: (np.arange(int(np.prod(one.shape))).reshape(one.shape) + step).astype(
            dtypes.get(one.dtype, one.dtype)
        )
        for one in SCHEMA
    }


@pytest.fixture
def run(run: Path) -> Path:
    """A run with the checkpoints of steps 100 and 200."""
    for step in (100, 200):
        arrays = state_of(step)
        draft = draft_of(arrays, step, schema=SCHEMA, metrics={"loss": 1 / step}, sequence=step // 100)
        CheckpointStore(run).write(draft, arrays)
    return run


def at(run: Path, step: int) -> Path:
    return CheckpointStore(run).path(step).as_path()


def damage(run: Path, step: int, variable: str = "model/dense/bias") -> None:
    with open_checkpoint(at(run, step)) as reader:
        place = reader.layout.spans[variable].start
    flip(at(run, step) / "state.safetensors", place)


def test_no_command_loads_tensorflow_when_it_works(run: Path) -> None:
    checkpoint = ["list run", "show run", "verify run", "diff run run"]
    checkpoint.append("patch run/checkpoints/00000100 --set learning_rate=1 -o out")
    commands = [
        "push run --set learning_rate=0.1 --id x --wait --timeout 0",
        *("status run", "log run", "show run x", "inspect run/inbox/x.safetensors"),
        *("withdraw run x", "audit run", "audit run --now --timeout 0"),
        *(f"checkpoint {words}" for words in checkpoint),
    ]
    code = (
        "import sys\nfrom replicast.cli import main\n"
        f"for words in {commands!r}:\n"
        "    try: main(words.split(), prog_name='replicast')\n"
        "    except SystemExit as end: assert end.code in (0, 3, None), (words, end.code)\n"
        "assert not [name for name in ('tensorflow', 'keras') if name in sys.modules]"
    )
    with heard_of_always(run):
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_checkpoints_are_listed_by_step(run: Path) -> None:
    heading, first, second = output_of(0, "checkpoint", "list", run).splitlines()
    assert heading.split()[:4] == ["step", "epoch", "batch", "update"]
    assert first.split()[:4] == ["100", "3", "7", "1"], "epochs from 1, as Keras prints them"
    assert "loss 0.005" in second
    one, two = map(json.loads, invoke("checkpoint", "list", run, "--json").output.splitlines())
    assert (one["step"], one["path"]) == (100, str(at(run, 100)))
    assert two["state_digest"] == digest_state(state_of(200))


def test_the_checkpoint_at_the_end_of_an_epoch_is_of_that_epoch(run: Path) -> None:
    arrays = state_of(300)
    draft = draft_of(arrays, 300, schema=SCHEMA, sequence=2, epoch=5, batch=0)
    CheckpointStore(run).write(draft, arrays)
    assert output_of(0, "checkpoint", "list", run).splitlines()[-1].split()[:3] == ["300", "5", "end"]
    assert "300, epoch 5, batch end" in output_of(0, "checkpoint", "show", run)


def test_a_run_without_checkpoints_says_so(run: Path) -> None:
    shutil.rmtree(run / "checkpoints")
    for name in ("list", "verify"):
        assert output_of(0, "checkpoint", name, run) == "The run has no checkpoints yet.\n"
    assert "no checkpoint that can be used" in output_of(1, "checkpoint", "show", run)


def test_damaged_checkpoints_are_named_in_the_list_and_when_they_are_skipped(run: Path) -> None:
    flip(at(run, 200) / "manifest.json", 5)
    result = invoke("checkpoint", "list", run)
    assert (result.exit_code, result.stdout.splitlines()[-1].split()[0]) == (1, "100")
    assert "Damaged: run/checkpoints/00000200/manifest.json" in result.stderr
    result = invoke("checkpoint", "show", run)
    assert f"Skipped: {at(run, 200) / 'manifest.json'} is damaged" in result.stderr
    assert (result.exit_code, "00000100" in result.stdout) == (0, True), "the last that can be used"


@pytest.mark.parametrize("words", [("run", "100"), ("run/checkpoints/00000100",)])
def test_a_checkpoint_is_shown_with_its_variables(run: Path, words: tuple[str, ...]) -> None:
    result = output_of(0, "checkpoint", "show", *words)
    manifest = open_checkpoint(at(run, 100)).manifest
    for text in ("100, epoch 3, batch 7", "4×3", manifest.digests["model/dense/kernel"][:16]):
        assert text in result
    assert all(len(line) <= 80 for line in result.splitlines())
    described = json.loads(invoke("checkpoint", "show", *words, "--json").output)
    assert described == json.loads(json.dumps(manifest.to_json() | {"path": str(at(run, 100))}))


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
        (("patch", "run/checkpoints/00000100", "--set", "rate=1", "-o", "out"), 1, "Refused: There is no"),
        (("patch", "run/checkpoints/00000100", "--set", "learning_rate=1", "-o", "run"), 1, "already"),
        (
            ("patch", "run", "--set", "learning_rate=1", "-o", "train.py/out"),
            1,
            "train.py/out was not created",
        ),
        (("list", "x" * 300), 2, "File name too long"),
    ],
)
def test_what_cannot_be_done_is_said_with_its_exit_code(
    run: Path, words: tuple[str, ...], code: int, text: str
) -> None:
    Path("train.py").touch()
    assert text in output_of(code, "checkpoint", *words)
    assert not Path("out").exists()


def test_whole_checkpoints_are_verified_and_one_that_is_not_committed_is_named(run: Path) -> None:
    result = output_of(0, "checkpoint", "verify", run)
    assert [line.split()[:2] for line in result.splitlines()] == [
        ["00000100", "intact:"],
        ["00000200", "intact:"],
    ]
    (at(run, 100) / "manifest.json").unlink()
    result = invoke("checkpoint", "verify", run)
    assert (result.exit_code, "not complete" in result.stderr) == (1, True)
    assert invoke("checkpoint", "verify", at(run, 100)).exit_code == 1


def test_damage_is_named_by_variable(run: Path) -> None:
    damage(run, 100)
    for words in ((run,), (run, 100), (at(run, 100),)):
        result = invoke("checkpoint", "verify", *words)
        assert (result.exit_code, "00000100  damaged" in result.stdout) == (1, True)
        assert "model/dense/bias" in result.stderr
    output_of(0, "checkpoint", "verify", run, 200)


def test_a_terminal_gets_a_bar_beside_the_output(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    result = invoke("checkpoint", "verify", run, 100)
    assert result.exit_code == 0
    assert "━" in result.stderr
    assert result.stdout.startswith("00000100  intact")
    assert "━" not in result.output.partition("intact")[2]  # The bar is gone before the result is written.


def test_two_checkpoints_are_compared(run: Path) -> None:
    result = output_of(1, "checkpoint", "diff", at(run, 100), at(run, 200))
    assert "model/dense/bias" in result
    assert "0 of 6 variables are equal" in result
    assert (
        output_of(0, "checkpoint", "diff", run, at(run, 200)) == "All 6 variables are equal, bit for bit.\n"
    )
    listed = invoke("checkpoint", "diff", run, run, "--all", "--json")
    assert {json.loads(line)["verdict"] for line in listed.output.splitlines()} == {"equal"}
    quick = invoke("checkpoint", "diff", at(run, 100), at(run, 200), "--digests-only", "--json")
    assert json.loads(quick.output.splitlines()[0])["differing"] is None
    damage(run, 200)
    assert "the bytes of model/dense/bias are not those" in output_of(1, "checkpoint", "diff", run, run)
    output_of(0, "checkpoint", "diff", run, run, "--digests-only")


def test_a_patch_applies_all_operations_and_says_what_has_changed(run: Path) -> None:
    bias = tensors("bias", dense__bias=BIAS)
    operations = ("--add", bias, "--scale", "dense/kernel=0.5", "--set", "learning_rate=0.25", "--add", bias)
    result = output_of(0, "checkpoint", "patch", at(run, 100), *operations, "--reset-slots", "-o", "out")
    update = Update(reset_slots=True).add("dense/bias", BIAS).scale("dense/kernel", 0.5)
    job = MemoryState(state_of(100), SCHEMA)
    job.apply(planned(update.assign("learning_rate", 0.25).add("dense/bias", BIAS), SCHEMA).edits)
    assert "4 of 6 variables changed" in result
    assert digest_state(job.values) in result
    assert "patched" in invoke("checkpoint", "show", "out").output


@pytest.mark.parametrize("where", [("-o", "out"), ()])
def test_a_dry_run_writes_nothing(ended: Path, where: tuple[str, ...]) -> None:
    before = files_in(ended)
    assert "No problems found" in output_of(0, "checkpoint", "patch", ended, *SCALE, *where, "--dry-run")
    assert "perhaps model/dense/kernel" in output_of(
        1, "checkpoint", "patch", ended, "--scale", "dense/kernl=2", *where, "--dry-run"
    )
    assert (files_in(ended), Path("out").exists()) == (before, False)


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run with the checkpoints of steps 100 and 200 and no updates, whose job has ended."""
    monkeypatch.chdir(tmp_path)
    path = made_run()
    heard_of(path, waiting_for=ENDED)
    for step in (100, 200):
        arrays = state_of(step)
        CheckpointStore(path).write(draft_of(arrays, step, schema=SCHEMA, sequence=0), arrays)
    return path


def files_in(run: Path) -> set[Path]:
    return {path for path in run.rglob("*") if path.is_file()}


SCALE = ("--scale", "dense/kernel=0.5")


def test_a_damaged_checkpoint_is_not_patched(ended: Path) -> None:
    damage(ended, 200)
    assert "damaged" in output_of(1, "checkpoint", "patch", ended, 200, *SCALE, "-o", "out")
    assert not Path("out").exists()
