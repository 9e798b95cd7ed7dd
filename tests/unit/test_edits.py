from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from replicast.update.edits import Edit, EditKind, apply_edit, factor_as, touched_rows

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [np.dtype(np.float16), BFLOAT16, np.dtype(np.float32), np.dtype(np.float64)]
BITS = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def edit(operation: EditKind, *, factor: float | None = None, **arrays: Any) -> Edit:
    return Edit(operation, "x", arrays, factor)


def bits(array: np.ndarray) -> list[int]:
    return np.asarray(array).reshape(-1).view(BITS[array.dtype.itemsize]).tolist()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_each_operation_does_what_its_comment_says(dtype: np.dtype) -> None:
    x = np.array([[1, 2], [3, 4], [5, 6]], dtype)
    value = np.full((3, 2), 8, dtype)
    rows = np.array([[10, 20], [30, 40]], dtype)
    a, b = np.array([[1, 0], [0, 1], [1, 1]], dtype), np.array([[1, 2], [3, 4]], dtype)
    indices = np.array([2, 0])
    cases = [
        (edit(EditKind.ADD, value=value), [[9, 10], [11, 12], [13, 14]]),
        (edit(EditKind.ASSIGN, value=value), [[8, 8]] * 3),
        (edit(EditKind.SCALE, factor=0.5), [[0.5, 1], [1.5, 2], [2.5, 3]]),
        (edit(EditKind.BLEND, value=value, factor=0.5), [[4.5, 5], [5.5, 6], [6.5, 7]]),
        (edit(EditKind.ADD_ROWS, indices=indices, rows=rows), [[31, 42], [3, 4], [15, 26]]),
        (edit(EditKind.ASSIGN_ROWS, indices=indices, rows=rows), [[30, 40], [3, 4], [10, 20]]),
        (edit(EditKind.ADD_LOW_RANK, a=a, b=b), [[2, 4], [6, 8], [9, 12]]),
        (edit(EditKind.RESET, factor=0.25), [[0.25, 0.25]] * 3),
        (edit(EditKind.RESET_ROWS, indices=indices, factor=0.25), [[0.25, 0.25], [3, 4], [0.25, 0.25]]),
    ]
    assert {case[0].operation for case in cases} == set(EditKind)
    for made, expected in cases:
        before = x.copy()
        after = apply_edit(made, x)
        assert after.dtype == dtype
        assert after.tolist() == np.array(expected, dtype).tolist(), made.operation
        assert x.tolist() == before.tolist()
        assert not np.shares_memory(after, x)
        assert all(not np.shares_memory(after, array) for array in made.arrays.values())


@pytest.mark.parametrize("dtype", [np.dtype(np.float32), np.dtype(np.float64), BFLOAT16], ids=str)
def test_arithmetic_takes_denormals_as_zero_and_returns_none(dtype: np.dtype) -> None:
    tiny = ml_dtypes.finfo(dtype).tiny
    denormal = np.array([tiny], dtype) * np.array([0.5], dtype)
    zero = np.zeros(1, dtype)
    assert bits(apply_edit(edit(EditKind.ADD, value=zero), denormal)) == bits(zero)
    assert bits(apply_edit(edit(EditKind.ADD, value=-zero), -denormal)) == bits(-zero)
    assert bits(apply_edit(edit(EditKind.ADD, value=denormal), denormal)) == bits(zero)
    assert bits(apply_edit(edit(EditKind.SCALE, factor=-0.5), np.array([tiny], dtype))) == bits(-zero)
    untouched = apply_edit(edit(EditKind.ADD_ROWS, indices=np.array([0]), rows=zero), np.repeat(denormal, 2))
    assert bits(untouched) == [*bits(zero), *bits(denormal)]


def test_float16_keeps_its_denormals() -> None:
    assert factor_as(1e300, np.float16) == np.inf
    denormal = np.array([1], np.uint16).view(np.float16)
    assert bits(apply_edit(edit(EditKind.ADD, value=denormal), denormal)) == [2]
    assert bits(apply_edit(edit(EditKind.SCALE, factor=3.0), denormal)) == [3]


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_assigned_keeps_every_bit(dtype: np.dtype) -> None:
    unsigned = BITS[dtype.itemsize]
    all_ones = np.iinfo(unsigned).max
    odd = np.array([1, all_ones, all_ones >> 1, 1 << (8 * dtype.itemsize - 1)], unsigned).view(dtype)
    assert bits(apply_edit(edit(EditKind.ASSIGN, value=odd), np.ones(4, dtype))) == bits(odd)
    rows = edit(EditKind.ASSIGN_ROWS, indices=np.array([3, 2]), rows=odd[:2])
    assert bits(apply_edit(rows, odd)) == [bits(odd)[i] for i in (0, 1, 1, 0)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_product_just_below_the_smallest_normal_number_is_flushed(dtype: Any) -> None:
    info = np.finfo(dtype)
    half = info.dtype.type(2.0) ** ((info.minexp) // 2)
    x = np.array([half * (1 - info.eps / 2), half * (1 - info.eps / 2)], dtype)
    # Exactly one unit of the last place below: as a denormal it would be rounded up to the smallest normal.
    factor = np.array([half, half * (1 + info.eps)], dtype)
    made = edit(EditKind.ADD_LOW_RANK, a=x[:, None], b=factor[None, :])
    product = apply_edit(made, np.zeros((2, 2), dtype))
    assert product[0].tolist() == [0.0, info.tiny]


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "int64", "uint64"])
def test_integers_wrap(dtype: str) -> None:
    top = np.iinfo(dtype).max
    for x in (np.array([top], dtype), np.array(top, dtype)):
        after = apply_edit(edit(EditKind.ADD, value=np.ones(x.shape, dtype)), x)
        assert after.reshape(-1).tolist() == [np.iinfo(dtype).min]
        assert after.dtype == dtype
        assert after.shape == x.shape


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_variables_without_dimensions_stay_so(dtype: np.dtype) -> None:
    x, value = np.array(2, dtype), np.array(4, dtype)
    for made in (
        edit(EditKind.ADD, value=value),
        edit(EditKind.ASSIGN, value=value),
        edit(EditKind.SCALE, factor=2.0),
        edit(EditKind.BLEND, value=value, factor=0.5),
        edit(EditKind.RESET, factor=0.0),
    ):
        after = apply_edit(made, x)
        assert isinstance(after, np.ndarray)
        assert (after.shape, after.dtype) == ((), dtype)


@given(hnp.arrays(np.float32, 20), hnp.arrays(np.float32, 20), st.floats(width=32))
def test_no_arithmetic_ever_returns_a_denormal(x: np.ndarray, value: np.ndarray, factor: float) -> None:
    tiny = np.finfo(np.float32).tiny
    for made in (
        edit(EditKind.ADD, value=value),
        edit(EditKind.SCALE, factor=factor),
        edit(EditKind.BLEND, value=value, factor=factor),
    ):
        size = np.abs(apply_edit(made, x))
        assert not np.any((size > 0) & (size < tiny))


def test_only_row_edits_name_the_rows_they_touch() -> None:
    made = edit(EditKind.ADD_ROWS, indices=np.array([4, 1], np.int32), rows=np.zeros((2, 3)))
    rows = touched_rows([made])
    assert rows is not None
    assert (rows.tolist(), rows.dtype) == ([1, 4], np.int64)
    assert touched_rows([edit(EditKind.SCALE, factor=1.0)]) is None
    assert made.nbytes == 2 * 4 + 6 * 8


def test_an_edit_cannot_be_changed() -> None:
    made = edit(EditKind.ADD, value=np.zeros(2))
    with pytest.raises(TypeError):
        made.arrays["value"] = np.ones(2)  # type: ignore[index]
    with pytest.raises(AttributeError):
        made.factor = 2.0  # type: ignore[misc]
