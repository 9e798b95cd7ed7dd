"""Digests of variables on an accelerator, computed there: 16 bytes of each variable cross, not its value.

The bits of each element, as an integer w, and its place i in row-major order give two numbers of 64 bits:

    x = (w + offset) * (2 * i * step + odd)        every place has an odd multiplier of its own
    x = (x ^ x >>> 32) * mixing; x = x ^ x >>> 29

Each is a bijection of w, so a change of one element always changes the digest; of several, all but certainly.
The numbers are summed with wrap-around, in any order: hardware need not sum twice in the same one. Name of
the dtype and shape are mixed in as `replicast.digest` does. These digests are no xxh3: they are for workers
of one job to compare with each other, not for files.

Large variables are taken in chunks, so that the integers never take more than some megabytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf
import xxhash

CHUNK = 2**20
"""So many elements at a time."""
STEP = 0x9E3779B97F4A7C15
OFFSETS = (0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
ODDS = (0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
MIXINGS = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
_AS_INTEGERS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


def device_digests(tensors: Mapping[str, tf.Tensor]) -> dict[str, str]:
    """The digest of each of these tensors, computed where it is. Equal for equal bits on whatever device."""
    lanes = {name: _lanes(tensor) for name, tensor in tensors.items()}
    found = dict.fromkeys(tensors, "")
    # All are on their way before the first is waited for, and those of a device come in one transfer.
    for device in sorted({each.device for each in lanes.values()}):
        names = [name for name, each in lanes.items() if each.device == device]
        with tf.device(device):
            together = tf.stack([lanes[name] for name in names])
        for name, sums in zip(names, together.numpy(), strict=True):
            found[name] = _hexadecimal(tensors[name], sums)
    return found


def _hexadecimal(tensor: tf.Tensor, sums: np.ndarray[Any, Any]) -> str:
    head = f"{tensor.dtype.name}{tensor.shape.as_list()}".encode()
    return xxhash.xxh3_128(head + sums.astype("<i8").tobytes()).hexdigest()


def _lanes(tensor: tf.Tensor) -> tf.Tensor:
    """The two sums of a tensor, as one of shape [2] on the same device."""
    with tf.device(tensor.device):
        flat = tf.reshape(tensor, [-1])
        length = int(flat.shape[0])
        places = _places(tensor.device)
        sums = tf.zeros([2], tf.int64)
        for start in range(0, length, CHUNK):
            chunk = flat if length <= CHUNK else flat[start : start + CHUNK]
            begin = tf.constant(_wrapped(2 * start * STEP), tf.int64)
            sums += _lanes_of_chunk(_integers(chunk), places, begin)
        return sums


@cache
def _places(device: str) -> tf.Tensor:
    """What each place of a chunk adds to the multiplier. Made once: `tf.range` computes on the host."""
    with np.errstate(over="ignore"):
        steps = np.arange(CHUNK, dtype=np.int64) * np.int64(_wrapped(2 * STEP))
    with tf.device(device):
        return tf.identity(tf.constant(steps))


def _integers(flat: tf.Tensor) -> tf.Tensor:
    """The bits of each element as an integer, with its sign: accelerators lack operations for others."""
    bits = flat if flat.dtype == tf.bool else tf.bitcast(flat, _AS_INTEGERS[flat.dtype.size])
    return tf.cast(bits, tf.int64)


def _sums(words: tf.Tensor, places: tf.Tensor, begin: tf.Tensor) -> tf.Tensor:
    multipliers = places[: tf.size(words)] + begin
    sums = []
    for offset, odd, mixing in zip(OFFSETS, ODDS, MIXINGS, strict=True):
        mixed = (words + _wrapped(offset)) * (multipliers + _wrapped(odd))
        mixed = _shifted(mixed, 32) * tf.constant(_wrapped(mixing), tf.int64)
        sums.append(tf.reduce_sum(_shifted(mixed, 29)))
    return tf.stack(sums)


_lanes_of_chunk = tf.function(
    _sums,
    input_signature=[tf.TensorSpec(shape, tf.int64) for shape in ([None], [None], [])],
    autograph=False,
)


def _shifted(numbers: tf.Tensor, bits: int) -> tf.Tensor:
    """Each number, xor itself shifted right; what a shift copies of the sign is cut off."""
    shifted = tf.bitwise.right_shift(numbers, tf.constant(bits, tf.int64))
    return tf.bitwise.bitwise_xor(
        numbers, tf.bitwise.bitwise_and(shifted, tf.constant((1 << (64 - bits)) - 1, tf.int64))
    )


def _wrapped(number: int) -> int:
    """A number as one of 64 bits with a sign."""
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number
