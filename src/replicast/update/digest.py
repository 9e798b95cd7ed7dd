"""Digests of the bits of arrays: two digests are equal if every bit of the arrays is.

`-0.0` and `0.0` differ, and so do two NaNs with different payloads: digests compare the stored bits, not
their meaning. A digest is xxh3_128 as 32 hexadecimal digits, over the dtype's name, the shape, and the
elements in row-major order. It is fast, but not cryptographic: it does not protect against a forged array.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash


@functools.cache
def name_of(dtype: np.dtype[Any]) -> str:
    """`dtype.name`, which numpy composes again at each call: 4 us, and several times for each edit."""
    return dtype.name


def digest_array(array: npt.NDArray[Any]) -> str:
    """Digests one array. Reads a row-major array in place; copies any other layout first.

    Raises:
        TypeError: The elements are Python objects or records.
    """
    array = np.asarray(array)
    hasher = begun_digest(array.dtype, array.shape)
    hasher.update(_bytes_of(array))
    return hasher.hexdigest()


def begun_digest(dtype: np.dtype[Any], shape: Sequence[int]) -> xxhash.xxh3_128:
    """A hasher for an array of this dtype and shape, ready for its elements.

    Raises:
        TypeError: The elements are Python objects or records.
    """
    name = name_of(dtype)
    if dtype.hasobject or name.startswith("void"):  # Addresses, or bytes of unknown meaning.
        raise TypeError(f"Only arrays of plain numbers have a digest. Received: dtype {dtype}")
    return xxhash.xxh3_128(f"{name}{list(shape)}".encode())


def digest_state(state: Mapping[str, npt.NDArray[Any]]) -> str:
    """Digests named arrays, independent of their order."""
    hasher = xxhash.xxh3_128()
    for name in sorted(state):
        encoded = name.encode()
        # The length separates a name from what follows it.
        hasher.update(len(encoded).to_bytes(8, "little") + encoded)
        hasher.update(bytes.fromhex(digest_array(state[name])))
    return hasher.hexdigest()


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    if not array.dtype.isnative:
        array = array.byteswap().view(array.dtype.newbyteorder())
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
