"""The layout of arrays in one buffer, and its verification: pure functions between arrays and bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from replicast.mapped_memory import ALIGNMENT, Bytes, aligned
from replicast.transport.base import Inspect, Parcel, Piece, damaged
from replicast.update.digest import blocks_of, digest_block, name_of

_PARCEL_ID = re.compile(r"[A-Za-z0-9._-]+")


def checked_id(parcel_id: str) -> str:
    """Returns the id if it can be part of a file name."""
    if not _PARCEL_ID.fullmatch(parcel_id) or len(parcel_id) > 100:
        raise ValueError(
            "The id of a parcel or a job consists of at most 100 letters, digits, dots, hyphens and "
            f"underscores. Received: {parcel_id!r}"
        )
    return parcel_id


def lay_out(arrays: Sequence[npt.NDArray[Any]]) -> tuple[tuple[Piece, ...], int]:
    """The position of each array, and the size of the buffer: a multiple of 64 bytes, and at least 64."""
    pieces = []
    end = 0
    for array in arrays:
        if array.dtype.hasobject or array.dtype.kind in "SUMm" or name_of(array.dtype).startswith("void"):
            raise TypeError(f"Only arrays of numbers can be sent. Received: dtype {array.dtype}")
        pieces.append(Piece(name_of(array.dtype), tuple(array.shape), end))
        end += aligned(array.nbytes)
    return tuple(pieces), max(end, ALIGNMENT)


def write_out(arrays: Sequence[npt.NDArray[Any]], pieces: Sequence[Piece], buffer: Bytes) -> str:
    """Copies the arrays into a buffer; returns the digests of the copies' blocks."""
    digests = []
    for place, start, content in blocks_of(arrays):
        target = buffer[pieces[place].offset + start :]

        def copy(at: int, chunk: Bytes, target: Bytes = target) -> Bytes:
            written = target[at : at + len(chunk)]
            written[:] = chunk
            return written

        digests.append(digest_block(content, copy))
    return "".join(digests)


def arrays_in(buffer: Bytes, pieces: Sequence[Piece]) -> list[npt.NDArray[Any]]:
    """The arrays in a buffer, as views that keep it alive."""
    return [_view(buffer, piece) for piece in pieces]


def check_share(
    parcel: Parcel,
    arrays: Sequence[npt.NDArray[Any]],
    rank: int,
    local_ranks: Sequence[int],
    inspect: Inspect,
) -> None:
    """Verifies this worker's share of the blocks of a parcel, and inspects their values in the same pass."""
    for number, (place, _, content) in enumerate(blocks_of(arrays)):
        if local_ranks[number % len(local_ranks)] != rank:
            continue

        def inspected(_: int, chunk: Bytes, place: int = place) -> Bytes:
            inspect(place, chunk.view(arrays[place].dtype))
            return chunk

        found, expected = digest_block(content, inspected), parcel.digest_of(number)
        if found != expected:
            raise damaged(parcel, f"digest {expected} of block {number}", f"digest {found}", rank)


def aligned_buffer(nbytes: int) -> Bytes:
    """Zeros in private memory, with the alignment of a parcel's buffer."""
    raw = np.zeros(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


def piece_bytes(piece: Piece) -> int:
    return int(np.prod(piece.shape, dtype=np.int64)) * _dtype_named(piece.dtype).itemsize


def _view(buffer: Bytes, piece: Piece) -> npt.NDArray[Any]:
    content = buffer[piece.offset : piece.offset + piece_bytes(piece)]
    return content.view(_dtype_named(piece.dtype)).reshape(piece.shape)


def _dtype_named(name: str) -> np.dtype[Any]:
    try:
        return np.dtype(name)
    except TypeError:
        import ml_dtypes  # bfloat16 and the 8-bit floats, which are not numpy's own

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found
