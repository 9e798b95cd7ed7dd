"""When a run was started again: from the claims of its groups of workers, which never change."""

from __future__ import annotations

import contextlib
from pathlib import Path

from replicast.client.views import Restart
from replicast.errors import FileDamaged
from replicast.files import read_sealed
from replicast.storage.groups import CLAIM, Claim, group_directory, group_numbers

MOST = 50
"""So many of the last restarts are told."""


class Restarts:
    """The restarts of a run. Reads each claim once.

    Args:
        path: The run directory.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[int, Restart] = {}

    def read(self) -> tuple[Restart, ...]:
        """The last ones, oldest first; without those whose claim cannot be read."""
        groups = sorted(group_numbers(self._path))[1:][-MOST:]
        for group in groups:
            if group not in self._known:
                with contextlib.suppress(FileDamaged, ValueError):
                    claim = Claim.from_json(read_sealed(group_directory(self._path, group) / CLAIM))
                    self._known[group] = Restart(claim.attempt, claim.claimed_at)
        return tuple(self._known[group] for group in groups if group in self._known)
