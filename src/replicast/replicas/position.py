"""Where in its data a training stands."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Position:
    """How much of the data was used.

    Attributes:
        epoch: The epoch that training is in, from 0 on; in an own loop, the pass over the data.
        batch: How many batches of it are done.
    """

    epoch: int = 0
    batch: int = 0

    def in_passes_of(self, length: int) -> Position:
        """The same place, if every pass ends with the data. A length below 0 is not known."""
        if length <= 0:
            return self
        passes, batch = divmod(self.batch, length)
        return Position(self.epoch + passes, batch)
