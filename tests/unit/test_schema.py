import contextlib
import json
import tracemalloc

import ml_dtypes  # noqa: F401 - the name bfloat16
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicast import Timeouts
from replicast.codec import fields_of
from replicast.errors import UpdateRefused
from replicast.update.edits import Edit, EditKind, Variable, apply_edit
from replicast.update.schema import NO_LIMITS, Limits, Schema, check_outline, planned
from replicast.update.update import Update

FLOATS = ["float16", "bfloat16", "float32", "float64"]
SCHEMA = Schema(
    [
        Variable("model/dense/kernel", (3, 2), "float32", "trainable", (("adam/m", 0.0), ("adam/v", 0.5))),
        Variable("model/dense/bias", (2,), "float32", "trainable"),
        Variable("model/dense_1/bias", (2,), "float32", "trainable", (("adam/m", 0.0),)),
        Variable("count", (), "int8", "non_trainable"),
        Variable("index", (4,), "uint64", "non_trainable"),
        Variable("mask", (2,), "bool", "non_trainable"),
        Variable("adam/m", (3, 2), "float32", "optimizer"),
        Variable("adam/v", (3, 2), "float32", "optimizer"),
        *(Variable(f"wide/{dtype}", (5, 2), dtype, "trainable") for dtype in FLOATS),
    ]
)
KERNEL = np.ones((3, 2), np.float32)
NAN, INF = float("nan"), float("inf")
K, B = "model/dense/kernel", "model/dense/bias"


def test_names_become_full_and_lists_take_the_variables_dtype() -> None:
    update = Update(note="n", author="a", id="i").add("kernel", [[1, 2], [3, 4], [5, 6]]).add("count", 3)
    made = planned(update, SCHEMA)
    assert [(edit.variable, edit.arrays["value"].dtype, edit.loose) for edit in made.edits] == [
        ("model/dense/kernel", np.float32, False),
        ("count", np.int8, False),
    ]
    assert (made.note, made.author, made.id) == ("n", "a", "i")
    assert all(not array.flags.writeable for array in made.arrays())


def test_each_slot_of_a_touched_variable_is_reset_once_at_the_end() -> None:
    update = Update(reset_slots=True).scale("kernel", 2).add("dense_1/bias", [1, 2]).scale("kernel", 3)
    made = planned(update, SCHEMA)
    assert [(edit.operation, edit.variable, edit.factor) for edit in made.edits[3:]] == [
        (EditKind.RESET, "adam/m", 0.0),
        (EditKind.RESET, "adam/v", 0.5),
    ]
    assert not made.reset_slots
    assert len(planned(Update().scale("kernel", 2), SCHEMA).edits) == 1


def test_row_edits_reset_the_same_rows_of_the_slots() -> None:
    rows = Update(reset_slots=True).assign_rows("kernel", [2], KERNEL[:1])
    rows = rows.add_rows("kernel", np.array([0, 2], np.int32), KERNEL[:2])
    once = planned(rows, SCHEMA)
    resets = once.edits[2:]
    assert [(edit.operation, edit.variable, edit.factor) for edit in resets] == [
        (EditKind.RESET_ROWS, "adam/m", 0.0),
        (EditKind.RESET_ROWS, "adam/v", 0.5),
    ]
    before = np.arange(6, dtype=np.float32).reshape(3, 2) + 1
    assert apply_edit(resets[1], before).tolist() == [[0.5, 0.5], [3.0, 4.0], [0.5, 0.5]]
    assert before[0, 0] == 1.0
    assert planned(once, SCHEMA).describe() == once.describe()
    assert len(planned(Update(reset_slots=True).add_rows("kernel", [], KERNEL[:0]), SCHEMA).edits) == 1
    whole = planned(rows.scale("kernel", 2.0), SCHEMA)
    assert [edit.operation for edit in whole.edits[3:]] == [EditKind.RESET] * 2


def test_planning_twice_changes_nothing() -> None:
    update = Update(reset_slots=True, allow_nonfinite=True).assign("kernel", np.full((3, 2), NAN, np.float32))
    update = update.add_rows("wide/bfloat16", np.array([4, 0], np.uint8), [[1, 2], [3, 4]])
    once = planned(update.scale("dense/bias", INF), SCHEMA)
    twice = planned(once, SCHEMA)
    assert twice.describe() == once.describe()
    assert all(a is b for a, b in zip(once.arrays(), twice.arrays(), strict=True)), "not copied"
    assert once.content_digest() == twice.content_digest()


@pytest.mark.parametrize(
    ("update", "problem", "variable", "expected", "received"),
    [
        (Update(), "no edits", None, "at least one", "none"),
        (Update().scale("kernal", 2), "no variable", "kernal", "perhaps model/dense/kernel", "kernal"),
        (
            Update().add("bias", [1, 2]),
            "matches 2",
            "bias",
            "one of model/dense/bias, model/dense_1/bias",
            "bias",
        ),
        (Update().add("kernel", KERNEL.T), "shape", K, "(3, 2)", "(2, 3)"),
        (Update().add("kernel", 1.0), "shape", K, "(3, 2)", "()"),
        (Update().assign("count", [1]), "shape", "count", "()", "(1,)"),
        (Update().add("kernel", KERNEL.astype("f8")), "dtype", K, "float32", "float64"),
        (
            Update().add("wide/bfloat16", np.ones((5, 2), "f2")),
            "dtype",
            "wide/bfloat16",
            "bfloat16",
            "float16",
        ),
        (Update().add("count", np.int64(1)), "dtype", "count", "int8", "int64"),
        (Update().add("count", 0.5), "fit", "count", "numbers that fit int8", "0.5 at []"),
        (Update().add("count", 128), "fit", "count", "numbers that fit int8", "128 at []"),
        (Update().add("count", NAN), "fit", "count", "numbers that fit int8", "nan at []"),
        (Update().assign("index", [0, 1, -1, 0]), "fit", "index", "numbers that fit uint64", "-1 at [2]"),
        (Update().assign("index", [0, 1, 2.0**64, 0]), "fit", "index", None, None),
        (Update().assign("mask", [1, 0]), "dtype", "mask", "bool", "int64"),
        (Update().assign("dense/bias", [True, False]), "dtype", B, "float32", "bool"),
        (Update().add("dense/bias", [1, 1e39]), "fit", B, None, "1e+39 at [1]"),
        (Update().add("mask", [True, False]), "bool does not support add", "mask", None, "add"),
        (Update().add_rows("mask", [0], [True]), "bool does not support", "mask", None, "add_rows"),
        (Update().scale("count", 2), "int8 does not support scale", "count", None, "scale"),
        (Update().scale("mask", 2), "bool does not support scale", "mask", None, "scale"),
        (Update().blend("count", 2, 0.5), "int8 does not support blend", "count", None, "blend"),
        (Update().add_rows("count", [0], [1]), "no rows", "count", None, None),
        (Update().add_rows("kernel", 0, KERNEL[:1]), "indices", K, None, "int64 of shape ()"),
        (Update().add_rows("kernel", [0.0], KERNEL[:1]), "indices", K, None, "float64 of shape (1,)"),
        (Update().add_rows("kernel", [True], KERNEL[:1]), "indices", K, None, "bool of shape (1,)"),
        (Update().add_rows("kernel", [0, 3], KERNEL[:2]), "range", K, "0 to 2", "3 at position 1"),
        (Update().add_rows("kernel", [0, -1], KERNEL[:2]), "range", K, "0 to 2", "-1 at position 1"),
        (Update().add_rows("kernel", [2**64 - 1], KERNEL[:1]), "range", K, "0 to 2", None),
        (Update().assign_rows("kernel", [2, 0, 2], KERNEL), "twice", None, None, "row 2 at positions [0, 2]"),
        (Update().assign_rows("kernel", [2, 0], KERNEL), "shape", K, "(2, 2)", "(3, 2)"),
        (Update().assign_rows("kernel", [2], KERNEL[0]), "shape", K, "(1, 2)", "(2,)"),
        (Update().add_low_rank("kernel", KERNEL, KERNEL), "low-rank", K, None, None),
        (Update().add_low_rank("kernel", KERNEL[:2], KERNEL[:2]), "low-rank", None, None, None),
        (
            Update().add_low_rank("dense/bias", [[1]], [[1, 2]]),
            "low-rank",
            None,
            "a variable with 2 dimensions",
            None,
        ),
        (Update().add("dense/bias", [1, NAN]), "1 of 2 values", B, None, "nan at [1]"),
        (Update().add("dense/bias", [-INF, NAN]), "2 of 2 values", B, None, "-inf at [0]"),
        (
            Update().add_low_rank("kernel", np.full((3, 1), INF, "f4"), KERNEL[:1]),
            "3 of 3",
            None,
            None,
            "inf at [0, 0]",
        ),
        (Update().scale("kernel", NAN), "not finite", K, None, "nan"),
        (Update().blend("kernel", KERNEL, INF), "not finite", K, None, "inf"),
        (Update().scale("wide/float16", 1e6), "not finite in float16", "wide/float16", None, "1000000.0"),
    ],
)
def test_an_invalid_update_is_refused_with_expected_and_received(
    update: Update, problem: str, variable: str | None, expected: str | None, received: str | None
) -> None:
    with pytest.raises(UpdateRefused, match=problem) as raised:
        planned(update, SCHEMA)
    for name, value in (("variable", variable), ("expected", expected), ("received", received)):
        assert value is None or getattr(raised.value, name) == value


def test_size_and_number_have_limits() -> None:
    update = Update(reset_slots=True).add("kernel", KERNEL)
    assert planned(update, SCHEMA, Limits(max_bytes=24, max_edits=3))
    with pytest.raises(UpdateRefused, match=r"too large.*at most 23 bytes.*24 bytes"):
        planned(update, SCHEMA, Limits(max_bytes=23))
    with pytest.raises(UpdateRefused, match=r"too many edits.*at most 2.*Received: 3"):
        planned(update, SCHEMA, Limits(max_edits=2))
    with pytest.raises(UpdateRefused, match="too many edits"):
        planned(update.scale("kernel", 2), SCHEMA, Limits(max_edits=1))


def test_limits_and_timeouts_below_zero_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_bytes must be at least 0. Received: -1"):
        Limits(max_bytes=-1)
    for secs in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="meet_secs must be a number of seconds, at least 0"):
            Timeouts(meet_secs=secs)


@pytest.mark.parametrize(
    "edits",
    [
        [Edit(EditKind.RESET, "adam/m", {}, 0.0)],
        [Edit(EditKind.SCALE, "kernel", {}, 2.0), Edit(EditKind.RESET, "adam/m", {}, 1.0)],
        [Edit(EditKind.SCALE, "kernel", {}, 2.0), Edit(EditKind.RESET, "model/dense/bias", {}, 0.0)],
        [Edit(EditKind.SCALE, "kernel", {}, 2.0), Edit(EditKind.RESET, "adam/m", {}, None)],
        [Edit(EditKind.RESET_ROWS, "adam/m", {"indices": np.array([0])}, 0.0)],
    ],
)
def test_a_reset_proposed_as_an_edit_is_refused(edits: list[Edit]) -> None:
    with pytest.raises(UpdateRefused, match="reset_slots=True"):
        planned(Update().replaced(edits), SCHEMA)


def test_no_rows_and_rank_zero_change_nothing_and_are_allowed() -> None:
    empty = np.zeros((0, 2), np.float32)
    update = (
        Update().add_rows("kernel", [], empty).add_low_rank("kernel", np.zeros((3, 0), np.float32), empty)
    )
    assert planned(update, SCHEMA).edits[0].arrays["indices"].dtype == np.int64


@given(st.sampled_from(FLOATS), st.data())
def test_the_check_by_bits_finds_what_numpy_finds(dtype: str, data: st.DataObject) -> None:
    kind = np.dtype(dtype)
    unsigned = np.dtype(f"u{kind.itemsize}")
    bits = data.draw(st.lists(st.integers(0, np.iinfo(unsigned).max), min_size=10, max_size=10))
    value = np.array(bits, unsigned).view(kind).reshape(5, 2)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        wrong = ~np.isfinite(value.astype(np.float64))
    update = Update().assign(f"wide/{dtype}", value)
    if not wrong.any():
        planned(update, SCHEMA)
        return
    with pytest.raises(UpdateRefused, match=f"{wrong.sum()} of 10 values") as raised:
        planned(update, SCHEMA)
    assert raised.value.received is not None
    assert raised.value.received.endswith(str(np.argwhere(wrong)[0].tolist()))


@pytest.mark.parametrize("position", [0, 65_535, 65_536, 199_999])
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_bad_value_in_many_is_found_where_it_is(dtype: str, position: int) -> None:
    schema = Schema([Variable("x", (200_000,), dtype, "trainable")])
    value = np.full(200_000, -3.0).astype(np.dtype(dtype))
    planned(Update().add("x", value), schema)
    value[position] = NAN
    with pytest.raises(UpdateRefused, match=f"1 of 200000 values.*nan at .{position}."):
        planned(Update().add("x", value), schema)


def test_checking_takes_no_memory_of_the_arrays_size() -> None:
    schema = Schema([Variable("x", (4_000_000,), "float32", "trainable")])
    update = Update().add("x", np.ones(4_000_000, np.float32))
    tracemalloc.start()
    try:
        planned(update, schema)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


@given(st.lists(st.integers(-2, 6), max_size=6))
def test_rows_are_accepted_if_they_exist_and_are_unique(rows: list[int]) -> None:
    update = Update().assign_rows("wide/float32", rows, np.zeros((len(rows), 2), np.float32))
    valid = len(set(rows)) == len(rows) and all(0 <= row < 5 for row in rows)
    with contextlib.nullcontext() if valid else pytest.raises(UpdateRefused):
        planned(update, SCHEMA)


# Names of variables, and the schema as JSON.


def variable(name: str, *slots: tuple[str, float]) -> Variable:
    return Variable(name, (2,), "float32", "trainable", slots)


NAMES = ("model/dense/kernel", "model/dense/bias", "model/dense_1/bias", "model/embedding/embeddings", "bias")
HINTS = {"optimizer/learning_rate": "the learning rate is computed by a schedule"}
NAMED = Schema([variable(name) for name in NAMES], HINTS)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("model/dense/kernel", "model/dense/kernel"),
        ("dense/kernel", "model/dense/kernel"),
        ("kernel", "model/dense/kernel"),
        ("dense/bias", "model/dense/bias"),
        ("embeddings", "model/embedding/embeddings"),
        ("bias", "bias"),
    ],
)
def test_a_full_name_or_a_unique_suffix_is_found(asked: str, found: str) -> None:
    assert NAMED.resolve(asked).name == found


@pytest.mark.parametrize("asked", ["", "/", "ernel", "nse/kernel", "model", "model/dense/kernel/"])
def test_a_part_of_a_name_that_is_not_a_suffix_is_refused(asked: str) -> None:
    with pytest.raises(UpdateRefused):
        NAMED.resolve(asked)


def test_at_most_five_similar_names_are_listed() -> None:
    schema = Schema([variable(f"layer_{n}/kernel") for n in range(50)])
    with pytest.raises(UpdateRefused) as raised:
        schema.resolve("layer/kernel")
    assert raised.value.expected is not None
    assert raised.value.expected.count("kernel") == 5


@pytest.mark.parametrize("asked", ["optimizer/learning_rate", "learning_rate"])
def test_a_name_with_a_hint_is_refused_with_the_hint(asked: str) -> None:
    with pytest.raises(UpdateRefused, match="computed by a schedule"):
        NAMED.resolve(asked)


def test_names_are_unique_and_slots_exist() -> None:
    with pytest.raises(ValueError, match="Received twice: a"):
        Schema([variable("a"), variable("a")])
    with pytest.raises(ValueError, match="Received: m"):
        Schema([variable("a", ("m", 0.0))])


def test_a_schema_survives_json() -> None:
    schema = Schema([variable("a", ("m", 0.1)), variable("m")], {"x": "y"})
    copy = Schema.from_json(json.loads(json.dumps(schema.to_json())))
    assert list(copy) == list(schema)
    assert copy.to_json() == schema.to_json()
    assert copy.digest() == schema.digest()
    assert len(copy) == 2
    assert "a" in copy
    assert "b" not in copy


def test_the_digest_tells_order_shape_dtype_and_slots_apart() -> None:
    schemas = [
        Schema([variable("a"), variable("b")]),
        Schema([variable("b"), variable("a")]),
        Schema([variable("a"), variable("b", ("a", 0.0))]),
        Schema([variable("a"), Variable("b", (3,), "float32", "trainable")]),
        Schema([variable("a"), Variable("b", (2,), "float16", "trainable")]),
        Schema([variable("a"), Variable("b", (2,), "float32", "optimizer")]),
    ]
    assert len({schema.digest() for schema in schemas}) == len(schemas)


@pytest.mark.parametrize(
    "fields",
    [
        *({}, {"variables": {}}, {"variables": [3]}, {"variables": [{}]}, {"variables": [], "hints": []}),
        *(
            {"variables": [fields_of(variable("a")) | wrong]}
            for wrong in ({"dtype": "string"}, {"shape": [-1]}, {"kind": "other"}, {"slots": [3]})
        ),
    ],
)
def test_json_that_is_not_a_schema_is_a_value_error(fields: dict) -> None:
    with pytest.raises(ValueError, match="Received"):
        Schema.from_json(fields)


RATE = Variable("optimizer/learning_rate", (), "float32", "optimizer")
CONSTANT_RATE, RATE_OF_SCHEDULE = Schema([RATE, *SCHEMA]), Schema([RATE, *SCHEMA], HINTS)


@pytest.mark.parametrize("value", [-1, -0.5, -2000, -1e-9])
def test_a_rate_below_0_is_refused_unless_a_schedule_computes_the_rate(value: float) -> None:
    update = Update().assign("learning_rate", value)
    for check in (planned, check_outline):
        with pytest.raises(UpdateRefused, match="no schedule") as raised:
            check(update, CONSTANT_RATE)
        assert (raised.value.expected, raised.value.received) == ("a rate of 0 or more", f"{value:g}")
        check(update, RATE_OF_SCHEDULE)
        check(Update().assign("learning_rate", 0.0), CONSTANT_RATE)
    planned(update, CONSTANT_RATE, NO_LIMITS)  # a journal of before is replayed


def test_a_negative_factor_is_refused_for_a_rate_unless_its_author_has_been_checked() -> None:
    schema, update = CONSTANT_RATE, Update().scale("learning_rate", -1)
    for check in (planned, check_outline):
        with pytest.raises(UpdateRefused, match="A learning rate cannot be scaled by a negative factor"):
            check(update, schema)
    assert planned(update, schema, NO_LIMITS).edits[0].factor == -1, "a journal of before is replayed"
    with pytest.raises(UpdateRefused, match="assign -1") as with_schedule:
        planned(update, RATE_OF_SCHEDULE)
    assert with_schedule.value.expected == "a factor of 0 or more"
    for allowed in (Update().scale("learning_rate", 0.5), Update().scale("dense/kernel", -1)):
        planned(allowed, schema)
