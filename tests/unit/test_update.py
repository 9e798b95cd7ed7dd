import contextlib
import copy
import json
import pickle
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from replicast.errors import FileDamaged, UpdateRefused
from replicast.mapped_memory import LARGE_BYTES
from replicast.update.edits import DTYPES, RESETS, EditKind
from replicast.update.tensorfiles import tensor_chunks
from replicast.update.update import Update

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
ONES = np.ones(3, np.float32)


def small() -> Update:
    update = Update(id="small", note="why", author="who").add("a", ONES)
    return update.assign_rows("e", [1, 0], np.ones((2, 2), BFLOAT16)).scale("lr", 0.5)


def same(left: Update, right: Update) -> bool:
    arrays = zip(left.arrays(), right.arrays(), strict=True)
    return left.describe() == right.describe() and all(a.tobytes() == b.tobytes() for a, b in arrays)


def content(update: Update) -> bytes:
    return b"".join(update.file_chunks())


def file_with(description: Any, tensors: dict[str, Any] | None = None) -> memoryview:
    text = description if isinstance(description, str) else json.dumps(description)
    arrays = {"0.value": ONES} if tensors is None else tensors
    return memoryview(b"".join(tensor_chunks(arrays, {"replicast": text})))


def test_chaining_makes_new_updates_with_the_same_id() -> None:
    first = Update(note="why", author="who", reset_slots=True, allow_nonfinite=True)
    second = first.add("a", ONES)
    assert first.edits == ()
    assert [edit.variable for edit in second.scale("b", 2).edits] == ["a", "b"]
    assert second.id == first.id
    assert Update().id != Update().id
    assert (second.note, second.author) == ("why", "who")
    assert second.reset_slots
    assert second.allow_nonfinite


def test_each_method_makes_its_edit() -> None:
    update = Update().add("v", ONES).assign("v", ONES).scale("v", np.float32(0.5))
    update = update.blend("v", ONES, np.array(0.25)).add_rows("v", [1], [[1.0]])
    update = update.assign_rows("v", np.array([2]), ONES)
    update = update.add_low_rank("v", np.ones((3, 1)), np.ones((1, 2)))
    assert [edit.operation for edit in update.edits] == [op for op in EditKind if op not in RESETS]
    assert [edit.factor for edit in update.edits] == [None, None, 0.5, 0.25, None, None, None]
    assert [edit.loose for edit in update.edits] == [False, False, False, False, True, False, False]
    rows = ["indices", "rows"]
    assert [sorted(edit.arrays) for edit in update.edits][3:] == [["value"], rows, rows, ["a", "b"]]
    assert update.nbytes == sum(array.nbytes for array in update.arrays())


def test_what_the_author_changes_later_does_not_change_the_update() -> None:
    value = np.ones(3, np.float32)
    update = Update().add("a", value)
    value[0] = 7
    assert update.arrays()[0].tolist() == [1, 1, 1]
    assert not update.arrays()[0].flags.writeable
    assert value.flags.writeable
    value.flags.writeable = False
    assert np.shares_memory(Update().add("a", value).arrays()[0], value), "no copy of what is read-only"


def test_memory_of_another_library_is_copied_even_when_it_says_read_only() -> None:
    class Tensor:
        memory = np.ones(3, np.float32)

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
            view = self.memory.view()
            view.flags.writeable = False
            return view

    update = Update().add("a", Tensor())
    assert not np.shares_memory(update.arrays()[0], Tensor.memory)
    assert not update.edits[0].loose


@pytest.mark.parametrize("layout", ["F", "strided", "swapped", "negative"])
def test_every_layout_is_taken_as_rows_of_native_numbers(layout: str) -> None:
    value = np.arange(12, dtype=np.float32).reshape(3, 4)
    given_value = {
        "F": np.asfortranarray(value),
        "strided": np.repeat(value, 2, axis=1)[:, ::2],
        "swapped": value.astype(">f4"),
        "negative": value[::-1].copy()[::-1],
    }[layout]
    taken = Update().add("a", given_value).arrays()[0]
    assert taken.flags.c_contiguous
    assert taken.dtype == np.dtype("=f4")
    assert taken.tolist() == value.tolist()


def test_a_list_beside_an_array_takes_its_dtype() -> None:
    (edit,) = Update().add_low_rank("a", np.ones((2, 1), np.float32), [[1, 2]]).edits
    assert (edit.arrays["b"].dtype, edit.loose) == (np.float32, False)


@pytest.mark.parametrize(
    "value",
    [
        *("text", ["a"], b"x", None, object(), [1, "a"], [[1], [1, 2]], 1j, [10**40], {"a": 1}),
        *(np.array([1j]), np.array(["a"]), np.array([object()])),
        *(np.zeros(2, "M8[s]"), np.zeros(1, [("x", "i4")])),
    ],
)
def test_what_is_no_number_is_refused_at_once(value: Any) -> None:
    with pytest.raises(UpdateRefused) as raised:
        Update().add("the/name", value)
    assert raised.value.variable == "the/name"
    assert raised.value.received is not None


@pytest.mark.parametrize("factor", [None, "2", [1.0, 2.0], 1j, 10**400])
def test_a_factor_is_one_number(factor: Any) -> None:
    with pytest.raises(UpdateRefused):
        Update().scale("a", factor)
    with pytest.raises(UpdateRefused):
        Update().blend("a", ONES, factor)


@pytest.mark.parametrize("bad", ["", ".hidden", "a/b", "a b", "-x", "x" * 101, "é", "a\n", 3])
def test_an_id_must_be_able_to_name_a_file(bad: Any) -> None:
    with pytest.raises(UpdateRefused, match="The id"):
        Update(id=bad)


def test_texts_have_a_limit() -> None:
    Update(note="n" * 10_000, id="x" * 100)
    for arguments in ({"note": "n" * 10_001}, {"author": 3}, {"note": "\ud800"}):
        with pytest.raises(UpdateRefused):
            Update(**arguments)  # type: ignore[arg-type]
    for name in ("", "n" * 1001, "\ud800", 3):
        with pytest.raises(UpdateRefused):
            Update().add(name, 1)  # type: ignore[arg-type]


def test_the_content_digest_is_of_what_is_done_and_not_of_who_and_why() -> None:
    first = Update(note="a", author="b").add("x", ONES).scale("y", 2)
    assert first.content_digest() == Update(note="c").add("x", ONES).scale("y", 2).content_digest()
    others = [
        Update().scale("y", 2).add("x", ONES),
        Update().assign("x", ONES).scale("y", 2),
        Update().add("z", ONES).scale("y", 2),
        Update().add("x", ONES).scale("y", 3),
        Update().add("x", -ONES).scale("y", 2),
        Update().add("x", ONES.astype(np.float64)).scale("y", 2),
        Update(reset_slots=True).add("x", ONES).scale("y", 2),
        Update(allow_nonfinite=True).add("x", ONES).scale("y", 2),
    ]
    assert len({update.content_digest() for update in [first, *others]}) == len(others) + 1


@st.composite
def updates(draw: st.DrawFn) -> Update:
    text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
    resets, nonfinite = draw(st.booleans()), draw(st.booleans())
    update = Update(note=draw(text), author=draw(text), reset_slots=resets, allow_nonfinite=nonfinite)
    dtypes = st.sampled_from(sorted(DTYPES))
    for _ in range(draw(st.integers(0, 4))):
        name = draw(text.filter(bool))
        shape = draw(hnp.array_shapes(min_dims=0, min_side=0, max_side=3))
        raw = draw(hnp.arrays(np.uint8, (*shape, 8)))
        dtype = draw(dtypes)
        value = (
            (raw[..., 0] % 2).astype(bool) if dtype == "bool" else raw.copy().view(np.dtype(dtype))[..., 0]
        )
        factor = draw(st.floats())
        arguments = {
            "add": (value,),
            "blend": (value, factor),
            "scale": (factor,),
            "add_low_rank": (value, value),
            "assign_rows": ([0, 2**40], value),
        }
        method = draw(st.sampled_from(sorted(arguments)))
        update = getattr(update, method)(name, *arguments[method])
    return update


@given(updates())
def test_every_update_survives_its_file_and_its_content(update: Update) -> None:
    loaded, _ = Update.parse(memoryview(content(update)), "file")
    assert same(loaded, update)
    assert loaded.content_digest() == update.content_digest()
    assert content(loaded) == content(update)
    sent = Update.from_content(update.id, update.content())
    assert same(sent.labelled(update.author, update.note), update)


def test_a_saved_update_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "u.safetensors"
    small().save(path)
    assert same(Update.load(path), small())
    assert same(Update.load(str(path), max_bytes=path.stat().st_size), small())
    with pytest.raises(FileDamaged, match="too large"):
        Update.load(path, max_bytes=path.stat().st_size - 1)
    with pytest.raises(FileDamaged, match="No such file"):
        Update.load(tmp_path / "missing")


def test_every_truncation_of_a_file_is_refused() -> None:
    whole = content(small())
    for length in range(len(whole)):
        with pytest.raises(FileDamaged):
            Update.parse(memoryview(whole[:length]), "file")
    with pytest.raises(FileDamaged):
        Update.parse(memoryview(whole + b"\0"), "file")


def test_flipped_bytes_of_a_header_are_refused_or_mean_something_else() -> None:
    whole = content(small())
    header = 8 + int.from_bytes(whole[:8], "little")
    for position in range(header):
        for flip in (0x01, 0x10, 0x80, 0xFF):
            damaged = bytearray(whole)
            damaged[position] ^= flip
            with contextlib.suppress(FileDamaged):  # Any other error would fail the test.
                Update.parse(memoryview(bytes(damaged)), "file")[0].content_digest()


EDIT = {"operation": "add", "variable": "a", "factor": None, "loose": False, "arrays": {"value": "0.value"}}
GOOD = {"format": 1, "id": "x", "note": "", "author": "", "edits": [EDIT]}


def edited(**change: Any) -> dict[str, Any]:
    return GOOD | {"edits": [EDIT | change]}


@pytest.mark.parametrize(
    "description",
    [
        *("", "nonsense", "[]", "null", '{"format": 1, "format": 1}'),
        *(GOOD | {"format": wrong} for wrong in (2, None)),
        *(GOOD | wrong for wrong in ({"id": None}, {"id": "../x"}, {"note": 3}, {"reset_slots": "yes"})),
        *(GOOD | {"edits": wrong} for wrong in (None, {}, [], [3], [EDIT, EDIT])),
        *(edited(operation=wrong) for wrong in ("explode", None, ["add"], "scale", "add_rows")),
        *(edited(variable=wrong) for wrong in ("", None)),
        *(edited(factor=wrong) for wrong in (1.0, "nan")),
        edited(loose=1),
        *(edited(arrays=wrong) for wrong in (None, {}, {"value": "1.value"}, {"value": None})),
        edited(arrays={"value": "0.value", "more": "0.value"}),
        *(edited(operation="scale", arrays={}, factor=wrong) for wrong in (None, True)),
        *(edited(operation="blend", factor=wrong) for wrong in (10**400, "much")),
    ],
)
def test_an_invalid_description_is_refused(description: Any) -> None:
    assert Update.parse(file_with(GOOD | {"at_step": 7}), "file")[1]["at_step"] == 7
    with pytest.raises(FileDamaged):
        Update.parse(file_with(description), "file")


def test_a_file_of_too_many_edits_is_refused() -> None:
    scale = EDIT | {"operation": "scale", "factor": 1.0, "arrays": {}}
    with pytest.raises(FileDamaged, match="of length <= 100000"):
        Update.parse(file_with(GOOD | {"edits": [scale] * 100_001}, {}), "file")


def test_content_is_not_copied_and_must_belong_together() -> None:
    *arrays, described = small().content()
    made = Update.from_content("id", [*arrays, described])
    assert all(a is b for a, b in zip(made.arrays(), arrays, strict=True))
    for wrong in (arrays[:-1], [*arrays, ONES], arrays[::-1], [a.astype(np.int8) for a in arrays]):
        with pytest.raises(UpdateRefused):
            Update.from_content("id", [*wrong, described])


ROWS = {"e": ONES, "e.indices": np.arange(3)}
FACTORS = {"k.a": np.ones((2, 1)), "k.b": np.ones((1, 2))}


@pytest.mark.parametrize(
    ("operation", "weight", "tensors", "expected"),
    [
        (EditKind.ADD, None, {"a/b": ONES, "c": ONES}, [("a/b", ["value"], None), ("c", ["value"], None)]),
        (EditKind.ASSIGN, None, {"x.a": ONES}, [("x.a", ["value"], None)]),
        (EditKind.BLEND, 0.25, {"a": ONES}, [("a", ["value"], 0.25)]),
        (EditKind.SCALE, None, {"a": np.array(2.0), "b": np.array([3])}, [("a", [], 2.0), ("b", [], 3.0)]),
        (EditKind.ADD_ROWS, None, ROWS, [("e", ["indices", "rows"], None)]),
        (EditKind.ADD_LOW_RANK, None, FACTORS, [("k", ["a", "b"], None)]),
    ],
)
def test_a_plain_file_is_an_update_given_its_operation(
    tmp_path: Path, operation: EditKind, weight: float | None, tensors: dict[str, Any], expected: list[Any]
) -> None:
    path = tmp_path / "plain.safetensors"
    safetensors.numpy.save_file(tensors, path)
    update = Update.from_tensors(path, operation, weight=weight, note="n", author="a", id="i")
    made = [(edit.variable, list(edit.arrays), edit.factor) for edit in update.edits]
    assert sorted(made) == expected
    assert {edit.operation for edit in update.edits} == {operation}
    assert (update.note, update.author, update.id) == ("n", "a", "i")


@pytest.mark.parametrize(
    ("operation", "weight", "tensors"),
    [
        (EditKind.BLEND, None, {"a": ONES}),
        (EditKind.ADD, 0.5, {"a": ONES}),
        (EditKind.SCALE, None, {"a": ONES}),
        (EditKind.RESET, None, {"a": ONES}),
        (EditKind.ADD_ROWS, None, {"e": ONES}),
        (EditKind.ADD_ROWS, None, {"e.indices": np.arange(3)}),
        (EditKind.ADD_LOW_RANK, None, {"k.a": ONES}),
        (EditKind.ADD_LOW_RANK, None, {"k": ONES}),
    ],
)
def test_a_plain_file_that_does_not_fit_its_operation_is_refused(
    tmp_path: Path, operation: EditKind, weight: float | None, tensors: dict[str, Any]
) -> None:
    path = tmp_path / "plain.safetensors"
    safetensors.numpy.save_file(tensors, path)
    with pytest.raises(UpdateRefused):
        Update.from_tensors(path, operation, weight=weight)
    with pytest.raises(FileDamaged, match="replicast push RUN --add FILE"):
        Update.load(path)


def test_an_unknown_operation_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(UpdateRefused, match=r"one of add, assign, scale, .*add_low_rank. Received: subtract"):
        Update.from_tensors(tmp_path / "plain.safetensors", "subtract")


def test_large_values_are_copied_row_major_and_read_only() -> None:
    mine = np.asfortranarray(np.arange(2 * LARGE_BYTES, dtype=np.float32).reshape(2, -1).T)
    expected = mine.tobytes()
    (found,) = Update().add("x", mine).arrays()
    mine[:] = 0
    assert found.flags.c_contiguous
    assert found.tobytes() == expected
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1


def test_a_deep_copy_is_the_update_itself_because_nothing_of_it_can_change() -> None:
    update = Update(note="why").add("x", np.ones(3, np.float32))
    assert copy.deepcopy([update])[0] is update


@pytest.mark.parametrize("id_", [None, "mine"])
def test_an_update_can_be_pickled(id_: str | None) -> None:
    values = np.arange(LARGE_BYTES, dtype=np.float32)
    update = Update(note="why", author="me", id=id_, reset_slots=True).add("x", values).scale("y", 0.5)
    found = pickle.loads(pickle.dumps(update))
    assert (found.id, found.id_was_given) == (update.id, id_ is not None)
    assert (found.note, found.author) == ("why", "me")
    assert found.content_digest() == update.content_digest()
    assert not found.arrays()[0].flags.writeable
