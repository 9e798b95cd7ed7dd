"""When a run was started again: from the claims of its groups of workers, which never change."""

from __future__ import annotations

import contextlib

from replicast.client.views import Restart
from replicast.errors import FileDamaged
from replicast.files import RunDir, read_sealed
from replicast.storage.claims import CLAIM, Claim, group_directory, group_numbers

MOST = 50
"""So many of the last restarts are told."""


class Restarts:
    """The restarts of a run. Reads each claim once."""

    def __init__(self, path: RunDir) -> None:
        self._path = path
        self._known: dict[tuple[int, int, int], Restart] = {}

    def read(self) -> tuple[Restart, ...]:
        """The last ones, oldest first; without those whose claim cannot be read."""
        found: dict[tuple[int, int, int], Restart] = {}
        for group in sorted(group_numbers(self._path))[1:][-MOST:]:
            path = group_directory(self._path, group) / CLAIM
            with contextlib.suppress(OSError, FileDamaged, ValueError):
                # Another run under the same name has other files.
                status = path.stat()
                key = group, status.st_ino, status.st_mtime_ns
                known = self._known.get(key)
                if known is None:
                    claim = Claim.from_json(read_sealed(path))
                    known = Restart(claim.attempt, claim.claimed_at)
                found[key] = known
        self._known = found
        return tuple(found.values())
