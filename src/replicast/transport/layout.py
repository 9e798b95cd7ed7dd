"""How arrays lie in one buffer: pure functions from arrays to bytes and back."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from replicast.blocks import bytes_of, digest_blocks
from replicast.mapping import ALIGNMENT, Bytes, aligned
from replicast.transport.base import Parcel, Piece

_PARCEL_ID = re.compile(r"[A-Za-z0-9._-]+")


def checked_id(parcel_id: str) -> str:
    """The id itself, if it can be part of a file's name.

    Raises:
        ValueError: It cannot.
    """
    if not _PARCEL_ID.fullmatch(parcel_id) or len(parcel_id) > 200:
        raise ValueError(
            "A parcel's id is made of at most 200 letters, digits, dots, hyphens and underscores. "
            f"Received: {parcel_id!r}"
        )
    return parcel_id


def lay_out(arrays: Sequence[npt.NDArray[Any]]) -> tuple[tuple[Piece, ...], int]:
    """Where each array goes, and the size of the buffer: at least 64 bytes, and a multiple of them.

    Raises:
        TypeError: The elements of an array are Python objects, text or records.
    """
    pieces = []
    end = 0
    for array in arrays:
        if array.dtype.hasobject or array.dtype.kind in "SUMm" or array.dtype.name.startswith("void"):
            raise TypeError(f"Only arrays of numbers can be sent. Received: dtype {array.dtype}")
        pieces.append(Piece(array.dtype.name, tuple(array.shape), end))
        end += aligned(array.nbytes)
    return tuple(pieces), max(end, ALIGNMENT)


def write_out(
    arrays: Sequence[npt.NDArray[Any]], pieces: Sequence[Piece], write: Callable[[int, Bytes], None]
) -> str:
    """Hands the arrays to `write`, offset and bytes, in order; returns the digests of their blocks."""

    def written(offset: int, chunk: Bytes) -> Bytes:
        write(offset, chunk)
        return chunk

    def write_one(array: npt.NDArray[Any], piece: Piece) -> str:
        return digest_blocks(bytes_of(array), lambda start, chunk: written(piece.offset + start, chunk))

    return "".join(write_one(array, piece) for array, piece in zip(arrays, pieces, strict=True))


def arrays_in(data: Bytes, parcel: Parcel) -> list[npt.NDArray[Any]]:
    """The arrays of a parcel as views of its buffer, which they keep alive."""
    return [_view(data, piece) for piece in parcel.arrays]


def aligned_buffer(nbytes: int) -> Bytes:
    """Zeros in private memory, aligned as a parcel's buffer has to be."""
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def _view(data: Bytes, piece: Piece) -> npt.NDArray[Any]:
    dtype = _dtype_named(piece.dtype)
    size = int(np.prod(piece.shape, dtype=np.int64)) * dtype.itemsize
    return data[piece.offset : piece.offset + size].view(dtype).reshape(piece.shape)


def _dtype_named(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # bfloat16 and the 8-bit floats, which numpy does not know by itself

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found
