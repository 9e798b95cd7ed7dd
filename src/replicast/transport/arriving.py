"""A parcel taken while it is still being written: mapped and digested behind the writer's back."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import xxhash

from replicast.transport.base import Look, Parcel
from replicast.transport.layout import CHUNK_BYTES, Bytes, arrays_in
from replicast.transport.mapping import bring_in, map_private

MAPPED_BYTES = 1 << 22
"""Its pages are brought in so much at a time: all at once, the writer would be done before."""
PROGRESS_BYTES = 64
"""Behind a parcel's bytes in its file: a number that says how many of them are there."""
ARRIVE_SECS = 60.0
_LOOK_SECS = 0.0005


class Arrival:
    """One parcel on its way, followed by a thread of its own.

    It is a head start and nothing else: whoever needs the parcel compares the digest, and takes the bytes
    the usual way when it is not the one that was announced.

    Args:
        parcel: What was announced; its digest is not known yet.
        opened: Opens the file; raises OSError when there is none.
        look: Called for each part of an array that is there; None for a parcel that need not be looked at,
            and not be digested either.
    """

    def __init__(self, parcel: Parcel, opened: Callable[[], int], look: Look | None) -> None:
        self._parcel = parcel
        self._nbytes = parcel.nbytes
        self._opened = opened
        self._look = look
        self._given_up = threading.Event()
        self._taken: tuple[Bytes, str] | None = None
        self._thread = threading.Thread(target=self._follow, name="replicast-arrival", daemon=True)
        self._thread.start()

    def result(self, timeout_secs: float) -> tuple[Bytes, str] | None:
        """The bytes in a private mapping and their digest; None if they did not come in time."""
        self._thread.join(timeout_secs)
        self.give_up()
        return self._taken

    def give_up(self) -> None:
        """Nobody needs it: the thread ends, at the latest behind the chunk that it is digesting."""
        self._given_up.set()
        self._thread.join()

    def _follow(self) -> None:
        try:
            descriptor = self._opened()
        except OSError:
            return
        try:
            if os.fstat(descriptor).st_size != self._nbytes + PROGRESS_BYTES:
                return
            mapped = map_private(descriptor, self._nbytes + PROGRESS_BYTES)
        except OSError:
            return
        finally:
            os.close(descriptor)
        data, progress = mapped[: self._nbytes], mapped[self._nbytes :].view(np.int64)
        if self._look is None:
            bring_in(data)
            self._taken = data, ""
            return
        digest = self._digest(data, progress, self._look)
        if digest is not None:
            self._taken = data, digest

    def _digest(self, data: Bytes, progress: npt.NDArray[np.int64], look: Look) -> str | None:
        """Follows the writer chunk by chunk: what was digested is looked at while the cache has it."""
        hasher = xxhash.xxh3_128()
        written = done = mapped = 0
        ends = time.monotonic() + ARRIVE_SECS
        pieces = zip(self._parcel.arrays, arrays_in(data, self._parcel), strict=True)
        for place, (piece, array) in enumerate(pieces):
            flat, size = array.reshape(-1), max(1, CHUNK_BYTES // array.itemsize)
            for start in range(0, flat.size, size):
                part = flat[start : start + size]
                end = piece.offset + start * array.itemsize + part.nbytes
                while mapped < end:
                    bring_in(data[mapped : mapped + MAPPED_BYTES])
                    mapped += MAPPED_BYTES
                while written < end:
                    written = int(progress[0])
                    if written < end and (self._given_up.wait(_LOOK_SECS) or time.monotonic() > ends):
                        return None
                if self._given_up.is_set():
                    return None
                hasher.update(data[done:end].data)
                done = end
                look(place, array, part)
        hasher.update(data[done:].data)
        return hasher.hexdigest()
