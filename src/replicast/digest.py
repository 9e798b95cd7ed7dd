"""Digests of arrays as bits: two digests are equal when every bit of the arrays is.

`-0.0` and `0.0` differ, and so do two NaNs with other payloads: this compares what is stored, not what it
means. A digest is xxh3_128 as 32 hexadecimal digits, over the dtype's name, the shape, and the elements in
row-major order. It is quick, and no protection against somebody who wants two arrays to look equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash


def digest_array(array: npt.NDArray[Any]) -> str:
    """The digest of one array. Reads a row-major array in place; any other layout is copied first.

    Raises:
        TypeError: The elements are Python objects or records.
    """
    hasher, content = _begun(array)
    hasher.update(content)
    return hasher.hexdigest()


def digest_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, str]:
    """The digest of each of these arrays, in less time than one after the other.

    All is prepared before the first byte is hashed: megabytes that go through the processor's cache throw out
    the code and data of everything else, which would be fetched again for each array.

    Raises:
        TypeError: As `digest_array`.
    """
    begun = [_begun(array) for array in arrays.values()]
    for hasher, content in begun:
        hasher.update(content)
    return {name: hasher.hexdigest() for name, (hasher, _) in zip(arrays, begun, strict=True)}


def digest_state(state: Mapping[str, npt.NDArray[Any]]) -> str:
    """The digest of named arrays, whatever the order of the names."""
    hasher = xxhash.xxh3_128()
    for name in sorted(state):
        encoded = name.encode()
        # With its length, a name cannot run into what follows it.
        hasher.update(len(encoded).to_bytes(8, "little") + encoded)
        hasher.update(bytes.fromhex(digest_array(state[name])))
    return hasher.hexdigest()


def _begun(array: npt.NDArray[Any]) -> tuple[xxhash.xxh3_128, memoryview]:
    """A hasher that has dtype and shape, and the bytes that it is still to be given."""
    array = np.asarray(array)
    name = array.dtype.name
    if array.dtype.hasobject or name.startswith("void"):  # Addresses, or bytes of unknown meaning.
        raise TypeError(f"Only arrays of plain elements have a digest. Received: dtype {array.dtype}")
    return xxhash.xxh3_128(f"{name}{list(array.shape)}".encode()), _bytes_of(array)


def _bytes_of(array: npt.NDArray[Any]) -> memoryview:
    if not array.dtype.isnative:
        array = array.byteswap().view(array.dtype.newbyteorder())
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
