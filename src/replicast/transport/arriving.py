"""A parcel taken while it is still being written: mapped and digested behind the writer's back."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from replicast.mapping import Bytes, bring_in, map_private
from replicast.transport.base import Look, Parcel
from replicast.transport.checking import Share, digests_of_share
from replicast.transport.layout import arrays_in

MAPPED_BYTES = 1 << 22
"""Its pages are brought in so much at a time: all at once, the writer would be done before."""
PROGRESS_BYTES = 64
"""Behind a parcel's bytes in its file: a number that says how many of them are there."""
ARRIVE_SECS = 60.0
_LOOK_SECS = 0.0005


class Arrival:
    """One parcel on its way, followed by a thread of its own.

    It is a head start and nothing else: whoever needs the parcel compares the digests, and takes the bytes
    the usual way when they are not those that were announced.

    Args:
        parcel: What was announced; its digests are not known yet.
        opened: Opens the file; raises OSError when there is none.
        share: The blocks that are digested and looked at.
        look: Called for each part of them that is there.
    """

    def __init__(self, parcel: Parcel, opened: Callable[[], int], share: Share, look: Look) -> None:
        self._parcel = parcel
        self._nbytes = parcel.nbytes
        self._opened = opened
        self._share = share
        self._look = look
        self._given_up = threading.Event()
        self._taken: tuple[Bytes, dict[int, str]] | None = None
        self._thread = threading.Thread(target=self._follow, name="replicast-arrival", daemon=True)
        self._thread.start()

    def result(self, timeout_secs: float) -> tuple[Bytes, dict[int, str]] | None:
        """The bytes in a private mapping, and digests of blocks; None if they did not come in time."""
        self._thread.join(timeout_secs)
        self.give_up()
        return self._taken

    def give_up(self) -> None:
        """Nobody needs it: the thread ends, at the latest behind the block that it is digesting."""
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
        if self._share.is_empty:
            bring_in(data)
            self._taken = data, {}
            return
        arrays = arrays_in(data, self._parcel)
        wait = self._waiting(data, progress)
        digests = digests_of_share(self._parcel, arrays, self._share, self._look, wait)
        if digests is not None:
            self._taken = data, digests

    def _waiting(self, data: Bytes, progress: npt.NDArray[np.int64]) -> Callable[[int], bool]:
        """Follows the writer: what it has written is brought in, and waited for."""
        ends = time.monotonic() + ARRIVE_SECS
        mapped = 0

        def wait(end: int) -> bool:
            nonlocal mapped
            while mapped < end:
                bring_in(data[mapped : mapped + MAPPED_BYTES])
                mapped += MAPPED_BYTES
            while int(progress[0]) < end:
                if self._given_up.wait(_LOOK_SECS) or time.monotonic() > ends:
                    return False
            return not self._given_up.is_set()

        return wait
