"""What a guard accepts, and its refusals."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable
from dataclasses import FrozenInstanceError
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from replicast.errors import UpdateRefused
from replicast.update.edits import Variable
from replicast.update.guard import Guard, check_rates, checked_guard
from replicast.update.schema import Schema, planned
from replicast.update.update import Update

KERNEL = np.array([[3.0, 0.0], [0.0, 4.0], [0.0, 0.0]], np.float32)
LIVE: dict[str, np.ndarray[Any, Any]] = {
    "model/dense/kernel": KERNEL,
    "model/dense/bias": np.zeros(2, np.float32),
    "model/half": np.array([3.0, 4.0], ml_dtypes.bfloat16),
    "model/count": np.array([3, 4], np.int64),
    "model/mask": np.array([True, False]),
    "optimizer/momentum": np.ones((3, 2), np.float32),
}
SLOTS = {"model/dense/kernel": (("optimizer/momentum", 0.0),)}
SCHEMA = Schema(
    Variable(name, value.shape, value.dtype.name, "trainable", SLOTS.get(name, ()))
    for name, value in LIVE.items()
)
Made = Callable[[Update], Update]


class Reading:
    """Gives the live values and remembers for which it was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __call__(self, names: Iterable[str]) -> dict[str, np.ndarray[Any, Any]]:
        listed = list(names)
        self.asked += listed
        return {name: LIVE[name].copy() for name in listed}


def check(guard: Guard, make: Made, read: Reading | None = None) -> None:
    update = planned(make(Update(allow_nonfinite=True)), SCHEMA)
    guard.check(update.edits, SCHEMA, read if read is not None else Reading())


def refusal(guard: Guard, make: Made) -> UpdateRefused:
    with pytest.raises(UpdateRefused) as caught:
        check(guard, make)
    return caught.value


NORMS: list[tuple[str, Made, float, float]] = [
    ("add", lambda u: u.add("kernel", np.full((3, 2), 2, "f4")), math.sqrt(24), math.sqrt(24) / 5),
    ("assign", lambda u: u.assign("kernel", KERNEL + np.float32(1)), math.sqrt(6), math.sqrt(6) / 5),
    ("scale up", lambda u: u.scale("kernel", 3.0), 10.0, 2.0),
    ("scale down", lambda u: u.scale("kernel", 0.5), 2.5, 0.5),
    ("blend", lambda u: u.blend("kernel", np.zeros((3, 2), "f4"), 0.5), 2.5, 0.5),
    ("add rows", lambda u: u.add_rows("kernel", [1], [[3, 3]]), math.sqrt(18), math.sqrt(18) / 4),
    ("assign rows", lambda u: u.assign_rows("kernel", [0], np.zeros((1, 2), "f4")), 3.0, 1.0),
    (
        "low rank",
        lambda u: u.add_low_rank("kernel", [[1, 1]] * 3, [[1, 1]] * 2),
        math.sqrt(24),
        math.sqrt(24) / 5,
    ),
    ("bfloat16", lambda u: u.assign("half", np.array([0, 4], ml_dtypes.bfloat16)), 3.0, 0.6),
    ("integers", lambda u: u.add("count", np.array([0, -5])), 5.0, 1.0),
    ("bools", lambda u: u.assign("mask", np.array([True, True])), 1.0, 1.0),
    ("there and back", lambda u: u.scale("kernel", 2.0).scale("kernel", 0.5), 0.0, 0.0),
    ("twice", lambda u: u.scale("kernel", 2.0).add("kernel", KERNEL), 10.0, 2.0),
    ("rows twice", lambda u: rows_twice(u), math.sqrt(17), math.sqrt(17) / 5),
]


def rows_twice(update: Update) -> Update:
    return update.add_rows("kernel", [1, 0], [[0, 1], [1, 0]]).assign_rows("kernel", [1], [[0, 0]])


@pytest.mark.parametrize(("make", "norm", "relative"), [row[1:] for row in NORMS], ids=[r[0] for r in NORMS])
def test_the_change_is_measured_against_the_live_value(make: Made, norm: float, relative: float) -> None:
    for guard, parameter, found in (
        (lambda bound: Guard(max_norm=bound), "max_norm", norm),
        (lambda bound: Guard(max_relative_change=bound), "max_relative_change", relative),
    ):
        check(guard(found * 1.0001 + 1e-9), make)
        if found:
            error = refusal(guard(found / 2), make)
            assert error.variable in LIVE
            assert error.expected == f"at most {found / 2:g} ({parameter})"
            assert error.received == f"{found:.6g}, 2 times the bound"


def test_any_change_of_zeros_is_relatively_too_large_and_no_change_passes() -> None:
    guard = Guard(max_relative_change=1e9)
    assert refusal(guard, lambda u: u.add("bias", np.ones(2, "f4"))).received == "inf"
    check(guard, lambda u: u.add("bias", np.zeros(2, "f4")))
    check(guard, lambda u: u.scale("bias", 2.0))


def test_non_finite_values_are_refused_even_if_the_update_allows_them() -> None:
    for value in (np.nan, np.inf, -np.inf):
        error = refusal(Guard(), lambda u, value=value: u.add("bias", np.array([1, value], "f4")))
        assert "require_finite" in str(error)
        assert "which the guard refuses" in error.problem
        assert "require_finite=False" in str(error.remedy)
        assert str(value) in str(error.received)
    assert "factor" in refusal(Guard(), lambda u: u.scale("half", math.inf)).problem
    refusal(Guard(), lambda u: u.assign("half", np.array([1, np.nan], ml_dtypes.bfloat16)))
    check(Guard(require_finite=False), lambda u: u.add("bias", np.array([1, np.nan], "f4")))


def test_a_nan_change_exceeds_every_bound() -> None:
    for bound in ({"max_norm": 1e300}, {"max_relative_change": 9}):
        guard = Guard(require_finite=False, **bound)
        for value in (np.nan, np.inf):
            refusal(guard, lambda u, value=value: u.assign("kernel", np.full((3, 2), value, "f4")))


@pytest.mark.parametrize(
    ("guard", "passes"),
    [
        (Guard(), True),
        (Guard(allow=["model/*"]), True),
        (Guard(allow=["*/bias"]), False),
        (Guard(allow=["*/bias", "model/dense/kernel"]), True),
        (Guard(allow=["dense/kernel"]), False),
        (Guard(deny=["*/bias"]), True),
        (Guard(deny=["model/*"]), False),
        (Guard(allow=["model/*"], deny=["*/kernel"]), False),
        (Guard(deny=["MODEL/*"]), True),
    ],
)
def test_patterns_are_matched_with_full_names(guard: Guard, passes: bool) -> None:
    def make(update: Update) -> Update:
        return update.scale("kernel", 0.5)

    if passes:
        check(guard, make)
        return
    error = refusal(guard, make)
    assert error.variable == error.received == "model/dense/kernel"
    assert "(allow)" in str(error.expected) or "(deny)" in str(error.expected)
    assert "Leave this variable out" in str(error.remedy)


def test_a_reset_of_slots_is_matched_with_the_patterns_but_not_measured() -> None:
    update = planned(Update(reset_slots=True).scale("kernel", 1.01), SCHEMA)
    Guard(max_relative_change=0.1).check(update.edits, SCHEMA, Reading())
    with pytest.raises(UpdateRefused) as caught:
        Guard(deny=["optimizer/*"]).check(update.edits, SCHEMA, Reading())
    assert caught.value.variable == "optimizer/momentum"


def test_values_are_read_only_if_the_change_depends_on_them() -> None:
    read = Reading()
    check(Guard(max_norm=100), lambda u: u.add("kernel", KERNEL).add("bias", [1, 1]), read)
    assert read.asked == []
    check(Guard(max_norm=100), lambda u: u.assign("kernel", KERNEL), read)
    check(Guard(max_relative_change=100), lambda u: u.scale("half", 2.0), read)
    assert read.asked == ["model/dense/kernel", "model/half"]


def test_many_small_changes_add_up_in_double_precision() -> None:
    count = 3_000_001
    schema = Schema([Variable("x", (count,), "float32", "trainable")])
    update = planned(Update().add("x", np.full(count, 1e-4, "f4")), schema)
    norm = math.sqrt(count) * float(np.float32(1e-4))
    Guard(max_norm=norm * (1 + 1e-9)).check(update.edits, schema, Reading())
    with pytest.raises(UpdateRefused):
        Guard(max_norm=norm * (1 - 1e-9)).check(update.edits, schema, Reading())


@pytest.mark.parametrize(
    "arguments",
    [
        *({"max_norm": wrong} for wrong in (0, -1.0, math.nan, "1", True)),
        {"max_relative_change": math.inf},
        {"allow": "model/*"},
        {"deny": [""]},
        {"deny": [3]},
        {"require_finite": 1},
    ],
)
def test_invalid_arguments_of_a_guard_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Received:"):
        Guard(**arguments)


def test_a_pattern_that_matches_no_variable_is_refused_with_similar_names() -> None:
    Guard(allow=["model/*"], deny=["*/bias"]).check_patterns(SCHEMA)
    with pytest.raises(ValueError, match=r"deny .*optimizer/momentum.* Received: 'optimzer/momentum'"):
        Guard(deny=["optimzer/momentum"]).check_patterns(SCHEMA)


@pytest.mark.parametrize("wrong", ["x", Guard, {"max_norm": 1.0}, 1.0, False])
def test_anything_but_a_guard_is_refused_with_an_example(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"guard must be a replicast\.Guard.*Received: "):
        checked_guard(wrong)


def test_a_guard_is_immutable() -> None:
    patterns = ["model/*"]
    guard = Guard(allow=patterns)
    patterns.append("*")
    assert guard.allow == ("model/*",)
    with pytest.raises(FrozenInstanceError):
        guard.max_norm = 1.0  # type: ignore[misc]
    assert guard == Guard(allow=("model/*",))
    assert checked_guard(guard) is guard
    assert checked_guard(None) is None


@pytest.mark.parametrize(
    ("before", "after", "allowed"),
    [
        *((-1, 0.001, True), (0.001, -1, True), (-1, -0.5, False), (0.5, 0.001, False), (-1, -1.05, True)),
        *((0.001, -0.001, False), (0.001, -1e6, False), (-0.5, -1, True), (0.001, -0.5, False)),
    ],
)
def test_a_rate_is_not_compared_with_a_multiple_of_its_schedule(
    before: float, after: float, allowed: bool
) -> None:
    rate = "optimizer/learning_rate"
    schema, live = (
        Schema([Variable(rate, (), "float32", "optimizer")], {rate: "a schedule"}),
        np.array(before, "f4"),
    )
    edits = planned(Update().assign(rate, after), schema).edits
    with contextlib.nullcontext() if allowed else pytest.raises(UpdateRefused, match="relative change"):
        Guard(max_relative_change=0.1).check(edits, schema, lambda _names: {rate: live})


@pytest.mark.parametrize(
    "update", [Update().add("learning_rate", -0.25), Update().blend("learning_rate", -0.5, 0.5)]
)
def test_no_edit_makes_a_rate_without_a_schedule_negative(update: Update) -> None:
    rate = Variable("optimizer/learning_rate", (), "float32", "optimizer")
    for schema in (Schema([rate]), Schema([rate], {rate.name: "a schedule"})):
        edits = planned(update, schema).edits
        check_rates(edits, schema, lambda _names: {rate.name: np.array(0.5, "f4")})
        is_refused = pytest.raises(UpdateRefused, match="no schedule")
        with is_refused if schema.is_constant_rate(rate) else contextlib.nullcontext():
            check_rates(edits, schema, lambda _names: {rate.name: np.array(0.125, "f4")})


def test_a_rate_that_is_not_finite_exceeds_the_bound_also_in_place_of_a_schedule() -> None:
    rate = "optimizer/learning_rate"
    schema, live = Schema([Variable(rate, (), "float32", "optimizer")]), np.array(-1, "f4")
    edits = planned(Update(allow_nonfinite=True).assign(rate, math.nan), schema).edits
    with pytest.raises(UpdateRefused, match="relative change"):
        Guard(max_relative_change=0.1, require_finite=False).check(edits, schema, lambda _names: {rate: live})
