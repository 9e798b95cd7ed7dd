"""An update applied to a checkpoint gives the bits that it gives to a running job."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from replicast.errors import CheckpointError, FileDamaged, UpdateRefused
from replicast.storage.checkpoint_tools import patch
from replicast.storage.checkpoints import CheckpointStore, open_checkpoint
from replicast.update.schema import Schema, Variable, planned
from replicast.update.state import MemoryState
from replicast.update.update import Update
from tests.unit.checkpoint.samples import BFLOAT16, Arrays, draft_of, state_of


def made(arrays: Arrays, folder: Path, **fields: Any) -> Path:
    store = CheckpointStore(folder)
    store.write(draft_of(arrays, **fields), arrays.items())
    return store.path(1200).as_path()


def values(path: Path) -> Arrays:
    with open_checkpoint(path, verify=True) as reader:
        return {name: reader.read(name) for name in reader.names()}


def every_operation(arrays: Arrays) -> Update:
    return (
        Update(note="all")
        .add("kernel", np.full((4, 3), 0.1, np.float32))
        .scale("dense/kernel", 3.0)
        .add_low_rank("kernel", np.full((4, 2), 0.3, np.float32), np.full((2, 3), 0.7, np.float32))
        .blend("dense/kernel", np.zeros((4, 3), np.float32), 0.25)
        .assign_rows("table", [4, 0], arrays["table"][:2])
        .add_rows("table", [1, 4], arrays["table"][1:3])
        .assign("learning_rate", 0.5)
        .add("iteration", -7)
    )


def test_a_patched_checkpoint_holds_what_a_running_job_would(tmp_path: Path) -> None:
    arrays = state_of()
    source, update = made(arrays, tmp_path), every_operation(state_of())
    job = MemoryState(arrays, open_checkpoint(source).manifest.schema)
    job.apply(planned(update, job.schema).edits)
    patch(source, update, tmp_path / "patched")
    assert {name: array.tobytes() for name, array in values(tmp_path / "patched").items()} == {
        name: array.tobytes() for name, array in job.values.items()
    }
    assert {name: array.tobytes() for name, array in values(source).items()} == {
        name: array.tobytes() for name, array in arrays.items()
    }


def test_the_new_checkpoint_names_its_parent_and_keeps_its_position(tmp_path: Path) -> None:
    source = made(state_of(), tmp_path)
    update = Update(id="u1").scale("half", 2.0)
    manifest = patch(source, update, tmp_path / "deep" / "patched")
    parent = open_checkpoint(source).manifest
    assert manifest == open_checkpoint(tmp_path / "deep" / "patched").manifest
    assert manifest.parent == {"step": 1200, "path": str(source.resolve()), "update_id": "u1"}
    assert manifest.position() == parent.position()
    assert manifest.metrics == {}
    assert {name for name in manifest.digests if manifest.digests[name] != parent.digests[name]} == {"half"}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["patched"]


def test_a_patched_checkpoint_can_be_that_of_another_run_and_be_patched_again(tmp_path: Path) -> None:
    source, other = made(state_of(), tmp_path), CheckpointStore(tmp_path / "other")
    patch(source, Update(id="u1").scale("half", 2.0), other.path(1200).as_path())
    assert [manifest.step for manifest in other.list()] == [1200]
    again = patch(other.path(1200).as_path(), Update(id="u2").scale("half", 0.5), tmp_path / "again")
    assert again.digests == open_checkpoint(source).manifest.digests
    assert again.parent is not None
    assert again.parent["update_id"] == "u2"


def test_slots_are_reset_when_asked_for(tmp_path: Path) -> None:
    arrays: Arrays = {"w": np.ones(3, np.float32), "optimizer/m": np.ones(3, np.float32)}
    schema = Schema(
        [
            Variable("w", (3,), "float32", "trainable", (("optimizer/m", 0.25),)),
            Variable("optimizer/m", (3,), "float32", "optimizer"),
        ]
    )
    source = made(arrays, tmp_path, schema=schema)
    patch(source, Update(reset_slots=True).scale("w", 2.0), tmp_path / "patched")
    found = values(tmp_path / "patched")
    assert found["optimizer/m"].tolist() == [0.25] * 3
    assert found["w"].tolist() == [2.0] * 3


def test_an_update_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source = made(state_of(), tmp_path)
    with pytest.raises(UpdateRefused, match="halff"):
        patch(source, Update().scale("halff", 2.0), tmp_path / "patched")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


@pytest.mark.parametrize("name", ["half", "table"], ids=["edited", "copied"])
def test_damage_is_not_carried_over(tmp_path: Path, name: str) -> None:
    source = made(state_of(), tmp_path)
    place = open_checkpoint(source).layout.spans[name].start
    content = bytearray((source / "state.safetensors").read_bytes())
    content[place] ^= 1
    (source / "state.safetensors").write_bytes(content)
    with pytest.raises(FileDamaged, match=name):
        patch(source, Update().scale("half", 2.0), tmp_path / "patched")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    source = made(state_of(), tmp_path)
    for occupied in (source, tmp_path / "file", tmp_path / "link"):
        if occupied.name == "file":
            occupied.write_text("mine")
        elif occupied.name == "link":
            occupied.symlink_to(tmp_path / "nowhere")
        with pytest.raises(CheckpointError, match="already"):
            patch(source, Update().scale("half", 2.0), occupied)
    source.rename(source.with_name("00001200-3"))
    with pytest.raises(CheckpointError, match="already"):
        patch(source.with_name("00001200-3"), Update().scale("half", 2.0), source)


def test_the_name_of_another_step_is_refused(tmp_path: Path) -> None:
    source = made(state_of(), tmp_path)
    with pytest.raises(CheckpointError, match="Received: 00001201"):
        patch(source, Update().scale("half", 2.0), tmp_path / "00001201")


def test_what_is_no_checkpoint_cannot_be_patched(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        patch(tmp_path / "none", Update().scale("half", 2.0), tmp_path / "patched")


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    source = made(state_of(), tmp_path)
    seen: list[tuple[int, int]] = []
    patch(
        source,
        Update().scale("half", 2.0),
        tmp_path / "patched",
        progress=lambda *numbers: seen.append(numbers),
    )
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


MEMORY = """
import resource, sys
from pathlib import Path
import numpy as np
from replicast.storage.checkpoint_tools import patch
from replicast.update.update import Update

generator = np.random.default_rng(0)
columns = generator.normal(size=(1, 1_000)).astype(np.float32)
rows = generator.normal(size=(50_000, 1)).astype(np.float32)
update = (
    Update()
    .scale("large", 0.5)
    .add_low_rank("large", rows, columns)
    .assign_rows("large", [7], columns)
    .scale("narrow", 2.0)
)

def status(field):
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024

before = status("VmRSS")
resource.setrlimit(resource.RLIMIT_AS, (status("VmSize") + 100 * 2**20,) * 2)
patch(Path(sys.argv[1]), update, Path(sys.argv[2]))
# Not ru_maxrss: a child inherits that of the process that started it.
print(status("VmHWM") - before)
"""


def test_patching_takes_a_fraction_of_the_checkpoint_in_memory(tmp_path: Path) -> None:
    # Two variables of 200 MB: the limit is half of one of them.
    large = np.zeros((50_000, 1_000), np.float32)
    narrow = np.ones((100_000_000,), BFLOAT16)
    source = made({"large": large, "narrow": narrow}, tmp_path)
    command = [sys.executable, "-c", MEMORY, str(source), str(tmp_path / "patched")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert 0 < int(result.stdout) < 100 * 2**20
    with open_checkpoint(tmp_path / "patched") as reader:
        assert reader.read("narrow")[-1] == 2
        assert reader.read("large")[7].any()
    shutil.rmtree(tmp_path)  # pytest would keep it for some runs.
