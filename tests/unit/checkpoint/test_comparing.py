"""Differences between two checkpoints, and between two models."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from replicast.errors import CheckpointError, FileDamaged
from replicast.storage.checkpoint_tools import Comparison, Equality, diff, differences
from replicast.storage.checkpoints import CheckpointStore, open_checkpoint
from tests.unit.checkpoint.samples import BFLOAT16, Arrays, draft_of, flip, schema_of, state_of


def made(folder: Path, step: int, arrays: Arrays) -> Path:
    store = CheckpointStore(folder)
    store.write(draft_of(arrays, step), arrays.items())
    return store.path(step).as_path()


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


def test_equal_checkpoints_are_equal_in_every_variable(tmp_path: Path) -> None:
    found = diff(made(tmp_path, 1, state_of()), made(tmp_path, 2, state_of()))
    assert [each.name for each in found] == list(state_of())
    assert {each.verdict for each in found} == {Equality.EQUAL}
    assert {each.differing for each in found} == {0}


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


def test_zeros_of_another_sign_differ_by_nothing(tmp_path: Path) -> None:
    found = compared(tmp_path, np.array(0.0), np.array(-0.0))
    assert (found.verdict, found.differing) == (Equality.DIFFERENT, 1)
    assert (found.max_absolute, found.max_relative) == (0.0, 0.0)


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


def test_progress_reaches_the_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    paths = made(tmp_path, 1, state_of()), made(tmp_path, 2, state_of(1))
    diff(*paths, progress=lambda *numbers: seen.append(numbers))
    assert seen[-1][0] == seen[-1][1] > 0
