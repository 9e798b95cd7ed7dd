"""Edits on slices give the bits of edits on the whole variable, for any state."""

from __future__ import annotations

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

from replicast.storage import checkpoint_tools as patching
from replicast.storage.checkpoint_tools import apply_edits, blocks_of, patch
from replicast.storage.checkpoints import CheckpointStore, open_checkpoint
from replicast.update.edits import RESETS, Edit, EditKind, apply_edit
from replicast.update.schema import Variable
from replicast.update.update import Update
from tests.unit.checkpoint.samples import BFLOAT16, Arrays, draft_of

DTYPES = [np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16), BFLOAT16, np.dtype(np.int32)]
SHAPES = [(), (1,), (7,), (5, 3), (2, 11), (3, 2, 4), (0, 3), (4, 0), (1, 30)]


def finite(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array with ones where it is not finite: as what an update may hold unless it is told otherwise."""
    with np.errstate(all="ignore"):
        return np.where(np.isfinite(array.astype(np.float64)), array, np.ones((), array.dtype))


def stored(arrays: Arrays, folder: Path) -> Path:
    store = CheckpointStore(folder)
    store.write(draft_of(arrays), arrays.items())
    return store.path(1200).as_path()


def in_slices(
    edits: list[Edit], variable: Variable, before: npt.NDArray[Any], elements: int
) -> npt.NDArray[Any]:
    flat, parts, done = before.reshape(-1), [before.reshape(-1)[:0]], 0
    for block in blocks_of(variable, elements):
        end = done + block.shape[0] * block.shape[1]
        parts.append(apply_edits(edits, variable, block, flat[done:end].reshape(block.shape)).reshape(-1))
        done = end
    assert done == before.size
    return np.concatenate(parts)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("elements", [1, 2, 3, 4, 7, 100])
def test_blocks_follow_one_another_and_cover_all(shape: tuple[int, ...], elements: int) -> None:
    variable = Variable("x", shape, "float32", "trainable")
    whole = np.arange(int(np.prod(shape)))
    table = whole.reshape((shape[0], -1) if shape and whole.size else (1, -1))
    parts = [table[block.rows, block.columns] for block in blocks_of(variable, elements)]
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
        context.setattr(patching, "blocks_of", partial(blocks_of, elements=elements))
        source = stored({"x": before, "y": np.ones(3)}, Path(folder))
        patch(source, Update().replaced(edits), Path(folder) / "patched")
        with open_checkpoint(Path(folder) / "patched", verify=True) as reader:
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
