"""Digests of variables computed on an accelerator: 16 bytes per variable are copied to the host.

The bits of each element, as an integer w, and its index i in row-major order give two 64-bit numbers:

    x = (w + offset) * (2 * i * step + odd)        every index has a different odd multiplier
    x = (x ^ x >>> 32) * mixing; x = x ^ x >>> 29

Each is a bijection of w, so a change of one element always changes the digest, and a change of several almost
certainly does. The numbers are summed with wrap-around, so the result does not depend on the order in which
the hardware adds. The name of the dtype and the shape are mixed in as in `update/digest.py`. These digests
are not xxh3: workers of one job compare them with each other; they are not for files.

Large variables are processed in chunks, so that the integers take only a few megabytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import tensorflow as tf
import xxhash

CHUNK = 2**20
"""The number of elements processed at a time."""
STEP = 0x9E3779B97F4A7C15
OFFSETS = (0xD6E8FEB86659FD93, 0xA0761D6478BD642F)
ODDS = (0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)
MIXINGS = (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53)
_AS_INTEGERS = {1: tf.int8, 2: tf.int16, 4: tf.int32, 8: tf.int64}


def device_digests(tensors: Mapping[str, tf.Tensor]) -> dict[str, str]:
    """Digests each tensor on its device. Equal bits give equal digests on all devices."""
    lanes = {name: _lanes(tensor) for name, tensor in tensors.items()}
    found = dict.fromkeys(tensors, "")
    # All computations start before the first result is read, and each device copies its results at once.
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
    """The two sums of a tensor, as a tensor of shape [2] on the same device."""
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
    """What each index of a chunk adds to the multiplier. Cached, because `tf.range` computes on the host."""
    with np.errstate(over="ignore"):
        steps = np.arange(CHUNK, dtype=np.int64) * np.int64(_wrapped(2 * STEP))
    with tf.device(device):
        return tf.identity(tf.constant(steps))


def _integers(flat: tf.Tensor) -> tf.Tensor:
    """The bits of each element as a signed integer: accelerators lack operations for unsigned ones."""
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
    """Each number xor itself shifted right, without the sign bits that an arithmetic shift copies."""
    shifted = tf.bitwise.right_shift(numbers, tf.constant(bits, tf.int64))
    return tf.bitwise.bitwise_xor(
        numbers, tf.bitwise.bitwise_and(shifted, tf.constant((1 << (64 - bits)) - 1, tf.int64))
    )


def _wrapped(number: int) -> int:
    """A number as a signed 64-bit integer, wrapped around."""
    number &= 2**64 - 1
    return number - 2**64 if number >= 2**63 else number
