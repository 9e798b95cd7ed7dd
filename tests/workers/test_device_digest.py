"""Digests that TensorFlow computes on the device of the variable; here on a CPU."""

from __future__ import annotations

from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf
import xxhash

from replicast.training import state as state_module
from replicast.training.state import device_digests
from replicast.update.edits import DTYPES
from tests.pool import Pool
from tests.workers.changing import state_of
from tests.workers.recipes import perceptron
from tests.workers.test_updates import replicas_of

Array = np.ndarray[Any, Any]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)


def digest(array: Array) -> str:
    return device_digests({"x": tf.constant(array)})["x"]


def by_definition(array: Array) -> str:
    """The digest as the module's first lines define it, in Python's integers."""
    words = array.reshape(-1).view(f"i{array.dtype.itemsize}").tolist()
    whole = 2**64
    sums = []
    for offset, odd, mixing in zip(
        (0xD6E8FEB86659FD93, 0xA0761D6478BD642F),
        (0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9),
        (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53),
        strict=True,
    ):
        total = 0
        for place, word in enumerate(words):
            x = (word + offset) * (2 * place * 0x9E3779B97F4A7C15 + odd) % whole
            x = (x ^ x >> 32) * mixing % whole
            total += x ^ x >> 29
        sums.append(total % whole)
    head = f"{array.dtype.name}{list(array.shape)}".encode()
    return xxhash.xxh3_128(head + np.array(sums, "<u8").tobytes()).hexdigest()


def random_bits(dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    random = np.random.default_rng(3)
    if dtype.name == "bool":
        return random.integers(0, 2, shape).astype(bool)
    nbytes = int(np.prod(shape)) * dtype.itemsize
    return np.frombuffer(random.bytes(nbytes), dtype).reshape(shape)


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (7, 5)])
def test_it_is_what_its_definition_says_in_every_dtype(name: str, shape: tuple[int, ...]) -> None:
    array = random_bits(dtype_of(name), shape)
    assert digest(array) == by_definition(array)


def test_chunks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    array = random_bits(np.dtype(np.float32), (1000,))
    whole = digest(array)
    for chunk in (1, 7, 999, 1000, 1001):
        monkeypatch.setattr(state_module, "CHUNK", chunk)
        state_module._places.cache_clear()
        assert digest(array) == whole
    state_module._places.cache_clear()


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_single_bit_counts(name: str) -> None:
    dtype = dtype_of(name)
    array = np.array(random_bits(dtype, (3,)))
    bits = [0] if name == "bool" else range(8 * dtype.itemsize)
    variants = {"as it was": tf.constant(array)}
    words = array.view(f"u{dtype.itemsize}")
    for place in range(3):
        for bit in bits:
            words[place] ^= np.array(1 << bit, words.dtype)
            variants[f"{place} {bit}"] = tf.constant(array)
            words[place] ^= np.array(1 << bit, words.dtype)
    found = device_digests(variants)
    assert list(found) == list(variants)
    assert len(set(found.values())) == 1 + 3 * len(bits)


def test_swaps_shapes_dtypes_and_lengths_count() -> None:
    array = np.arange(6, dtype=np.float32)
    others = [array[::-1], array.reshape(2, 3), array.reshape(3, 2), array.view(np.int32), array[:5]]
    others += [np.append(array, np.float32(0)), array[[1, 0, 2, 3, 4, 5]], array[[0, 1, 2, 5, 4, 3]]]
    others += [np.zeros(0, np.float32), np.zeros(1, np.float32), np.zeros(2, np.float32), np.float32(0)]
    digests = [digest(np.array(each)) for each in (array, *others)]
    assert len(set(digests)) == len(digests)


def compared(strategy: Any, on_device: bool) -> list[Any]:
    """A state whose fingerprints are forced to be computed by TensorFlow, before and after a flipped bit."""
    model = perceptron(strategy, lambda: keras.optimizers.Adam(0.01))
    with replicas_of(model):
        state = state_of(model)
        names = [variable.name for variable in state.schema]
        agreed = state.fingerprints_on_device
        state.fingerprints_on_device = on_device
        before = state.fingerprints(names)
        same = state.fingerprints(names) == before
        values = state.read(names)
        by_value = {name: state.fingerprint_of(values[name]) for name in names} == before
        if strategy.rank == 1:
            model.layers[-1].bias.assign(-model.layers[-1].bias.value)  # 0.0 becomes -0.0
        after = state.fingerprints(names)
        digests = state.digests(names)
        changed = [name for name in names if before[name] != after[name]]
        return [agreed, same, by_value, changed, before, after == digests]


@pytest.mark.parametrize("on_device", [True, False])
def test_workers_compare_what_their_devices_compute(pool2: Pool, on_device: bool) -> None:
    zero, one = pool2.run(compared, on_device=on_device)
    for agreed, same, by_value, _, _, is_xxh3 in (zero, one):
        assert (agreed, same, by_value, is_xxh3) == (False, True, True, not on_device)
    assert zero[4] == one[4]
    assert zero[3] == []
    assert [name.rpartition("/")[2] for name in one[3]] == ["bias"]
