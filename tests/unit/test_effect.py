"""What an update has done to a variable, in numbers and in words."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from msgspec import UNSET

from replicast.update.edits import RESETS, Variable
from replicast.update.guard import effects
from replicast.update.schema import Schema, parts_to_keep, planned, touched_parts
from replicast.update.trial import Effect, Histogram
from replicast.update.update import Update
from tests.threads import MemoryState

Arrays = dict[str, npt.NDArray[Any]]


def done(update: Update, values: Arrays) -> tuple[Effect, ...]:
    """What a worker measures, which keeps what a revert needs before, and reads what was touched after."""
    state = MemoryState(values)
    plan = planned(update, state.schema)
    whole, rows = state.hold(*parts_to_keep(plan.edits, state.schema))()
    state.apply(plan.edits)
    after = state.hold(*touched_parts([edit for edit in plan.edits if edit.operation not in RESETS]))()
    return effects(plan.edits, state.schema, whole | rows, after[0] | after[1])


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16, np.int32])
def test_of_one_number_both_values_are_told(dtype: Any) -> None:
    values = {"rate": np.array(4, dtype)}
    for update in (Update().assign("rate", 2), Update().add("rate", -2)):
        assert done(update, values) == (Effect("rate", (), before=4.0, after=2.0),)
    assert str(Effect("rate", (), before=0.001, after=0.0005)) == "0.001 → 0.0005"


def test_a_learning_rate_that_a_schedule_computes_is_told_in_words() -> None:
    rate = "optimizer/learning_rate"
    assert str(Effect(rate, (), before=-1.0, after=-0.5)) == "the schedule → 0.5 × the schedule"
    assert str(Effect(rate, (), before=-0.5, after=0.01)) == "0.5 × the schedule → 0.01"


def test_a_scaled_learning_rate_says_from_what_to_what() -> None:
    (found,) = done(Update().scale("lr", 0.5), {"lr": np.array(0.001, np.float32)})
    assert str(found) == "0.001 → 0.0005"


OPERATIONS = {
    "add": Update().add("x", np.full((3, 4), 0.5, np.float32)),
    "assign": Update().assign("x", np.full((3, 4), 9.0, np.float32)),
    "scale": Update().scale("x", 1.5),
    "blend": Update().blend("x", np.zeros((3, 4), np.float32), 0.25),
    "low rank": Update().add_low_rank("x", np.ones((3, 2), np.float32), np.ones((2, 4), np.float32)),
    "several": Update().add("x", np.ones((3, 4), np.float32)).scale("x", 2.0),
    "twice": Update().assign("x", np.ones((3, 4), np.float32)).add("x", np.ones((3, 4), np.float32)),
}


@pytest.mark.parametrize("update", OPERATIONS.values(), ids=OPERATIONS)
def test_the_norms_are_those_of_the_values_and_of_their_difference(update: Update) -> None:
    value = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
    state = MemoryState({"x": value})
    state.apply(planned(update, state.schema).edits)
    (found,) = done(update, {"x": value})
    assert (found.variable, found.shape, found.rows) == ("x", (3, 4), None)
    assert found.norm == pytest.approx(np.linalg.norm(value), rel=1e-6)
    assert found.change == pytest.approx(np.linalg.norm(state.values["x"] - value), rel=1e-6)
    assert found.relative == pytest.approx((found.change or 0) / (found.norm or 1))


def test_the_histogram_counts_the_changes_between_the_least_and_the_greatest() -> None:
    delta = np.zeros((8, 8), np.float32)
    delta[0, :3], delta[7, 7] = -1.0, 3.0
    (found,) = done(Update().add("x", delta), {"x": np.ones((8, 8), np.float32)})
    told = found.histogram
    assert isinstance(told, Histogram)
    assert (told.least, told.greatest, len(told.counts)) == (-1.0, 3.0, 32)
    assert {place: count for place, count in enumerate(told.counts) if count} == {0: 3, 8: 60, 31: 1}
    assert str(told) == "-1 ▁       █                      ▁ 3"


@pytest.mark.parametrize("delta", [0.5, np.nan, np.inf])
def test_a_change_that_is_the_same_everywhere_has_one_bin_and_one_that_is_not_finite_none(
    delta: float,
) -> None:
    (found,) = done(Update(allow_nonfinite=True).add("x", np.full(9, delta, "f4")), {"x": np.ones(9, "f4")})
    assert found.histogram == (Histogram(0.5, 0.5, (9,)) if delta == 0.5 else UNSET)


def test_of_many_values_an_even_sample_is_counted_and_of_many_variables_the_first_have_histograms() -> None:
    delta = np.random.default_rng(1).normal(size=300_001).astype(np.float32)
    values = {f"x{number}": np.zeros(2, np.float32) for number in range(20)} | {"x0": np.zeros_like(delta)}
    update = Update().add("x0", delta)
    for name in list(values)[1:]:
        update = update.assign(name, np.ones(2, np.float32))
    found = done(update, values)
    told = found[0].histogram
    assert isinstance(told, Histogram)
    assert (told.least, told.greatest) == (delta.min(), delta.max())
    assert 2**12 < sum(told.counts) <= 2**13 + 100
    assert [bool(one.histogram) for one in found] == [True] * 16 + [False] * 4


@pytest.mark.parametrize("operation", ["add_rows", "assign_rows"])
def test_of_rows_only_the_touched_ones_are_measured(operation: str) -> None:
    value = np.arange(20, dtype=np.float32).reshape(5, 4)
    update = getattr(Update(), operation)("x", [3, 1], np.full((2, 4), 2.0, np.float32))
    state = MemoryState({"x": value})
    state.apply(planned(update, state.schema).edits)
    (found,) = done(update, {"x": value})
    rows = value[[1, 3]]
    assert (found.shape, found.rows) == ((5, 4), 2)
    assert found.norm == pytest.approx(np.linalg.norm(rows))
    assert found.change == pytest.approx(np.linalg.norm(state.values["x"][[1, 3]] - rows))
    assert str(found).startswith("2 rows of 5×4, norm ")


def test_a_large_variable_is_measured_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replicast.update.guard._AT_ONCE", 64)
    monkeypatch.setattr("replicast.update.guard._EXACT", 0)
    value = np.linspace(-1, 1, 1000, dtype=np.float32).reshape(20, 50)
    for update in (Update().add("x", value * 1e-3), Update().assign("x", value * 1.001)):
        (found,) = done(update, {"x": value})
        assert found.norm == pytest.approx(np.linalg.norm(value), rel=1e-4)
        assert found.relative == pytest.approx(1e-3, rel=1e-2)


def test_resets_of_slots_are_left_out() -> None:
    variables = [
        Variable("x", (2,), "float32", "trainable", (("m", 0.0),)),
        Variable("m", (2,), "float32", "optimizer"),
    ]
    state = MemoryState({"x": np.ones(2, np.float32), "m": np.ones(2, np.float32)}, Schema(variables))
    plan = planned(Update(reset_slots=True).add("x", np.ones(2, np.float32)), state.schema)
    assert len(plan.edits) == 2
    (found,) = effects(plan.edits, state.schema, {}, {"x": np.full(2, 2, np.float32)})
    assert str(found) == "2, norm 1.414, changed by 1.414 (100 %)"


def test_what_is_not_finite_has_no_number_and_what_was_not_kept_no_norm() -> None:
    update = Update(allow_nonfinite=True).assign("lr", float("nan"))
    (found,) = done(update, {"lr": np.array(1.0)})
    assert (found.before, found.after, str(found)) == (1.0, None, "1 → not finite")
    (found,) = done(Update().add("x", np.ones(2)), {"x": np.array([np.inf, 1.0])})
    assert (found.norm, str(found)) == (None, "2")
    schema, values = Schema([Variable("x", (2,), "float64", "trainable")]), {"x": np.ones(2)}
    (found,) = effects(Update().assign("x", np.ones(2)).edits, schema, {}, values)
    assert (found.norm, found.change) == (None, None)
    (found,) = done(Update().add("x", np.zeros(0)), {"x": np.zeros(0)})
    assert (found.norm, found.change, found.relative) == (0.0, 0.0, None)
