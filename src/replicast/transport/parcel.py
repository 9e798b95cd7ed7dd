"""Parcels: arrays in one buffer, with a digest of each block; and why one is refused that does not arrive."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import ml_dtypes  # noqa: F401 - makes bfloat16 and the 8-bit floats known to numpy by name
import numpy as np

from replicast.codec import Record
from replicast.errors import UpdateRefused
from replicast.mapped_memory import ALIGNMENT, Bytes, aligned
from replicast.tensorfiles import Array
from replicast.update.digest import DIGITS, blocks_of, digest_block, digest_of_blocks, name_of

# Called with the index of an array in the parcel, and a flat chunk of that array.
Inspect = Callable[[int, Array], None]
_PARCEL_ID = re.compile(r"[A-Za-z0-9._-]{1,100}")


class Piece(Record):
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class Parcel(Record):
    """The description of a parcel, which the source sends to the others so that they can fetch the bytes."""

    id: str
    source: int
    nbytes: int
    arrays: tuple[Piece, ...]
    blocks: str
    memory: str = ""  # the first parcel in this memory of the source, if it may be used again
    to_read: bool = False

    @property
    def digest(self) -> str:
        """One digest of the bytes of all arrays; independent of their offsets."""
        return digest_of_blocks(self.blocks)


def damaged(parcel: Parcel, expected: str, received: str, worker: int) -> UpdateRefused:
    return UpdateRefused(
        f"The bytes of parcel {parcel.id!r} from worker {parcel.source} arrived damaged at worker {worker}",
        expected=expected,
        received=received,
        worker=worker,
        remedy="Propose it again; if it happens again, check that worker's memory and network",
    )


def damaged_block(parcel: Parcel, block: int, found: str, worker: int) -> UpdateRefused | None:
    """The refusal of a block whose bytes have another digest than those that the source published."""
    expected = parcel.blocks[DIGITS * block : DIGITS * (block + 1)]
    if found == expected:
        return None
    return damaged(parcel, f"digest {expected} of block {block}", f"digest {found}", worker)


def not_arrived(parcel: Parcel, timeout_secs: float, worker: int, waited_for: int) -> UpdateRefused:
    return UpdateRefused(
        f"Worker {worker} waited {timeout_secs:g} s for parcel {parcel.id!r} from worker {waited_for}",
        expected=f"{parcel.nbytes:,} bytes from worker {waited_for}",
        received="nothing",
        worker=worker,
        remedy=f"See worker {waited_for}'s log for the reason, then propose it again",
    )


def no_room(needed: int, free: int, place: str, worker: int, remedy: str) -> UpdateRefused:
    return UpdateRefused(
        f"Worker {worker} has no room for the update in {place}",
        expected=f"{needed:,} bytes free",
        received=f"{free:,} bytes free",
        worker=worker,
        remedy=remedy,
    )


# The layout of arrays in one buffer, and its verification: pure functions between arrays and bytes.


def path_part(name: str) -> str:
    """The id of a parcel or a job, if it can be part of a file name."""
    if not _PARCEL_ID.fullmatch(name):
        raise ValueError(
            "The id of a parcel or a job consists of at most 100 letters, digits, dots, hyphens and "
            f"underscores. Received: {name!r}"
        )
    return name


def lay_out(arrays: Sequence[Array]) -> tuple[tuple[Piece, ...], int]:
    """The position of each array, and the size of the buffer: a multiple of 64 bytes, and at least 64."""
    pieces = []
    end = 0
    for array in arrays:
        if array.dtype.hasobject or array.dtype.kind in "SUMm" or name_of(array.dtype).startswith("void"):
            raise TypeError(f"Only arrays of numbers can be sent. Received: dtype {array.dtype}")
        pieces.append(Piece(name_of(array.dtype), tuple(array.shape), end))
        end += aligned(array.nbytes)
    return tuple(pieces), max(end, ALIGNMENT)


def write_out(arrays: Sequence[Array], pieces: Sequence[Piece], buffer: Bytes) -> str:
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


def arrays_in(buffer: Bytes, pieces: Sequence[Piece]) -> list[Array]:
    """The arrays in a buffer, as views that keep it alive."""
    return [
        buffer[piece.offset : piece.offset + piece.nbytes].view(piece.dtype).reshape(piece.shape)
        for piece in pieces
    ]


def check_share(
    parcel: Parcel, arrays: Sequence[Array], rank: int, local_ranks: Sequence[int], inspect: Inspect
) -> None:
    """Verifies this worker's share of the blocks of a parcel, and inspects their values in the same pass."""
    for number, (place, _, content) in enumerate(blocks_of(arrays)):
        if local_ranks[number % len(local_ranks)] != rank:
            continue

        def inspected(_: int, chunk: Bytes, place: int = place) -> Bytes:
            inspect(place, chunk.view(arrays[place].dtype))
            return chunk

        refusal = damaged_block(parcel, number, digest_block(content, inspected), rank)
        if refusal is not None:
            raise refusal
