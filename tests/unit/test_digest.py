import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from replicast.update.digest import begun_digest, digest_array, digest_state

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, BFLOAT16])
def test_minus_zero_and_zero_differ(dtype: np.dtype) -> None:
    zero = np.zeros(3, dtype)
    assert np.array_equal(zero, -zero)
    assert digest_array(zero) != digest_array(-zero)


def test_nans_with_other_payloads_differ_and_with_the_same_payload_agree() -> None:
    quiet = np.array([0x7FC00000], np.uint32).view(np.float32)
    other = np.array([0x7FC00001], np.uint32).view(np.float32)
    assert np.isnan(quiet).all()
    assert np.isnan(other).all()
    assert digest_array(quiet) != digest_array(other)
    assert digest_array(quiet) == digest_array(quiet.copy())


def test_the_same_bytes_as_another_dtype_or_shape_differ() -> None:
    values = np.arange(12, dtype=np.float32)
    same_bytes = [values, values.view(np.int32), values.reshape(3, 4), values.reshape(4, 3), values[:, None]]
    same_bytes += [values.view(np.float16), values.view(BFLOAT16), values.view("u2")]
    assert len({digest_array(array) for array in same_bytes}) == len(same_bytes)


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16, np.bool_])
def test_the_layout_in_memory_does_not_matter(dtype: np.dtype) -> None:
    values = (np.arange(48).reshape(6, 8) % 5).astype(dtype)
    for same in (np.asfortranarray(values), np.repeat(values, 2, axis=1)[:, ::2], values[::-1][::-1]):
        assert digest_array(same) == digest_array(values)
    assert digest_array(values.T) == digest_array(values.T.copy())
    swapped = np.array([1.5, -0.0, np.nan], ">f4")
    assert digest_array(swapped) == digest_array(swapped.astype("=f4"))
    values.setflags(write=False)
    assert digest_array(values) == digest_array(values.copy())


@pytest.mark.parametrize("dtype", [np.float32, np.int64, np.bool_, BFLOAT16])
def test_arrays_without_dimensions_and_without_elements_work(dtype: np.dtype) -> None:
    shapes = [(), (1,), (0,), (0, 3), (3, 0)]
    assert len({digest_array(np.zeros(shape, dtype)) for shape in shapes}) == len(shapes)
    assert digest_array(np.zeros((), dtype)) == digest_array(np.zeros((), dtype)[()])


@pytest.mark.parametrize("dtype", [object, [("a", "i1"), ("b", "f8")], "V8"])
def test_objects_and_records_are_refused(dtype: object) -> None:
    with pytest.raises(TypeError, match="Received: dtype"):
        digest_array(np.zeros(2, dtype))  # type: ignore[call-overload]


@pytest.mark.parametrize("dtype", [np.float32, BFLOAT16])
def test_a_row_major_array_is_not_copied(dtype: np.dtype) -> None:
    values = np.ones((1000, 1000), dtype)
    tracemalloc.start()
    digest_array(values)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < values.nbytes / 10


def test_a_digest_can_be_begun_before_the_elements_are_known() -> None:
    for array in (np.arange(6.0).reshape(2, 3), np.ones(3, BFLOAT16), np.zeros((0, 2)), np.array(True)):
        begun = begun_digest(array.dtype, array.shape)
        for _ in range(2):  # as often as one likes
            hasher = begun.copy()
            hasher.update(array.tobytes())
            assert hasher.hexdigest() == digest_array(array)
    with pytest.raises(TypeError, match="object"):
        begun_digest(np.dtype(object), (1,))


def test_a_state_differs_when_a_name_a_value_or_their_pairing_does() -> None:
    ones, zeros = np.ones(3), np.zeros(3)
    both = [{"a": ones, "b": zeros}, {"a": zeros, "b": ones}, {"a": ones, "c": zeros}]
    states = [*both, {"a": ones}, {"ab": ones}, {}]
    assert len({digest_state(state) for state in states}) == len(states)
    assert digest_state(dict(reversed(states[0].items()))) == digest_state(states[0]), "in any order"
