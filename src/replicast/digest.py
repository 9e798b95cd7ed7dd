"""Digests of arrays as bits: two digests are equal when every bit of the arrays is.

`-0.0` and `0.0` differ, and so do two NaNs with other payloads: this compares what is stored, not what it
means. A digest is xxh3_128 as 32 hexadecimal digits, over the dtype's name, the shape, and the elements in
row-major order. It is quick, and no protection against somebody who wants two arrays to look equal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash


def digest_array(array: npt.NDArray[Any]) -> str:
    """The digest of one array. Reads a row-major array in place; any other layout is copied first.

    Raises:
        TypeError: The elements are Python objects or records.
    """
    array = np.asarray(array)
    hasher = begun_digest(array.dtype, array.shape)
    hasher.update(_bytes_of(array))
    return hasher.hexdigest()


def begun_digest(dtype: np.dtype[Any], shape: Sequence[int]) -> xxhash.xxh3_128:
    """The digest of an array before its first element.

    Raises:
        TypeError: The elements are Python objects or records.
    """
    name = dtype.name
    if dtype.hasobject or name.startswith("void"):  # Addresses, or bytes of unknown meaning.
        raise TypeError(f"Only arrays of plain elements have a digest. Received: dtype {dtype}")
    return xxhash.xxh3_128(f"{name}{list(shape)}".encode())


def digest_state(state: Mapping[str, npt.NDArray[Any]]) -> str:
    """The digest of named arrays, whatever the order of the names."""
    hasher = xxhash.xxh3_128()
    for name in sorted(state):
        encoded = name.encode()
        # With its length, a name cannot run into what follows it.
        hasher.update(len(encoded).to_bytes(8, "little") + encoded)
        hasher.update(bytes.fromhex(digest_array(state[name])))
    return hasher.hexdigest()


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    if not array.dtype.isnative:
        array = array.byteswap().view(array.dtype.newbyteorder())
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
