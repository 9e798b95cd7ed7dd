"""A transport within one process, for tests: N threads act as N workers."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from replicast.mapped_memory import Bytes
from replicast.tensorfiles import Array
from replicast.transport.base import (
    Inspect,
    Parcel,
    Transport,
    aligned_buffer,
    arrays_in,
    check_share,
    lay_out,
    no_inspection,
    no_room,
    not_arrived,
    path_part,
    write_out,
)


class MemoryTransport(Transport):
    class Board:
        """Holds parcels until their source releases them; tests inject faults here."""

        def __init__(self) -> None:
            self.buffers: dict[str, Bytes] = {}
            self.room: int | None = None
            self.changed = threading.Condition()
            self.to_corrupt: set[str] = set()

        def corrupt(self, parcel_id: str) -> None:
            """Changes one bit of a parcel, before the next worker receives it."""
            self.to_corrupt.add(parcel_id)

    def __init__(self, board: Board, rank: int = 0) -> None:
        self._board = board
        self._rank = rank
        self._published: set[str] = set()

    def publish(self, parcel_id: str, arrays: Sequence[Array], *, to_read: bool = False) -> Parcel:
        pieces, nbytes = lay_out(arrays)
        if self._board.room is not None:
            with self._board.changed:
                free = max(0, self._board.room - sum(map(len, self._board.buffers.values())))
            if nbytes > free:
                raise no_room(nbytes, free, "memory", self._rank, "Propose a smaller update")
        buffer = aligned_buffer(nbytes)
        blocks = write_out(arrays, pieces, buffer)
        with self._board.changed:
            self._board.buffers[path_part(parcel_id)] = buffer
            self._board.changed.notify_all()
        self._published.add(parcel_id)
        return Parcel(parcel_id, self._rank, nbytes, pieces, blocks, to_read=to_read)

    def receive(self, parcel: Parcel, timeout_secs: float, inspect: Inspect = no_inspection) -> list[Array]:
        board = self._board
        with board.changed:
            if not board.changed.wait_for(lambda: parcel.id in board.buffers, timeout_secs):
                raise not_arrived(parcel, timeout_secs, self._rank, waited_for=parcel.source)
            buffer = board.buffers[parcel.id]
            if parcel.id in board.to_corrupt:
                board.to_corrupt.remove(parcel.id)
                buffer[0] ^= 1
        if not parcel.to_read:
            private = aligned_buffer(parcel.nbytes)
            private[:] = buffer
            buffer = private
        arrays = arrays_in(buffer, parcel.arrays)
        check_share(parcel, arrays, self._rank, [self._rank], inspect)
        return arrays

    def release(self, parcel_id: str, *, reuse: bool = False) -> None:
        if parcel_id in self._published:
            self._published.discard(parcel_id)
            with self._board.changed:
                buffer = self._board.buffers.pop(parcel_id, None)
            if reuse and buffer is not None:
                buffer[:] = 0xFF  # stands for reuse: a worker that still reads it gets NaN

    def close(self) -> None:
        for parcel_id in list(self._published):
            self.release(parcel_id)
