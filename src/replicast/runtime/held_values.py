"""Worker 0: the values that updates have overwritten, from the boundary of the update until they are written.

A revert needs them (`update/inverse.py`). Holding them costs the training thread no copy of whole variables,
and they are written in the background.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from replicast.core.proposal import Content
from replicast.core.refusal import Refuse
from replicast.storage.journal import Journal
from replicast.update.edits import Edit
from replicast.update.inverse import bytes_to_keep, parts_to_keep, update_before
from replicast.update.state import Arrays, Held, State
from replicast.update.validate import Limits

logger = logging.getLogger("replicast")


@dataclass(frozen=True, slots=True)
class _Held:
    id: str
    values: Held | None
    rows: Arrays
    problem: str = ""


class HeldValues:
    """The values that updates have overwritten, by the update's number.

    Args:
        state: The variables.
        limits: How much is kept of one update.
    """

    def __init__(self, state: State, limits: Limits) -> None:
        self._state = state
        self._limits = limits
        self._held: dict[int, _Held] = {}

    def hold(self, id_: str, sequence: int, edits: Sequence[Edit]) -> bool:
        """Holds what these edits are about to overwrite. For the training thread.

        Returns:
            Whether there is something that a revert needs: `write` or `drop` must follow.
        """
        whole, rows = parts_to_keep(edits, self._state.schema)
        if not whole and not rows:
            return False
        nbytes, most = bytes_to_keep(whole, rows, self._state.schema), self._limits.max_before_bytes
        if nbytes <= most:
            self._held[sequence] = _Held(id_, self._state.hold(whole, rows), rows)
            return True
        problem = (
            f"Update {sequence} cannot be reverted: it has overwritten {_mib(nbytes)}, and only up to "
            f"{_mib(most)} are kept. Limits(max_before_bytes=...) keeps more"
        )
        self._held[sequence] = _Held(id_, None, {}, problem)
        return True

    def write(self, sequence: int, journal: Journal) -> tuple[Content, str]:
        """Makes the values durable. For a thread in the background.

        Returns:
            Where they are; or None, and why they are not kept.

        Raises:
            Refuse: They cannot be written.
        """
        held = self._held.pop(sequence)
        if held.values is None:
            logger.warning("%s", held.problem)
            return None, held.problem
        whole, parts = held.values()
        for value in (*whole.values(), *parts.values()):
            value.flags.writeable = False  # an update does not copy what nobody writes to
        pairs = {name: (held.rows[name], values) for name, values in parts.items()}
        try:
            return journal.stage_before(update_before(held.id, whole, pairs)), ""
        except OSError as error:
            logger.warning(
                "update %d cannot be reverted: its values before cannot be written: %s", sequence, error
            )
            raise Refuse(
                f"The values before update {sequence} cannot be written ({error.strerror})"
            ) from error

    def drop(self, sequence: int) -> None:
        """Forgets what is held for an update. No-op if nothing is."""
        self._held.pop(sequence, None)


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
