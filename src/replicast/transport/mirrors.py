"""Files of a host for what comes from other hosts, used again as their sources use theirs again.

A source that publishes a parcel in memory of an earlier one (`Parcel.memory`) knows that no worker of the
job uses the earlier one any more. So a host that has the earlier one may write over it too, and nothing else
has to be said: new memory would take longer to find and to clear than the bytes take to arrive.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from replicast.transport.base import Parcel
from replicast.transport.shared import SharedMemoryTransport
from replicast.transport.shared_file import SharedFile


@dataclass(slots=True)
class Mirror:
    file: SharedFile
    source: int
    name: str
    parcel: str


class Mirrors:
    """Those of one host. All methods may be called from any thread."""

    def __init__(self, shared: SharedMemoryTransport) -> None:
        self._shared = shared
        self._mirrors: dict[str, Mirror] = {}  # by the source's name of its memory; the last used is the last
        self._closed = False
        self._lock = threading.Lock()

    def reserve(self, parcel: Parcel) -> Mirror:
        """The file for a parcel in memory that its source uses again, now or later."""
        with self._lock:
            mirror = self._mirrors.pop(parcel.memory, None)
            if mirror is not None and mirror.file.nbytes >= parcel.nbytes:
                mirror.parcel = parcel.id
                self._mirrors[parcel.memory] = mirror
                return mirror
        if mirror is not None:
            mirror.file.remove()
        mirror = Mirror(self._shared.reserve(parcel.nbytes), parcel.source, parcel.id, parcel.id)
        with self._lock:
            self._mirrors[parcel.memory] = mirror
        return mirror

    def complete(self, mirror: Mirror) -> None:
        """Makes a written file visible to the workers of this host."""
        if mirror.name == mirror.parcel:
            mirror.file.complete(self._shared.path(mirror.name))

    def release(self, parcel_id: str, *, keep: bool = True) -> None:
        """Keeps the file of a parcel for the next one, if there is space for it. No-op if it has none."""
        with self._lock:
            released = [
                (memory, mirror) for memory, mirror in self._mirrors.items() if mirror.parcel == parcel_id
            ]
            for memory, mirror in released:
                mirror.parcel = ""
                self._mirrors[memory] = self._mirrors.pop(memory)
                self._trim(mirror.source, keep=keep and not self._closed)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            for mirror in self._mirrors.values():
                mirror.file.remove()
            self._mirrors.clear()

    def _trim(self, source: int, *, keep: bool) -> None:
        """A source keeps one file; all together take at most what one worker may keep."""
        kept = 0
        last = True
        for memory, mirror in reversed(list(self._mirrors.items())):
            if mirror.parcel:
                continue
            stays = mirror.source != source or (keep and last)
            last = last and mirror.source != source
            if stays and self._shared.is_worth_keeping(kept + mirror.file.nbytes):
                kept += mirror.file.nbytes
            else:
                del self._mirrors[memory]
                mirror.file.remove()
