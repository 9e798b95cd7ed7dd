"""The update that undoes another one, for every kind of edit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from replicast.errors import UpdateRefused
from replicast.update.edits import Edit, EditKind, Variable, apply_edit
from replicast.update.schema import (
    Schema,
    bytes_to_keep,
    disturbs,
    inverse,
    meaning,
    parts_to_keep,
    planned,
    update_before,
)
from replicast.update.update import Update
from tests.threads import MemoryState

FLOATS = [np.float32, np.float64, np.float16, ml_dtypes.bfloat16]


def undone(update: Update, state: MemoryState) -> Update:
    """Applies an update to a state, and gives what undoes it."""
    plan = planned(update, state.schema)
    whole, rows = parts_to_keep(plan.edits, state.schema)
    values, parts = state.hold(whole, rows)()
    before = update_before(plan.id, values, {name: (rows[name], parts[name]) for name in rows})
    state.apply(plan.edits)
    return planned(inverse(plan, before if before.edits else None), state.schema)


def table(dtype: Any) -> MemoryState:
    return MemoryState({"w": np.arange(12).reshape(4, 3).astype(dtype), "s": np.asarray(2).astype(dtype)})


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "update",
    [
        Update().assign("w", [[9] * 3] * 4),
        Update().assign_rows("w", [3, 1], [[9] * 3] * 2),
        Update().blend("w", [[9] * 3] * 4, 0.3),
        Update().scale("w", 0.0),
        Update().scale("s", 1e-45),
        Update().add("w", [[1] * 3] * 4).assign_rows("w", [0], [[5] * 3]),
        Update().assign("s", 7).scale("s", 3.0),
    ],
    ids=["assign", "assign rows", "blend", "scale by 0", "scale by almost 0", "add and assign", "scalar"],
)
def test_what_was_overwritten_comes_back_bit_for_bit(update: Update, dtype: Any) -> None:
    state = table(dtype)
    before = {name: value.tobytes() for name, value in state.values.items()}
    back = undone(update, state)
    state.apply(back.edits)
    assert {name: value.tobytes() for name, value in state.values.items()} == before


@pytest.mark.parametrize("dtype", [*FLOATS, np.int8, np.uint8, np.int64])
@pytest.mark.parametrize(
    "update",
    [
        Update().add("w", [[1] * 3] * 4),
        Update().add_rows("w", [2, 0], [[100] * 3] * 2),
        Update().add_low_rank("w", [[1, 2]] * 4, [[1, 2, 3], [4, 5, 6]]),
        Update().add("s", 3),
    ],
    ids=["add", "add rows", "low rank", "scalar"],
)
def test_what_was_added_is_subtracted_and_nothing_is_kept(update: Update, dtype: Any) -> None:
    state = table(dtype)
    before = {name: value.copy() for name, value in state.values.items()}
    plan = planned(update, state.schema)
    assert parts_to_keep(plan.edits, state.schema) == ([], {})
    state.apply(undone(update, state).edits)
    for name, value in before.items():
        np.testing.assert_array_equal(state.values[name], value)


def test_what_was_scaled_is_divided_and_training_since_then_as_well() -> None:
    state = table(np.float32)
    back = undone(Update().scale("w", 4.0), state)
    state.values["w"] += 8
    state.apply(back.edits)
    np.testing.assert_array_equal(state.values["w"], np.arange(12).reshape(4, 3) + 2)
    assert "divided as well" in meaning(back.edits[0])


def test_only_the_touched_rows_are_kept() -> None:
    schema = Schema([Variable("w", (1000, 3), "float32", "trainable")])
    plan = planned(Update().assign_rows("w", [7, 3], np.ones((2, 3), np.float32)), schema)
    whole, rows = parts_to_keep(plan.edits, schema)
    assert (whole, rows["w"].tolist()) == ([], [3, 7])
    assert bytes_to_keep(whole, rows, schema) == 2 * 3 * 4


def test_without_the_values_before_it_says_so_and_what_to_do() -> None:
    update = planned(Update().assign("w", [[9] * 3] * 4), table(np.float32).schema)
    with pytest.raises(UpdateRefused, match=r"of w before the update are not kept.*--assign"):
        inverse(update, None)


def test_an_inverse_may_hold_what_is_not_finite() -> None:
    state = table(np.float32)
    state.values["w"][1, 1] = np.nan
    before = state.values["w"].tobytes()
    state.apply(undone(Update().assign("w", [[0] * 3] * 4), state).edits)
    assert state.values["w"].tobytes() == before


def test_every_operation_says_what_becomes_of_the_training_since() -> None:
    said = {operation: meaning(Edit(operation, "w", {}, 1.0)) for operation in EditKind}
    assert all("training" in text for text in said.values())
    assert "exactly" in said[EditKind.ASSIGN]
    assert "last bits may differ" in said[EditKind.ADD]


def test_an_edit_and_its_inverse_may_differ_in_the_last_bits_in_floating_point() -> None:
    state = MemoryState({"w": np.array([1.0], np.float32)})
    back = undone(Update().add("w", np.array([1e8], np.float32)), state)
    assert apply_edit(back.edits[0], state.values["w"]).tolist() == [0.0], "1 + 1e8 - 1e8"


def test_a_heal_keeps_what_was_added_before_it_and_is_lost_when_values_before_come_back() -> None:
    assert disturbs(EditKind.ASSIGN, EditKind.ADD)
    assert not disturbs(EditKind.ASSIGN, EditKind.ADD, heals=True)
    assert disturbs(EditKind.ASSIGN, EditKind.ASSIGN, heals=True)
    assert not disturbs(EditKind.SCALE, EditKind.SCALE), "in any order"
    assert disturbs(EditKind.SCALE, EditKind.ADD)
    assert disturbs(EditKind.RESET_ROWS, EditKind.SCALE)
