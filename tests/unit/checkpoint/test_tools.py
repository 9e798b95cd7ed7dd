"""Checkpoints patched and compared, in a stream: the bits of a running job, and of whole variables."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from replicast.errors import CheckpointError, FileDamaged, UpdateRefused
from replicast.storage import checkpoints
from replicast.storage.checkpoints import (
    CheckpointStore,
    Comparison,
    Equality,
    diff,
    differences,
    open_checkpoint,
    patch,
)
from replicast.update.edits import RESETS, Edit, EditKind, Variable, apply_edit, apply_to_slice, slices_of
from replicast.update.schema import planned
from replicast.update.update import Update
from tests.threads import MemoryState
from tests.unit.checkpoint.samples import BFLOAT16, Arrays, flip, made, schema_of, state_of


def values(path: Path) -> Arrays:
    with open_checkpoint(path) as reader:
        reader.verify()
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
    source, update = made(tmp_path, 1200, arrays), every_operation(state_of())
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
    source = made(tmp_path, 1200, state_of())
    update = Update(id="u1").scale("half", 2.0)
    manifest = patch(source, update, tmp_path / "deep" / "patched")
    parent = open_checkpoint(source).manifest
    assert manifest == open_checkpoint(tmp_path / "deep" / "patched").manifest
    assert manifest.parent == {"step": 1200, "path": str(source.resolve()), "update_id": "u1"}
    of_place = ("step", "sequence", "missing", "epoch", "batch", "pending", "script", "measured")
    assert all(getattr(manifest, name) == getattr(parent, name) for name in of_place)
    assert manifest.metrics == {}
    assert {name for name in manifest.digests if manifest.digests[name] != parent.digests[name]} == {"half"}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["patched"]


def test_a_patched_checkpoint_can_be_that_of_another_run_and_be_patched_again(tmp_path: Path) -> None:
    source, other = made(tmp_path, 1200, state_of()), CheckpointStore(tmp_path / "other")
    patch(source, Update(id="u1").scale("half", 2.0), other.path(1200).as_path())
    assert [manifest.step for manifest in other.manifests()] == [1200]
    again = patch(other.path(1200).as_path(), Update(id="u2").scale("half", 0.5), tmp_path / "again")
    assert again.digests == open_checkpoint(source).manifest.digests
    assert again.parent is not None
    assert again.parent["update_id"] == "u2"


def test_an_update_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    source = made(tmp_path, 1200, state_of())
    with pytest.raises(UpdateRefused, match="halff"):
        patch(source, Update().scale("halff", 2.0), tmp_path / "patched")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


@pytest.mark.parametrize("name", ["half", "table"], ids=["edited", "copied"])
def test_damage_is_not_carried_over(tmp_path: Path, name: str) -> None:
    source = made(tmp_path, 1200, state_of())
    place = open_checkpoint(source).layout.spans[name].start
    flip(source / "state.safetensors", place)
    with pytest.raises(FileDamaged, match=name):
        patch(source, Update().scale("half", 2.0), tmp_path / "patched")
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    source = made(tmp_path, 1200, state_of())
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
    source = made(tmp_path, 1200, state_of())
    with pytest.raises(CheckpointError, match="Received: 00001201"):
        patch(source, Update().scale("half", 2.0), tmp_path / "00001201")


def test_the_progress_of_a_patch_reaches_its_end(tmp_path: Path) -> None:
    source = made(tmp_path, 1200, state_of())
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
from replicast.storage.checkpoints import patch
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
    source = made(tmp_path, 1200, {"large": large, "narrow": narrow})
    command = [sys.executable, "-c", MEMORY, str(source), str(tmp_path / "patched")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert 0 < int(result.stdout) < 100 * 2**20
    with open_checkpoint(tmp_path / "patched") as reader:
        assert reader.read("narrow")[-1] == 2
        assert reader.read("large")[7].any()
    shutil.rmtree(tmp_path)  # pytest would keep it for some runs.


# Edits on slices give the bits of edits on the whole variable, for any state.


DTYPES = [np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), BFLOAT16, np.dtype(np.int32)]
SHAPES = [(), (1,), (7,), (5, 3), (2, 11), (3, 2, 4), (0, 3), (4, 0), (1, 30)]


def finite(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array with ones where it is not finite: as what an update may hold unless it is told otherwise."""
    with np.errstate(all="ignore"):
        return np.where(np.isfinite(array.astype(np.float64)), array, np.ones((), array.dtype))


def in_slices(
    edits: list[Edit], variable: Variable, before: npt.NDArray[Any], elements: int
) -> npt.NDArray[Any]:
    flat, parts, done = before.reshape(-1), [before.reshape(-1)[:0]], 0
    for block in slices_of(variable.shape, elements):
        end = done + block.shape[0] * block.shape[1]
        parts.append(
            apply_to_slice(edits, variable.shape, block, flat[done:end].reshape(block.shape)).reshape(-1)
        )
        done = end
    assert done == before.size
    return np.concatenate(parts)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("elements", [1, 2, 3, 4, 7, 100])
def test_blocks_follow_one_another_and_cover_all(shape: tuple[int, ...], elements: int) -> None:
    variable = Variable("x", shape, "float32", "trainable")
    whole = np.arange(int(np.prod(shape)))
    table = whole.reshape((shape[0], -1) if shape and whole.size else (1, -1))
    parts = [table[block.rows, block.columns] for block in slices_of(variable.shape, elements)]
    assert all(0 < part.size <= elements for part in parts)
    assert [int(number) for part in parts for number in part.reshape(-1)] == whole.tolist()


@st.composite
def cases(draw: st.DrawFn) -> tuple[Variable, npt.NDArray[Any], list[Edit], int]:
    """A variable of any bits, some edits of it, and how many elements a block has."""
    dtype, shape = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(SHAPES))

    def array(shape: tuple[int, ...]) -> npt.NDArray[Any]:
        return finite(np.asarray(draw(hnp.arrays(f"u{dtype.itemsize}", shape))).view(dtype))

    variable = Variable("x", shape, dtype.name, "trainable")
    possible = [EditKind.ADD, EditKind.ASSIGN]
    if dtype.kind != "i":
        possible += [EditKind.SCALE, EditKind.BLEND, EditKind.RESET]
    if shape:
        possible += [EditKind.ADD_ROWS, EditKind.ASSIGN_ROWS, EditKind.RESET_ROWS]
    if len(shape) == 2:
        possible += [EditKind.ADD_LOW_RANK]
    edits = []
    for operation in draw(st.lists(st.sampled_from(possible), min_size=1, max_size=4)):
        arrays: Arrays = {}
        factor = None
        if operation.has_factor:
            factor = draw(st.floats(width=16, allow_nan=False, allow_infinity=False))
        if operation in (EditKind.ADD, EditKind.ASSIGN, EditKind.BLEND):
            arrays["value"] = array(shape)
        elif operation.is_of_rows:
            rows = st.permutations(range(shape[0])).map(lambda order: order[: len(order) // 2 + 1])
            arrays["indices"] = np.array(draw(rows), np.int64)
            if operation is not EditKind.RESET_ROWS:
                arrays["rows"] = array((len(arrays["indices"]), *shape[1:]))
        elif operation is EditKind.ADD_LOW_RANK:
            rank = draw(st.integers(1, 3))
            arrays |= {"a": array((shape[0], rank)), "b": array((rank, shape[1]))}
        edits.append(Edit(operation, "x", arrays, factor))
    before = np.asarray(draw(hnp.arrays(f"u{dtype.itemsize}", shape))).view(dtype)
    return variable, before, edits, draw(st.integers(1, 12))


@given(cases())
def test_edits_on_slices_give_the_bits_of_edits_on_the_whole(
    case: tuple[Variable, npt.NDArray[Any], list[Edit], int],
) -> None:
    variable, before, edits, elements = case
    whole = before
    for edit in edits:
        whole = apply_edit(edit, whole)
    assert in_slices(edits, variable, before, elements).tobytes() == whole.tobytes()


@settings(max_examples=40)
@given(cases())
def test_a_patched_file_holds_the_bits_of_edits_on_the_whole(
    case: tuple[Variable, npt.NDArray[Any], list[Edit], int],
) -> None:
    _, before, edits, elements = case
    edits = [edit for edit in edits if edit.operation not in RESETS]  # Only planning makes those.
    assume(edits)
    whole = before
    for edit in edits:
        whole = apply_edit(edit, whole)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as context:
        context.setattr(checkpoints, "slices_of", partial(slices_of, elements=elements))
        source = made(Path(folder), 1200, {"x": before, "y": np.ones(3)})
        patch(source, Update().replaced(edits), Path(folder) / "patched")
        with open_checkpoint(Path(folder) / "patched") as reader:
            reader.verify()
            found = {name: reader.read(name) for name in reader.names()}
    assert found["x"].tobytes() == whole.tobytes()
    assert found["y"].tolist() == [1.0] * 3


@pytest.mark.parametrize("elements", [333, 1500])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slices_give_the_same_bits_where_processors_compute_many_at_once(
    dtype: np.dtype[Any], elements: int
) -> None:
    generator = np.random.default_rng(0)

    def bits(*shape: int) -> npt.NDArray[Any]:
        size = dtype.itemsize
        return generator.integers(0, 2 ** (8 * size) - 1, shape, f"u{size}", endpoint=True).view(dtype)

    before = bits(100, 301)
    if dtype.kind != "i":
        before[generator.random(before.shape) < 0.2] = np.nan
    edits = [
        Edit(EditKind.ADD, "x", {"value": finite(bits(100, 301))}),
        Edit(EditKind.ADD_LOW_RANK, "x", {"a": finite(bits(100, 2)), "b": finite(bits(2, 301))}),
        Edit(EditKind.ADD_ROWS, "x", {"indices": np.arange(0, 100, 3), "rows": finite(bits(34, 301))}),
    ]
    if dtype.kind != "i":
        edits.append(Edit(EditKind.BLEND, "x", {"value": finite(bits(100, 301))}, 0.3))
        edits.append(Edit(EditKind.SCALE, "x", {}, -1.5))
    for edit in edits:
        variable = Variable("x", before.shape, dtype.name, "trainable")
        assert in_slices([edit], variable, before, elements).tobytes() == apply_edit(edit, before).tobytes()


# Differences between two checkpoints, and between two models.


def compared(folder: Path, left: npt.NDArray[Any], right: npt.NDArray[Any]) -> Comparison:
    (found,) = diff(made(folder, 1, {"x": left}), made(folder, 2, {"x": right}))
    return found


def test_differences_to_a_changed_model_are_listed_by_variable() -> None:
    old = schema_of({"same": np.zeros(1), "wider": np.zeros((2, 3)), "gone": np.zeros((), np.int32)})
    new = schema_of({"new": np.zeros(4, BFLOAT16), "wider": np.zeros((2, 4)), "same": np.zeros(1)})
    assert differences(old, new) == [
        Comparison("wider", Equality.CHANGED, "float64 of shape (2, 3)", "float64 of shape (2, 4)"),
        Comparison("gone", Equality.ONLY_FIRST, "int32 of shape ()", "nothing"),
        Comparison("new", Equality.ONLY_SECOND, "nothing", "bfloat16 of shape (4,)"),
    ]
    assert differences(old, old) == []


def test_each_variable_has_its_verdict(tmp_path: Path) -> None:
    first, second = state_of(), state_of(1)
    first["mine"], second["yours"] = np.zeros(1), np.zeros(2)
    second["half"] = np.zeros((3, 1), np.float16)
    paths = made(tmp_path, 1, first), made(tmp_path, 2, second)
    for values in (True, False):
        verdicts = {each.name: each.verdict for each in diff(*paths, values=values)}
        assert verdicts["dense/kernel"] is Equality.DIFFERENT
        assert verdicts["dense/bias"] is Equality.EQUAL
        assert verdicts["half"] is Equality.CHANGED
        assert verdicts["mine"] is Equality.ONLY_FIRST
        assert verdicts["yours"] is Equality.ONLY_SECOND
    quick = {each.name: each for each in diff(*paths, values=False)}
    assert quick["dense/kernel"].differing is None


@pytest.mark.parametrize("dtype", [np.float16, BFLOAT16, np.float32, np.float64], ids=str)
def test_floats_are_compared_by_bits_and_by_distance(tmp_path: Path, dtype: Any) -> None:
    left = np.array([1.0, 2.0, 0.0, np.nan, np.nan, 5.0, 8.0], dtype)
    right = np.array([1.0, 1.5, -0.0, np.nan, 1.0, np.nan, 4.0], dtype)
    found = compared(tmp_path, left, right)
    assert (found.elements, found.differing, found.one_is_nan) == (7, 5, 2)
    assert (found.max_absolute, found.max_relative) == (4.0, 0.5)


def test_infinity_is_infinitely_far_from_numbers_only(tmp_path: Path) -> None:
    found = compared(tmp_path, np.array([np.inf, np.inf]), np.array([np.inf, 1.0]))
    assert (found.differing, found.max_absolute, found.max_relative) == (1, math.inf, math.inf)
    assert found.to_json()["max_absolute"] == "inf"


@pytest.mark.parametrize(
    ("left", "right", "distance"),
    [
        (np.int64(2**62), np.int64(2**62 + 1), 1.0),
        (np.int8(-128), np.int8(127), 255.0),
        (np.uint64(0), np.uint64(2**64 - 1), float(2**64 - 1)),
        (np.bool_(True), np.bool_(False), 1.0),
    ],
)
def test_the_distance_of_integers_does_not_wrap(
    tmp_path: Path, left: Any, right: Any, distance: float
) -> None:
    assert compared(tmp_path / "a", np.array([left]), np.array([right])).max_absolute == distance
    assert compared(tmp_path / "b", np.array([right]), np.array([left])).max_absolute == distance


def test_large_variables_are_compared_to_their_end(tmp_path: Path) -> None:
    left = np.zeros(1_000_001, np.float32)
    right = left.copy()
    right[[0, 500_000, -1]] = [1, 2, 3]
    found = compared(tmp_path, left, right)
    assert (found.elements, found.differing, found.max_absolute) == (left.size, 3, 3.0)


def test_what_is_read_is_checked(tmp_path: Path) -> None:
    paths = made(tmp_path, 1, {"x": np.zeros(3)}), made(tmp_path, 2, {"x": np.ones(3)})
    flip(paths[1] / "state.safetensors", -1)
    with pytest.raises(FileDamaged, match="bytes of x"):
        diff(*paths)
    with pytest.raises(CheckpointError):
        diff(paths[0], tmp_path / "none")


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("name", ["same", "changed", "only here"])
def test_damage_is_found_although_the_digests_in_the_manifests_agree(
    tmp_path: Path, name: str, where: int
) -> None:
    alike, other = (
        {"same": np.zeros(3), "changed": np.zeros(2)},
        {"same": np.zeros(3), "changed": np.zeros(5)},
    )
    both = (alike, other) if where == 0 else (other, alike)
    both[where]["only here"] = np.zeros(4)
    paths = made(tmp_path, 1, both[0]), made(tmp_path, 2, both[1])
    with open_checkpoint(paths[where]) as reader:
        place = reader.layout.spans[name].start
    flip(paths[where] / "state.safetensors", place)
    with pytest.raises(FileDamaged, match=f"bytes of {name} .* remove .*{paths[where].name} to discard it"):
        diff(*paths)
    diff(*paths, values=False)


def test_the_progress_of_a_comparison_reaches_its_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    paths = made(tmp_path, 1, state_of()), made(tmp_path, 2, state_of(1))
    diff(*paths, progress=lambda *numbers: seen.append(numbers))
    assert seen[-1][0] == seen[-1][1] > 0
